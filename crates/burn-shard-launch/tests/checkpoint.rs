//! `burn-shard checkpoint` as a user calls it.
#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a test ends at the first error")]

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use burn_shard_checkpoint::{
    Checkpoint, DType, Description, IndexedSafetensors, Keep, TensorName, TensorPart, Writer,
    even_range,
};

fn saved(root: &Path) {
    let writer = Writer::create(root, 30).unwrap();
    let bytes: Vec<u8> = (0..40).collect();
    let reports: Vec<_> = (0..2)
        .map(|rank| {
            let range = even_range(10, rank, 2);
            let part = |name| {
                let bytes = &bytes[range.start * 4..range.end * 4];
                TensorPart::ranges(name, DType::F32, &[2, 5], vec![range.clone()], bytes)
            };
            let weight = TensorName::parameter("encoder.weight");
            let moment = TensorName::state("encoder.weight", "moment_1");
            writer
                .write_rank(rank, vec![part(weight), part(moment)])
                .unwrap()
        })
        .collect();
    let description = Description {
        strategy: "full".into(),
        ..Description::default()
    };
    writer.publish(&reports, &description, Keep::ALL).unwrap();
}

fn checkpoint(arguments: &[&str], root: &Path) -> Output {
    let program = env!("CARGO_BIN_EXE_burn-shard");
    Command::new(program)
        .arg("checkpoint")
        .args(arguments)
        .current_dir(root)
        .output()
        .unwrap()
}

fn succeeded(output: &Output) -> String {
    let (out, error) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{out}{error}");
    out
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[test]
fn inspect_prints_what_a_checkpoint_holds() {
    let root = tempfile::tempdir().unwrap();
    saved(root.path());
    let out = succeeded(&checkpoint(&["inspect", ".", "--tensors"], root.path()));
    for line in [
        "./step-0000000030.000001",
        "step         30",
        "ranks        2",
        "strategy     full",
        "tensors      2: 1 moment_1, 1 parameter",
        "tensor       encoder.weight (moment_1)  F32 [2, 5]  0..5@0 5..10@1",
    ] {
        assert!(out.lines().any(|found| found == line), "{line:?} in {out}");
    }
    let short = succeeded(&checkpoint(&["inspect", "."], root.path()));
    assert!(!short.contains("encoder.weight"), "{short}");
}

#[test]
fn verify_says_what_is_wrong_and_fails() {
    let root = tempfile::tempdir().unwrap();
    saved(root.path());
    let out = succeeded(&checkpoint(
        &["verify", "step-0000000030.000001"],
        root.path(),
    ));
    assert!(
        out.starts_with("step-0000000030.000001: intact, 2 files"),
        "{out}"
    );

    let file = root
        .path()
        .join("step-0000000030.000001/rank-00001.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&file, bytes).unwrap();
    let output = checkpoint(&["verify", "."], root.path());
    assert_eq!(output.status.code(), Some(1));
    let error = text(&output.stderr);
    assert!(
        error.contains("rank-00001.safetensors: the checksum of its contents is"),
        "{error}"
    );
    assert!(error.contains("1 of 2 files are not intact"), "{error}");

    // A damaged checkpoint is not copied.
    let output = checkpoint(
        &["reshard", ".", "--ranks", "1", "--out", "new"],
        root.path(),
    );
    assert_eq!(output.status.code(), Some(1));
    assert!(!root.path().join("new").exists());
    let nothing = tempfile::tempdir().unwrap();
    let output = checkpoint(&["verify", "."], nothing.path());
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(
        text(&output.stderr),
        "burn-shard checkpoint: no complete checkpoint in .\n"
    );
}

#[test]
fn consolidate_and_reshard_write_the_same_tensors() {
    let root = tempfile::tempdir().unwrap();
    saved(root.path());
    let name = TensorName::parameter("encoder.weight");
    let expected = Checkpoint::open(root.path()).unwrap().read(&name).unwrap();

    succeeded(&checkpoint(
        &["consolidate", ".", "--out", "model.safetensors"],
        root.path(),
    ));
    let model = IndexedSafetensors::open(root.path().join("model.safetensors")).unwrap();
    assert_eq!(model.tensors().len(), 1);
    let file = fs::read(root.path().join("model.safetensors")).unwrap();
    assert!(file.ends_with(&expected));
    let everything = [
        "consolidate",
        ".",
        "--everything",
        "--out",
        "all.safetensors",
    ];
    succeeded(&checkpoint(&everything, root.path()));
    let model = IndexedSafetensors::open(root.path().join("all.safetensors")).unwrap();
    assert_eq!(model.tensors().len(), 2);

    let out = succeeded(&checkpoint(
        &["reshard", ".", "--ranks", "3", "--out", "new"],
        root.path(),
    ));
    assert!(
        out.starts_with("new/step-0000000030.000001: 3 ranks"),
        "{out}"
    );
    let resharded = Checkpoint::open(root.path().join("new")).unwrap();
    assert_eq!(resharded.manifest().world_size, 3);
    assert_eq!(resharded.read(&name).unwrap(), expected);
}
