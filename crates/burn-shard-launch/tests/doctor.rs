//! `burn-shard doctor` as a user calls it, on a machine that lacks something: the test sees to that.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test ends at the first error")]

use std::process::{Command, Output, Stdio};

fn doctor(environment: &[(&str, &str)]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_burn-shard"));
    command.arg("doctor").envs(environment.iter().copied());
    command
}

/// Wherever this runs, there is no NCCL under that name, nor a toolkit.
const NOTHING: [(&str, &str); 2] = [
    ("BURN_SHARD_NCCL", "/nowhere/libnccl.so.2"),
    ("CUDA_PATH", "/nowhere"),
];

fn text(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

#[test]
fn each_thing_has_a_line_and_each_lack_says_what_it_means() {
    let output = doctor(&NOTHING).output().unwrap();
    let out = text(&output);
    assert_eq!(output.status.code(), Some(1), "{out}");
    assert!(output.stderr.is_empty(), "{output:?}");
    let lines: Vec<&str> = out.lines().collect();
    for what in [
        "driver",
        "libdevice",
        "NCCL",
        "MPI",
        "cores",
        "huge pages",
        "/dev/shm",
        "locked memory",
        "open files",
    ] {
        let named = |mark: &str| {
            let start = format!("{mark}  {what} ");
            lines.iter().position(|line| line.starts_with(&start))
        };
        let good = named("ok");
        let lack = named("--");
        assert!(good.is_some() != lack.is_some(), "{what} in {out}");
        if let Some(lack) = lack {
            let meaning = lines.get(lack + 1).unwrap().trim_start();
            assert!(meaning.starts_with("-> "), "{what} in {out}");
        }
    }
    for part in [
        "--  NCCL           not usable",
        "/nowhere/libnccl.so.2: ",
        "BURN_SHARD_NCCL",
        "--  libdevice      not found",
        "/nowhere/nvvm/libdevice/libdevice.10.bc",
    ] {
        assert!(out.contains(part), "{part} in {out}");
    }
}

#[test]
fn a_reader_that_leaves_is_no_error_of_its_own() {
    let mut child = doctor(&NOTHING)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(output.stderr.is_empty(), "{output:?}");
}

#[test]
fn the_help_says_what_it_exits_with() {
    let output = Command::new(env!("CARGO_BIN_EXE_burn-shard"))
        .args(["doctor", "--help"])
        .output()
        .unwrap();
    assert!(output.status.success());
    assert!(text(&output).contains("Exits with 0"), "{output:?}");
}
