//! A small model's tensors, and a save of them by ranks of one thread.
#![allow(clippy::unwrap_used, reason = "a test ends at the first error")]
#![allow(dead_code, reason = "each test takes what it needs")]

use std::fs;
use std::path::Path;

use burn_shard_checkpoint::{
    Checkpoint, DType, Description, Error, Keep, Published, RankReport, TensorName, TensorPart,
    Writer, even_range,
};
use serde_json::{Value, json};
use xxhash_rust::xxh3::xxh3_64;

/// A tensor with all its bytes.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Full {
    pub(crate) name: TensorName,
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: Vec<u8>,
}

impl Full {
    /// Bytes follow from the name and `seed`.
    pub(crate) fn new(name: TensorName, dtype: DType, shape: &[usize], seed: u64) -> Self {
        let length = shape.iter().product::<usize>() * dtype.size_bytes();
        let mut state = xxh3_64(format!("{name} {seed}").as_bytes()) | 1;
        let byte = |_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state.to_le_bytes()[3]
        };
        Self {
            name,
            dtype,
            shape: shape.to_vec(),
            bytes: (0..length).map(byte).collect(),
        }
    }

    pub(crate) fn numel(&self) -> usize {
        self.shape.iter().product()
    }

    /// What `rank` of `world_size` writes of it.
    pub(crate) fn part(&self, rank: usize, world_size: usize) -> TensorPart<'_> {
        let range = even_range(self.numel(), rank, world_size);
        let size = self.dtype.size_bytes();
        let bytes = &self.bytes[range.start * size..range.end * size];
        TensorPart::ranges(
            self.name.clone(),
            self.dtype,
            &self.shape,
            vec![range],
            bytes,
        )
    }
}

/// Odd shapes: lengths that no world size divides, fewer elements than ranks, a scalar, none at all.
pub(crate) fn model(seed: u64) -> Vec<Full> {
    let tensor = |name, dtype, shape: &[usize]| Full::new(name, dtype, shape, seed);
    vec![
        tensor(
            TensorName::parameter("embedding.weight"),
            DType::F32,
            &[7, 15],
        ),
        tensor(
            TensorName::state("embedding.weight", "moment_1"),
            DType::F32,
            &[7, 15],
        ),
        tensor(
            TensorName::state("embedding.weight", "moment_2"),
            DType::F32,
            &[7, 15],
        ),
        tensor(
            TensorName::state("embedding.weight", "time"),
            DType::U64,
            &[],
        ),
        tensor(TensorName::parameter("norm.gamma"), DType::BF16, &[17]),
        tensor(TensorName::parameter("norm.beta"), DType::F16, &[2]),
        tensor(TensorName::parameter("empty"), DType::F32, &[0, 3]),
        tensor(TensorName::parameter("mask"), DType::Bool, &[5]),
        tensor(TensorName::parameter("ids"), DType::I64, &[2, 2, 2]),
    ]
}

pub(crate) fn describe(step: u64) -> Description {
    Description {
        strategy: "full".into(),
        plan: "one group".into(),
        user: json!({ "position": step, "schedule": { "name": "cosine" }, "bits": "3f800000" }),
    }
}

pub(crate) fn write_all(
    writer: &Writer,
    tensors: &[Full],
    world_size: usize,
) -> Result<Vec<RankReport>, Error> {
    let parts = |rank| {
        tensors
            .iter()
            .map(|tensor| tensor.part(rank, world_size))
            .collect()
    };
    (0..world_size)
        .map(|rank| writer.write_rank(rank, parts(rank)))
        .collect()
}

pub(crate) fn save(
    root: &Path,
    step: u64,
    world_size: usize,
    keep: Keep,
) -> Result<Published, Error> {
    let writer = Writer::create(root, step)?;
    let reports = write_all(&writer, &model(step), world_size)?;
    writer.publish(&reports, &describe(step), keep)
}

/// Checks that `checkpoint` is the one that [`save`] wrote for its step.
pub(crate) fn assert_holds_its_step(checkpoint: &Checkpoint) {
    let step = checkpoint.manifest().step;
    let model = model(step);
    assert_eq!(checkpoint.tensors().len(), model.len());
    for tensor in model {
        assert_eq!(
            checkpoint.read(&tensor.name).unwrap(),
            tensor.bytes,
            "{}",
            tensor.name
        );
    }
    assert_eq!(checkpoint.manifest().description, describe(step));
}

/// Names in a directory, sorted.
pub(crate) fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).unwrap();
    let mut names: Vec<_> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// Changes a manifest as somebody would who knows how its checksum is made.
pub(crate) fn edit_manifest(checkpoint: &Path, edit: impl FnOnce(&mut Value)) {
    let path = checkpoint.join("manifest.json");
    let mut value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    edit(&mut value);
    replace_manifest(
        checkpoint,
        serde_json::to_string(&value).unwrap().as_bytes(),
    );
}

/// Puts other text in place of a manifest, with the right checksum.
pub(crate) fn replace_manifest(checkpoint: &Path, text: &[u8]) {
    fs::write(checkpoint.join("manifest.json"), text).unwrap();
    let checksum = format!("{:016x}\n", xxh3_64(text));
    fs::write(checkpoint.join("manifest.xxh3"), checksum).unwrap();
}
