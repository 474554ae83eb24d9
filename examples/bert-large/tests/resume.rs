//! A run that was saved goes on as if it had not been interrupted.

#![allow(
    clippy::unwrap_used,
    reason = "a test fails by panicking, helpers included"
)]

mod common;

use std::fs;
use std::path::Path;
use std::thread;
use std::time::Duration;

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
    if !arguments.contains(&"--steps") {
        all.extend(["--steps", "6"]);
    }
    all.extend(["--micro-batch", "2", "--accumulate", "2"]);
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
    assert_eq!(rest, whole[3..]);
}

/// One of two processes is killed as soon as there is a checkpoint. What the launcher starts again ends with the
/// losses of a run that nobody has disturbed.
#[cfg(target_os = "linux")]
#[test]
fn a_job_whose_rank_is_killed_goes_on_from_its_newest_checkpoint() {
    const STEPS: &str = "60";
    let root = tempfile::tempdir().unwrap();
    let options = |dir: &'static str| {
        let dir = root.path().join(dir).to_str().unwrap().to_owned();
        let fixed = ["--steps", STEPS, "--launch", "2", "--checkpoint-every", "2"];
        let fixed = fixed.map(ToOwned::to_owned).into_iter();
        fixed
            .chain(["--checkpoint-dir".to_owned(), dir])
            .collect::<Vec<_>>()
    };
    let whole = options("undisturbed");
    let whole: Vec<&str> = whole.iter().map(String::as_str).collect();
    let whole = train(root.path(), "zero2", &whole);

    let disturbed = options("disturbed");
    let mut disturbed: Vec<&str> = disturbed.iter().map(String::as_str).collect();
    disturbed.extend(["--max-restarts", "1"]);
    let latest = root.path().join("disturbed/latest");
    let mark = root.path().to_str().unwrap().to_owned();
    let killer = thread::spawn(move || {
        while !latest.exists() {
            thread::sleep(Duration::from_millis(5));
        }
        // A rank of this job: it has the directory among its arguments.
        let victim = rank_process(1, &mark).expect("rank 1 should run");
        rustix::process::kill_process(victim, rustix::process::Signal::KILL).unwrap();
    });
    let rest = train(root.path(), "zero2", &disturbed);
    killer.join().unwrap();
    let resumed_at = whole.len() - rest.len();
    assert!((2..60).contains(&resumed_at), "{resumed_at}");
    assert_eq!(rest, whole[resumed_at..]);
}

/// The process that runs as this rank with `mark` in its arguments.
#[cfg(target_os = "linux")]
fn rank_process(rank: usize, mark: &str) -> Option<rustix::process::Pid> {
    let wanted = format!("RANK={rank}").into_bytes();
    let processes = fs::read_dir("/proc").unwrap().flatten();
    let mut numbers = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let found = numbers.find(|pid| {
        let read = |name| fs::read(format!("/proc/{pid}/{name}")).unwrap_or_default();
        let arguments = String::from_utf8_lossy(&read("cmdline")).into_owned();
        let environment = read("environ");
        arguments.contains(mark) && environment.split(|&byte| byte == 0).any(|v| v == wanted)
    });
    found.and_then(rustix::process::Pid::from_raw)
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
