//! A run that was saved goes on as if it had not been interrupted.

#![allow(
    clippy::unwrap_used,
    reason = "a test fails by panicking, helpers included"
)]

mod common;

use std::fs;
use std::path::Path;

use common::{bert_large, refused, write_corpus};

/// Trains on two ranks; returns the lines of losses.
fn train(root: &Path, strategy: &str, arguments: &[&str]) -> Vec<String> {
    let (corpus, losses) = (root.join("corpus.jsonl"), root.join("losses.csv"));
    if !corpus.exists() {
        write_corpus(&corpus, 60);
    }
    let mut all = vec![
        "--corpus",
        corpus.to_str().unwrap(),
        "--losses",
        losses.to_str().unwrap(),
    ];
    all.extend(["--steps", "6", "--micro-batch", "2", "--accumulate", "2"]);
    all.extend(["--seq-len", "16", "--dropout", "0", "--clip-norm", "1"]);
    all.extend(["--strategy", strategy]);
    all.extend(arguments);
    let output = bert_large(root, &all);
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
    let losses = fs::read_to_string(losses).unwrap();
    losses
        .lines()
        .map(ToOwned::to_owned)
        .filter(|line| !line.starts_with("step"))
        .collect()
}

/// The digits of a line of losses, without the number of the step.
fn digits(lines: &[String]) -> Vec<&str> {
    lines
        .iter()
        .map(|line| line.split_once(',').unwrap().1)
        .collect()
}

#[test]
fn a_resumed_run_has_the_losses_of_an_uninterrupted_one_under_another_strategy_too() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("checkpoints");
    let dir_name = dir.to_str().unwrap();
    let save = ["--checkpoint-dir", dir_name, "--checkpoint-every", "3"];
    let whole = train(root.path(), "zero2", &save);
    assert_eq!(whole.len(), 6, "{whole:?}");
    // As if the machine had gone down after the fourth step.
    for entry in fs::read_dir(&dir).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        if name.starts_with("step-0000000006") {
            fs::remove_dir_all(entry.path()).unwrap();
        } else if name == "latest" {
            fs::remove_file(entry.path()).unwrap();
        }
    }
    let resume = ["--checkpoint-dir", dir_name, "--resume"];
    let rest = train(root.path(), "zero3", &resume);
    assert_eq!(digits(&rest), digits(&whole[3..]));
}

#[test]
fn resuming_without_a_checkpoint_is_one_line() {
    let root = tempfile::tempdir().unwrap();
    let nowhere = root.path().join("nowhere");
    let corpus = root.path().join("corpus.jsonl");
    write_corpus(&corpus, 60);
    let text = refused(&[
        "--corpus",
        corpus.to_str().unwrap(),
        "--seq-len",
        "16",
        "--micro-batch",
        "2",
        "--checkpoint-dir",
        nowhere.to_str().unwrap(),
        "--resume",
    ]);
    assert!(text.contains("nowhere"), "{text}");
}
