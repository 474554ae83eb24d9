//! Ranks as threads where the system has no thread left, and counts that no system has.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test ends at the first error")]
#![allow(
    clippy::print_stdout,
    reason = "a process tells the test by its output"
)]

use std::{
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use burn_shard_comm::{Error, Local, ProcessGroup};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Megabytes of addresses that a process of this program may still take; it then spawns ranks and ends.
const LEFT: &str = "BURN_SHARD_TEST_LEFT_MB";
const RANKS: u64 = 12;
/// A large stack for each thread, beside which all other memory is small.
const STACK_MB: u64 = 256;

/// Limits this process, and says what becomes of a group.
fn spawn_with_little(left_mb: u64) {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = pages.split(' ').next().unwrap().parse().unwrap();
    let limit = Rlimit {
        current: Some(pages * 4096 + (left_mb << 20)),
        maximum: getrlimit(Resource::As).maximum,
    };
    setrlimit(Resource::As, limit).unwrap();
    let ranks = usize::try_from(RANKS).unwrap();
    let local = Local::new(ranks)
        .threads_per_rank(1)
        .deadline(Duration::from_secs(600));
    let result = local.spawn(|group| {
        println!("ran");
        group.barrier()
    });
    match result {
        Ok(_) => println!("\nok"),
        Err(Error::Threads { rank, threads, .. }) => println!("\nno thread: {rank} of {threads}"),
        Err(error) => println!("\n{error}"),
    }
}

#[test]
fn a_spawn_that_gets_no_thread_is_an_error_before_any_rank_runs() {
    if let Ok(left) = std::env::var(LEFT) {
        spawn_with_little(left.parse().unwrap());
        return;
    }
    let start = Instant::now();
    // The pools have no room, the ranks have none though their pools have, all have room.
    let rank_threads = RANKS * STACK_MB;
    for (left, expected) in [
        (STACK_MB * RANKS / 2, "no thread: "),
        (rank_threads + STACK_MB * RANKS / 2, "no thread: "),
        (3 * rank_threads + 8192, "ok"),
    ] {
        let name = "a_spawn_that_gets_no_thread_is_an_error_before_any_rank_runs";
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name, "--nocapture"])
            .env(LEFT, left.to_string())
            .env("RUST_MIN_STACK", (STACK_MB << 20).to_string())
            // Each thread would otherwise reserve addresses for an arena of its own.
            .env("MALLOC_ARENA_MAX", "1")
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let said = String::from_utf8(output.stdout).unwrap();
        let err = String::from_utf8(output.stderr).unwrap();
        assert!(said.contains(expected), "{left} MB: {said}{err}");
        assert!(
            expected == "ok" || !said.contains("ran\n"),
            "{left} MB: {said}"
        );
    }
    assert!(start.elapsed() < Duration::from_secs(300));
}

#[test]
fn absurd_counts_are_refused_before_memory_is_asked_for() {
    for (ranks, threads) in [
        (usize::MAX, 1),
        (usize::MAX / 2, 3),
        (40_000, 1),
        (2, usize::MAX),
    ] {
        let local = Local::new(ranks).threads_per_rank(threads);
        let error = local.spawn(|_| ()).unwrap_err();
        assert!(matches!(error, Error::Threads { rank: 0, .. }), "{error}");
    }
    assert!(matches!(
        ProcessGroup::spawn(0, |_| ()),
        Err(Error::NoRanks)
    ));
}
