//! A run that was saved goes on as if it had not been interrupted: losses, parameters and optimizer state.

#![allow(
    clippy::unwrap_used,
    reason = "a test fails by panicking, helpers included"
)]

mod common;

use std::fs;
use std::path::Path;
use std::process::Output;
#[cfg(target_os = "linux")]
use std::{
    collections::{BTreeMap, HashMap},
    ops::Range,
    process::Command,
    thread::{self, JoinHandle},
    time::Duration,
};

#[cfg(target_os = "linux")]
use burn_shard::checkpoint::Checkpoint;
#[cfg(target_os = "linux")]
use rand::{Rng, SeedableRng};
#[cfg(target_os = "linux")]
use rand_chacha::ChaCha8Rng;

use common::{bert_large, refused, write_corpus};

/// Trains on two ranks; returns the lines of losses.
fn train(root: &Path, strategy: &str, arguments: &[&str]) -> Vec<String> {
    let output = run(root, strategy, arguments);
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
    let losses = fs::read_to_string(root.join("losses.csv")).unwrap();
    losses
        .lines()
        .map(ToOwned::to_owned)
        .filter(|line| !line.starts_with("step"))
        .collect()
}

/// Every tensor of the newest checkpoint, whole: parameters and moments.
#[cfg(target_os = "linux")]
fn newest(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let checkpoint = Checkpoint::open(dir).unwrap();
    let tensors = checkpoint.tensors().iter().map(|tensor| {
        let name = tensor.name();
        (name.to_string(), checkpoint.read(&name).unwrap())
    });
    tensors.collect()
}

fn run(root: &Path, strategy: &str, arguments: &[&str]) -> Output {
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
    bert_large(root, &all)
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

/// A job of two processes that saves every second step.
#[cfg(target_os = "linux")]
const JOB: [&str; 6] = ["--steps", "60", "--launch", "2", "--checkpoint-every", "2"];

/// Kills one or both of two processes that save to `dir`, at a random moment after the first checkpoint.
#[cfg(target_os = "linux")]
fn killer(dir: &Path, random: &mut ChaCha8Rng) -> JoinHandle<()> {
    let victims = [&[0][..], &[1], &[0, 1]][random.random_range(0..3)];
    let after = Duration::from_millis(random.random_range(0..400));
    let (latest, mark) = (dir.join("latest"), dir.to_str().unwrap().to_owned());
    thread::spawn(move || {
        while !latest.exists() {
            thread::sleep(Duration::from_millis(5));
        }
        thread::sleep(after);
        for &victim in victims {
            // It may have ended, by itself or since the other one is gone.
            if let Some(process) = rank_process(victim, &mark) {
                rustix::process::kill_process(process, rustix::process::Signal::KILL).ok();
            }
        }
    })
}

/// What the launcher starts again after a kill ends with the losses and the last checkpoint of a run that nobody
/// has disturbed.
#[cfg(target_os = "linux")]
fn crash_trials(seeds: Range<u64>) {
    let root = tempfile::tempdir().unwrap();
    let job = |strategy, dir: &Path, more: &[&str]| {
        let dir = dir.to_str().unwrap();
        let all = [&JOB[..], &["--checkpoint-dir", dir], more].concat();
        train(root.path(), strategy, &all)
    };
    let mut undisturbed = HashMap::new();
    let (trials, mut restarted) = (seeds.end - seeds.start, 0);
    for seed in seeds {
        let strategy = ["zero1", "zero2", "zero3"][(seed % 3) as usize];
        let (whole, saved) = undisturbed.entry(strategy).or_insert_with(|| {
            let dir = root.path().join(strategy);
            (job(strategy, &dir, &[]), newest(&dir))
        });
        let dir = root.path().join(format!("disturbed-{seed}"));
        let killer = killer(&dir, &mut ChaCha8Rng::seed_from_u64(seed));
        let rest = job(strategy, &dir, &["--max-restarts", "2"]);
        killer.join().unwrap();
        let resumed_at = whole.len() - rest.len();
        assert_eq!(rest, whole[resumed_at..], "seed {seed}");
        assert!(newest(&dir) == *saved, "seed {seed}");
        restarted += u64::from(resumed_at > 0);
        fs::remove_dir_all(dir).unwrap();
    }
    assert!(2 * restarted >= trials, "{restarted} of {trials} met a run");
}

/// Sums over three ranks are rounded otherwise than over two, so the run to compare with is plain data parallel on
/// three ranks from the same checkpoint.
#[cfg(target_os = "linux")]
#[test]
fn another_number_of_ranks_goes_on_from_what_a_killed_job_left() {
    let root = tempfile::tempdir().unwrap();
    for (seed, strategy) in [(7, "zero2"), (8, "zero3")] {
        let dir = root.path().join(format!("killed-{seed}"));
        let killer = killer(&dir, &mut ChaCha8Rng::seed_from_u64(seed));
        let save = ["--checkpoint-dir", dir.to_str().unwrap()];
        let output = run(root.path(), strategy, &[&JOB[..], &save].concat());
        killer.join().unwrap();
        assert!(!output.status.success(), "the kill should have met a run");
        let [expected, found] = ["ddp", "zero3"].map(|strategy| {
            let copy = root.path().join(format!("{strategy}-{seed}"));
            let copied = Command::new("cp").arg("-r").args([&dir, &copy]).status();
            assert!(copied.unwrap().success());
            let from = ["--checkpoint-dir", copy.to_str().unwrap(), "--resume"];
            let more = ["--steps", "60", "--world-size", "3"];
            let losses = train(root.path(), strategy, &[&more[..], &from].concat());
            (losses, newest(&copy))
        });
        assert!(found.0.len() < 60, "it begins where the killed job ended");
        assert_eq!(found.0, expected.0, "seed {seed}");
        assert!(found.1 == expected.1, "seed {seed}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_job_whose_ranks_are_killed_goes_on_from_its_newest_checkpoint() {
    crash_trials(0..4);
}

#[cfg(target_os = "linux")]
#[test]
#[ignore = "takes minutes; docs/reliability.md has what it found"]
fn a_job_whose_ranks_are_killed_a_hundred_times_loses_nothing() {
    crash_trials(100..200);
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
