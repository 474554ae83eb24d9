//! Jobs that do not end as planned.

use std::{
    thread,
    time::{Duration, Instant},
};

use burn_shard_comm::Transport;
use burn_shard_mpi::MpiTransport;

use crate::{exchanges::within, job};

/// The rank that breaks, and after how many microseconds.
fn draw(seed: u64, ranks: usize) -> (usize, u64) {
    let mut bits = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (
        usize::try_from(bits % ranks as u64).unwrap(),
        (bits >> 32) % 50_000,
    )
}

/// Exchanges without end; one rank gets `signal` in the midst of it.
fn until(signal: libc::c_int, deadline_s: u64) {
    let seed = std::env::var(job::SEED).unwrap().parse().unwrap();
    let mut transport = MpiTransport::init().unwrap();
    let (rank, world_size) = (transport.rank(), transport.world_size());
    let (broken, after_us) = draw(seed, world_size);
    println!("pid {}", std::process::id());
    if rank == broken {
        thread::spawn(move || {
            thread::sleep(Duration::from_micros(after_us));
            // SAFETY: a signal to this process itself.
            unsafe { libc::raise(signal) };
        });
    }
    let (to, from) = (
        (rank + 1) % world_size,
        (rank + world_size - 1) % world_size,
    );
    let mut received = vec![0; 3_000_000];
    for round in (0..=u8::MAX).cycle() {
        let sent = vec![round; received.len()];
        let result = transport.exchange(to, &sent, from, &mut received, within(deadline_s));
        if let Err(fault) = result {
            println!("rank {rank} sees {fault:?}");
            transport.farewell(format!("{fault:?}").as_bytes(), within(1));
            panic!("rank {rank} ends");
        }
        // Not even from a rank that died while its memory was read.
        assert!(
            received.iter().all(|&byte| byte == round),
            "rank {rank}: wrong bytes"
        );
    }
}

pub(crate) fn die() {
    until(libc::SIGKILL, 200);
}

pub(crate) fn stall() {
    until(libc::SIGSTOP, 2);
}

/// No process that printed its number is left.
pub(crate) fn nobody_left(output: &str) {
    let pids: Vec<&str> = output
        .lines()
        // After "test rank ... ", where a rank has one core.
        .filter_map(|line| line.split_once("pid "))
        .map(|(_, pid)| pid)
        .filter(|pid| pid.parse::<u32>().is_ok())
        .collect();
    assert!(!pids.is_empty(), "{output}");
    let end = Instant::now() + Duration::from_secs(60);
    for pid in pids {
        let path = format!("/proc/{pid}/cmdline");
        // A number may be used again, by another program.
        while std::fs::read_to_string(&path).is_ok_and(|line| line.contains("--nocapture")) {
            assert!(Instant::now() < end, "process {pid} is left: {output}");
            thread::sleep(Duration::from_millis(50));
        }
    }
}

#[test]
fn a_job_ends_when_a_rank_is_killed_and_names_it() {
    for seed in 0..6 {
        let (broken, _) = draw(seed, 3);
        let outcome = job::run(3, "die", seed);
        assert!(!outcome.status.success(), "{}", outcome.output);
        let named = format!("process rank {broken} ");
        assert!(
            outcome.output.contains(&named),
            "seed {seed}: {}",
            outcome.output
        );
        assert!(outcome.output.contains("signal 9"), "{}", outcome.output);
        assert!(
            !outcome.output.contains("wrong bytes"),
            "{}",
            outcome.output
        );
        assert!(
            outcome.took < Duration::from_secs(100),
            "{:?}",
            outcome.took
        );
        nobody_left(&outcome.output);
    }
}

#[test]
fn a_job_ends_when_a_rank_stalls_and_names_it() {
    for seed in 0..3 {
        let (broken, _) = draw(seed, 3);
        let outcome = job::run(3, "stall", seed);
        assert!(!outcome.status.success(), "{}", outcome.output);
        // Whoever waits for it says so; the third rank hears of it.
        let named = format!("sees TimedOut {{ peers: [{broken}");
        assert!(
            outcome.output.contains(&named),
            "seed {seed}: {}",
            outcome.output
        );
        assert!(
            outcome.took < Duration::from_secs(100),
            "{:?}",
            outcome.took
        );
        nobody_left(&outcome.output);
    }
}

/// One rank exits in the midst of it, without an error.
pub(crate) fn exit() {
    let mut transport = MpiTransport::init().unwrap();
    println!("pid {}", std::process::id());
    if transport.rank() == 1 {
        std::process::exit(0);
    }
    let other = 2 - transport.rank();
    transport
        .exchange(other, &[], other, &mut [0], within(200))
        .unwrap();
}

#[test]
fn a_rank_that_exits_without_a_farewell_ends_the_job() {
    let outcome = job::run(3, "exit", 0);
    assert!(!outcome.status.success(), "{}", outcome.output);
    let said = outcome.output.contains("rank 1: left without a farewell");
    assert!(said, "{}", outcome.output);
    assert!(
        outcome.took < Duration::from_secs(100),
        "{:?}",
        outcome.took
    );
    nobody_left(&outcome.output);
}
