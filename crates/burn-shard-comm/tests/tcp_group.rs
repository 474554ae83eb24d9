//! Groups over TCP: the conformance suite, the bits of ranks that are threads, and real processes that
//! join from their environment. How those end is in `deaths.rs`.
#![allow(
    clippy::unwrap_used,
    clippy::wildcard_enum_match_arm,
    reason = "a test ends at the first error"
)]

mod processes;
#[path = "processes/programs.rs"]
mod programs;

use std::{sync::Arc, time::Duration};

use burn_shard_comm::{
    Local, Pairwise, ProcessGroup, ReduceOp, conformance::Launcher, shard_numel,
};
use processes::{LONG, all, free_port, rendezvous};
use programs::{Job, Rank, program};
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
burn_shard_comm::sub_group_tests!(Tcp);

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

/// For what ends by itself, however busy the machine.
const SOON: Duration = Duration::from_secs(60);

#[test]
fn this_program_can_be_a_rank() {
    programs::this_program_can_be_a_rank();
}

#[test]
fn processes_join_from_their_environment() {
    let job = Job {
        rounds: 3,
        ..Job::new(3)
    };
    for rank in job.start_all() {
        let output = rank.end(SOON).output;
        assert!(output.contains("done"), "{output}");
    }
}

#[test]
fn a_process_without_a_launcher_is_told_how_to_start() {
    let output = Rank::start(program()).end(SOON).output;
    assert!(output.contains("burn-shard launch"), "{output}");
    let mut command = program();
    command.envs([("RANK", "2"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")]);
    let output = Rank::start(command).end(SOON).output;
    assert!(output.contains("failed: RANK is 2"), "{output}");
}

#[test]
fn one_main_runs_threads_without_a_launcher_and_its_rank_with_one() {
    let run = |mut command: std::process::Command| {
        command.env(programs::OR_SPAWN, "3");
        Rank::start(command)
    };
    let alone = run(program()).end(SOON).output;
    assert!(alone.contains("sums: [6, 6, 6]\n"), "{alone}");
    let job = Job::new(2);
    let ranks: Vec<Rank> = (0..2).map(|rank| run(job.command(rank))).collect();
    for rank in ranks {
        let output = rank.end(SOON).output;
        assert!(output.contains("sums: [3]\n"), "{output}");
    }
    // Wrong variables are no reason to go on as threads.
    let mut wrong = program();
    wrong.envs([("RANK", "2"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")]);
    let output = run(wrong).end(SOON).output;
    assert!(output.contains("failed: RANK is 2"), "{output}");
}

#[test]
fn processes_listen_beyond_loopback_only_with_a_token() {
    let job = Job {
        rounds: 1,
        ..Job::new(2)
    };
    let ranks = |token: Option<&str>| {
        let ranks = (0..2).map(|rank| {
            let mut command = job.command(rank);
            command.env("BURN_SHARD_BIND", "0.0.0.0");
            command.envs(token.map(|token| ("BURN_SHARD_TOKEN", token)));
            Rank::start(command)
        });
        let ranks: Vec<Rank> = ranks.collect();
        ranks.into_iter().map(|rank| rank.end(SOON).output)
    };
    for output in ranks(None) {
        let expected = "will not listen on 0.0.0.0 without a token";
        assert!(output.contains(expected), "{output}");
    }
    for output in ranks(Some(processes::TOKEN)) {
        assert!(output.contains("done"), "{output}");
    }
}

#[test]
fn a_rank_that_may_open_too_few_files_says_so_before_ranks_meet() {
    let job = Job {
        timeout: Duration::from_secs(20),
        ..Job::new(32)
    };
    let limited = |rank, limit: &str| {
        let command = job.command(rank);
        let mut shell = std::process::Command::new("sh");
        shell
            .args(["-c", &format!("ulimit {limit} 48; exec \"$@\""), "sh"])
            .arg(command.get_program())
            .args(command.get_args())
            .env_clear()
            .envs(
                command
                    .get_envs()
                    .filter_map(|(name, value)| Some((name, value?))),
            );
        Rank::start(shell)
    };
    // Rank 0 waits for all 32, and hears of rank 2 long before its deadline.
    let first = job.start(0);
    // A limit that the process itself may raise is no obstacle: this one joins.
    let raised = limited(1, "-Sn");
    let refused = limited(2, "-n").end(SOON).output;
    assert!(
        refused.contains("rank 2: a job of 32 ranks takes"),
        "{refused}"
    );
    assert!(refused.contains("at most 48 are allowed"), "{refused}");
    for output in [first.end(SOON).output, raised.end(SOON).output] {
        assert!(
            output.contains("rank 2 failed: rank 2: a job of 32 ranks takes"),
            "{output}"
        );
    }
}
