//! Ranks as processes: the same bits as ranks that are threads, and an end for all when one dies.

#![allow(
    clippy::unwrap_used,
    reason = "a test fails by panicking, helpers included"
)]

mod common;

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use common::write_corpus;

/// Variables by which a launcher that runs the tests, or the user, would interfere.
const INHERITED: [&str; 8] = [
    "RANK",
    "WORLD_SIZE",
    "SLURM_PROCID",
    "OMPI_COMM_WORLD_RANK",
    "PMI_RANK",
    "BURN_SHARD_TOKEN",
    "BURN_SHARD_BIND",
    "RAYON_NUM_THREADS",
];

/// The program, on a corpus in `root`, for `arguments`.
fn bert_large(root: &Path, arguments: &[&str]) -> Command {
    let corpus = root.join("corpus.jsonl");
    if !corpus.exists() {
        write_corpus(&corpus, 60);
    }
    let mut command = Command::new(env!("CARGO_BIN_EXE_bert-large"));
    command
        .args(["--micro-batch", "2", "--seq-len", "32", "--corpus"])
        .arg(corpus)
        .args(arguments)
        .env("XDG_CACHE_HOME", root)
        // A dead rank is noticed at once; this is for what is not.
        .env("BURN_SHARD_TIMEOUT", "100")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    for variable in INHERITED {
        command.env_remove(variable);
    }
    command
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

fn succeed(mut command: Command) -> Output {
    let output = command.output().unwrap();
    assert!(
        output.status.success(),
        "{}{}",
        text(&output.stdout),
        text(&output.stderr)
    );
    output
}

/// Trains three steps; returns all digits of the losses, and the output.
fn losses(root: &Path, arguments: &[&str]) -> (String, String) {
    let file = root.join("losses.csv");
    let mut command = bert_large(root, arguments);
    command.args(["--steps", "3", "--losses"]).arg(&file);
    let output = succeed(command);
    let losses = fs::read_to_string(&file).unwrap();
    assert_eq!(losses.lines().count(), 4, "{losses}");
    fs::remove_file(file).unwrap();
    (losses, text(&output.stdout).to_owned())
}

#[test]
fn processes_have_the_losses_of_threads_to_the_last_bit() {
    for strategy in ["zero2", "zero3"] {
        let root = tempfile::tempdir().unwrap();
        let common = ["--dropout", "0", "--strategy", strategy];
        // The processes go first: only one may train the vocabulary.
        let (processes, output) = losses(root.path(), &[&common[..], &["--launch", "2"]].concat());
        let (threads, _) = losses(root.path(), &common);
        assert_eq!(processes, threads, "{strategy}");

        // Rank 0 reports, for both.
        assert_eq!(output.matches("trained now").count(), 1, "{output}");
        assert!(output.contains("on 2 ranks (processes)"), "{output}");
        assert!(
            output.lines().all(|line| line.starts_with("[0] ")),
            "{output}"
        );
        let row = |name: &str| -> Vec<f64> {
            let row = output.lines().find_map(|line| line[4..].strip_prefix(name));
            let measured = row.unwrap().split('|').next().unwrap();
            let cells = measured.split_whitespace();
            cells.map(|cell| cell.parse().unwrap()).collect()
        };
        let [state, process] = ["together", "its process"].map(row);
        assert_eq!((state.len(), process.len()), (2, 2), "{output}");
        // Both ranks hold about as much; the process holds the state, and more.
        assert!((state[0] - state[1]).abs() < 0.1 * state[0], "{output}");
        assert!(
            process.iter().zip(&state).all(|(all, part)| all > part),
            "{output}"
        );
    }
}

#[test]
fn processes_repeat_with_dropout() {
    let root = tempfile::tempdir().unwrap();
    let [first, second] = [(); 2].map(|()| losses(root.path(), &["--launch=2", "--dropout=0.1"]).0);
    assert_eq!(first, second);
}

#[test]
fn what_the_libraries_log_is_seen_when_asked_for() {
    let root = tempfile::tempdir().unwrap();
    let [quiet, asked] = [None, Some("burn_shard_comm=debug")].map(|level| {
        let port = free_port();
        let ranks = [0, 1].map(|r| {
            let mut command = rank(root.path(), r, port, &["--steps", "1"]);
            command.env_remove("RUST_LOG");
            command.envs(level.map(|level| ("RUST_LOG", level)));
            command.spawn().unwrap()
        });
        let [first, _] = ranks.map(|child| child.wait_with_output().unwrap());
        assert!(first.status.success(), "{}", text(&first.stderr));
        text(&first.stderr).to_owned()
    });
    assert_eq!(quiet, "");
    assert!(asked.contains(" burn_shard_comm::"), "{asked}");

    let mut command = bert_large(root.path(), &[]);
    let output = command.env("RUST_LOG", "nonsense=loud").output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).starts_with("error: RUST_LOG is "));
}

/// A rank of two, as torchrun would start it.
fn rank(root: &Path, rank: usize, port: u16, arguments: &[&str]) -> Command {
    let mut command = bert_large(root, arguments);
    command
        .env("RANK", rank.to_string())
        .env("LOCAL_RANK", rank.to_string())
        .env("WORLD_SIZE", "2")
        .env("LOCAL_WORLD_SIZE", "2")
        .env("MASTER_ADDR", "127.0.0.1")
        .env("MASTER_PORT", port.to_string());
    command
}

/// Not one that the system gives to others in between: those are higher.
fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let first = std::process::id() * 16;
    loop {
        let port = 20_000 + (first + NEXT.fetch_add(1, Ordering::Relaxed)) % 10_000;
        let port = port.try_into().unwrap();
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

/// Reads until a line has `text`.
fn wait_for(child: &mut Child, text: &str) {
    let lines = BufReader::new(child.stdout.as_mut().unwrap()).lines();
    if !lines.map(Result::unwrap).any(|line| line.contains(text)) {
        let mut error = String::new();
        let mut stderr = child.stderr.take().unwrap();
        stderr.read_to_string(&mut error).unwrap();
        panic!("no {text:?}: {error}");
    }
}

#[test]
fn a_rank_that_loses_the_other_says_which_and_fails() {
    let root = tempfile::tempdir().unwrap();
    let port = free_port();
    let [mut first, mut second] = [0, 1].map(|r| {
        rank(root.path(), r, port, &["--steps", "100000"])
            .spawn()
            .unwrap()
    });
    wait_for(&mut first, "tokens/s");
    second.kill().unwrap();
    second.wait().unwrap();
    // The progress goes on to be read, or the pipe would fill.
    let mut rest = first.stdout.take().unwrap();
    std::io::copy(&mut rest, &mut std::io::sink()).unwrap();
    let output = first.wait_with_output().unwrap();
    let error = text(&output.stderr);
    let last = error.lines().last().unwrap();
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(last.starts_with("error: rank 0"), "{error}");
    assert!(last.contains("rank 1 is gone"), "{error}");
}

#[test]
fn a_killed_rank_ends_the_job_and_is_named() {
    let root = tempfile::tempdir().unwrap();
    let mut launcher = bert_large(root.path(), &["--launch", "2", "--steps", "100000"])
        .spawn()
        .unwrap();
    wait_for(&mut launcher, "tokens/s");
    let killed = child_of_rank(launcher.id(), 1);
    let killed = Command::new("sh")
        .args(["-c", &format!("kill -9 {killed}")])
        .status();
    assert!(killed.unwrap().success());
    let mut rest = launcher.stdout.take().unwrap();
    std::io::copy(&mut rest, &mut std::io::sink()).unwrap();
    let output = launcher.wait_with_output().unwrap();
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(128 + 9), "{error}");
    assert!(
        error.contains("rank 1 was the first to fail: signal 9 (SIGKILL)"),
        "{error}"
    );
}

/// The process that `launcher` has started as this rank.
fn child_of_rank(launcher: u32, rank: usize) -> u32 {
    let parent = format!("PPid:\t{launcher}");
    let rank = format!("RANK={rank}");
    let processes = fs::read_dir("/proc").unwrap().flatten();
    let mut found = processes.filter_map(|entry| {
        let pid = entry.file_name().to_str()?.parse().ok()?;
        let read = |file: &str| {
            let mut text = Vec::new();
            fs::File::open(entry.path().join(file))
                .ok()?
                .read_to_end(&mut text)
                .ok()?;
            Some(String::from_utf8_lossy(&text).into_owned())
        };
        let is_child = read("status")?.lines().any(|line| line == parent);
        let is_rank = read("environ")?
            .split('\0')
            .any(|variable| variable == rank);
        (is_child && is_rank).then_some(pid)
    });
    found.next().expect("the rank should run")
}

#[test]
fn what_one_rank_refuses_all_ranks_say() {
    let root = tempfile::tempdir().unwrap();
    let missing = root.path().join("nowhere.json");
    let missing = missing.to_str().unwrap();
    let port = free_port();
    // Only rank 0 reads it.
    let ranks = [0, 1].map(|r| {
        rank(root.path(), r, port, &["--tokenizer", missing])
            .spawn()
            .unwrap()
    });
    let [first, second] = ranks.map(|child| child.wait_with_output().unwrap());
    let cause = format!("cannot read {missing}: ");
    for (output, start) in [(&first, "error: cannot"), (&second, "error: rank 1")] {
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{error}");
        assert!(
            error.starts_with(start) && error.contains(&cause),
            "{error}"
        );
    }
}

#[test]
fn contradictions_are_refused_before_ranks_meet() {
    let root = tempfile::tempdir().unwrap();
    let refused = |mut command: Command| {
        let output = command.output().unwrap();
        let error = text(&output.stderr).to_owned();
        assert_eq!(output.status.code(), Some(1), "{error}");
        error
    };
    // Nobody is there to meet.
    let error = refused(rank(root.path(), 1, free_port(), &["--world-size", "4"]));
    assert_eq!(
        error,
        "error: --world-size is 4, but this process is one of 2 ranks (leave --world-size out)\n"
    );
    // Said once, by what would have launched.
    let error = refused(bert_large(
        root.path(),
        &["--launch", "2", "--dropout", "2"],
    ));
    assert_eq!(
        error,
        "error: --dropout is 2 (allowed: from 0 to below 1)\n"
    );
    if cfg!(not(feature = "mpi")) {
        let error = refused(bert_large(root.path(), &["--comm", "mpi"]));
        assert_eq!(
            error,
            "error: --comm mpi: built without the cargo feature `mpi`\n"
        );
    }
}
