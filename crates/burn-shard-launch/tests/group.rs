//! The launcher with ranks that form a real group: this program, started again.
//!
//! Linux only: processes are found in `/proc`.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test ends at the first error")]
#![allow(clippy::print_stdout, reason = "a rank tells the test by its output")]

mod common;
#[path = "../../burn-shard-comm/examples/rank_loop.rs"]
#[allow(dead_code, reason = "its main function is this test's business")]
mod rank_loop;

use std::{
    fs,
    process::Command,
    time::{Duration, Instant},
};

use burn_shard_comm::{ProcessGroup, ReduceOp};
use common::{Job, Running, kill, text};
use rustix::process::Signal;

/// Makes a process of this program one rank, which fails as [`Fault`] says, or exchanges until it is killed.
const AS_RANK: &str = "BURN_SHARD_TEST_AS_RANK";
const VICTIM: &str = "BURN_SHARD_TEST_VICTIM";
const TEST: &str = "a_job_of_a_real_group_ends_when_a_rank_is_killed";
/// In which a job ends after a death, however busy the machine; ranks wait ten times as long for each other.
const SOON: Duration = Duration::from_secs(30);
/// How long a rank that fails cleans up, which is longer than its peers need to notice.
const CLEAN_UP: Duration = Duration::from_millis(700);

/// How a rank fails by its own fault, what it says, and the exit code of the launcher.
const FAULTS: [(&str, &str, i32); 5] = [
    ("panic", "the culprit panics", 101),
    ("abort", "the culprit aborts", 3),
    ("return", "the culprit returns", 3),
    ("exit", "the culprit exits", 3),
    ("process-abort", "the culprit aborts its process", 128 + 6),
];

/// A job of `ranks` ranks that exchange until something fails.
fn job(ranks: usize, fault: &str, victim: usize) -> Job {
    job_with("", ranks, fault, victim)
}

fn job_with(options: &str, ranks: usize, fault: &str, victim: usize) -> Job {
    let program = std::env::current_exe().unwrap();
    let program = [program.to_str().unwrap(), "--exact", TEST, "--nocapture"];
    Job::of(&format!("-n {ranks} --grace 20 {options}"), &program)
        .env(AS_RANK, fault)
        .env("RUST_BACKTRACE", "1")
        .env(VICTIM, &victim.to_string())
}

fn start() -> Running {
    let mut running = job(4, "none", 0).start();
    running.wait_for("ready: rank", 4);
    running
}

/// Says that its owner has ended in order, after a while.
struct CleanUp;

impl Drop for CleanUp {
    fn drop(&mut self) {
        std::thread::sleep(CLEAN_UP);
        println!("\ncleaned up");
    }
}

/// What a rank's process does; its exit code.
fn rank(fault: &str) -> i32 {
    let group = || ProcessGroup::from_env().unwrap();
    let victim: usize = std::env::var(VICTIM).unwrap().parse().unwrap();
    if fault == "none" {
        let end = rank_loop::run(usize::MAX, 20_011);
        println!("\nfailed: {}", end.unwrap_err());
        return 1;
    }
    // Dropped after the group: peers notice while it sleeps.
    let _clean_up = CleanUp;
    let group = group();
    for round in 0.. {
        let mut buffer = vec![1.0f32; 1000];
        let is_time = group.rank() == victim && round == 50;
        match fault {
            "panic" if is_time => panic!("the culprit panics"),
            "abort" if is_time => {
                group.abort("the culprit aborts");
                println!("\nthe culprit aborts");
                return 3;
            }
            "return" if is_time => {
                drop(group);
                std::thread::sleep(CLEAN_UP);
                println!("\nthe culprit returns");
                return 3;
            }
            "exit" if is_time => {
                println!("\nthe culprit exits");
                std::process::exit(3);
            }
            "process-abort" if is_time => {
                println!("\nthe culprit aborts its process");
                std::process::abort();
            }
            _ => {}
        }
        if let Err(error) = group.all_reduce(&mut buffer, ReduceOp::Sum) {
            println!("\nfailed: {error}");
            // As fast as possible, which is what makes it look like the first.
            std::process::exit(1);
        }
    }
    0
}

/// The process of `rank`.
fn process(running: &Running, rank: usize) -> i32 {
    let wanted = format!("RANK={rank}").into_bytes();
    let is_wanted = |pid: i32| {
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment.split(|&byte| byte == 0).any(|v| v == wanted)
    };
    let mut processes = running.job.processes().into_iter().map(|(pid, _)| pid);
    processes.find(|&pid| is_wanted(pid)).unwrap()
}

#[test]
fn a_job_of_a_real_group_ends_when_a_rank_is_killed() {
    if let Ok(fault) = std::env::var(AS_RANK) {
        let code = std::panic::catch_unwind(|| rank(&fault));
        std::process::exit(code.unwrap_or(101));
    }
    for victim in [0, 2] {
        let running = start();
        let begin = Instant::now();
        kill(process(&running, victim), Signal::KILL);
        let (status, out, err) = running.end();
        assert!(begin.elapsed() < SOON, "{out}{err}");
        assert_eq!(status.code(), Some(128 + 9), "{out}{err}");
        let first = format!("rank {victim} was the first to fail: signal 9 (SIGKILL)\n");
        assert!(err.contains(&first), "{out}{err}");
        let (_, tail) = err
            .split_once(&format!("last lines of rank {victim}:\n"))
            .unwrap();
        assert!(
            tail.contains(&format!("ready: rank {victim} of 4")),
            "{err}"
        );
        // What the others said before they were ended, if they had the time.
        for line in out.lines().filter(|line| line.contains("failed: ")) {
            assert!(line.contains(&format!("rank {victim} is gone")), "{out}");
        }
    }
}

/// A rank that ends its own process writes nothing, and the files of the others say what it was wanted for.
#[test]
fn the_flight_recorder_says_in_what_the_others_waited_for_a_rank_that_died() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_str().unwrap();
    let options = format!("--flight-recorder {path}");
    for (fault, victim) in [("process-abort", 2), ("return", 0)] {
        let output = job_with(&options, 3, fault, victim).run();
        let err = text(&output.stderr);
        let pointer = format!("burn-shard flight-recorder {path}");
        assert!(err.contains(&pointer), "{err}");
        let output = Command::new(env!("CARGO_BIN_EXE_burn-shard"))
            .args(["flight-recorder", path])
            .output()
            .unwrap();
        let report = text(&output.stdout);
        assert!(output.status.success(), "{report}");
        let who = if victim == 0 {
            "all of them"
        } else {
            "all with a file"
        };
        let finished = format!("the last collective that {who} finished is number 49, all_reduce");
        assert!(report.contains(&finished), "{report}");
        let waited = "in number 50, all_reduce f32 sum [1000], for ";
        assert!(report.contains(waited), "{report}");
        // A rank that heard of the failure before it began was not waiting.
        for survivor in (0..3).filter(|&rank| rank != victim) {
            let begins = [
                format!("all ranks: rank {survivor} was in number 50"),
                format!("    rank {survivor} had not started it"),
                format!("all ranks: ranks {}", ["1, 2", "0, 2", "0, 1"][victim]),
            ];
            let is_told = |line: &str| begins.iter().any(|begin| line.starts_with(begin));
            assert!(report.lines().any(is_told), "{survivor}: {report}");
        }
        let victim_is = match fault {
            "return" => "rank 0 had not started it: its last one was number 49",
            _ => "rank 2 has no file: killed, ended by exit, or still running",
        };
        assert!(report.contains(victim_is), "{report}");
    }
}

#[test]
fn the_rank_that_fails_in_order_is_named_and_ends_its_clean_up() {
    for (fault, line, code) in FAULTS {
        for victim in [0, 2] {
            let output = job(3, fault, victim).run();
            let (out, err) = (text(&output.stdout), text(&output.stderr));
            let what = format!("{fault} of rank {victim}: {out}{err}");
            assert_eq!(output.status.code(), Some(code), "{what}");
            let first = format!("rank {victim} was the first to fail: ");
            assert!(err.contains(&first), "{what}");
            let (_, tail) = err
                .split_once(&format!("last lines of rank {victim}:\n"))
                .expect(&what);
            assert!(tail.contains(line), "{what}");
            // Nothing can be cleaned up by a process that has ended itself.
            if matches!(fault, "panic" | "abort" | "return") {
                let cleaned_up = format!("[{victim}] cleaned up");
                assert!(out.contains(&cleaned_up), "{what}");
            }
        }
    }
}
