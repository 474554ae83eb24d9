//! Groups over TCP: the conformance suite, the bits of ranks that are threads, and real processes that
//! join from their environment and die.
#![allow(clippy::unwrap_used, reason = "a test ends at the first error")]

mod processes;
#[path = "../examples/rank_loop.rs"]
#[allow(dead_code, reason = "its main function is this test's business")]
mod rank_loop;

use std::{
    io::{BufRead, BufReader, Read},
    process::{Child, Command, Stdio},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use burn_shard_comm::{
    Local, Pairwise, ProcessGroup, ReduceOp, conformance::Launcher, shard_numel,
};
use processes::{LONG, all, free_port, rendezvous};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

struct Tcp;

impl Launcher for Tcp {
    fn run<F: Fn(ProcessGroup) + Sync>(&self, world_size: usize, f: F) {
        tcp(world_size, f);
    }
}

/// Runs `f` on every rank of a new group, each in its own thread; results in rank order.
fn tcp<R: Send>(world_size: usize, f: impl Fn(ProcessGroup) -> R + Sync) -> Vec<R> {
    let port = free_port();
    let ranks = (0..world_size).map(|rank| rendezvous(rank, world_size, port));
    all(ranks.collect(), |rendezvous| {
        let transport = rendezvous.tcp().unwrap();
        f(ProcessGroup::new(Arc::new(Pairwise::new(transport, LONG))))
    })
}

burn_shard_comm::conformance_tests!(Tcp);

#[test]
fn results_have_the_bits_of_ranks_that_are_threads() {
    let program = |group: ProcessGroup| {
        let mut random = ChaCha8Rng::seed_from_u64(group.rank() as u64);
        let mut results: Vec<u32> = Vec::new();
        for numel in [1, 2, 17, 5000, 600_011] {
            let input: Vec<f32> = (0..numel).map(|_| random.random::<f32>() - 0.5).collect();
            for op in [ReduceOp::Sum, ReduceOp::Mean] {
                let mut reduced = input.clone();
                group.all_reduce(&mut reduced, op).unwrap();
                let mut own = vec![0.0f32; shard_numel(numel, group.world_size())];
                group.reduce_scatter(&input, &mut own, op).unwrap();
                let mut gathered = vec![0.0f32; numel];
                group.all_gather(&own, &mut gathered).unwrap();
                results.extend(
                    reduced
                        .iter()
                        .chain(&own)
                        .chain(&gathered)
                        .map(|x| x.to_bits()),
                );
            }
        }
        results
    };
    for world_size in 1..=4 {
        let threads = Local::new(world_size).spawn(program).unwrap();
        assert!(
            tcp(world_size, program) == threads,
            "world size {world_size}"
        );
    }
}

/// Makes a process of this program one rank.
const AS_RANK: &str = "BURN_SHARD_TEST_AS_RANK";

#[test]
fn one_process_needs_no_network() {
    if std::env::var_os(AS_RANK).is_some() {
        // This is a process that a test below has started.
        let rounds = std::env::var("ROUNDS").unwrap().parse().unwrap();
        match rank_loop::run(rounds, 100_003) {
            Ok(()) => println!("\ndone"),
            Err(error) => println!("\nfailed: {error}"),
        }
        std::process::exit(0);
    }
    let job = Job {
        world_size: 1,
        port: 0,
        rounds: 2,
    };
    let output = finish(job.start(0), &mut String::new());
    assert!(output.contains("done"), "{output}");
}

#[derive(Clone, Copy)]
struct Job {
    world_size: usize,
    port: u16,
    rounds: usize,
}

impl Job {
    fn new(world_size: usize, rounds: usize) -> Self {
        Self {
            world_size,
            port: free_port(),
            rounds,
        }
    }

    fn start(self, rank: usize) -> Child {
        let variables = [
            ("RANK", rank.to_string()),
            ("WORLD_SIZE", self.world_size.to_string()),
            ("LOCAL_RANK", rank.to_string()),
            ("MASTER_ADDR", "127.0.0.1".to_owned()),
            ("MASTER_PORT", self.port.to_string()),
            ("BURN_SHARD_TIMEOUT", LONG.as_secs().to_string()),
            ("ROUNDS", self.rounds.to_string()),
        ];
        // A job of one has no master.
        let used = variables
            .into_iter()
            .filter(|(name, _)| self.port != 0 || !name.starts_with("MASTER"));
        process().envs(used).spawn().unwrap()
    }
}

fn process() -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "one_process_needs_no_network", "--nocapture"])
        .env_clear()
        .env(AS_RANK, "1")
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    command
}

/// Reads until the group is there.
fn ready(child: &mut Child) -> BufReader<std::process::ChildStdout> {
    let mut output = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    while !line.contains("ready") {
        line.clear();
        assert_ne!(
            output.read_line(&mut line).unwrap(),
            0,
            "it ended without being ready"
        );
    }
    output
}

/// The rest of what a process prints.
fn finish(mut child: Child, output: &mut String) -> String {
    child.stdout.take().unwrap().read_to_string(output).unwrap();
    child.wait().unwrap();
    output.clone()
}

#[test]
fn processes_join_from_their_environment() {
    let job = Job::new(3, 3);
    let ranks: Vec<Child> = (0..3).map(|rank| job.start(rank)).collect();
    for child in ranks {
        let output = finish(child, &mut String::new());
        assert!(output.contains("done"), "{output}");
    }
}

#[test]
fn a_process_that_is_killed_is_named_by_all_others() {
    for victim in [0, 2] {
        let job = Job::new(3, usize::MAX);
        let mut ranks: Vec<Child> = (0..3).map(|rank| job.start(rank)).collect();
        let mut outputs: Vec<_> = ranks.iter_mut().map(ready).collect();
        thread::sleep(Duration::from_millis(100));
        let start = Instant::now();
        ranks[victim].kill().unwrap();
        for (rank, child) in ranks.iter_mut().enumerate() {
            let mut output = String::new();
            outputs[rank].read_to_string(&mut output).unwrap();
            child.wait().unwrap();
            if rank != victim {
                let named = format!("rank {victim}");
                assert!(
                    output.contains("failed: ") && output.contains(&named),
                    "rank {rank}: {output}"
                );
            }
        }
        assert!(start.elapsed() < LONG / 2);
    }
}

#[test]
fn a_process_without_a_launcher_is_told_how_to_start() {
    let child = process().env("ROUNDS", "1").spawn().unwrap();
    let output = finish(child, &mut String::new());
    assert!(output.contains("burn-shard launch"), "{output}");
    let child = process()
        .envs([
            ("ROUNDS", "1"),
            ("RANK", "2"),
            ("WORLD_SIZE", "2"),
            ("LOCAL_RANK", "0"),
        ])
        .spawn()
        .unwrap();
    let output = finish(child, &mut String::new());
    assert!(output.contains("failed: RANK is 2"), "{output}");
}
