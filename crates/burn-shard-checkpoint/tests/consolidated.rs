//! One file of a checkpoint, a checkpoint for other ranks, and models in the layout of Hugging Face.
#![allow(clippy::unwrap_used, reason = "a test ends at the first error")]

mod common;

use std::fs;
use std::path::Path;
use std::process::Command;

use burn_shard_checkpoint::{
    Checkpoint, Content, DType, DTypePolicy, Error, IndexedSafetensors, Keep, Renames, TensorName,
    TensorPart, Wanted, consolidate, reshard, write_consolidated,
};
use common::{Full, assert_holds_its_step, model, names, save};
use safetensors::SafeTensors;

#[test]
fn a_consolidated_file_holds_every_full_tensor() {
    let root = tempfile::tempdir().unwrap();
    save(root.path(), 3, 3, Keep::ALL).unwrap();
    let checkpoint = Checkpoint::open(root.path()).unwrap();
    let out = root.path().join("model.safetensors");
    let bytes = consolidate(&checkpoint, &out, Content::Everything).unwrap();
    let file = fs::read(&out).unwrap();
    assert_eq!(bytes, file.len() as u64);
    let tensors = SafeTensors::deserialize(&file).unwrap();
    assert_eq!(tensors.len(), model(3).len());
    for tensor in model(3) {
        let found = tensors.tensor(&tensor.name.key()).unwrap();
        assert_eq!(
            (found.shape(), found.data()),
            (&tensor.shape[..], &tensor.bytes[..])
        );
    }
    let error = consolidate(&checkpoint, &out, Content::Everything).unwrap_err();
    assert!(matches!(error, Error::Exists { .. }), "{error}");

    let parameters = root.path().join("parameters.safetensors");
    consolidate(&checkpoint, &parameters, Content::Parameters).unwrap();
    let file = fs::read(&parameters).unwrap();
    let mut names = SafeTensors::deserialize(&file)
        .unwrap()
        .names()
        .into_iter()
        .map(String::from)
        .collect::<Vec<_>>();
    names.sort();
    assert_eq!(
        names,
        [
            "embedding.weight",
            "empty",
            "ids",
            "mask",
            "norm.beta",
            "norm.gamma"
        ]
    );
}

#[test]
fn a_consolidated_file_is_whole_or_not_there() {
    let directory = tempfile::tempdir().unwrap();
    let out = directory.path().join("model.safetensors");
    let name = TensorName::parameter("w");
    let part = TensorPart::ranges(name.clone(), DType::U8, &[4], vec![0..1, 2..4], &[0; 3][..]);
    let error = write_consolidated(&out, vec![part]).unwrap_err();
    assert!(
        matches!(
            error,
            Error::Gap {
                start: 1,
                end: 2,
                ..
            }
        ),
        "{error}"
    );
    let failing = TensorPart::lazy(name, DType::U8, &[4], vec![0..4], || Err("gone".into()));
    let error = write_consolidated(&out, vec![failing]).unwrap_err();
    assert!(matches!(error, Error::Source { .. }), "{error}");
    assert_eq!(names(directory.path()), Vec::<String>::new());
}

#[test]
fn a_resharded_checkpoint_is_the_same_for_other_ranks() {
    let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    save(from.path(), 3, 3, Keep::ALL).unwrap();
    let checkpoint = Checkpoint::open(from.path()).unwrap();
    for world_size in [1, 2, 5] {
        let published = reshard(&checkpoint, world_size, to.path()).unwrap();
        let resharded = Checkpoint::open(&published.path).unwrap();
        resharded.verify().unwrap();
        assert_eq!(resharded.manifest().world_size, world_size);
        assert_holds_its_step(&resharded);
    }
    let error = reshard(&checkpoint, 0, to.path()).unwrap_err();
    assert!(matches!(error, Error::NoRanks), "{error}");
}

#[test]
fn a_damaged_checkpoint_leaves_no_output() {
    let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let path = save(from.path(), 3, 2, Keep::ALL).unwrap().path;
    fs::write(
        path.join("rank-00001.safetensors"),
        fs::read(path.join("rank-00000.safetensors")).unwrap(),
    )
    .unwrap();
    let length = fs::metadata(path.join("rank-00001.safetensors"))
        .unwrap()
        .len();
    common::edit_manifest(&path, |manifest| {
        manifest["files"][1]["bytes"] = length.into()
    });
    let checkpoint = Checkpoint::open(&path).unwrap();
    let error = reshard(&checkpoint, 2, to.path()).unwrap_err();
    assert!(matches!(error, Error::Source { .. }), "{error}");
    assert!(
        error.to_string().contains("checksum of its header"),
        "{error}"
    );
    assert_eq!(names(to.path()), [".lock"]);
}

/// A model of two files and an index.
fn hugging_face(directory: &Path) -> Vec<Full> {
    let weight = Full::new(TensorName::parameter("bert.w"), DType::F32, &[3, 4], 1);
    let bias = Full::new(TensorName::parameter("bert.b"), DType::BF16, &[5], 1);
    let spare = Full::new(TensorName::parameter("position_ids"), DType::I64, &[2], 1);
    let write = |name: &str, tensors: &[&Full]| {
        let parts = tensors.iter().map(|tensor| tensor.part(0, 1)).collect();
        write_consolidated(directory.join(name), parts).unwrap();
    };
    write("model-00001-of-00002.safetensors", &[&weight]);
    write("model-00002-of-00002.safetensors", &[&bias, &spare]);
    index(
        directory,
        r#"{"metadata":{"total_size":58},"weight_map":{
            "bert.b":"model-00002-of-00002.safetensors","bert.w":"model-00001-of-00002.safetensors"}}"#,
    );
    vec![bias, weight]
}

fn index(directory: &Path, text: &str) {
    fs::write(directory.join("model.safetensors.index.json"), text).unwrap();
}

#[test]
fn an_indexed_model_is_read_by_name_and_range() {
    let directory = tempfile::tempdir().unwrap();
    let tensors = hugging_face(directory.path());
    for path in [
        directory.path().into(),
        directory.path().join("model.safetensors.index.json"),
    ] {
        let model = IndexedSafetensors::open(path).unwrap();
        assert_eq!(model.not_indexed(), ["position_ids"]);
        assert_eq!(model.tensors().len(), 2);
        for (found, tensor) in model.tensors().iter().zip(&tensors) {
            assert_eq!(found.name, tensor.name);
            let (start, end, size) = (1, tensor.numel() - 1, tensor.dtype.size_bytes());
            let mut out = vec![0; (end - start) * size];
            let strict = (tensor.dtype, DTypePolicy::Strict);
            model
                .read_range_as(&tensor.name, start..end, strict, &mut out)
                .unwrap();
            assert_eq!(out, tensor.bytes[start * size..end * size]);
        }
        let wanted = Wanted {
            name: TensorName::parameter("encoder.w"),
            dtype: DType::BF16,
            shape: vec![3, 4],
        };
        let renames = Renames::new().rule(r"^bert\.", "encoder.").unwrap();
        let resolution = model
            .resolve(std::slice::from_ref(&wanted), &renames, DTypePolicy::Cast)
            .unwrap();
        assert_eq!(resolution.source(&wanted.name), Some(&tensors[1].name));
        assert_eq!(resolution.unexpected, [tensors[0].name.clone()]);
    }
}

#[test]
fn a_single_file_is_a_model_too() {
    let directory = tempfile::tempdir().unwrap();
    let tensor = Full::new(TensorName::parameter("w"), DType::F32, &[4], 1);
    write_consolidated(
        directory.path().join("model.safetensors"),
        vec![tensor.part(0, 1)],
    )
    .unwrap();
    let model = IndexedSafetensors::open(directory.path()).unwrap();
    let mut out = vec![0; 16];
    model
        .read_range_as(
            &tensor.name,
            0..4,
            (DType::F32, DTypePolicy::Strict),
            &mut out,
        )
        .unwrap();
    assert_eq!(out, tensor.bytes);
    let missing = TensorName::parameter("v");
    let error = model
        .read_range_as(&missing, 0..4, (DType::F32, DTypePolicy::Strict), &mut out)
        .unwrap_err();
    assert!(matches!(error, Error::UnknownTensor { .. }), "{error}");
}

#[test]
fn a_hostile_index_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    hugging_face(directory.path());
    let refused = |text: &str| {
        index(directory.path(), text);
        IndexedSafetensors::open(directory.path()).unwrap_err()
    };
    for name in [
        "../model-00001-of-00002.safetensors",
        "/etc/passwd",
        "a/b.safetensors",
    ] {
        let error = refused(&format!(r#"{{"weight_map":{{"w":"{name}"}}}}"#));
        assert!(matches!(error, Error::UnsafeFileName { .. }), "{error}");
    }
    let twice = r#"{"weight_map":{"bert.b":"model-00002-of-00002.safetensors","bert.b":"model-00001-of-00002.safetensors"}}"#;
    let error = refused(twice);
    assert!(
        error.to_string().contains("\"bert.b\" is named twice"),
        "{error}"
    );
    let elsewhere = r#"{"weight_map":{"bert.b":"model-00001-of-00002.safetensors"}}"#;
    let error = refused(elsewhere);
    assert!(matches!(error, Error::FileDisagrees { .. }), "{error}");
    for text in ["", "{}", "[1]", r#"{"weight_map":{"w":1}}"#] {
        let error = refused(text);
        assert!(matches!(error, Error::BadManifest { .. }), "{error}");
    }
    let error = refused(r#"{"weight_map":{"w":"missing.safetensors"}}"#);
    assert!(matches!(error, Error::Io { .. }), "{error}");
}

#[test]
#[ignore = "needs python3 with the packages safetensors and numpy"]
fn python_reads_what_a_rank_and_consolidate_have_written() {
    let root = tempfile::tempdir().unwrap();
    let published = save(root.path(), 3, 2, Keep::ALL).unwrap();
    let out = root.path().join("model.safetensors");
    consolidate(
        &Checkpoint::open(root.path()).unwrap(),
        &out,
        Content::Everything,
    )
    .unwrap();
    let program = "
import sys
from safetensors import safe_open
with safe_open(sys.argv[1], 'numpy') as full:
    weight = full.get_tensor('embedding.weight')
    moment = full.get_tensor('moment_1/embedding.weight')
    time = full.get_tensor('time/embedding.weight')
assert weight.shape == (7, 15) and str(weight.dtype) == 'float32', weight
assert time.shape == () and str(time.dtype) == 'uint64', time
with safe_open(sys.argv[2], 'numpy') as part:
    head = part.get_tensor('moment_1/embedding.weight')
    assert part.metadata()['rank'] == '0'
assert moment.reshape(-1)[:53].tobytes() == head.tobytes()
sys.stdout.write(weight.tobytes().hex())
";
    let output = Command::new("python3")
        .args(["-c", program])
        .arg(&out)
        .arg(published.path.join("rank-00000.safetensors"))
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let expected: String = model(3)[0]
        .bytes
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    assert_eq!(String::from_utf8(output.stdout).unwrap(), expected);
}
