//! Jobs that are started again after a failure.
//!
//! Linux only: processes are found in `/proc`.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test ends at the first error")]

mod common;

use std::process::Output;

use common::{Job, text};
use rustix::process::Signal;

/// The remarks about restarts.
fn restarts(output: &Output) -> Vec<&str> {
    restarts_of(text(&output.stderr))
}

fn restarts_of(err: &str) -> Vec<&str> {
    let lines = err.lines();
    let of = lines.filter_map(|line| line.strip_prefix("[launch] restart "));
    of.collect()
}

/// The lines of rank 0.
fn of_rank_0(output: &Output) -> Vec<&str> {
    let lines = text(&output.stdout).lines();
    lines.filter_map(|line| line.strip_prefix("[0] ")).collect()
}

#[test]
fn a_job_that_fails_twice_is_started_three_times() {
    // Rank 2 exits only once rank 0 has said its line.
    let script = "echo start $BURN_SHARD_RESTART_COUNT; [ $BURN_SHARD_RESTART_COUNT = 2 ] && exit 0; \
                  [ $RANK = 1 ] || exec sleep 1000; sleep 0.5; exit 3";
    let job = Job::new("-n 3 --max-restarts 5", script).env("BURN_SHARD_RESTART_COUNT", "7");
    let output = job.run();
    let err = text(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{err}");
    assert_eq!(of_rank_0(&output), ["start 0", "start 1", "start 2"]);
    let said = restarts(&output);
    assert_eq!(said.len(), 2, "{err}");
    for (number, said) in (1..).zip(said) {
        assert!(
            said.starts_with(&format!("{number} of 5: rank 1 failed after ")),
            "{err}"
        );
        assert!(said.ends_with("; starting 3 ranks"), "{err}");
    }
    let first = "rank 1 was the first to fail: exit code 3\n";
    assert_eq!(err.matches(first).count(), 2, "{err}");
}

#[test]
fn after_the_last_restart_a_failure_is_the_jobs() {
    for (max, starts) in [(0, 1), (2, 3)] {
        let script = "echo $BURN_SHARD_RESTART_COUNT; exit $((10 + BURN_SHARD_RESTART_COUNT))";
        let output = Job::new(&format!("-n 1 --max-restarts {max}"), script).run();
        assert_eq!(output.status.code(), Some(10 + max));
        assert_eq!(of_rank_0(&output).len(), starts);
        assert_eq!(restarts(&output).len(), starts - 1);
    }
}

#[test]
fn a_start_has_its_own_secret_and_place_to_meet() {
    let script = "echo $BURN_SHARD_TOKEN $MASTER_PORT $BURN_SHARD_ERROR_FILE; exit 1";
    let output = Job::new("-n 1 --max-restarts 1", script).run();
    let lines = of_rank_0(&output);
    let [first, second] = lines.as_slice() else {
        panic!("{lines:?}");
    };
    for (first, second) in first.split(' ').zip(second.split(' ')) {
        assert_ne!(first, second);
    }
}

#[test]
fn a_rank_that_was_killed_is_not_replaced_if_fewer_will_do() {
    let script =
        "echo $WORLD_SIZE $LOCAL_WORLD_SIZE; [ $RANK = 0 ] || exec sleep 1000; kill -KILL $$";
    let output = Job::new("-n 4 --max-restarts 4 --min-ranks 2", script).run();
    assert_eq!(output.status.code(), Some(128 + 9));
    assert_eq!(of_rank_0(&output), ["4 4", "3 3", "2 2", "2 2", "2 2"]);
    // Otherwise always as many.
    let output = Job::new("-n 4 --max-restarts 1", script).run();
    assert_eq!(of_rank_0(&output), ["4 4", "4 4"]);
    // It was not killed: it may have had bad luck.
    let script = script.replace("kill -KILL $$", "exit 3");
    let output = Job::new("-n 4 --max-restarts 1 --min-ranks 2", &script).run();
    assert_eq!(of_rank_0(&output), ["4 4", "4 4"]);
}

#[test]
fn a_job_that_the_user_ends_is_not_started_again() {
    // Ranks make a failure of the signal.
    let script = "trap 'exit 3' TERM; echo ready; sleep 1000 & wait";
    let mut running = Job::new("-n 2 --max-restarts 5", script).start();
    running.wait_for("ready", 2);
    running.signal(Signal::TERM);
    let (status, _, err) = running.end();
    assert_eq!(status.code(), Some(128 + 15), "{err}");
    assert_eq!(restarts_of(&err), [""; 0], "{err}");
}

#[test]
fn a_signal_after_a_failure_ends_the_job_for_good() {
    // Rank 1 fails, and rank 0 takes its time to end.
    let script = "if [ $RANK = 1 ]; then sleep 0.5; exit 3; fi; \
                  trap 'sleep 1; echo told; sleep 2; exit 1' TERM; sleep 1000 & wait";
    let mut running = Job::new("-n 2 --max-restarts 5 --grace 20", script).start();
    running.wait_for("told", 1);
    // Not SIGINT, which whoever runs the tests may have ignored.
    running.signal(Signal::TERM);
    let (status, _, err) = running.end();
    assert_eq!(status.code(), Some(3), "{err}");
    assert_eq!(restarts_of(&err), [""; 0], "{err}");
}

#[test]
fn what_no_restart_could_keep_is_refused() {
    for (arguments, reason) in [
        (
            "-n 2 --nnodes 2 --max-restarts 1 --master 127.0.0.1:29500",
            "of 2 nodes",
        ),
        (
            "-n 2 --min-ranks 1",
            "at least 1 of 2 ranks with 0 restarts",
        ),
        (
            "-n 2 --max-restarts 1 --min-ranks 0",
            "at least 0 of 2 ranks",
        ),
        (
            "-n 2 --max-restarts 1 --min-ranks 3",
            "at least 3 of 2 ranks",
        ),
    ] {
        let job = Job::new(arguments, "echo started").env("BURN_SHARD_TOKEN", &"x".repeat(44));
        let output = job.run();
        let err = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments}: {err}");
        assert!(err.contains(reason), "{arguments}: {err}");
        assert_eq!(text(&output.stdout), "", "{arguments}");
    }
}
