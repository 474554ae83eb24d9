//! Groups that are split: meshes, siblings, nested groups, and how they fail.

use std::{sync::Arc, time::Duration};

use super::{
    Launcher, check, collectives, garbage,
    probe::{Probe, reduced, values},
    shard,
};
use crate::{Collective, Error, OwnedSegments, ProcessGroup, Recording, ReduceOp, shard_numel};

const MESHES: [[usize; 2]; 4] = [[2, 2], [2, 3], [1, 4], [4, 1]];

/// When a rank fails, so that the others have left the split before and wait elsewhere: a failure overtakes what
/// is under way.
const LATE: Duration = Duration::from_millis(500);

/// This rank's row and column of a mesh.
fn mesh(group: &ProcessGroup, columns: usize) -> [ProcessGroup; 2] {
    let (row, column) = (group.rank() / columns, group.rank() % columns);
    let rows = group.split(Some(row), column).unwrap().unwrap();
    let columns = group.split(Some(column), row).unwrap().unwrap();
    assert_eq!((rows.rank(), columns.rank()), (column, row));
    [rows, columns]
}

/// A `reduce_scatter` in rows, then an `all_reduce` in columns, ends with the bits of that order of sums, and
/// an `all_gather` in rows brings the shards together; rows and columns are used in turn, with and without delays.
pub fn meshes_sum_in_rows_and_then_in_columns(launcher: &impl Launcher) {
    for [rows, columns] in MESHES {
        for delays in [None, Some(3), Some(4)] {
            launcher.run(rows * columns, |group| {
                let group = match delays {
                    None => group,
                    Some(seed) => ProcessGroup::new(Arc::new(
                        Recording::new(Arc::clone(group.communicator()))
                            .with_delays(seed, Duration::from_millis(2)),
                    )),
                };
                let mesh = mesh(&group, columns);
                for numel in [1, 5, 1009, 100_003] {
                    summed_over::<f32>(&group, &mesh, numel);
                }
                summed_over::<half::bf16>(&group, &mesh, 1009);
            });
        }
    }
}

fn summed_over<T: Probe>(group: &ProcessGroup, [row, column]: &[ProcessGroup; 2], numel: usize) {
    let sum = |inputs: &[Vec<T>]| reduced(ReduceOp::Sum, inputs).expect("floats should have sums");
    let of_rows: Vec<Vec<T>> = (0..column.world_size())
        .map(|r| {
            let ranks = (0..row.world_size()).map(|c| r * row.world_size() + c);
            sum(&ranks.map(|rank| values(7, rank, numel)).collect::<Vec<_>>())
        })
        .collect();
    let expected = sum(&of_rows);
    let mut own = garbage::<T>(shard_numel(numel, row.world_size()));
    let input = values::<T>(7, group.rank(), numel);
    row.reduce_scatter(&input, &mut own, ReduceOp::Sum).unwrap();
    column.all_reduce(&mut own, ReduceOp::Sum).unwrap();
    let expected_own = shard(&expected, row.rank(), row.world_size());
    check("a shard summed over the mesh", group, &own, &expected_own);
    let mut all = garbage::<T>(numel);
    row.all_gather(&own, &mut all).unwrap();
    check("the sum over the mesh", group, &all, &expected);
}

/// Keys order a sub-group, equal ones by rank; a rank without a color is in none; groups may be nested.
pub fn keys_order_a_sub_group(launcher: &impl Launcher) {
    launcher.run(4, |group| {
        let rank = group.rank();
        let members = |group: &ProcessGroup| {
            let mut all = vec![99; group.world_size()];
            group.all_gather(&[rank as u64], &mut all).unwrap();
            all
        };
        let reversed = group.split(Some(1 << 40), 10 - rank).unwrap().unwrap();
        assert_eq!(members(&reversed), [3, 2, 1, 0]);
        assert_eq!(reversed.rank(), 3 - rank);
        let alike = group.split(Some(0), 5).unwrap().unwrap();
        assert_eq!(members(&alike), [0, 1, 2, 3]);
        let color = (rank != 2).then_some(usize::from(rank == 3));
        let some = group.split(color, 0).unwrap();
        let expected: Option<&[u64]> = [Some(&[0, 1][..]), Some(&[0, 1]), None, Some(&[3])][rank];
        assert_eq!(some.as_ref().map(members).as_deref(), expected);
        // Nested: the reversed group in halves, and each half alone.
        let half = reversed
            .split(Some(reversed.rank() / 2), 0)
            .unwrap()
            .unwrap();
        assert_eq!(members(&half), if rank < 2 { [1, 0] } else { [3, 2] });
        let alone = half.split(Some(half.rank()), 0).unwrap().unwrap();
        assert_eq!(members(&alone), [rank as u64]);
        collectives::<f32>(&half, &[0, 5, 1009]);
        collectives::<f32>(&group, &[5]);
    });
}

/// Sub-groups side by side do different things at the same time, one rank of each late.
pub fn siblings_do_different_things(launcher: &impl Launcher) {
    launcher.run(4, |group| {
        let rank = group.rank();
        let half = group.split(Some(rank % 2), rank).unwrap().unwrap();
        if rank < 2 {
            std::thread::sleep(Duration::from_millis(20));
        }
        if rank % 2 == 0 {
            collectives::<i32>(&half, &[17, 300_007]);
        } else {
            for round in 0..20 {
                let mut buffer = vec![rank as u64; 1000];
                half.broadcast(&mut buffer, round % 2).unwrap();
                assert_eq!(buffer, [2 * (round % 2) as u64 + 1; 1000]);
                half.barrier().unwrap();
            }
        }
        collectives::<f32>(&group, &[1009]);
    });
}

/// What a sub-group moves is counted there, and in the groups it comes from.
pub fn traffic_of_a_sub_group_counts_in_its_parent(launcher: &impl Launcher) {
    launcher.run(4, |group| {
        let [row, column] = mesh(&group, 2);
        let splits = group.traffic();
        assert_eq!(splits.get(Collective::AllGather).calls, 2);
        assert_eq!(row.traffic().total_calls(), 0);
        row.all_reduce(&mut [1.0f32; 6], ReduceOp::Sum).unwrap();
        column.broadcast(&mut [1.0f64; 3], 0).unwrap();
        let bytes = |of: &ProcessGroup| of.traffic().total_bytes();
        assert_eq!(bytes(&row), 4 * (3 + 3));
        assert_eq!(bytes(&column), if column.rank() == 0 { 0 } else { 8 * 3 });
        let parent = group.traffic() - splits;
        assert_eq!(parent.total_calls(), 2);
        assert_eq!(parent.total_bytes(), bytes(&row) + bytes(&column));
    });
}

/// Ranks of a sub-group that disagree are told so, with its color and ranks; all other groups are poisoned.
pub fn a_mismatch_in_a_sub_group_poisons_all(launcher: &impl Launcher) {
    launcher.run(4, |group| {
        let rank = group.rank();
        let half = group.split(Some(rank % 2), rank).unwrap().unwrap();
        if rank % 2 == 0 {
            let error = group.barrier().unwrap_err();
            let text = error.to_string();
            assert!(text.contains("color 1, ranks [1, 3]"), "{text}");
        } else {
            std::thread::sleep(LATE);
            let mut buffer = vec![1.0f32; 5 + rank];
            let error = half.all_reduce(&mut buffer, ReduceOp::Sum).unwrap_err();
            assert!(
                matches!(error.root_cause(), Error::Mismatch { .. }),
                "{error}"
            );
            let text = error.to_string();
            for expected in [
                format!("rank {rank}: ranks disagree on collective #0"),
                "rank 1: all_reduce f32 sum [6]; rank 3: all_reduce f32 sum [8]".to_owned(),
                "color 1, ranks [1, 3]".to_owned(),
            ] {
                assert!(text.contains(&expected), "{text}");
            }
            let error = group.barrier().unwrap_err();
            assert!(matches!(error, Error::Poisoned { .. }), "{error}");
        }
        let error = half.barrier().unwrap_err();
        let poisoned = error.to_string().contains("poisoned");
        assert!(poisoned, "{error}");
    });
}

/// A rank that does not come, or ends the group: all ranks of all groups hear which it was.
pub fn a_sub_group_fails_with_its_parent(launcher: &impl Launcher) {
    // The sub-group's deadline.
    launcher.run(4, |group| {
        let rank = group.rank();
        let half = group.split(Some(rank / 2), rank).unwrap().unwrap();
        assert_eq!(half.deadline(), group.deadline());
        half.set_deadline(Duration::from_secs(2));
        if rank == 1 {
            // Comes to nothing until all is over.
            while group.communicator().failure().is_none() {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        let error = match rank {
            0 => half.barrier(),
            _ => group.barrier(),
        };
        let error = error.unwrap_err();
        let Error::Deadline {
            rank: 0, missing, ..
        } = error.root_cause()
        else {
            panic!("{error}")
        };
        assert_eq!(*missing, [1]);
        assert!(
            error.to_string().contains("color 0, ranks [0, 1]"),
            "{error}"
        );
    });
    // Either way round.
    for in_sub_group in [true, false] {
        launcher.run(4, |group| {
            let rank = group.rank();
            let half = group.split(Some(rank % 2), rank).unwrap().unwrap();
            if rank == 3 {
                std::thread::sleep(LATE);
            }
            let error = match (rank, in_sub_group) {
                (3, true) => {
                    half.abort("out of data");
                    half.barrier()
                }
                (3, false) => {
                    group.abort("out of data");
                    half.barrier()
                }
                (1, _) => half.all_reduce(&mut [1.0f32], ReduceOp::Sum),
                _ => group.barrier(),
            };
            let error = error.unwrap_err();
            let aborted = matches!(error.root_cause(), Error::Aborted { rank: 3, .. });
            assert!(aborted, "{error}");
            assert!(half.communicator().failure().is_some());
            assert!(group.communicator().failure().is_some());
        });
    }
}

/// Refusals of a sub-group name it and leave it usable.
pub fn refusals_of_a_sub_group_name_it(launcher: &impl Launcher) {
    launcher.run(4, |group| {
        let rank = group.rank();
        let half = group.split(Some(rank % 2), rank).unwrap().unwrap();
        let error = half.all_gather(&[1.0f32], &mut [0.0; 5]).unwrap_err();
        assert!(error.is_refusal());
        let text = error.to_string();
        assert!(
            text.starts_with(&format!("rank {rank}: all_gather")),
            "{text}"
        );
        let ranks = [rank % 2, rank % 2 + 2];
        assert!(
            text.contains(&format!("color {}, ranks {ranks:?}", rank % 2)),
            "{text}"
        );
        let input = Arc::new(OwnedSegments(vec![vec![1.0f32; 2]]));
        let work = half
            .communicator()
            .all_reduce(input, ReduceOp::Sum)
            .unwrap();
        let error = work.finish(&mut OwnedSegments(vec![vec![0.0f32; 3]]));
        assert!(matches!(error, Err(Error::SubGroup { .. })));
        collectives::<f32>(&half, &[5]);
    });
}

/// A launcher whose groups are halves of groups twice as large, in reverse order.
struct Halves<'a, L>(&'a L);

impl<L: Launcher> Launcher for Halves<'_, L> {
    fn run<F: Fn(ProcessGroup) + Sync>(&self, world_size: usize, f: F) {
        self.0.run(2 * world_size, |group| {
            let key = group.world_size() - group.rank();
            f(group.split(Some(group.rank() % 2), key).unwrap().unwrap());
        });
    }
}

/// Sub-groups pass what the suite asks of results.
pub fn sub_groups_pass_the_suite(launcher: &impl Launcher) {
    let launcher = Halves(launcher);
    super::lists_may_mix_lengths(&launcher);
    super::a_nan_on_any_rank_shows(&launcher);
    super::unfinished_collectives_may_be_finished_in_any_order(&launcher);
    super::traffic_follows_from_the_lengths(&launcher);
    super::bytes_of_any_length_travel(&launcher);
    super::a_deadline_can_be_set(&launcher);
}
