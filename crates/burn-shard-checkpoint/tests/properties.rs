//! What holds for all inputs: any cut of any tensors is read back, and no bytes make the reader panic.

mod common;

use std::fs;
use std::ops::Range;

use burn_shard_checkpoint::{
    Checkpoint, DType, Description, IndexedSafetensors, Keep, RankReport, TensorName, TensorPart,
    Writer, told,
};
use common::{Full, replace_manifest, save};
use proptest::prelude::*;

fn dtype() -> impl Strategy<Value = DType> {
    prop::sample::select(vec![DType::Bool, DType::BF16, DType::F32, DType::U64])
}

/// A tensor, and of each boundary between its elements the rank that holds what follows.
fn cut_tensor() -> impl Strategy<Value = (DType, Vec<usize>, Vec<usize>)> {
    (dtype(), prop::collection::vec(0_usize..5, 0..4)).prop_flat_map(|(dtype, shape)| {
        let numel = shape.iter().product::<usize>();
        (
            Just(dtype),
            Just(shape),
            prop::collection::vec(0_usize..4, numel),
        )
    })
}

/// The ranges of elements that are owned by `rank`.
fn ranges(owners: &[usize], rank: usize) -> Vec<Range<usize>> {
    let mut ranges: Vec<Range<usize>> = Vec::new();
    for (element, _) in owners
        .iter()
        .enumerate()
        .filter(|(_, owner)| **owner == rank)
    {
        match ranges.last_mut() {
            Some(last) if last.end == element => last.end += 1,
            _ => ranges.push(element..element + 1),
        }
    }
    ranges
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_cut_of_any_tensors_is_read_back(
        cuts in prop::collection::vec(cut_tensor(), 1..4),
        from in 0_usize..60,
        length in 0_usize..60,
    ) {
        let root = tempfile::tempdir().unwrap();
        let tensors: Vec<_> = (0_u64..)
            .zip(&cuts)
            .map(|(i, (dtype, shape, _))| {
                Full::new(TensorName::parameter(format!("t{i}")), *dtype, shape, i)
            })
            .collect();
        let writer = Writer::create(root.path(), 1).unwrap();
        let reports: Vec<_> = (0..4)
            .map(|rank| {
                let parts = tensors.iter().zip(&cuts).map(|(tensor, (dtype, shape, owners))| {
                    let ranges = ranges(owners, rank);
                    let size = dtype.size_bytes();
                    let slice = |range: &Range<usize>| &tensor.bytes[range.start * size..range.end * size];
                    let bytes: Vec<u8> = ranges.iter().flat_map(slice).copied().collect();
                    TensorPart::ranges(tensor.name.clone(), *dtype, shape, ranges, bytes)
                });
                writer.write_rank(rank, parts.collect()).unwrap()
            })
            .collect();
        writer.publish(&reports, &Description::default(), Keep::ALL).unwrap();

        let checkpoint = Checkpoint::open(root.path()).unwrap();
        checkpoint.verify().unwrap();
        for tensor in &tensors {
            prop_assert_eq!(&checkpoint.read(&tensor.name).unwrap(), &tensor.bytes);
            let start = from.min(tensor.numel());
            let end = (start + length).min(tensor.numel());
            let size = tensor.dtype.size_bytes();
            let mut out = vec![0; (end - start) * size];
            checkpoint.read_range(&tensor.name, start..end, &mut out).unwrap();
            prop_assert_eq!(&out, &tensor.bytes[start * size..end * size]);
        }
    }

    #[test]
    fn no_text_makes_the_reader_panic(
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0_usize..3), 1..8),
    ) {
        let root = tempfile::tempdir().unwrap();
        let path = save(root.path(), 3, 2, Keep::ALL).unwrap().path;
        for name in ["manifest.json", "rank-00001.safetensors"] {
            let file = path.join(name);
            let mut bytes = fs::read(&file).unwrap();
            for (index, byte, kind) in &edits {
                let at = index.index(bytes.len());
                match kind {
                    0 => bytes[at] = *byte,
                    1 => bytes.insert(at, *byte),
                    _ => drop(bytes.remove(at)),
                }
            }
            if name == "manifest.json" {
                replace_manifest(&path, &bytes);
            } else {
                fs::write(&file, &bytes).unwrap();
            }
            if let Ok(checkpoint) = Checkpoint::open(&path) {
                drop(checkpoint.verify_all());
                for tensor in checkpoint.tensors() {
                    drop(checkpoint.read(&tensor.name()));
                }
            }
            if let Ok(model) = IndexedSafetensors::open(path.join("rank-00001.safetensors")) {
                prop_assert!(model.not_indexed().is_empty());
            }
        }
    }

    #[test]
    fn no_message_makes_a_rank_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        prop_assert!(told::<RankReport>(&bytes).is_err());
    }
}
