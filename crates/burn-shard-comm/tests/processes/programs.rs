//! Ranks that are processes: the test's own program, started again.
//!
//! A test file that uses this has a test `this_program_can_be_a_rank` that calls the function of that name.
#![allow(clippy::print_stdout, reason = "a rank tells the test by its output")]
#![allow(dead_code, reason = "each test uses some of it")]

#[path = "../../examples/rank_loop.rs"]
mod rank_loop;

use std::{
    io::{BufRead, BufReader, Read},
    process::{Child, ChildStdout, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use burn_shard_comm::{Error, JobFault, ProcessGroup, ReduceOp, RendezvousError};

use crate::processes::free_port;

/// Makes a process of this program one rank.
const AS_RANK: &str = "BURN_SHARD_TEST_AS_RANK";

/// Makes a process of this program call `from_env_or_spawn` with this many threads.
pub(crate) const OR_SPAWN: &str = "BURN_SHARD_TEST_OR_SPAWN";

/// A rank, if this process was started as one; otherwise a test of one.
pub(crate) fn this_program_can_be_a_rank() {
    if let Some(threads) = std::env::var_os(OR_SPAWN) {
        let threads: usize = threads.to_str().unwrap().parse().unwrap();
        let sums = ProcessGroup::from_env_or_spawn(threads, |group| {
            let mut sum = [group.rank() as u64 + 1];
            group.all_reduce(&mut sum, ReduceOp::Sum).map(|()| sum[0])
        });
        match sums {
            Ok(sums) => println!(
                "\nsums: {:?}",
                sums.into_iter().map(Result::unwrap).collect::<Vec<_>>()
            ),
            Err(error) => println!("\nfailed: {error}"),
        }
        std::process::exit(0);
    }
    if std::env::var_os(AS_RANK).is_some() {
        let number = |name| std::env::var(name).unwrap().parse().unwrap();
        match rank_loop::run(number("ROUNDS"), number("NUMEL")) {
            Ok(()) => println!("\ndone"),
            Err(error) => println!("\nblames: {:?}\nfailed: {error}", blamed(&error)),
        }
        std::process::exit(0);
    }
    let job = Job {
        rounds: 2,
        ..Job::new(1)
    };
    let end = job.start(0).end(Duration::from_secs(60));
    assert!(end.output.contains("done"), "{}", end.output);
}

/// Those whose fault `error` is; none if it is for people to read.
fn blamed(error: &Error) -> Vec<usize> {
    match error.root_cause() {
        Error::RankDied { peer, .. } => vec![*peer],
        Error::Deadline { missing, .. } | Error::RankLeft { missing, .. } => missing.clone(),
        Error::Rendezvous(error) => match &**error {
            RendezvousError::NoMaster { .. } | RendezvousError::MasterLost { .. } => vec![0],
            RendezvousError::Job { fault, .. } => match fault {
                JobFault::Died { other, .. } => vec![*other],
                JobFault::Missing { missing, .. } => missing.clone(),
                _ => Vec::new(),
            },
            _ => Vec::new(),
        },
        _ => Vec::new(),
    }
}

/// What the ranks of a job have in common.
#[derive(Clone)]
pub(crate) struct Job {
    pub(crate) world_size: usize,
    pub(crate) port: u16,
    pub(crate) timeout: Duration,
    pub(crate) rounds: usize,
    pub(crate) numel: usize,
}

impl Job {
    /// A job that goes on until it fails, with a deadline that nothing should ever wait for.
    pub(crate) fn new(world_size: usize) -> Self {
        Self {
            world_size,
            port: free_port(),
            timeout: crate::processes::LONG,
            rounds: usize::MAX,
            numel: 100_003,
        }
    }

    pub(crate) fn start(&self, rank: usize) -> Rank {
        Rank::start(self.command(rank))
    }

    pub(crate) fn start_all(&self) -> Vec<Rank> {
        (0..self.world_size).map(|rank| self.start(rank)).collect()
    }

    /// The program, and the variables that make it a rank.
    pub(crate) fn command(&self, rank: usize) -> Command {
        let mut command = program();
        command
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", self.world_size.to_string())
            .env("LOCAL_RANK", rank.to_string())
            .env("BURN_SHARD_TIMEOUT", self.timeout.as_secs_f64().to_string())
            .env("ROUNDS", self.rounds.to_string())
            .env("NUMEL", self.numel.to_string());
        // A job of one has no master.
        if self.world_size > 1 {
            command
                .env("MASTER_ADDR", "127.0.0.1")
                .env("MASTER_PORT", self.port.to_string());
        }
        command
    }
}

/// This program as a rank that nobody has told where it stands.
pub(crate) fn program() -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "this_program_can_be_a_rank", "--nocapture"])
        .env_clear()
        .env(AS_RANK, "1")
        .env("ROUNDS", "1")
        .env("NUMEL", "1000");
    command
}

/// One process; killed if it is dropped before its end.
pub(crate) struct Rank {
    child: Child,
    out: BufReader<ChildStdout>,
    output: String,
}

impl Rank {
    pub(crate) fn start(mut command: Command) -> Self {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let out = BufReader::new(child.stdout.take().unwrap());
        let output = String::new();
        Self { child, out, output }
    }

    /// Returns once the group is there; fails if there is none.
    pub(crate) fn wait_until_ready(&mut self) {
        let seen = self.output.len();
        while !self.output[seen..].contains("ready: ") {
            let read = self.out.read_line(&mut self.output).unwrap();
            assert_ne!(read, 0, "it never was ready: {}", self.output);
        }
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
    }

    /// Waits for the process to end by itself, which has to be within `limit`.
    pub(crate) fn end(mut self, limit: Duration) -> End {
        let start = Instant::now();
        let mut in_time = true;
        while self.child.try_wait().unwrap().is_none() {
            if start.elapsed() > limit {
                in_time = false;
                self.kill();
            }
            thread::sleep(Duration::from_millis(5));
        }
        self.out.read_to_string(&mut self.output).unwrap();
        let output = std::mem::take(&mut self.output);
        assert!(in_time, "it did not end within {limit:?}: {output}");
        End { output }
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        // Both fail if it has ended, as it should have.
        let _gone = self.child.kill();
        let _reaped = self.child.wait();
    }
}

/// What a process has printed until its end.
#[derive(Debug)]
pub(crate) struct End {
    pub(crate) output: String,
}

impl End {
    /// Whether it failed, and the first cause is `rank`, or ranks that `rank` is one of.
    pub(crate) fn blames(&self, rank: usize) -> bool {
        let Some(blamed) = self.blamed() else {
            return false;
        };
        let named = || self.output.contains(&format!("rank {rank}"));
        blamed.contains(&rank) || blamed.is_empty() && named()
    }

    /// Those it blames; none if it did not fail.
    pub(crate) fn blamed(&self) -> Option<Vec<usize>> {
        let (_, rest) = self.output.split_once("blames: [")?;
        let (list, _) = rest.split_once(']')?;
        let ranks = list
            .split(',')
            .map(str::trim)
            .filter(|rank| !rank.is_empty());
        Some(ranks.map(|rank| rank.parse().unwrap()).collect())
    }

    /// What it says of its failure, if it has failed.
    pub(crate) fn failure(&self) -> Option<&str> {
        Some(
            self.output
                .split_once("failed: ")?
                .1
                .lines()
                .next()
                .unwrap_or(""),
        )
    }
}
