//! What fails in NCCL itself, and who hears of it. One test at a time: faults wait for the next
//! communicator of the process.

#![allow(clippy::unwrap_used, reason = "a test ends at the first error")]

mod common;

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use burn_shard_comm::{Communicator, Error, Local, OwnedSegments, ProcessGroup, ReduceOp};
use burn_shard_nccl::{Memory, NcclCommunicator, NcclError};
use burn_shard_nccl_double::{Fault, HostMemory, alive, inject, load};
use common::{LONG, join, spawn};
use parking_lot::Mutex;

static ONE: Mutex<()> = Mutex::new(());
/// Met on purpose.
const SHORT: Duration = Duration::from_secs(2);

fn steps(group: &ProcessGroup) -> Result<(), Error> {
    loop {
        group.all_reduce(&mut [1.0f32; 5], ReduceOp::Sum)?;
        group.reduce_scatter(&[1.0f32; 5], &mut [0.0; 2], ReduceOp::Mean)?;
        group.all_gather(&[1.0f32; 2], &mut [0.0; 5])?;
    }
}

fn poisoned(group: &ProcessGroup) -> Error {
    let error = group.barrier().unwrap_err();
    assert!(matches!(error, Error::Poisoned { .. }), "{error}");
    error
}

/// Communicators end on threads of their own.
fn all_ended() {
    let start = Instant::now();
    while alive() > 0 {
        assert!(start.elapsed() < LONG, "{} communicators are left", alive());
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn an_error_in_a_kernel_reaches_every_rank() {
    let _one = ONE.lock();
    for op in [0, 4] {
        inject(1, op, Fault::AsyncError);
        spawn(3, LONG, |group, _| {
            let error = steps(&group).unwrap_err();
            if group.rank() == 1 {
                let Error::Backend {
                    rank: 1,
                    sequence,
                    backend: "NCCL",
                    message,
                    ..
                } = &error
                else {
                    panic!("{error}")
                };
                assert_eq!(*sequence, op);
                assert!(
                    message.contains("returned 2 (double: system error)"),
                    "{error}"
                );
            } else {
                let cause = error.root_cause().to_string();
                assert!(cause.contains("rank 1 aborted: rank 1: "), "{error}");
                assert!(cause.contains("double: system error"), "{error}");
            }
            poisoned(&group);
        })
        .unwrap();
    }
    all_ended();
}

#[test]
fn a_refused_launch_reaches_every_rank() {
    let _one = ONE.lock();
    inject(2, 3, Fault::Launch);
    spawn(3, LONG, |group, _| {
        let error = steps(&group).unwrap_err();
        if group.rank() == 2 {
            assert!(
                matches!(error, Error::Backend { sequence: 3, .. }),
                "{error}"
            );
            // The code, and what `ncclGetLastError` has to say.
            assert!(
                error.to_string().contains("ncclAllReduce returned 2"),
                "{error}"
            );
            assert!(error.to_string().contains("told to refuse"), "{error}");
        } else {
            assert!(
                matches!(error.root_cause(), Error::Aborted { rank: 2, .. }),
                "{error}"
            );
        }
        poisoned(&group);
        // No group of calls was left open on this thread.
        let alone = Local::new(1)
            .deadline(Duration::from_secs(20))
            .groups()
            .remove(0);
        let alone = ProcessGroup::new(Arc::new(join(&alone).0));
        let mut buffer = [3.0f32];
        alone.all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
        assert_eq!(buffer, [3.0]);
    })
    .unwrap();
    all_ended();
}

#[test]
fn a_kernel_that_hangs_ends_at_the_deadline() {
    let _one = ONE.lock();
    inject(0, 1, Fault::Hang);
    let start = Instant::now();
    spawn(2, LONG, |group, _| {
        group.set_deadline(SHORT);
        let error = steps(&group).unwrap_err();
        let cause = error.root_cause();
        assert!(
            matches!(cause, Error::Backend { .. } | Error::Aborted { .. }),
            "{error}"
        );
        assert!(cause.to_string().contains("was not done after"), "{error}");
        poisoned(&group);
    })
    .unwrap();
    assert!(start.elapsed() < LONG / 2);
    all_ended();
}

#[test]
fn an_abort_elsewhere_ends_a_kernel_that_hangs() {
    let _one = ONE.lock();
    inject(0, 0, Fault::Hang);
    let start = Instant::now();
    spawn(2, LONG, |group, _| {
        let input = Arc::new(OwnedSegments(vec![vec![1.0f32; 4]]));
        let mut work = group
            .communicator()
            .all_reduce(input, ReduceOp::Sum)
            .unwrap();
        if group.rank() == 1 {
            thread::sleep(SHORT / 10);
            group.abort("enough");
        }
        let error = work.wait().unwrap_err();
        assert!(
            error.to_string().contains("rank 1 aborted: enough"),
            "{error}"
        );
        poisoned(&group);
    })
    .unwrap();
    assert!(start.elapsed() < LONG / 2);
    all_ended();
}

/// The rank itself is held by something that knows no deadline, as a driver is.
#[test]
fn a_reduction_in_flight_is_watched_while_its_rank_is_held() {
    let _one = ONE.lock();
    inject(1, 0, Fault::Hang);
    spawn(2, LONG, |group, memory| {
        group.set_deadline(SHORT);
        let input = Arc::new(OwnedSegments(vec![vec![1.0f32; 4]]));
        let mut work = group
            .communicator()
            .all_reduce(input, ReduceOp::Sum)
            .unwrap();
        // Not page-locked: the double returns once its stream has come to this.
        let buffer = memory.allocate(4).unwrap();
        let mut host = [0u8; 4];
        // SAFETY: both are four bytes, and the stream has passed them when it returns.
        unsafe { memory.download(buffer, host.as_mut_ptr(), 4) }.unwrap();
        // SAFETY: allocated above.
        unsafe { memory.free(buffer) };
        let error = work.wait().unwrap_err();
        assert!(
            error
                .root_cause()
                .to_string()
                .contains("was not done after"),
            "{error}"
        );
        poisoned(&group);
    })
    .unwrap();
    all_ended();
}

/// The upload is of more than page-locked memory holds.
#[test]
fn a_large_upload_behind_a_kernel_that_hangs_ends_at_the_deadline() {
    let _one = ONE.lock();
    inject(0, 0, Fault::Hang);
    spawn(2, LONG, |group, _| {
        group.set_deadline(SHORT);
        let input = Arc::new(OwnedSegments(vec![vec![1.0f32; 4]]));
        let communicator = group.communicator();
        let _first = communicator.all_reduce(input, ReduceOp::Sum).unwrap();
        let input = Arc::new(OwnedSegments(vec![vec![1.0f32; 3_000_000]]));
        let error = communicator.all_reduce(input, ReduceOp::Sum);
        let error = error.and_then(|mut work| work.wait()).unwrap_err();
        assert!(
            error
                .root_cause()
                .to_string()
                .contains("was not done after"),
            "{error}"
        );
        poisoned(&group);
    })
    .unwrap();
    all_ended();
}

#[test]
fn a_hang_that_nobody_waits_for_poisons_the_group() {
    let _one = ONE.lock();
    inject(1, 0, Fault::Hang);
    spawn(2, LONG, |group, _| {
        group.set_deadline(SHORT);
        let input = Arc::new(OwnedSegments(vec![vec![1.0f32; 4]]));
        drop(
            group
                .communicator()
                .all_reduce(input, ReduceOp::Sum)
                .unwrap(),
        );
        let start = Instant::now();
        while group.communicator().failure().is_none() {
            assert!(start.elapsed() < LONG, "somebody should notice");
            thread::sleep(Duration::from_millis(1));
        }
        assert!(poisoned(&group).to_string().contains("was not done after"));
    })
    .unwrap();
    all_ended();
}

#[test]
fn a_rank_that_does_not_come_is_named() {
    let _one = ONE.lock();
    spawn(3, LONG, |group, _| {
        group.barrier().unwrap();
        if group.rank() == 1 {
            thread::sleep(2 * SHORT);
            return;
        }
        group.set_deadline(SHORT);
        let error = group.all_reduce(&mut [1.0f32], ReduceOp::Sum).unwrap_err();
        let (Error::Deadline {
            missing, sequence, ..
        }
        | Error::Interrupted {
            missing, sequence, ..
        }) = &error
        else {
            panic!("{error}")
        };
        assert!(missing.contains(&1), "{error}");
        assert_eq!(*sequence, 1);
        poisoned(&group);
    })
    .unwrap();
    all_ended();
}

#[test]
fn a_rank_that_leaves_is_named() {
    let _one = ONE.lock();
    spawn(2, LONG, |group, _| {
        group.all_reduce(&mut [1.0f32], ReduceOp::Sum).unwrap();
        if group.rank() == 0 {
            let error = group.all_reduce(&mut [1.0f32], ReduceOp::Sum).unwrap_err();
            assert!(
                matches!(&error, Error::RankLeft { missing, sequence: 1, .. } if *missing == [1]),
                "{error}"
            );
        }
    })
    .unwrap();
    all_ended();
}

#[test]
fn no_rank_starts_if_one_cannot() {
    let _one = ONE.lock();
    // Its library is missing.
    Local::new(3)
        .deadline(LONG)
        .spawn(|control| {
            let rank = control.rank();
            let missing = NcclError::LibraryMissing {
                tried: "libnccl.so.2: not found".to_owned(),
                search: String::new(),
            };
            let nccl = if rank == 1 { Err(missing) } else { Ok(load()) };
            let memory: Arc<dyn Memory> = Arc::new(HostMemory::new(rank));
            let error = NcclCommunicator::new(&control, nccl, Ok(memory)).unwrap_err();
            if rank == 1 {
                assert!(matches!(error, NcclError::LibraryMissing { .. }), "{error}");
            } else {
                let NcclError::OtherRanks { failed, .. } = &error else {
                    panic!("{error}")
                };
                assert_eq!(failed.len(), 1);
                assert_eq!(failed[0].0, 1);
                assert!(failed[0].1.contains("libnccl.so.2: not found"), "{error}");
            }
            // The control group is as it was.
            control.barrier().unwrap();
        })
        .unwrap();
    // NCCL cannot start, or does not come to an end with it.
    for (fault, text) in [
        (Fault::Init, "returned 2"),
        (Fault::InitHang, "was not done after"),
    ] {
        inject(1, 0, fault);
        Local::new(2)
            .deadline(SHORT)
            .spawn(|control| {
                let memory: Arc<dyn Memory> = Arc::new(HostMemory::new(control.rank()));
                let error = NcclCommunicator::new(&control, Ok(load()), Ok(memory)).unwrap_err();
                assert!(error.to_string().contains(text), "{error}");
            })
            .unwrap();
    }
    all_ended();
}

#[test]
fn closing_ends_nccl_and_tells_how_it_went() {
    let _one = ONE.lock();
    Local::new(2)
        .deadline(LONG)
        .spawn(|control| {
            let (communicator, _memory) = join(&control);
            communicator.barrier().unwrap();
            communicator.close().unwrap();
        })
        .unwrap();
    assert_eq!(alive(), 0, "closed means ended");
}

/// Ranks 0 and 1 of three have a sub-group, whose NCCL fails on one of them.
#[test]
fn a_failure_in_a_sub_group_reaches_every_rank() {
    let _one = ONE.lock();
    let named = "(in the sub-group of color 7, ranks [0, 1])";
    for (fault, cause) in [
        (Fault::AsyncError, "double: system error"),
        (Fault::Hang, "was not done after"),
    ] {
        spawn(3, LONG, |group, _| {
            let rank = group.rank();
            group.barrier().unwrap();
            if rank == 0 {
                inject(1, 1, fault);
            }
            group.barrier().unwrap();
            let sub_group = group.split((rank < 2).then_some(7), rank).unwrap();
            let Some(sub_group) = sub_group else {
                let error = group.barrier().unwrap_err();
                let text = error.to_string();
                assert!(text.contains(cause) && text.contains(named), "{text}");
                poisoned(&group);
                return;
            };
            sub_group.set_deadline(SHORT);
            let error = steps(&sub_group).unwrap_err();
            let text = error.to_string();
            assert!(text.contains(cause) && text.contains(named), "{text}");
            if fault == Fault::AsyncError {
                // Numbered as the sub-group's second.
                assert!(text.contains("#1"), "{text}");
            }
            let text = poisoned(&group).to_string();
            assert!(text.contains(cause) && text.contains(named), "{text}");
        })
        .unwrap();
    }
    all_ended();
}

#[test]
fn no_rank_has_a_sub_group_if_one_cannot_start() {
    let _one = ONE.lock();
    for (fault, cause) in [
        (Fault::Init, "ncclCommInitRankConfig returned 2"),
        (Fault::InitHang, "was not done after"),
    ] {
        spawn(3, LONG, |group, _| {
            let rank = group.rank();
            group.barrier().unwrap();
            if rank == 0 {
                inject(1, 0, fault);
            }
            group.barrier().unwrap();
            group.set_deadline(SHORT);
            let error = match group.split((rank < 2).then_some(7), rank) {
                Ok(sub_group) => {
                    assert_eq!(rank, 2);
                    assert!(sub_group.is_none());
                    group.set_deadline(LONG);
                    group.barrier().unwrap_err()
                }
                Err(error) => error,
            };
            let text = error.to_string();
            assert!(text.contains(cause), "{text}");
            assert!(
                text.contains("the sub-group of color 7, ranks [0, 1]"),
                "{text}"
            );
            poisoned(&group);
        })
        .unwrap();
    }
    all_ended();
}

#[test]
fn closing_ends_sub_groups_first() {
    let _one = ONE.lock();
    Local::new(2)
        .deadline(LONG)
        .spawn(|control| {
            let (communicator, _memory) = join(&control);
            let all = communicator.split(Some(0), 0).unwrap().unwrap();
            let all = ProcessGroup::new(all);
            let nested = all.split(Some(0), 0).unwrap().unwrap();
            let mut buffer = [1.0f32];
            nested.all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
            assert_eq!(buffer, [2.0]);
            drop(communicator.split(Some(control.rank()), 0).unwrap());
            communicator.close().unwrap();
            // A handle that is left does not hang.
            let error = nested.all_reduce(&mut buffer, ReduceOp::Sum).unwrap_err();
            assert!(error.to_string().contains("was aborted"), "{error}");
        })
        .unwrap();
    all_ended();
}
