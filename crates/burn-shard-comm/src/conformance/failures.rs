//! What is refused, what fails, and who hears of it.

use std::{sync::Arc, time::Duration};

use super::{Launcher, collectives};
use crate::{
    Caller, Collective, DType, Error, MaybeSegment, OwnedSegments, ProcessGroup, Recording,
    ReduceOp, SegmentLayout, Segments, SparseSegments,
};

/// What is refused by one rank or by all leaves the group usable.
pub fn refusals_leave_the_group_usable(launcher: &impl Launcher) {
    fn refused<T>(result: Result<T, Error>, expected: impl Fn(&Error) -> bool) {
        let Err(error) = result else {
            panic!("should be refused")
        };
        assert!(error.is_refusal(), "{error}");
        assert!(expected(&error), "{error}");
    }
    launcher.run(2, |group| {
        let communicator = group.communicator();
        let before = group.traffic();
        // Alike on all ranks.
        refused(group.all_reduce(&mut [1u32], ReduceOp::Mean), |e| {
            matches!(
                e,
                Error::MeanOfIntegers {
                    dtype: DType::U32,
                    ..
                }
            )
        });
        refused(
            group.reduce_scatter(&[1i64, 2], &mut [0i64], ReduceOp::Mean),
            |e| {
                matches!(
                    e,
                    Error::MeanOfIntegers {
                        dtype: DType::I64,
                        ..
                    }
                )
            },
        );
        refused(group.broadcast(&mut [1.0f32], 2), |e| {
            matches!(
                e,
                Error::RootOutOfRange {
                    root: 2,
                    world_size: 2,
                    ..
                }
            )
        });
        // On one rank only: the other goes straight to the barrier below.
        if group.rank() == 1 {
            refused(group.all_gather(&[1.0f32], &mut [0.0f32; 3]), |e| {
                matches!(
                    e,
                    Error::NumelDiffers {
                        segment: 0,
                        input_numel: 1,
                        output_numel: 3,
                        ..
                    }
                )
            });
            let absent = || {
                Arc::new(SparseSegments::<f32>(vec![MaybeSegment::Absent {
                    numel: 1,
                }]))
            };
            refused(communicator.all_gather(absent(), &[2]), |e| {
                matches!(e, Error::AbsentSegment { segment: 0, .. })
            });
            let layout = |dtype, numels: &[usize]| SegmentLayout {
                dtype,
                numels: numels.to_vec(),
            };
            let one = || layout(DType::F32, &[1]);
            refused(communicator.broadcast(Some(absent()), one(), 1), |e| {
                matches!(e, Error::AbsentSegment { segment: 0, .. })
            });
            let input = || Arc::new(OwnedSegments(vec![vec![1.0f32]]));
            refused(communicator.all_gather(input(), &[2, 2]), |e| {
                matches!(
                    e,
                    Error::SegmentCountDiffers {
                        input: 1,
                        output: 2,
                        ..
                    }
                )
            });
            let bytes = layout(DType::U8, &[1]);
            refused(communicator.broadcast(Some(input()), bytes, 1), |e| {
                matches!(
                    e,
                    Error::DTypeDiffers {
                        input: DType::F32,
                        output: DType::U8,
                        ..
                    }
                )
            });
            let two = layout(DType::F32, &[1, 1]);
            refused(communicator.broadcast(Some(input()), two, 1), |e| {
                matches!(e, Error::SegmentCountDiffers { .. })
            });
            let longer = layout(DType::F32, &[2]);
            refused(communicator.broadcast(Some(input()), longer, 1), |e| {
                matches!(
                    e,
                    Error::NumelDiffers {
                        input_numel: 1,
                        output_numel: 2,
                        ..
                    }
                )
            });
            refused(communicator.broadcast(None, one(), 1), |e| {
                matches!(e, Error::RootWithoutInput { .. })
            });
            refused(communicator.broadcast(Some(input()), one(), 0), |e| {
                matches!(e, Error::InputOutsideRoot { root: 0, .. })
            });
            refused(
                communicator
                    .all_reduce(Arc::new(Liar), ReduceOp::Sum)
                    .map(drop),
                |e| {
                    matches!(
                        e,
                        Error::BadSegment {
                            expected_bytes: 8,
                            found_bytes: 7,
                            ..
                        }
                    )
                },
            );
        }
        assert_eq!(
            group.traffic(),
            before,
            "a refused collective is not counted"
        );
        group.barrier().unwrap();

        // An output that does not fit is found when the collective is over.
        let input = || Arc::new(OwnedSegments(vec![vec![1.0f32; 3]]));
        let scatter = communicator.reduce_scatter(input(), ReduceOp::Sum).unwrap();
        let reduce = communicator.all_reduce(input(), ReduceOp::Sum).unwrap();
        let numel = if group.rank() == 0 { 1 } else { 2 };
        let mut output = OwnedSegments(vec![vec![0.0f32; numel]]);
        let result = scatter.finish(&mut output);
        if group.rank() == 0 {
            refused(result, |e| {
                matches!(
                    e,
                    Error::NumelDiffers {
                        output_numel: 1,
                        ..
                    }
                )
            });
        } else {
            result.unwrap();
            assert_eq!(output.0[0], [2.0, 0.0]);
        }
        let numel = if group.rank() == 0 { 3 } else { 4 };
        let mut output = OwnedSegments(vec![vec![0.0f32; numel]]);
        let result = reduce.finish(&mut output);
        if group.rank() == 1 {
            refused(result, |e| {
                matches!(
                    e,
                    Error::NumelDiffers {
                        output_numel: 4,
                        ..
                    }
                )
            });
        } else {
            result.unwrap();
            assert_eq!(output.0[0], [2.0; 3]);
        }

        // The same of collectives that copy; another element type is no fit either.
        let input = Arc::new(OwnedSegments(vec![vec![group.rank() as f32; 2]]));
        let layout = SegmentLayout::of(&*input);
        let gather = communicator
            .all_gather(Arc::clone(&input) as _, &[3])
            .unwrap();
        let own = (group.rank() == 1).then(|| Arc::clone(&input) as _);
        let sent = communicator.broadcast(own, layout, 1).unwrap();
        let mut doubles = OwnedSegments(vec![vec![0.0f64; 3]]);
        let mut singles = OwnedSegments(vec![vec![0.0f32; 3]]);
        if group.rank() == 0 {
            refused(gather.finish(&mut doubles), |e| {
                matches!(e, Error::DTypeDiffers { .. })
            });
        } else {
            gather.finish(&mut singles).unwrap();
            assert_eq!(singles.0[0], [0.0, 0.0, 1.0]);
        }
        refused(sent.finish(&mut singles), |e| {
            matches!(
                e,
                Error::NumelDiffers {
                    output_numel: 3,
                    ..
                }
            )
        });
        collectives::<f32>(&group, &[5]);
    });
}

/// Says it has two `f32`, and hands out seven bytes.
struct Liar;

impl Segments for Liar {
    fn dtype(&self) -> DType {
        DType::F32
    }
    fn count(&self) -> usize {
        1
    }
    fn numel(&self, _: usize) -> usize {
        2
    }
    fn bytes(&self, _: usize) -> Option<&[u8]> {
        Some(&[0; 7])
    }
}

/// If ranks call different things, every rank is told what each called, and the group is poisoned.
pub fn mismatches_are_told_to_every_rank(launcher: &impl Launcher) {
    type Run = fn(&ProcessGroup) -> Result<(), Error>;
    let cases: [(Run, Run, [&str; 2]); 6] = [
        (
            |group| group.all_reduce(&mut [1.0f32; 3], ReduceOp::Sum),
            |group| group.all_reduce(&mut [1.0f32; 4], ReduceOp::Sum),
            ["all_reduce f32 sum [3]", "all_reduce f32 sum [4]"],
        ),
        (
            |group| group.all_reduce(&mut [1.0f32; 3], ReduceOp::Sum),
            |group| group.all_reduce(&mut [1.0f32; 3], ReduceOp::Max),
            ["all_reduce f32 sum [3]", "all_reduce f32 max [3]"],
        ),
        (
            |group| group.all_reduce(&mut [1.0f32; 3], ReduceOp::Sum),
            |group| group.all_reduce(&mut [1i32; 3], ReduceOp::Sum),
            ["all_reduce f32 sum [3]", "all_reduce i32 sum [3]"],
        ),
        (
            |group| group.broadcast(&mut [1.0f32; 3], 0),
            |group| group.broadcast(&mut [1.0f32; 3], 1),
            ["broadcast f32 from 0 [3]", "broadcast f32 from 1 [3]"],
        ),
        // The shards are alike, what they are shards of is not.
        (
            |group| group.all_gather(&[1u8; 3], &mut [0; 7]),
            |group| group.all_gather(&[1u8; 3], &mut [0; 8]),
            ["all_gather u8 [7]", "all_gather u8 [8]"],
        ),
        (
            ProcessGroup::barrier,
            |group| group.reduce_scatter(&[1.0f64; 3], &mut [0.0], ReduceOp::Min),
            ["barrier", "reduce_scatter f64 min [3]"],
        ),
    ];
    for (even, odd, texts) in cases {
        launcher.run(3, |group| {
            group.barrier().unwrap();
            let call = if group.rank() == 1 { odd } else { even };
            let error = call(&group).unwrap_err();
            let Error::Mismatch { rank, calls, .. } = &error else {
                panic!("{error}")
            };
            assert_eq!(*rank, group.rank());
            let found: Vec<String> = calls.iter().map(ToString::to_string).collect();
            assert_eq!(found, [texts[0], texts[1], texts[0]]);
            assert!(
                error.to_string().contains(&format!("rank 1: {}", texts[1])),
                "{error}"
            );
            poisoned(&group, |cause| matches!(cause, Error::Mismatch { .. }));
        });
    }
}

/// Every call of a poisoned group is refused with its cause.
fn poisoned(group: &ProcessGroup, expected: impl Fn(&Error) -> bool) {
    let results = [
        group.barrier(),
        group.all_gather(&[1u8], &mut vec![0; group.world_size()]),
        group.all_reduce(&mut [1.0f32], ReduceOp::Sum),
        group.reduce_scatter(&[1.0f32], &mut [0.0], ReduceOp::Sum),
        group.broadcast(&mut [1u64], 0),
    ];
    for result in results {
        let error = result.unwrap_err();
        let Error::Poisoned { rank, cause, .. } = &error else {
            panic!("{error}")
        };
        assert_eq!(*rank, group.rank());
        assert!(expected(cause), "{error}");
        assert!(!error.is_refusal());
    }
}

/// `abort` ends the calls that wait and refuses later ones, with the reason.
pub fn an_abort_reaches_every_rank(launcher: &impl Launcher) {
    fn aborted(error: &Error) -> bool {
        matches!(error, Error::Aborted { rank: 1, reason } if reason == "out of data")
    }
    launcher.run(3, |group| {
        group.barrier().unwrap();
        if group.rank() == 1 {
            // Late enough that the others have left the first barrier, and wait in the second most of
            // the time; either way they get an error.
            std::thread::sleep(Duration::from_millis(200));
            group.abort("out of data");
            group.abort("a second reason changes nothing");
        } else {
            let error = group.barrier().unwrap_err();
            assert!(aborted(error.root_cause()), "{error}");
            if let Error::Interrupted {
                missing,
                collective,
                sequence,
                ..
            } = &error
            {
                assert!(missing.contains(&1), "{error}");
                assert_eq!((*collective, *sequence), (Collective::Barrier, 1));
            }
        }
        poisoned(&group, aborted);
    });
}

/// The n-th call fails on one rank, and the others hear of it.
pub fn a_failed_call_reaches_every_rank(launcher: &impl Launcher) {
    for call in 0..8 {
        launcher.run(3, |group| {
            let mut recording = Recording::new(Arc::clone(group.communicator()));
            if group.rank() == 2 {
                recording = recording.fail_call(call);
            }
            let recording = Arc::new(recording);
            let group = ProcessGroup::new(Arc::clone(&recording) as _);
            let run = || -> Result<(), Error> {
                loop {
                    group.all_reduce(&mut [1.0f32; 7], ReduceOp::Mean)?;
                    group.barrier()?;
                    group.reduce_scatter(&[1.0f32; 7], &mut [0.0; 3], ReduceOp::Sum)?;
                }
            };
            let error = run().unwrap_err();
            if group.rank() == 2 {
                let Error::Injected {
                    rank: 2,
                    call: failed,
                    ..
                } = error
                else {
                    panic!("{error}")
                };
                assert_eq!(failed, call);
                assert_eq!(recording.calls().len() as u64, call + 1);
            } else {
                assert!(
                    matches!(error.root_cause(), Error::Aborted { rank: 2, .. }),
                    "{error}"
                );
            }
        });
    }
}

/// Announcements move nothing, are numbered and compared as other calls are, and tell of failures.
pub fn announcements_are_compared(launcher: &impl Launcher) {
    launcher.run(3, |group| {
        let (rank, communicator) = (group.rank(), group.communicator());
        let announce = |numel: usize| {
            let input = SparseSegments(vec![MaybeSegment::<f32>::Absent { numel }]);
            let caller = Caller::host(rank, 3);
            let call = caller.reduction(Collective::AllReduce, &input, ReduceOp::Sum);
            communicator.announce(call.unwrap()).unwrap()
        };
        let before = group.traffic();
        let mut first = announce(1 << 40);
        let second = announce(7);
        assert_eq!(group.traffic(), before, "an announcement moves nothing");
        // In another order than they were made, among calls that do move something.
        collectives::<f32>(&group, &[5]);
        second
            .finish(&mut OwnedSegments(vec![vec![0.0f32; 7]]))
            .unwrap();
        first.wait().unwrap();
        first.wait().unwrap();
        assert!(first.is_ready());
        assert!(communicator.failure().is_none());
        group.barrier().unwrap();

        let mut odd = announce(if rank == 1 { 4 } else { 3 });
        let error = odd.wait().unwrap_err();
        let Error::Mismatch { calls, .. } = &error else {
            panic!("{error}")
        };
        let found: Vec<String> = calls.iter().map(ToString::to_string).collect();
        let (three, four) = ("all_reduce f32 sum [3]", "all_reduce f32 sum [4]");
        assert_eq!(found, [three, four, three]);
        let failure = communicator.failure().map(|cause| cause.to_string());
        assert!(failure.is_some_and(|text| text.contains(four)));
        let error = communicator.announce(Caller::barrier()).map(drop);
        assert!(matches!(error, Err(Error::Poisoned { .. })));
        poisoned(&group, |cause| matches!(cause, Error::Mismatch { .. }));
    });
}
