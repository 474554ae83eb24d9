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

use burn_shard_comm::{Launcher, Placement};
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
            (placement.local_world_size, placement.launcher),
            (Some(3), Launcher::Torchrun)
        );
        assert!(placement.master_is_loopback() && placement.master_port > 0);
        assert_eq!(placement.job_id.len(), 16);
        assert!(find("RAYON_NUM_THREADS").unwrap().parse::<usize>().unwrap() >= 1);
        tokens.push(find("BURN_SHARD_TOKEN").unwrap());
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
    assert_eq!(status.code(), Some(128 + 15));
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
    assert_eq!(status.code(), Some(128 + 15), "{err}");
    assert_eq!(out.matches("told").count(), 1, "{out}");
}

#[test]
fn what_ends_because_of_the_users_signal_is_no_failure_of_a_rank() {
    for (signal, name, expected) in [
        (Signal::TERM, "15 (SIGTERM)", 128 + 15),
        (Signal::INT, "2 (SIGINT)", 128 + 2),
        (Signal::HUP, "1 (SIGHUP)", 128 + 1),
    ] {
        // One dies of it, one ends as the peer of a rank that is gone would.
        let script =
            "[ $RANK = 0 ] || trap 'exit 1' TERM INT HUP; echo ready; while :; do sleep 0.1; done";
        let mut job = Job::new("-n 2", script);
        // Whoever runs the tests may ignore them.
        job.wrap("exec env --default-signal=HUP,INT \"$@\"");
        let mut running = job.start();
        running.wait_for("ready", 2);
        running.signal(signal);
        let (status, _, err) = running.end();
        assert_eq!(status.code(), Some(expected), "{err}");
        let ended = format!(
            "the job was ended by signal {name}: rank 0: signal {name}, rank 1: exit code 1"
        );
        assert!(err.contains(&ended), "{err}");
        assert!(
            !err.contains("first to fail") && !err.contains(" failed: "),
            "{err}"
        );
    }
}

#[test]
fn a_failure_before_the_users_signal_stays_one() {
    let script =
        "if [ $RANK = 1 ]; then echo culprit; exit 5; fi; trap 'sleep 1; exit 1' TERM; echo ready
        while :; do sleep 0.1; done";
    let mut running = Job::new("-n 2 --grace 100", script).start();
    running.wait_for("ready", 1);
    std::thread::sleep(Duration::from_millis(500));
    running.signal(Signal::TERM);
    let (status, _, err) = running.end();
    assert_eq!(status.code(), Some(5), "{err}");
    assert!(
        err.contains("rank 1 was the first to fail: exit code 5"),
        "{err}"
    );
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

/// Starts a job as `starter` leaves it, a program in Python that ends with `os.execvp(sys.argv[1], sys.argv[1:])`.
fn started_by(mut job: Job, starter: &str) -> Job {
    let starter =
        format!("import os, signal, sys\n{starter}\nos.execvp(sys.argv[1], sys.argv[1:])");
    job.wrap(&format!("exec python3 -c '{starter}' \"$@\""));
    job
}

#[test]
fn a_job_ends_as_it_ends_when_its_starter_ignored_the_end_of_children() {
    let ignored = "signal.signal(signal.SIGCHLD, signal.SIG_IGN)";
    let output = started_by(Job::new("-n 2", "true"), ignored).run();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let output = started_by(Job::new("-n 2", "exit $((RANK * 6))"), ignored).run();
    assert_eq!(code(&output), 6, "{}", text(&output.stderr));
    // The ranks' own children are waited for as ever.
    let script = "(exit 4) & wait $!; echo $?";
    let output = started_by(Job::new("-n 1", script), ignored).run();
    assert_eq!(text(&output.stdout), "[0] 4\n");
}

#[test]
fn a_job_can_be_ended_whose_starter_had_blocked_or_ignored_signals() {
    let all = "[signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2]";
    for (starter, signal, expected) in [
        (
            format!("signal.pthread_sigmask(signal.SIG_BLOCK, {all})"),
            Signal::TERM,
            128 + 15,
        ),
        (
            "signal.signal(signal.SIGTERM, signal.SIG_IGN)".to_owned(),
            Signal::TERM,
            128 + 15,
        ),
    ] {
        let job = Job::new("-n 2", "echo ready; exec sleep 1000");
        let mut running = started_by(job, &starter).start();
        running.wait_for("ready", 2);
        running.signal(signal);
        let (status, _, err) = running.end();
        assert_eq!(status.code(), Some(expected), "{starter}: {err}");
    }
}

#[test]
fn variables_of_other_launchers_and_other_jobs_do_not_reach_the_ranks() {
    let mut job = Job::new("-n 1", "env");
    for (name, value) in [
        ("TORCHELASTIC_USE_AGENT_STORE", "True"),
        ("TORCHELASTIC_RUN_ID", "outer"),
        ("ROLE_RANK", "5"),
        ("OMPI_COMM_WORLD_RANK", "5"),
        ("PMIX_NAMESPACE", "outer"),
        ("PMI_SIZE", "8"),
        ("SLURM_PROCID", "5"),
        ("SLURM_NTASKS", "8"),
        ("RANK", "5"),
        ("WORLD_SIZE", "8"),
        ("BURN_SHARD_BIND", "10.9.8.7"),
        ("BURN_SHARD_JOB_ID", ""),
        ("BURN_SHARD_TOKEN", ""),
        ("BURN_SHARD_ERROR_FILE", "/dev/null/outer"),
        ("SLURM_JOB_ID", "stays"),
        ("OMPI_MCA_btl", "stays"),
        ("BURN_SHARD_TIMEOUT", "77"),
    ] {
        job = job.env(name, value);
    }
    let output = job.run();
    let out = text(&output.stdout);
    let value = |name: &str| {
        let start = format!("[0] {name}=");
        out.lines().find_map(|line| line.strip_prefix(&start))
    };
    for gone in [
        "TORCHELASTIC_USE_AGENT_STORE",
        "TORCHELASTIC_RUN_ID",
        "ROLE_RANK",
        "OMPI_COMM_WORLD_RANK",
        "PMIX_NAMESPACE",
        "PMI_SIZE",
        "SLURM_PROCID",
        "SLURM_NTASKS",
        "BURN_SHARD_BIND",
    ] {
        assert_eq!(value(gone), None, "{gone}");
    }
    let kept = [
        "RANK",
        "WORLD_SIZE",
        "SLURM_JOB_ID",
        "OMPI_MCA_btl",
        "BURN_SHARD_TIMEOUT",
    ];
    let kept = kept.map(|name| value(name).unwrap());
    assert_eq!(kept, ["0", "1", "stays", "stays", "77"]);
    assert_eq!(value("BURN_SHARD_JOB_ID").unwrap().len(), 16);
    assert_eq!(value("BURN_SHARD_TOKEN").unwrap().len(), 64);
    let file = std::path::Path::new(value("BURN_SHARD_ERROR_FILE").unwrap());
    assert!(!file.starts_with("/dev/null") && !file.parent().unwrap().exists());
}

/// The kernel's part and the shell's, one without the other.
#[test]
fn nothing_is_left_of_a_launcher_that_was_killed() {
    let script = "sleep 1000 & sleep 1000 & echo ready; wait";
    let scratch = tempfile::tempdir().unwrap();
    let job = Job::new("-n 3", script).env("TMPDIR", scratch.path().to_str().unwrap());
    let mut running = job.start();
    running.wait_for("ready", 3);
    assert_eq!(fs::read_dir(scratch.path()).unwrap().count(), 1);
    // The launcher, its watch, three shells with two processes each; a busy machine starts them late.
    let begin = Instant::now();
    while running.job.processes().len() != 11 {
        assert!(begin.elapsed() < Duration::from_secs(30));
        std::thread::sleep(Duration::from_millis(10));
    }
    running.signal(Signal::KILL);
    let (status, ..) = running.end();
    assert_eq!(status.code(), None);
    assert_eq!(fs::read_dir(scratch.path()).unwrap().count(), 0);
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
    refused("-n 40000", "", "a job has at most 32768");
    refused("-n 18446744073709551615", "", "a job has at most 32768");
    refused(
        "-n 9223372036854775808 --nnodes 2",
        "secret",
        "a job has at most 32768",
    );
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
fn a_launcher_that_may_open_too_few_files_raises_its_limit_or_says_so() {
    let mut job = Job::new("-n 20", "true");
    job.wrap("ulimit -Sn 40; exec \"$@\"");
    let output = job.run();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let mut job = Job::new("-n 20", "true");
    job.wrap("ulimit -n 40; exec \"$@\"");
    let output = job.run();
    let err = text(&output.stderr);
    assert_eq!(code(&output), 2, "{err}");
    assert!(
        err.contains("20 ranks need 104 open files in the launcher, but at most 40 are allowed"),
        "{err}"
    );
}

#[test]
fn a_token_is_bytes_and_any_grace_is_accepted() {
    let mut job = Job::new(
        "-n 1 --grace 18446744073709551615",
        "printf %s \"$BURN_SHARD_TOKEN\"; exit 3",
    );
    job.wrap("BURN_SHARD_TOKEN=$(printf 'a\\377b'); export BURN_SHARD_TOKEN; exec \"$@\"");
    let output = job.run();
    assert_eq!(output.stdout, b"[0] a\xffb\n");
    assert_eq!(code(&output), 3, "{}", text(&output.stderr));
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
