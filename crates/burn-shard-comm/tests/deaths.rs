//! Ranks that are processes and are killed or stopped at random moments: all others end in time, and name
//! them.
#![cfg(unix)]
#![allow(
    clippy::unwrap_used,
    clippy::wildcard_enum_match_arm,
    reason = "a test ends at the first error"
)]

mod processes;
#[path = "processes/programs.rs"]
mod programs;

use std::{
    sync::atomic::{AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use programs::{End, Job, Rank};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rustix::process::{Pid, Signal, kill_process};

/// In which all others end after a death, however busy the machine; far below the deadline of the job.
const SOON: Duration = Duration::from_secs(30);

#[test]
fn this_program_can_be_a_rank() {
    programs::this_program_can_be_a_rank();
}

#[derive(Clone, Debug)]
struct Trial {
    world_size: usize,
    victim: usize,
    numel: usize,
    /// Between the start of a job, or the moment when it is ready, and the blow.
    after: Duration,
}

impl Trial {
    fn draw(seed: u64, longest: Duration) -> Self {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let world_size = random.random_range(2..=4);
        Self {
            world_size,
            victim: random.random_range(0..world_size),
            // Sent behind the header, in one chunk, in several.
            numel: [100, 20_011, 600_011][random.random_range(0..3)],
            after: longest.mul_f64(random.random()),
        }
    }

    fn job(&self) -> Job {
        Job {
            numel: self.numel,
            ..Job::new(self.world_size)
        }
    }

    /// Ends all ranks but the victim, which is given back.
    fn end(&self, mut ranks: Vec<Rank>, limit: Duration) -> (Rank, Vec<(usize, End)>) {
        let victim = ranks.remove(self.victim);
        let others = (0..self.world_size).filter(|&rank| rank != self.victim);
        let start = Instant::now();
        let ends = others.zip(ranks).map(|(rank, process)| {
            let left = limit.saturating_sub(start.elapsed());
            (rank, process.end(left))
        });
        (victim, ends.collect())
    }
}

/// Runs trials with these seeds, `at_once` at a time.
fn trials(count: u64, at_once: usize, run: impl Fn(u64) + Sync) {
    let next = AtomicU64::new(0);
    thread::scope(|scope| {
        for _ in 0..at_once {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= count {
                        return;
                    }
                    run(seed);
                }
            });
        }
    });
}

#[test]
fn a_rank_that_is_killed_at_any_moment_is_named_by_all_others() {
    trials(100, 3, |seed| {
        let trial = Trial::draw(seed, Duration::from_millis(60));
        let mut ranks = trial.job().start_all();
        ranks.iter_mut().for_each(Rank::wait_until_ready);
        thread::sleep(trial.after);
        ranks[trial.victim].kill();
        for (rank, end) in trial.end(ranks, SOON).1 {
            let gone = format!("rank {} is gone without a word", trial.victim);
            let told = end.failure().is_some_and(|failure| failure.contains(&gone));
            let right = told && end.blamed() == Some(vec![trial.victim]);
            assert!(right, "{seed}: {trial:?}: rank {rank}: {}", end.output);
        }
    });
}

#[test]
fn a_rank_that_is_killed_while_ranks_meet_is_named_by_all_others() {
    // One that never comes is missed at the deadline, so this has to be met.
    let timeout = Duration::from_secs(8);
    trials(24, 12, |seed| {
        let trial = Trial::draw(1000 + seed, Duration::from_millis(30));
        let job = Job {
            timeout,
            ..trial.job()
        };
        let mut ranks = job.start_all();
        thread::sleep(trial.after);
        ranks[trial.victim].kill();
        for (rank, end) in trial.end(ranks, timeout + SOON).1 {
            let right = end.blames(trial.victim);
            assert!(right, "{seed}: {trial:?}: rank {rank}: {}", end.output);
        }
    });
}

#[test]
fn a_rank_that_is_stopped_is_named_by_all_others_and_fails_when_it_goes_on() {
    let timeout = Duration::from_secs(6);
    trials(16, 8, |seed| {
        let trial = Trial::draw(2000 + seed, Duration::from_millis(60));
        let job = Job {
            timeout,
            ..trial.job()
        };
        let mut ranks = job.start_all();
        ranks.iter_mut().for_each(Rank::wait_until_ready);
        thread::sleep(trial.after);
        let id = Pid::from_raw(i32::try_from(ranks[trial.victim].id()).unwrap()).unwrap();
        kill_process(id, Signal::STOP).unwrap();
        let start = Instant::now();
        let (victim, ends) = trial.end(ranks, timeout + SOON);
        assert!(start.elapsed() > timeout / 2, "{seed}: {trial:?}: {ends:?}");
        for (rank, end) in ends {
            let late = end
                .failure()
                .is_some_and(|failure| failure.contains("waited"));
            let right = late && end.blamed() == Some(vec![trial.victim]);
            assert!(right, "{seed}: {trial:?}: rank {rank}: {}", end.output);
        }
        kill_process(id, Signal::CONT).unwrap();
        let end = victim.end(SOON);
        assert!(end.failure().is_some(), "{seed}: {trial:?}: {}", end.output);
    });
}
