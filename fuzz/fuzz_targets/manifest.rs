//! Bytes as a manifest, with the right checksum, beside one empty rank's file.
#![no_main]

use std::fs;

use burn_shard_checkpoint::Checkpoint;
use libfuzzer_sys::fuzz_target;
use xxhash_rust::xxh3::xxh3_64;

fuzz_target!(|data: &[u8]| {
    let directory = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| fs::write(directory.path().join(name), bytes).unwrap();
    write("manifest.json", data);
    write(
        "manifest.xxh3",
        format!("{:016x}\n", xxh3_64(data)).as_bytes(),
    );
    write("rank-00000.safetensors", b"\x08\0\0\0\0\0\0\0{}      ");
    if let Ok(checkpoint) = Checkpoint::open(directory.path()) {
        drop(checkpoint.verify_all());
        for tensor in checkpoint.tensors() {
            drop(checkpoint.read(&tensor.name()));
        }
    }
});
