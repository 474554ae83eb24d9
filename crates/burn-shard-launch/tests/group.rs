//! The launcher with ranks that form a real group: this program, started again.
//!
//! Linux only: processes are found in `/proc`.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test ends at the first error")]

mod common;
#[path = "../../burn-shard-comm/examples/rank_loop.rs"]
#[allow(dead_code, reason = "its main function is this test's business")]
mod rank_loop;

use std::{
    fs,
    time::{Duration, Instant},
};

use common::{Job, Running, kill};
use rustix::process::Signal;

/// Makes a process of this program one rank.
const AS_RANK: &str = "BURN_SHARD_TEST_AS_RANK";
/// In which a job ends after a death, however busy the machine; ranks wait ten times as long for each other.
const SOON: Duration = Duration::from_secs(30);

/// A job of four ranks that exchange until something fails.
fn start() -> Running {
    let program = std::env::current_exe().unwrap();
    let program = [
        program.to_str().unwrap(),
        "--exact",
        "a_job_of_a_real_group_ends_when_a_rank_is_killed",
        "--nocapture",
    ];
    let mut running = Job::of("-n 4", &program).env(AS_RANK, "1").start();
    running.wait_for("ready: rank", 4);
    running
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
    if std::env::var_os(AS_RANK).is_some() {
        let end = rank_loop::run(usize::MAX, 20_011);
        println!("\nfailed: {}", end.unwrap_err());
        std::process::exit(1);
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
