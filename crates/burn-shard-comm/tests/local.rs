//! Ranks as threads: the conformance suite, and how ranks come and go.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use burn_shard_comm::{
    Collective, Error, Local, OwnedSegments, ProcessGroup, Recording, ReduceOp, Segments,
    conformance::{self, Launcher},
};

struct Threads {
    per_rank: usize,
}

impl Launcher for Threads {
    fn run<F: Fn(ProcessGroup) + Sync>(&self, world_size: usize, f: F) {
        let local = Local::new(world_size).threads_per_rank(self.per_rank);
        if let Err(error) = local.deadline(Duration::from_secs(120)).spawn(f) {
            panic!("{error}");
        }
    }
}

burn_shard_comm::conformance_tests!(Threads { per_rank: 1 });
burn_shard_comm::sub_group_tests!(Threads { per_rank: 1 });

#[test]
fn results_do_not_depend_on_the_threads_of_a_rank() {
    conformance::large_buffers_match_a_naive_reference(&Threads { per_rank: 3 });
    conformance::lists_may_mix_lengths(&Threads { per_rank: 3 });
}

/// Long enough never to be met by accident; no test below waits for it.
const LONG: Duration = Duration::from_secs(60);

#[test]
fn a_group_without_ranks_is_refused() {
    assert!(matches!(
        ProcessGroup::spawn(0, |_| ()),
        Err(Error::NoRanks)
    ));
    assert!(Local::new(0).groups().is_empty());
}

#[test]
fn each_rank_has_its_own_pool() {
    let threads = Local::new(2)
        .threads_per_rank(3)
        .spawn(|group| (group.rank(), rayon::current_num_threads()))
        .unwrap();
    assert_eq!(threads, [(0, 3), (1, 3)]);
}

#[test]
fn a_panic_reaches_every_rank_and_is_returned() {
    let start = Instant::now();
    let interrupted = AtomicUsize::new(0);
    let error = Local::new(3)
        .deadline(LONG)
        .spawn(|group| {
            group.barrier().unwrap();
            if group.rank() == 1 {
                thread::sleep(Duration::from_millis(20));
                panic!("the loss is {}", "NaN");
            }
            let error = group.all_reduce(&mut [1.0f32], ReduceOp::Sum).unwrap_err();
            assert!(
                matches!(error.root_cause(), Error::RankPanicked { rank: 1, message } if message == "the loss is NaN"),
                "{error}"
            );
            if let Error::Interrupted { collective, sequence, missing, .. } = &error {
                assert_eq!((*collective, *sequence), (Collective::AllReduce, 1));
                assert!(missing.contains(&1));
                interrupted.fetch_add(1, Ordering::Relaxed);
            }
            let error = group.barrier().unwrap_err();
            assert!(matches!(error, Error::Poisoned { .. }), "{error}");
            // What fails because of it must not hide it.
            panic!("{error}");
        })
        .unwrap_err();
    assert!(
        matches!(&error, Error::RankPanicked { rank: 1, message } if message == "the loss is NaN"),
        "{error}"
    );
    assert!(start.elapsed() < LONG / 2);
}

#[test]
fn a_panic_is_not_mistaken_for_leaving() {
    // The panicking rank's handle is dropped while it unwinds, before anyone can know why.
    for _ in 0..50 {
        let error = Local::new(2)
            .deadline(LONG)
            .spawn(|group| {
                if group.rank() == 0 {
                    let _moved = group;
                    panic!("first");
                }
                let error = group.barrier().unwrap_err();
                assert!(matches!(
                    error.root_cause(),
                    Error::RankPanicked { rank: 0, .. }
                ));
            })
            .unwrap_err();
        assert!(
            matches!(error, Error::RankPanicked { rank: 0, .. }),
            "{error}"
        );
    }
}

#[test]
fn a_panic_while_wrapping_is_reported() {
    let error = Local::new(2)
        .deadline(LONG)
        .wrap(|communicator| {
            assert!(communicator.rank() != 1, "no wrapping");
            communicator
        })
        .spawn(|group| group.barrier().is_err())
        .unwrap_err();
    assert!(
        matches!(&error, Error::RankPanicked { rank: 1, message } if message == "no wrapping"),
        "{error}"
    );
}

#[test]
fn ranks_that_return_early_are_named() {
    let start = Instant::now();
    let results = Local::new(4)
        .deadline(LONG)
        .spawn(|group| {
            group.barrier()?;
            if group.rank() % 2 == 1 {
                return Ok(());
            }
            group.barrier()
        })
        .unwrap();
    // Waiting ranks are woken by the first to leave, so not every error names both.
    for rank in [0, 2] {
        let error = results[rank].clone().unwrap_err();
        let Error::RankLeft {
            collective,
            sequence,
            missing,
            ..
        } = error.root_cause()
        else {
            panic!("{error}")
        };
        assert_eq!((*collective, *sequence), (Collective::Barrier, 1));
        assert!(
            !missing.is_empty() && missing.iter().all(|rank| rank % 2 == 1),
            "{error}"
        );
    }
    assert!(results[1].is_ok() && results[3].is_ok());
    assert!(start.elapsed() < LONG / 2);
}

#[test]
fn a_rank_that_has_done_its_part_may_leave() {
    let results = Local::new(3)
        .deadline(LONG)
        .spawn(|group| -> Result<f32, Error> {
            let input = Arc::new(OwnedSegments(vec![vec![1.0f32; 100_000]]));
            let communicator = group.communicator();
            let reduce = communicator.all_reduce(input.clone(), ReduceOp::Sum)?;
            let scatter = communicator.reduce_scatter(input, ReduceOp::Sum)?;
            if group.rank() == 1 {
                return Ok(3.0);
            }
            thread::sleep(Duration::from_millis(30));
            let mut full = OwnedSegments(vec![vec![0.0f32; 100_000]]);
            reduce.finish(&mut full)?;
            let mut own = OwnedSegments(vec![vec![0.0f32; 33_334]]);
            scatter.finish(&mut own)?;
            assert!(full.0[0].iter().all(|&sum| sum == 3.0));
            Ok(own.0[0][0])
        })
        .unwrap();
    for result in results {
        assert_eq!(result.unwrap(), 3.0);
    }
}

#[test]
fn a_rank_that_leaves_later_calls_is_named_too() {
    let results = Local::new(2)
        .deadline(LONG)
        .spawn(|group| {
            if group.rank() == 0 {
                return None;
            }
            thread::sleep(Duration::from_millis(20));
            let input = Arc::new(OwnedSegments(vec![vec![1.0f32]]));
            let mut work = group
                .communicator()
                .all_reduce(input, ReduceOp::Sum)
                .unwrap();
            assert!(work.is_ready(), "an error is ready as well");
            work.wait().err()
        })
        .unwrap();
    let error = results[1].clone().unwrap();
    assert!(
        matches!(&error, Error::RankLeft { rank: 1, sequence: 0, missing, .. } if missing == &[0]),
        "{error}"
    );
}

#[test]
fn dropping_the_last_handle_leaves_the_group() {
    let mut groups = Local::new(2).deadline(LONG).groups();
    let second = groups.pop().unwrap();
    let clone = second.clone();
    drop(second);
    let first = groups.pop().unwrap();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| first.barrier());
        thread::sleep(Duration::from_millis(20));
        assert!(!waiting.is_finished(), "a clone still holds the rank");
        drop(clone);
        let error = waiting.join().unwrap().unwrap_err();
        assert!(
            matches!(&error, Error::RankLeft { missing, .. } if missing == &[1]),
            "{error}"
        );
    });
}

#[test]
fn ranks_that_never_arrive_are_named_after_the_deadline() {
    let deadline = Duration::from_millis(100);
    let hold = std::sync::Barrier::new(4);
    let results = Local::new(4)
        .spawn(|group| {
            group.barrier().unwrap();
            // All have the default deadline but one, which therefore fails first.
            assert_eq!(group.deadline(), Duration::from_secs(300));
            let result = match group.rank() {
                1 | 3 => Ok(()),
                rank => {
                    if rank == 2 {
                        thread::sleep(Duration::from_millis(10));
                        group.set_deadline(deadline);
                    }
                    group.all_gather(&[1u8], &mut [0; 4])
                }
            };
            // Ranks 1 and 3 are alive all the time.
            hold.wait();
            if group.rank() % 2 == 1 {
                let error = group.barrier().unwrap_err();
                assert!(matches!(error, Error::Poisoned { .. }), "{error}");
            }
            result
        })
        .unwrap();
    let error = results[2].clone().unwrap_err();
    let Error::Deadline {
        rank: 2,
        collective,
        sequence: 1,
        waited,
        missing,
    } = &error
    else {
        panic!("{error}")
    };
    assert_eq!(
        (*collective, missing.as_slice()),
        (Collective::AllGather, &[1, 3][..])
    );
    assert!(*waited >= deadline && *waited < LONG);
    let error = results[0].clone().unwrap_err();
    let Error::Interrupted {
        rank: 0,
        missing,
        cause,
        ..
    } = &error
    else {
        panic!("{error}")
    };
    assert_eq!(missing, &[1, 3]);
    assert!(matches!(**cause, Error::Deadline { rank: 2, .. }));
    let text = error.to_string();
    assert!(text.starts_with("rank 0: all_gather #1 was interrupted while waiting for ranks [1, 3]: rank 2: all_gather #1 waited"), "{text}");
}

#[test]
fn all_reduce_lets_go_of_inputs_before_wait_returns() {
    for threads in [1, 3] {
        Local::new(3)
            .threads_per_rank(threads)
            .spawn(|group| {
                for round in 0..200 {
                    let numel = [3, 1009, 400_000][round % 3];
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
            })
            .unwrap();
    }
}

#[test]
fn a_finished_collective_holds_no_input() {
    let inputs = Local::new(2)
        .spawn(|group| {
            let input = Arc::new(OwnedSegments(vec![vec![1.0f32; 10]]));
            let mut output = OwnedSegments(vec![vec![0.0f32; 20]]);
            group
                .communicator()
                .all_gather(input.clone(), &[20])
                .unwrap()
                .finish(&mut output)
                .unwrap();
            let scattered = Arc::new(OwnedSegments(vec![vec![1.0f32; 20]]));
            let work = group
                .communicator()
                .reduce_scatter(scattered.clone(), ReduceOp::Sum)
                .unwrap();
            work.finish(&mut OwnedSegments(vec![vec![0.0f32; 10]]))
                .unwrap();
            group.barrier().unwrap();
            (Arc::strong_count(&input), Arc::strong_count(&scattered))
        })
        .unwrap();
    assert_eq!(inputs, [(1, 1), (1, 1)]);
}

#[test]
fn a_failed_collective_holds_no_input() {
    let inputs = Local::new(2)
        .deadline(LONG)
        .spawn(|group| {
            let input = Arc::new(OwnedSegments(vec![vec![1.0f32; 10]]));
            if group.rank() == 1 {
                group.abort("enough");
            } else {
                // Either it is refused, or let go when the group fails.
                drop(
                    group
                        .communicator()
                        .reduce_scatter(input.clone(), ReduceOp::Sum),
                );
            }
            // The handle keeps the group alive, and whatever it holds.
            (group, input)
        })
        .unwrap();
    for (group, input) in inputs {
        assert_eq!(Arc::strong_count(&input), 1, "{group:?}");
    }
}

#[test]
fn an_input_may_own_a_handle_to_the_group() {
    /// Leaves the group when it is let go.
    struct Holder {
        _group: ProcessGroup,
        data: OwnedSegments<f32>,
    }
    impl Segments for Holder {
        fn dtype(&self) -> burn_shard_comm::DType {
            Segments::dtype(&self.data)
        }
        fn count(&self) -> usize {
            1
        }
        fn numel(&self, index: usize) -> usize {
            Segments::numel(&self.data, index)
        }
        fn bytes(&self, index: usize) -> Option<&[u8]> {
            self.data.bytes(index)
        }
    }
    let groups = Local::new(2).deadline(LONG).groups();
    thread::scope(|scope| {
        for group in groups {
            scope.spawn(move || {
                let communicator = Arc::clone(group.communicator());
                let data = OwnedSegments(vec![vec![1.0f32; 4]]);
                let input = Arc::new(Holder {
                    _group: group,
                    data,
                });
                let mut work = communicator.all_reduce(input, ReduceOp::Sum).unwrap();
                drop(communicator);
                work.wait().unwrap();
            });
        }
    });
    // The same when inputs are let go because the group fails.
    let mut groups = Local::new(2).deadline(LONG).groups();
    let (second, first) = (groups.pop().unwrap(), groups.pop().unwrap());
    let communicator = Arc::clone(first.communicator());
    let data = OwnedSegments(vec![vec![1.0f32; 4]]);
    let input = Arc::new(Holder {
        _group: first,
        data,
    });
    drop(communicator.reduce_scatter(input, ReduceOp::Sum).unwrap());
    drop(communicator);
    second.abort("over");
    assert!(second.barrier().is_err());
}

#[test]
fn a_thousand_small_collectives_in_a_hurry() {
    for world_size in [2, 4] {
        let local = Local::new(world_size).deadline(LONG).wrap(|communicator| {
            Arc::new(Recording::new(communicator).with_delays(11, Duration::from_micros(200)))
        });
        local
            .spawn(|group| {
                let (rank, world_size) = (group.rank(), group.world_size());
                for round in 0..250u32 {
                    let value = round as f32 + rank as f32;
                    let sum: f32 = (0..world_size).map(|rank| round as f32 + rank as f32).sum();
                    let mut buffer = [value; 3];
                    group.all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
                    assert_eq!(buffer, [sum; 3]);
                    let mut all = vec![0.0f32; world_size];
                    group.all_gather(&[value], &mut all).unwrap();
                    assert_eq!(all[world_size - 1], round as f32 + (world_size - 1) as f32);
                    let mut own = [0.0f32];
                    group
                        .reduce_scatter(&vec![value; world_size], &mut own, ReduceOp::Sum)
                        .unwrap();
                    assert_eq!(own, [sum]);
                    let root = round as usize % world_size;
                    let mut buffer = [value];
                    group.broadcast(&mut buffer, root).unwrap();
                    assert_eq!(buffer, [round as f32 + root as f32]);
                }
                assert_eq!(group.traffic().total_calls(), 1000);
            })
            .unwrap();
    }
}

#[test]
fn errors_that_closures_return_are_returned() {
    let results: Vec<Result<usize, String>> = ProcessGroup::spawn(2, |group| {
        if group.rank() == 0 {
            Err("mine".to_owned())
        } else {
            Ok(1)
        }
    })
    .unwrap();
    assert_eq!(results, [Err("mine".to_owned()), Ok(1)]);
}
