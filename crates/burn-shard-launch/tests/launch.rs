//! Jobs of real processes, and that nothing is left of them however they end.
//!
//! Linux only: processes are found in `/proc`.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test ends at the first error")]

mod common;

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    process::Output,
    time::{Duration, Instant},
};

use burn_shard_comm::{Placement, Rule};
use common::{Job, PATIENCE, kill, text};
use rustix::process::Signal;

fn code(output: &Output) -> i32 {
    output.status.code().unwrap()
}

#[test]
fn each_rank_finds_its_place() {
    let output = Job::new("-n 3", "env").run();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let mut tokens = Vec::new();
    for rank in 0..3 {
        let prefix = format!("[{rank}] ");
        let lines = text(&output.stdout)
            .lines()
            .filter_map(|line| line.strip_prefix(&prefix));
        let lines: Vec<&str> = lines.collect();
        let find = |name: &str| {
            let value = lines
                .iter()
                .find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
            value.map(str::to_owned)
        };
        let placement = Placement::from_vars(find).unwrap().unwrap();
        assert_eq!(
            (placement.rank, placement.world_size, placement.local_rank),
            (rank, 3, rank)
        );
        assert_eq!(
            (placement.local_world_size, placement.rule),
            (Some(3), Rule::Torchrun)
        );
        assert!(placement.master_is_loopback() && placement.master_port > 0);
        assert_eq!(placement.job_id.len(), 16);
        assert!(find("RAYON_NUM_THREADS").unwrap().parse::<usize>().unwrap() >= 1);
        tokens.push(placement.token.unwrap());
    }
    assert_eq!(tokens[0].len(), 64);
    assert!(tokens.iter().all(|token| *token == tokens[0]));
    assert!(!text(&output.stderr).contains(&tokens[0]));
}

#[test]
fn a_thread_count_that_is_set_stays() {
    let job = Job::new("-n 1", "echo $RAYON_NUM_THREADS").env("RAYON_NUM_THREADS", "7");
    assert_eq!(text(&job.run().stdout), "[0] 7\n");
}

#[test]
fn the_first_failure_ends_the_others_and_is_reported() {
    let script = "[ $RANK = 2 ] || exec sleep 1000; echo step 1; echo out of memory >&2; exit 3";
    let output = Job::new("-n 4", script).run();
    let err = text(&output.stderr);
    assert_eq!(code(&output), 3, "{err}");
    assert!(
        err.contains("[launch] rank 2 failed: exit code 3; ending rank 0, 1, 3\n"),
        "{err}"
    );
    assert!(
        err.contains("[launch] rank 2 was the first to fail: exit code 3\n"),
        "{err}"
    );
    assert!(
        err.contains("rank 0: signal 15 (SIGTERM), rank 1: signal 15 (SIGTERM)"),
        "{err}"
    );
    let (_, tail) = err.split_once("last lines of rank 2:\n").unwrap();
    let mut tail: Vec<&str> = tail.lines().collect();
    tail.sort_unstable();
    assert_eq!(tail, ["    out of memory", "    step 1"]);
}

#[test]
fn a_rank_that_is_killed_counts_as_in_a_shell() {
    let output = Job::new("-n 2", "[ $RANK = 1 ] || exec sleep 1000; kill -9 $$").run();
    assert_eq!(code(&output), 128 + 9);
    let err = text(&output.stderr);
    assert!(
        err.contains("rank 1 was the first to fail: signal 9 (SIGKILL)"),
        "{err}"
    );
    assert!(err.contains("rank 1 has written nothing"), "{err}");
}

#[test]
fn a_rank_that_ignores_sigterm_is_killed_after_the_grace() {
    let scratch = tempfile::tempdir().unwrap();
    let ready = scratch.path().join("ready");
    let script = "if [ $RANK = 1 ]; then until [ -e $READY ]; do sleep 0.1; done; exit 5; fi
        trap '' TERM; : > $READY; while :; do sleep 0.1; done";
    let job = Job::new("-n 2 --grace 1", script).env("READY", ready.to_str().unwrap());
    let output = job.run();
    let err = text(&output.stderr);
    assert_eq!(code(&output), 5, "{err}");
    assert!(
        err.contains("rank 0 did not end within 1s: SIGKILL"),
        "{err}"
    );
    assert!(
        err.contains("the others: rank 0: signal 9 (SIGKILL)"),
        "{err}"
    );
}

#[test]
fn a_job_whose_output_is_stuck_ends_in_time() {
    let script = "trap '' TERM; echo ready; while :; do echo y; done";
    let mut job = Job::new("-n 2 --grace 1", script);
    job.wrap("exec \"$@\" 2>&1");
    let mut running = job.start();
    running.wait_for("ready", 2);
    running.signal(Signal::TERM);
    let ranks_are_left = |running: &common::Running| {
        running
            .job
            .processes()
            .iter()
            .any(|(_, line)| line.starts_with("sh -c trap"))
    };
    let start = Instant::now();
    while ranks_are_left(&running) {
        assert!(start.elapsed() < PATIENCE, "{:?}", running.job.processes());
        std::thread::sleep(Duration::from_millis(20));
    }
    let (status, ..) = running.end();
    assert_eq!(status.code(), Some(128 + 9));
}

#[test]
fn a_stopped_rank_ends_like_the_others() {
    let script = "[ $RANK = 0 ] && kill -STOP $$; sleep 0.5; exit 4";
    let output = Job::new("-n 2 --grace 1000", script).run();
    assert_eq!(code(&output), 4, "{}", text(&output.stderr));
}

#[test]
fn a_signal_to_the_launcher_reaches_every_rank() {
    let script = "trap 'echo saved; exit 0' TERM; echo ready; while :; do sleep 0.1; done";
    let mut running = Job::new("-n 3 --grace 50", script).start();
    running.wait_for("ready", 3);
    running.signal(Signal::TERM);
    let (status, out, err) = running.end();
    assert_eq!(out.matches("saved").count(), 3, "{out}{err}");
    assert!(status.success(), "{err}");
    assert!(err.contains("[launch] SIGTERM passed on"), "{err}");
}

#[test]
fn ranks_that_were_told_to_end_are_told_once() {
    let script = "if [ $RANK = 0 ]; then trap 'exit 7' TERM; else trap 'echo told' TERM; fi
        echo ready; i=0; while [ $i -lt 30 ]; do sleep 0.1; i=$((i + 1)); done";
    let mut running = Job::new("-n 2 --grace 100", script).start();
    running.wait_for("ready", 2);
    running.signal(Signal::TERM);
    let (status, out, err) = running.end();
    assert_eq!(status.code(), Some(7), "{err}");
    assert_eq!(out.matches("told").count(), 1, "{out}");
}

#[test]
fn a_signal_that_ends_the_ranks_is_the_launchers_exit_code() {
    for (signal, expected) in [
        (Signal::TERM, 128 + 15),
        (Signal::INT, 128 + 2),
        (Signal::HUP, 128 + 1),
    ] {
        let mut job = Job::new("-n 2", "echo ready; exec sleep 1000");
        // Whoever runs the tests may ignore them.
        job.wrap("exec env --default-signal=HUP,INT \"$@\"");
        let mut running = job.start();
        running.wait_for("ready", 2);
        running.signal(signal);
        let (status, _, err) = running.end();
        assert_eq!(status.code(), Some(expected), "{err}");
    }
}

#[test]
fn sigusr1_is_passed_on_and_ends_nothing() {
    let script = "trap 'echo usr1; got=1' USR1; echo ready; while [ -z \"$got\" ]; do sleep 0.1; done; sleep 2";
    let mut running = Job::new("-n 2 --grace 0", script).start();
    running.wait_for("ready", 2);
    running.signal(Signal::USR1);
    let (status, out, err) = running.end();
    assert!(status.success(), "{err}");
    assert_eq!(out.matches("usr1").count(), 2, "{out}");
}

#[test]
fn a_signal_that_was_ignored_before_stays_so() {
    let mut job = Job::of("-n 1", &["sh", "-c", "echo ready; sleep 1; echo end"]);
    job.wrap("trap '' HUP; exec \"$@\"");
    let mut running = job.start();
    running.wait_for("ready", 1);
    running.signal(Signal::HUP);
    let (status, out, err) = running.end();
    assert!(status.success() && out == "[0] end\n", "{out}{err}");
}

/// The kernel's part and the shell's, one without the other.
#[test]
fn nothing_is_left_of_a_launcher_that_was_killed() {
    let script = "sleep 1000 & sleep 1000 & echo ready; wait";
    let mut running = Job::new("-n 3", script).start();
    running.wait_for("ready", 3);
    // The launcher, its watch, three shells with two processes each.
    assert_eq!(running.job.processes().len(), 11);
    running.signal(Signal::KILL);
    let (status, ..) = running.end();
    assert_eq!(status.code(), None);
}

#[test]
fn ranks_die_with_the_launcher_even_if_nobody_watches() {
    let mut running = Job::new("-n 3", "echo ready; exec sleep 1000").start();
    running.wait_for("ready", 3);
    let processes = running.job.processes();
    let (watch, _) = processes
        .iter()
        .find(|(_, line)| line.contains("burn-shard-watch"))
        .unwrap();
    kill(*watch, Signal::KILL);
    running.signal(Signal::KILL);
    running.end();
}

#[test]
fn a_job_that_nobody_watches_ends_as_it_ends() {
    let mut running = Job::new("-n 2", "echo ready; sleep 1").start();
    running.wait_for("ready", 2);
    let processes = running.job.processes();
    let (watch, _) = processes
        .iter()
        .find(|(_, line)| line.contains("burn-shard-watch"))
        .unwrap();
    kill(*watch, Signal::KILL);
    let (status, _, err) = running.end();
    assert!(status.success(), "{err}");
}

#[test]
fn what_a_rank_started_ends_with_the_job() {
    let output = Job::new("-n 2", "sleep 1000 & exit 0").run();
    let err = text(&output.stderr);
    assert!(output.status.success(), "{err}");
    assert!(
        err.contains("what ranks have started still holds their output"),
        "{err}"
    );
    let silent = Job::new("-n 2", "sleep 1000 >/dev/null 2>&1 & exit 0").run();
    assert!(silent.status.success(), "{}", text(&silent.stderr));
}

#[test]
fn a_program_that_cannot_be_started_is_named() {
    let output = Job::of("-n 2", &["no-such-program"]).run();
    let err = text(&output.stderr);
    assert_eq!(code(&output), 127);
    assert!(
        err.contains("rank 0: cannot start \"no-such-program\"") && err.contains("./program"),
        "{err}"
    );
    let output = Job::of("-n 2", &["/dev/null"]).run();
    assert_eq!(code(&output), 126);
    assert!(
        text(&output.stderr).contains("Permission denied"),
        "{}",
        text(&output.stderr)
    );
}

#[test]
fn several_nodes_need_a_secret_a_place_to_meet_and_an_address_to_listen_on() {
    let refused = |arguments: &str, token: &str, expected: &str| {
        let output = Job::new(arguments, "echo started")
            .env("BURN_SHARD_TOKEN", token)
            .run();
        let err = text(&output.stderr);
        assert_eq!(code(&output), 2, "{err}");
        assert!(err.contains(expected) && output.stdout.is_empty(), "{err}");
    };
    refused(
        "-n 2 --nnodes 2",
        "",
        "set BURN_SHARD_TOKEN to the same value on each, or pass --token-file",
    );
    refused("-n 2 --nnodes 2", "secret", "--master HOST:PORT");
    refused(
        "-n 2 --nnodes 2 --master gpu1:29500",
        "secret",
        "pass --bind ADDRESS",
    );
    refused(
        "-n 2 --nnodes 2 --node-rank 2",
        "secret",
        "node rank 2 of 2 nodes",
    );
    refused("-n 0", "", "no ranks to start");
    for master in ["gpu1", "gpu1:", ":1", "gpu1:0", "::1:5", "[::1:5"] {
        refused(
            &format!("-n 1 --master {master}"),
            "",
            "which is not HOST:PORT",
        );
    }
    let arguments = "-n 2 --nnodes 3 --node-rank 2 --master gpu1:29500 --bind 10.0.0.3 --job-id j";
    let script = "echo $RANK/$WORLD_SIZE $LOCAL_RANK $GROUP_RANK $MASTER_ADDR:$MASTER_PORT \
        $BURN_SHARD_BIND $BURN_SHARD_TOKEN $BURN_SHARD_JOB_ID";
    let output = Job::new(arguments, script)
        .env("BURN_SHARD_TOKEN", "secret")
        .run();
    let mut lines: Vec<&str> = text(&output.stdout).lines().collect();
    lines.sort_unstable();
    let expected = [
        "[4] 4/6 0 2 gpu1:29500 10.0.0.3 secret j",
        "[5] 5/6 1 2 gpu1:29500 10.0.0.3 secret j",
    ];
    assert_eq!(lines, expected);
}

#[test]
fn a_token_file_is_for_its_owner_only() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let arguments = format!("-n 1 --token-file {}", file.path().display());
    let run = || Job::new(&arguments, "echo $BURN_SHARD_TOKEN").run();
    assert!(text(&run().stderr).contains("is empty"));
    fs::write(file.path(), "secret\n").unwrap();
    assert_eq!(text(&run().stdout), "[0] secret\n");
    fs::set_permissions(file.path(), fs::Permissions::from_mode(0o640)).unwrap();
    let output = run();
    assert_eq!(code(&output), 2);
    assert!(
        text(&output.stderr).contains("its mode is 640 (chmod 600"),
        "{}",
        text(&output.stderr)
    );
}
