//! The example learns, with ranks as threads and as processes.

#![allow(clippy::unwrap_used, reason = "a test ends at the first error")]

use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Output, Stdio};

fn learner(directory: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_learner"));
    command
        .arg("--directory")
        .arg(directory)
        .args(["--epochs", "30"])
        .env_clear()
        .envs(std::env::var_os("PATH").map(|path| ("PATH", path)))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// How many of 256 points the program says that it tells right.
fn right(output: Output) -> u32 {
    let text = String::from_utf8(output.stdout).unwrap();
    let errors = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{text}{errors}");
    let last = text.lines().last().unwrap();
    let count = last.strip_suffix(" of 256 points are told right").unwrap();
    count.parse().unwrap()
}

#[test]
fn ranks_that_are_threads_learn_under_each_strategy() {
    for strategy in ["ddp", "zero1", "zero2", "zero3"] {
        let directory = tempfile::tempdir().unwrap();
        let output = learner(directory.path())
            .args(["--strategy", strategy])
            .output();
        let right = right(output.unwrap());
        assert!(right > 230, "{strategy}: {right}");
        // Burn's own metrics, which rank 0 writes.
        assert!(directory.path().join("valid").is_dir());
    }
}

#[test]
fn ranks_that_are_processes_learn() {
    let directory = tempfile::tempdir().unwrap();
    let port = free_port();
    let ranks = ["0", "1"].map(|rank| {
        let mut command = learner(directory.path());
        command
            .envs([("RANK", rank), ("LOCAL_RANK", rank)])
            .envs([("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2")])
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", port.to_string())
            .spawn()
            .unwrap()
    });
    let counts = ranks.map(|rank| right(rank.wait_with_output().unwrap()));
    assert!(counts[0] > 230, "{counts:?}");
    assert_eq!(counts[0], counts[1]);
}

/// Not one that the system gives to others in between: those are higher.
fn free_port() -> u16 {
    let first = std::process::id() * 16;
    (0..16)
        .map(|next| u16::try_from(20_000 + (first + next) % 10_000).unwrap())
        .find(|&port| TcpListener::bind(("127.0.0.1", port)).is_ok())
        .unwrap()
}
