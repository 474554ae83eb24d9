//! Bytes as a safetensors file, of which all is read.
#![no_main]

use std::fs;

use burn_shard_checkpoint::{DTypePolicy, IndexedSafetensors};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.safetensors");
    fs::write(&path, data).unwrap();
    let Ok(model) = IndexedSafetensors::open(&path) else {
        return;
    };
    for tensor in model.tensors() {
        let numel: usize = tensor.shape.iter().product();
        // No more than the file has: the header was checked against it.
        let mut out = vec![0; numel * tensor.dtype.size_bytes()];
        assert!(out.len() <= data.len());
        let as_it_is = (tensor.dtype, DTypePolicy::Strict);
        model
            .read_range_as(&tensor.name, 0..numel, as_it_is, &mut out)
            .unwrap();
    }
});
