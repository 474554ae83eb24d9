//! What every rank ends with, and what is counted.

use std::{sync::Arc, time::Duration};

use super::{
    Launcher, OPS, check, collectives, garbage,
    probe::{ForEach, Probe, for_each_dtype, reduced, values},
    shard,
};
use crate::{
    Collective, Error, MaybeSegment, OwnedSegments, ProcessGroup, Recording, ReduceOp,
    SegmentLayout, Segments, SegmentsMut, SlicesMut, SparseSegments, shard_numel,
};

/// None, one, fewer than ranks, primes, blocks and a bit.
const NUMELS: [usize; 9] = [0, 1, 2, 3, 4, 5, 17, 1009, 4099];
/// Large enough to be split, and a prime.
const LARGE: usize = 1_000_003;

struct Collectives<'a> {
    group: &'a ProcessGroup,
    numels: &'a [usize],
}

impl ForEach for Collectives<'_> {
    fn run<T: Probe>(&self) {
        collectives::<T>(self.group, self.numels);
    }
}

/// Every collective, element type, operation and odd length, on 1 to 4 ranks.
pub fn collectives_match_a_naive_reference(launcher: &impl Launcher) {
    for world_size in 1..=4 {
        launcher.run(world_size, |group| {
            for_each_dtype(&Collectives {
                group: &group,
                numels: &NUMELS,
            });
        });
    }
}

/// Every collective, element type and operation, on buffers that a backend splits over threads.
pub fn large_buffers_match_a_naive_reference(launcher: &impl Launcher) {
    launcher.run(2, |group| collectives::<f32>(&group, &[LARGE]));
    launcher.run(3, |group| {
        for_each_dtype(&Collectives {
            group: &group,
            numels: &[LARGE],
        });
    });
    launcher.run(4, |group| collectives::<half::bf16>(&group, &[LARGE]));
}

/// Ranks that are late in many ways get the same bits.
pub fn results_do_not_depend_on_timing(launcher: &impl Launcher) {
    for seed in 0..3 {
        launcher.run(4, |group| {
            let recording = Recording::new(Arc::clone(group.communicator()))
                .with_delays(seed, Duration::from_millis(2));
            let group = ProcessGroup::new(Arc::new(recording));
            collectives::<f32>(&group, &[5, 1009]);
            collectives::<half::f16>(&group, &[1009, 300_007]);
        });
    }
}

/// Several buffers in one call, some of them empty, give what one call each gives.
pub fn lists_may_mix_lengths(launcher: &impl Launcher) {
    const LISTS: [&[usize]; 6] = [
        &[],
        &[0],
        &[0, 0, 3, 0],
        &[17, 0, 1, 100_003, 2, 0],
        &[65_536, 65_536, 1, 65_535],
        &[1; 300],
    ];
    for world_size in 1..=4 {
        launcher.run(world_size, |group| {
            for numels in LISTS {
                list::<f32>(&group, numels);
                list::<half::bf16>(&group, numels);
                list::<u8>(&group, numels);
            }
        });
    }
}

fn list<T: Probe>(group: &ProcessGroup, numels: &[usize]) {
    let (rank, world_size) = (group.rank(), group.world_size());
    let communicator = group.communicator();
    let full = |rank: usize| -> Vec<Vec<T>> {
        numels
            .iter()
            .enumerate()
            .map(|(i, &numel)| values(i as u64, rank, numel))
            .collect()
    };
    let inputs: Vec<Vec<Vec<T>>> = (0..world_size).map(full).collect();
    let expected: Vec<Vec<T>> = (0..numels.len())
        .map(|i| {
            let column: Vec<Vec<T>> = inputs.iter().map(|input| input[i].clone()).collect();
            reduced(ReduceOp::Sum, &column).expect("every type should have a sum")
        })
        .collect();
    let garbage = || -> Vec<Vec<T>> { numels.iter().map(|&numel| garbage(numel)).collect() };
    let shards = |full: &[Vec<T>]| -> Vec<Vec<T>> {
        full.iter()
            .map(|full| shard(full, rank, world_size))
            .collect()
    };
    let compare = |what: &str, found: &[Vec<T>], expected: &[Vec<T>]| {
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(expected) {
            check(what, group, found, expected);
        }
    };

    let mut output = OwnedSegments(garbage());
    communicator
        .all_gather(Arc::new(OwnedSegments(shards(&inputs[0]))), numels)
        .unwrap()
        .finish(&mut output)
        .unwrap();
    compare("all_gather", &output.0, &inputs[0]);

    // The root takes its output too.
    let root = world_size - 1;
    let mut storage = garbage();
    let mut output = SlicesMut(storage.iter_mut().map(Vec::as_mut_slice).collect());
    let input: Option<Arc<dyn Segments>> =
        (rank == root).then(|| Arc::new(OwnedSegments(inputs[root].clone())) as _);
    communicator
        .broadcast(input, SegmentLayout::of(&OwnedSegments(garbage())), root)
        .unwrap()
        .finish(&mut output)
        .unwrap();
    compare("broadcast", &storage, &inputs[root]);

    let input = || Arc::new(OwnedSegments(inputs[rank].clone()));
    let scatter = communicator.reduce_scatter(input(), ReduceOp::Sum).unwrap();
    let reduce = communicator.all_reduce(input(), ReduceOp::Sum).unwrap();
    let mut output = OwnedSegments(garbage());
    reduce.finish(&mut output).unwrap();
    compare("all_reduce", &output.0, &expected);
    let mut output = OwnedSegments(shards(&garbage()));
    scatter.finish(&mut output).unwrap();
    compare("reduce_scatter", &output.0, &shards(&expected));
}

/// An absent contribution is `+0.0`, on whichever rank, for every operation and element type.
pub fn absent_contributions_count_as_zeros(launcher: &impl Launcher) {
    struct Absent<'a>(&'a ProcessGroup);
    impl ForEach for Absent<'_> {
        fn run<T: Probe>(&self) {
            absent::<T>(self.0);
        }
    }
    for world_size in 1..=4 {
        launcher.run(world_size, |group| {
            for_each_dtype(&Absent(&group));

            let one_is_absent = |rank| match rank {
                0 => MaybeSegment::Present(vec![-0.0f32]),
                _ => MaybeSegment::Absent { numel: 1 },
            };
            let input = Arc::new(SparseSegments(vec![one_is_absent(group.rank())]));
            let work = group
                .communicator()
                .all_reduce(input, ReduceOp::Sum)
                .unwrap();
            let mut output = OwnedSegments(vec![vec![7.0f32]]);
            work.finish(&mut output).unwrap();
            let expected = if world_size == 1 { -0.0f32 } else { 0.0 };
            assert_eq!(output.0[0][0].to_bits(), expected.to_bits());
        });
    }
}

fn absent<T: Probe>(group: &ProcessGroup) {
    const NUMEL: usize = 2053;
    let (rank, world_size) = (group.rank(), group.world_size());
    // Segment m is absent on the ranks whose bit is set in m; in the last one on all.
    let masks = 1usize << world_size;
    let is_absent = |segment: usize, rank: usize| segment >> rank & 1 == 1;
    let segments = (0..masks).map(|segment| match is_absent(segment, rank) {
        true => MaybeSegment::Absent { numel: NUMEL },
        false => MaybeSegment::Present(values::<T>(segment as u64, rank, NUMEL)),
    });
    let input = Arc::new(SparseSegments(segments.collect()));
    for op in OPS {
        if op == ReduceOp::Mean && !T::DTYPE.is_float() {
            continue;
        }
        let reduce = group.communicator().all_reduce(input.clone(), op).unwrap();
        let scatter = group
            .communicator()
            .reduce_scatter(input.clone(), op)
            .unwrap();
        let mut full = OwnedSegments(vec![garbage::<T>(NUMEL); masks]);
        let mut own = OwnedSegments(vec![garbage::<T>(shard_numel(NUMEL, world_size)); masks]);
        scatter.finish(&mut own).unwrap();
        reduce.finish(&mut full).unwrap();
        for segment in 0..masks {
            let inputs: Vec<Vec<T>> = (0..world_size)
                .map(|rank| match is_absent(segment, rank) {
                    true => vec![T::zeroed(); NUMEL],
                    false => values(segment as u64, rank, NUMEL),
                })
                .collect();
            let expected = reduced(op, &inputs).expect("refused operations are left out");
            check(
                &format!("all_reduce {op}, absent"),
                group,
                &full.0[segment],
                &expected,
            );
            let expected = shard(&expected, rank, world_size);
            check(
                &format!("reduce_scatter {op}, absent"),
                group,
                &own.0[segment],
                &expected,
            );
        }
    }
}

/// A NaN on any rank shows in every reduction, and does not spread to its neighbours.
pub fn a_nan_on_any_rank_shows(launcher: &impl Launcher) {
    launcher.run(3, |group| {
        for op in OPS {
            for guilty in 0..3 {
                let mut single = [1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0];
                let mut half = single.map(half::bf16::from_f32);
                let mut ieee = single.map(half::f16::from_f32);
                if group.rank() == guilty {
                    single[4] = f32::NAN;
                    // The payload is all in the bits that rounding could carry out of.
                    half[4] = half::bf16::from_bits(0x7fff);
                    ieee[4] = half::f16::NAN;
                }
                group.all_reduce(&mut single, op).unwrap();
                group.all_reduce(&mut half, op).unwrap();
                group.all_reduce(&mut ieee, op).unwrap();
                for index in 0..9 {
                    assert_eq!(single[index].is_nan(), index == 4, "f32 {op} rank {guilty}");
                    assert_eq!(half[index].is_nan(), index == 4, "bf16 {op} rank {guilty}");
                    assert_eq!(ieee[index].is_nan(), index == 4, "f16 {op} rank {guilty}");
                }
            }
        }
    });
}

/// Unfinished collectives are finished in another order on each rank, dropped, and overtaken.
pub fn unfinished_collectives_may_be_finished_in_any_order(launcher: &impl Launcher) {
    launcher.run(3, |group| {
        let (rank, communicator) = (group.rank(), group.communicator());
        let start = |value: f32| {
            let input = Arc::new(OwnedSegments(vec![vec![value; 5]]));
            communicator.all_reduce(input, ReduceOp::Sum).unwrap()
        };
        let mut pending: Vec<_> = (0..6u8)
            .map(|i| (f32::from(i), start(f32::from(i))))
            .collect();
        // Nobody but rank 0 ever finishes this one.
        let dropped = start(100.0);
        if rank == 0 {
            let mut output = OwnedSegments(vec![vec![0.0f32; 5]]);
            dropped.finish(&mut output).unwrap();
            assert_eq!(output.0[0], [300.0; 5]);
        } else {
            drop(dropped);
        }
        let order = pending.len();
        pending.rotate_left(rank * 2 % order);
        if rank == 1 {
            pending.reverse();
        }
        // A rank that is in another collective does not hold up the unfinished ones.
        if rank == 2 {
            group.barrier().unwrap();
        }
        for (value, mut work) in pending {
            work.wait().unwrap();
            work.wait().unwrap();
            assert!(work.is_ready());
            let mut output = OwnedSegments(vec![vec![0.0f32; 5]]);
            work.finish(&mut output).unwrap();
            assert_eq!(output.0[0], [value * 3.0; 5]);
        }
        if rank != 2 {
            group.barrier().unwrap();
        }
    });
}

/// Calls and bytes are those of the table at [`Traffic`](crate::Traffic).
pub fn traffic_follows_from_the_lengths(launcher: &impl Launcher) {
    for world_size in 1..=4usize {
        launcher.run(world_size, |group| {
            let rank = group.rank();
            for numel in [0usize, 1, 2, 3, 5, 8, 1009] {
                let shard = numel.div_ceil(world_size);
                let own = numel.min((rank + 1) * shard) - numel.min(rank * shard);
                let count = |collective, run: &dyn Fn() -> Result<(), Error>| {
                    let before = group.traffic();
                    run().unwrap();
                    let traffic = group.traffic() - before;
                    let count = traffic.get(collective);
                    assert_eq!((traffic.total_calls(), count.calls), (1, 1));
                    assert_eq!(traffic.total_bytes(), count.bytes);
                    count.bytes
                };
                let bytes = count(Collective::AllGather, &|| {
                    group.all_gather(&vec![1.0f32; shard], &mut vec![0.0; numel])
                });
                assert_eq!(bytes, 4 * (numel - own) as u64);
                let bytes = count(Collective::ReduceScatter, &|| {
                    let input = vec![half::f16::ONE; numel];
                    group.reduce_scatter(&input, &mut input[..shard].to_vec(), ReduceOp::Sum)
                });
                assert_eq!(bytes, 2 * ((world_size - 1) * own) as u64);
                let bytes = count(Collective::AllReduce, &|| {
                    group.all_reduce(&mut vec![1i64; numel], ReduceOp::Sum)
                });
                assert_eq!(bytes, 8 * ((world_size - 1) * own + numel - own) as u64);
                let root = world_size / 2;
                let bytes = count(Collective::Broadcast, &|| {
                    group.broadcast(&mut vec![1u8; numel], root)
                });
                assert_eq!(bytes, if rank == root { 0 } else { numel as u64 });
                assert_eq!(count(Collective::Barrier, &|| group.barrier()), 0);
            }
        });
    }
}

/// Bytes of a length that only their own rank knows.
pub fn bytes_of_any_length_travel(launcher: &impl Launcher) {
    for world_size in 1..=4 {
        launcher.run(world_size, |group| {
            let of_rank = |rank: usize| values::<u8>(3, rank, [5, 0, 1009, 1][rank]);
            let mine = of_rank(group.rank());
            for root in 0..world_size {
                assert_eq!(
                    group.broadcast_bytes(mine.clone(), root).unwrap(),
                    of_rank(root)
                );
            }
            let all = group.all_gather_bytes(&mine).unwrap();
            assert_eq!(all, (0..world_size).map(of_rank).collect::<Vec<_>>());
            assert_eq!(
                group.all_gather_bytes(&[]).unwrap(),
                vec![Vec::<u8>::new(); world_size]
            );
        });
    }
}

/// Deadlines can be set per rank, and outputs may borrow.
pub fn a_deadline_can_be_set(launcher: &impl Launcher) {
    launcher.run(2, |group| {
        group.set_deadline(Duration::from_secs(7));
        assert_eq!(group.deadline(), Duration::from_secs(7));
        let mut storage = [0.0f32; 6];
        let (first, second) = storage.split_at_mut(4);
        let mut output = SlicesMut(vec![second, first]);
        let output: &mut dyn SegmentsMut = &mut output;
        let input = Arc::new(OwnedSegments(vec![vec![1.0f32], vec![2.0; 2]]));
        let work = group.communicator().all_gather(input, &[2, 4]).unwrap();
        work.finish(output).unwrap();
        assert_eq!(storage, [2.0, 2.0, 2.0, 2.0, 1.0, 1.0]);
    });
}
