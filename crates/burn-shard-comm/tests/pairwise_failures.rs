//! Ranks that exchange bytes: how they come and go, and who hears of it.
#![allow(clippy::unwrap_used, reason = "a test ends at the first error")]

mod common;

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Barrier,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use burn_shard_comm::{
    Collective, Communicator, DType, Error, Fault, Limit, OwnedSegments, Pairwise, ProcessGroup,
    ReduceOp, Segments, Transport, conformance::MemoryTransport,
};
use common::{LONG, names, over, spawn};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// A few collectives of all kinds and sizes; some reductions are finished late.
fn step(group: &ProcessGroup, round: usize) -> Result<(), Error> {
    let communicator = group.communicator();
    let world_size = group.world_size();
    let numel = [3, 700, 30_000][round % 3];
    let input = Arc::new(OwnedSegments(vec![vec![1.0f32; numel]; 2]));
    let scatter = communicator.reduce_scatter(input.clone(), ReduceOp::Sum)?;
    let mut full = vec![0u8; numel];
    group.all_gather(&vec![1u8; numel.div_ceil(world_size)], &mut full)?;
    let mut reduce = communicator.all_reduce(input, ReduceOp::Mean)?;
    group.broadcast(&mut full, round % world_size)?;
    reduce.wait()?;
    group.barrier()?;
    scatter.finish(&mut OwnedSegments(vec![
        vec![
            0.0f32;
            numel.div_ceil(world_size)
        ];
        2
    ]))
}

#[derive(Clone, Copy, Debug)]
enum Fate {
    Dies,
    Stalls,
    Leaves,
    Panics,
    Aborts,
}

#[derive(Clone, Copy, Debug)]
struct Trial {
    fate: Fate,
    world_size: usize,
    victim: usize,
    /// The exchange or the round in which it happens.
    at: u64,
    delays: u64,
}

impl Trial {
    fn draw(seed: u64) -> Self {
        const FATES: [Fate; 5] = [
            Fate::Dies,
            Fate::Stalls,
            Fate::Leaves,
            Fate::Panics,
            Fate::Aborts,
        ];
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let world_size = rng.random_range(2..=4);
        let fate = FATES[(seed % 5) as usize];
        let by_exchange = matches!(fate, Fate::Dies | Fate::Stalls);
        Self {
            fate,
            world_size,
            victim: rng.random_range(0..world_size),
            at: rng.random_range(0..if by_exchange { 150 } else { 6 }),
            delays: seed,
        }
    }

    /// What each rank ended with, and how long the whole took.
    fn run(self) -> (Vec<Result<(), Error>>, Duration) {
        let deadline = match self.fate {
            Fate::Stalls => Duration::from_secs(3),
            _ => LONG,
        };
        let mut transports = MemoryTransport::group(self.world_size);
        let victim = transports.remove(self.victim);
        let victim = match self.fate {
            Fate::Dies => victim.die_at(self.at),
            Fate::Stalls => victim.stall_at(self.at),
            Fate::Leaves | Fate::Panics | Fate::Aborts => victim,
        };
        transports.insert(self.victim, victim);
        let transports = transports
            .into_iter()
            .map(|transport| transport.with_delays(self.delays, Duration::from_micros(200)));
        let start = Instant::now();
        let ends = over(transports.collect(), deadline, |group| {
            let rank = group.rank();
            for round in 0..10_000 {
                if rank == self.victim && round as u64 == self.at {
                    match self.fate {
                        Fate::Leaves => return Ok(()),
                        Fate::Panics => panic!("as it was told"),
                        Fate::Aborts => group.abort("as it was told"),
                        Fate::Dies | Fate::Stalls => {}
                    }
                }
                step(&group, round)?;
            }
            Ok(())
        });
        let ends = ends.into_iter().map(|end| end.unwrap_or(Ok(())));
        (ends.collect(), start.elapsed())
    }
}

#[test]
fn whatever_becomes_of_a_rank_all_others_name_it_in_time() {
    const TRIALS: u64 = 200;
    let next = AtomicU64::new(0);
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= TRIALS {
                        return;
                    }
                    let trial = Trial::draw(seed);
                    let (ends, time) = trial.run();
                    assert!(time < LONG / 2, "{trial:?} took {time:?}");
                    for (rank, end) in ends.into_iter().enumerate() {
                        if rank != trial.victim {
                            let error = end.expect_err("the group should have failed");
                            assert!(
                                names(&error, trial.victim),
                                "seed {seed}, {trial:?}: {error}"
                            );
                        }
                    }
                }
            });
        }
    });
}
