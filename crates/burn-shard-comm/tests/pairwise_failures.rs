//! Ranks that exchange bytes: how they come and go, and who hears of it.
#![allow(clippy::unwrap_used, reason = "a test ends at the first error")]

mod common;

use std::{
    sync::{
        Arc, Barrier,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use burn_shard_comm::{
    Collective, DType, Error, Fault, Limit, OwnedSegments, Pairwise, ProcessGroup, ReduceOp,
    Segments, Transport, conformance::MemoryTransport,
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
    let gather = communicator.all_gather(input.clone(), &[numel * world_size; 2])?;
    let half = group.split(Some(group.rank() % 2), 0)?;
    let half = half.expect("every rank should have a color");
    half.all_reduce(&mut vec![1.0f32; numel], ReduceOp::Max)?;
    let mut full = vec![0u8; numel];
    group.all_gather(&vec![1u8; numel.div_ceil(world_size)], &mut full)?;
    let mut reduce = communicator.all_reduce(input, ReduceOp::Mean)?;
    group.broadcast(&mut full, round % world_size)?;
    reduce.wait()?;
    group.barrier()?;
    gather.finish(&mut OwnedSegments(vec![
        vec![0.0f32; numel * world_size];
        2
    ]))?;
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
    fn draw(seed: u64, fate: Fate) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let world_size = rng.random_range(2..=4);
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
            Fate::Dies | Fate::Leaves | Fate::Panics | Fate::Aborts => LONG,
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

/// Runs `count` trials, some at a time, and hands each end but the victim's to `check`.
fn trials(count: u64, draw: impl Fn(u64) -> Trial + Sync, check: impl Fn(Trial, &Error) + Sync) {
    let next = AtomicU64::new(0);
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= count {
                        return;
                    }
                    let trial = draw(seed);
                    let (ends, time) = trial.run();
                    assert!(time < LONG / 2, "{trial:?} took {time:?}");
                    for (rank, end) in ends.into_iter().enumerate() {
                        if rank != trial.victim {
                            check(trial, &end.expect_err("the group should have failed"));
                        }
                    }
                }
            });
        }
    });
}

#[test]
fn whatever_becomes_of_a_rank_all_others_name_it_in_time() {
    let draw = |seed| {
        let fates = [Fate::Dies, Fate::Leaves, Fate::Panics, Fate::Aborts];
        Trial::draw(seed, fates[(seed % 4) as usize])
    };
    trials(160, draw, |trial, error| {
        let told = match trial.fate {
            Fate::Dies => matches!(error.root_cause(), Error::RankDied { .. }),
            Fate::Leaves => matches!(error.root_cause(), Error::RankLeft { .. }),
            Fate::Panics => matches!(error.root_cause(), Error::RankPanicked { .. }),
            Fate::Aborts => matches!(error.root_cause(), Error::Aborted { .. }),
            Fate::Stalls => false,
        };
        assert!(told && names(error, trial.victim), "{trial:?}: {error}");
    });
}

#[test]
fn a_stopped_rank_is_named_by_all_others_and_not_one_that_waits_for_it() {
    let draw = |seed| Trial::draw(1000 + seed, Fate::Stalls);
    trials(40, draw, |trial, error| {
        let late = matches!(error.root_cause(), Error::Deadline { .. });
        assert!(late && names(error, trial.victim), "{trial:?}: {error}");
    });
}

#[test]
fn ranks_that_are_late_are_named_and_not_those_that_wait_for_them() {
    for late in 0..4 {
        let hold = Barrier::new(4);
        // Long enough for the others to be in time on a busy machine.
        let deadline = Duration::from_millis(1500);
        let ends = spawn(4, LONG, |group| {
            group.barrier().unwrap();
            hold.wait();
            group.set_deadline(deadline);
            let result = if group.rank() == late {
                Ok(())
            } else {
                group.all_gather(&[1.0f32; 5000], &mut [0.0; 20_000])
            };
            hold.wait();
            if group.rank() == late {
                let error = group.barrier().unwrap_err();
                assert!(names(&error, late), "{error}");
            }
            result
        });
        for (rank, end) in ends
            .into_iter()
            .enumerate()
            .filter(|(rank, _)| *rank != late)
        {
            let error = end.unwrap_err();
            let Error::Deadline {
                collective: Collective::AllGather,
                sequence: 1,
                waited,
                missing,
                ..
            } = error.root_cause()
            else {
                panic!("{error}")
            };
            assert!(*waited >= deadline && *waited < LONG && *missing == [late]);
            if let Error::Interrupted {
                rank: own, missing, ..
            } = &error
            {
                assert!(*own == rank && missing.contains(&late), "{error}");
            }
        }
    }
}

#[test]
fn ranks_that_return_early_are_named() {
    let start = Instant::now();
    let arrived = Barrier::new(4);
    let ends = spawn(4, LONG, |group| {
        group.barrier().unwrap();
        arrived.wait();
        if group.rank() % 2 == 1 {
            return Ok(());
        }
        group.barrier()
    });
    for (rank, end) in ends.into_iter().enumerate() {
        if rank % 2 == 1 {
            end.unwrap();
            continue;
        }
        let error = end.unwrap_err();
        let Error::RankLeft {
            collective: Collective::Barrier,
            sequence: 1,
            missing,
            ..
        } = error.root_cause()
        else {
            panic!("{error}")
        };
        assert!(missing == &[1] || missing == &[3], "{error}");
    }
    assert!(start.elapsed() < LONG / 2);
}

#[test]
fn a_rank_that_has_started_its_part_may_leave() {
    let ends = spawn(3, LONG, |group| -> Result<f32, Error> {
        let input = Arc::new(OwnedSegments(vec![vec![1.0f32; 100_000]]));
        let communicator = group.communicator();
        let reduce = communicator.all_reduce(input.clone(), ReduceOp::Sum)?;
        let scatter = communicator.reduce_scatter(input, ReduceOp::Sum)?;
        if group.rank() == 1 {
            return Ok(3.0);
        }
        thread::sleep(Duration::from_millis(100));
        let mut full = OwnedSegments(vec![vec![0.0f32; 100_000]]);
        reduce.finish(&mut full)?;
        let mut own = OwnedSegments(vec![vec![0.0f32; 33_334]]);
        scatter.finish(&mut own)?;
        assert!(full.0[0].iter().all(|&sum| sum == 3.0));
        Ok(own.0[0][0])
    });
    for end in ends {
        assert_eq!(end.unwrap(), 3.0);
    }
}

#[test]
fn dropping_the_last_handle_leaves_the_group() {
    let mut groups = groups(2);
    let second = groups.pop().unwrap();
    let clone = second.clone();
    drop(second);
    let first = groups.pop().unwrap();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| first.barrier());
        thread::sleep(Duration::from_millis(100));
        assert!(!waiting.is_finished(), "a clone still holds the rank");
        drop(clone);
        let error = waiting.join().unwrap().unwrap_err();
        assert!(
            matches!(&error, Error::RankLeft { missing, .. } if missing == &[1]),
            "{error}"
        );
    });
}

fn groups(world_size: usize) -> Vec<ProcessGroup> {
    MemoryTransport::group(world_size)
        .into_iter()
        .map(|transport| ProcessGroup::new(Arc::new(Pairwise::new(transport, LONG))))
        .collect()
}

#[test]
fn a_rank_that_is_busy_elsewhere_hears_of_failures() {
    let (arrived, heard) = (Barrier::new(2), Barrier::new(2));
    spawn(2, LONG, |group| {
        group.barrier().unwrap();
        // A rank that fails would end the barrier of one that is still in it.
        arrived.wait();
        if group.rank() == 0 {
            group.abort("enough");
            heard.wait();
        } else {
            heard.wait();
            // Many times the interval in which an idle rank looks.
            thread::sleep(Duration::from_secs(2));
            let error = group.barrier().unwrap_err();
            assert!(
                matches!(&error, Error::Poisoned { cause, .. } if matches!(&**cause, Error::Aborted { rank: 0, .. })),
                "{error}"
            );
        }
    });
}

#[test]
fn an_abort_ends_an_exchange_of_its_own_rank() {
    let start = Instant::now();
    let done = Barrier::new(2);
    spawn(2, LONG, |group| {
        if group.rank() == 1 {
            done.wait();
            return;
        }
        thread::scope(|scope| {
            let input = Arc::new(OwnedSegments(vec![vec![1.0f32; 10]]));
            let mut work = group
                .communicator()
                .all_reduce(input, ReduceOp::Sum)
                .unwrap();
            let waiting = scope.spawn(|| group.barrier());
            thread::sleep(Duration::from_millis(100));
            assert!(!waiting.is_finished() && !work.is_ready());
            group.abort("enough");
            assert!(work.is_ready());
            for error in [
                waiting.join().unwrap().unwrap_err(),
                work.wait().unwrap_err(),
            ] {
                assert!(matches!(error, Error::Interrupted { .. }), "{error}");
                assert!(names(&error, 0), "{error}");
            }
        });
        done.wait();
    });
    assert!(start.elapsed() < LONG / 2);
}

#[test]
fn all_reduce_lets_go_of_inputs_before_wait_returns() {
    spawn(3, LONG, |group| {
        for round in 0..60 {
            let numel = [3, 1009, 40_000][round % 3];
            let input = Arc::new(OwnedSegments(vec![vec![1.0f32; numel]]));
            let shared: Arc<dyn Segments> = input.clone();
            let mut work = group
                .communicator()
                .all_reduce(shared, ReduceOp::Sum)
                .unwrap();
            work.wait().unwrap();
            assert_eq!(Arc::strong_count(&input), 1);
            let mut output = OwnedSegments(vec![vec![0.0f32; numel]]);
            work.finish(&mut output).unwrap();
            assert!(output.0[0].iter().all(|&sum| sum == 3.0));
        }
    });
}

/// One absent `f32` that owns something, and runs something when it is read.
struct Special<O, F>(O, F);

impl<O: Send + Sync, F: Fn() + Send + Sync> Segments for Special<O, F> {
    fn dtype(&self) -> DType {
        DType::F32
    }
    fn count(&self) -> usize {
        1
    }
    fn numel(&self, _: usize) -> usize {
        1
    }
    fn bytes(&self, _: usize) -> Option<&[u8]> {
        (self.1)();
        None
    }
}

#[test]
fn an_input_may_own_the_last_handle_to_the_group() {
    let start = Instant::now();
    spawn(2, LONG, |group| {
        let communicator = Arc::clone(group.communicator());
        let input = Arc::new(Special(group, || ()));
        let mut work = communicator.all_reduce(input, ReduceOp::Sum).unwrap();
        drop(communicator);
        work.wait().unwrap();
    });
    // The same when inputs are let go because the group fails.
    let mut groups = groups(2);
    let (second, first) = (groups.pop().unwrap(), groups.pop().unwrap());
    let communicator = Arc::clone(first.communicator());
    let input = Arc::new(Special(first, || ()));
    let mut work = communicator.reduce_scatter(input, ReduceOp::Sum).unwrap();
    drop(communicator);
    second.abort("over");
    assert!(names(&work.wait().unwrap_err(), 1));
    // It does not wait for itself.
    assert!(start.elapsed() < Duration::from_secs(5));
}

#[test]
fn an_input_that_panics_is_a_failure_of_its_rank() {
    spawn(2, LONG, |group| {
        // The first reads are the checks.
        let reads = AtomicU64::new(0);
        let bad = move || {
            assert!(reads.fetch_add(1, Ordering::Relaxed) < 1, "unreadable");
        };
        let error = if group.rank() == 0 {
            let work = group
                .communicator()
                .all_reduce(Arc::new(Special((), bad)), ReduceOp::Sum)
                .unwrap();
            work.finish(&mut OwnedSegments(vec![vec![0.0f32]]))
                .unwrap_err()
        } else {
            group.all_reduce(&mut [1.0f32], ReduceOp::Sum).unwrap_err()
        };
        assert!(
            matches!(error.root_cause(), Error::RankPanicked { rank: 0, message } if message == "unreadable"),
            "{error}"
        );
    });
}

#[test]
fn a_rank_of_another_version_is_named() {
    let mut transports = MemoryTransport::group(2);
    let mut strange = transports.pop().unwrap();
    let group = ProcessGroup::new(Arc::new(Pairwise::new(transports.pop().unwrap(), LONG)));
    let cancelled = AtomicBool::new(false);
    let at = Instant::now() + LONG;
    let limit = Limit {
        at,
        cancelled: &cancelled,
    };
    strange.exchange(0, &[7; 40], 0, &mut [], limit).unwrap();
    let error = group.barrier().unwrap_err();
    assert!(matches!(error, Error::OutOfStep { peer: 1, .. }), "{error}");
    assert!(error.to_string().contains("same version"), "{error}");
    // What it said while leaving is read by the other side.
    drop(group);
    let fault = strange.poll().unwrap_err();
    assert!(matches!(fault, Fault::Farewell { peer: 0, words } if !words.is_empty()));
}
