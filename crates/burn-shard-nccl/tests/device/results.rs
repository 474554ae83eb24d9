//! What collectives leave in buffers on the device and on the host.

use std::{sync::Arc, time::Instant};

use burn_shard_comm::{DType, OwnedSegments, ReduceOp, SegmentLayout};

use crate::{
    buffers::{Buffers, finish_stream},
    common::{LONG, spawn},
};

#[test]
fn collectives_work_on_the_memory_itself() {
    spawn(2, LONG, |group, memory| {
        let (rank, communicator) = (group.rank(), group.communicator());
        let one = 1.0 + f32::from(u8::try_from(rank).unwrap());

        // Only the result is new memory.
        let input = Arc::new(Buffers::full("input", &memory, &[&[one; 3]]));
        let mut output = Buffers::full("output", &memory, &[&[0.0; 6]]);
        let before = memory.allocated();
        let work = communicator.all_gather(Arc::clone(&input) as _, &[6]);
        assert_eq!(memory.allocated(), before + 1);
        work.unwrap().finish(&mut output).unwrap();
        assert_eq!(output.read()[0], [1.0, 1.0, 1.0, 2.0, 2.0, 2.0]);
        assert_eq!(input.log(), ["before input"]);
        assert_eq!(output.log(), ["before output", "after output"]);

        // Lengths that do not: cut.
        let mut output = Buffers::full("output", &memory, &[&[0.0; 5]]);
        let work = communicator.all_gather(Arc::clone(&input) as _, &[5]);
        work.unwrap().finish(&mut output).unwrap();
        assert_eq!(output.read()[0], [1.0, 1.0, 1.0, 2.0, 2.0]);

        // A reduction, whose input keeps its values, and of which only the result is new memory.
        let input = Arc::new(Buffers::full("input", &memory, &[&[one, 2.0, 3.0, 4.0]]));
        let before = memory.allocated();
        let scatter = communicator
            .reduce_scatter(Arc::clone(&input) as _, ReduceOp::Sum)
            .unwrap();
        assert_eq!(memory.allocated(), before + 1);
        let reduce = communicator
            .all_reduce(Arc::clone(&input) as _, ReduceOp::Max)
            .unwrap();
        let mut own = Buffers::full("own", &memory, &[&[9.0; 2]]);
        let mut all = Buffers::full("all", &memory, &[&[9.0; 4]]);
        reduce.finish(&mut all).unwrap();
        scatter.finish(&mut own).unwrap();
        assert_eq!(own.log(), ["before own", "after own"]);
        assert_eq!(
            own.read()[0],
            if rank == 0 { [3.0, 4.0] } else { [6.0, 8.0] }
        );
        assert_eq!(all.read()[0], [2.0, 2.0, 3.0, 4.0]);
        assert_eq!(input.read()[0], [one, 2.0, 3.0, 4.0]);

        // Absent on rank 0, and an odd length.
        let values = [3.0, 4.0, 5.0f32];
        let present = (rank == 1).then_some(&values[..]);
        let input = Arc::new(Buffers::new("input", &memory, &[present], &[3]));
        let scatter = communicator.reduce_scatter(input, ReduceOp::Mean).unwrap();
        let mut own = Buffers::full("own", &memory, &[&[9.0; 2]]);
        scatter.finish(&mut own).unwrap();
        assert_eq!(
            own.read()[0],
            if rank == 0 { [1.5, 2.0] } else { [2.5, 0.0] }
        );

        let mut buffer = Buffers::full("buffer", &memory, &[&[one; 3], &[one; 1]]);
        let layout = SegmentLayout {
            dtype: DType::F32,
            numels: vec![3, 1],
        };
        if rank == 1 {
            let work = communicator.broadcast(Some(Arc::new(buffer)), layout, 1);
            work.unwrap().wait().unwrap();
        } else {
            let work = communicator.broadcast(None, layout, 1).unwrap();
            work.finish(&mut buffer).unwrap();
            assert_eq!(buffer.read(), [vec![2.0; 3], vec![2.0]]);
        }
        group.barrier().unwrap();
    })
    .unwrap();
}

#[test]
fn the_host_and_the_device_may_be_mixed() {
    spawn(2, LONG, |group, memory| {
        let (rank, communicator) = (group.rank(), group.communicator());
        // From the device to the host.
        let input = Arc::new(Buffers::full("input", &memory, &[&[1.0, 2.0, 3.0]]));
        let work = communicator
            .all_reduce(Arc::clone(&input) as _, ReduceOp::Sum)
            .unwrap();
        let later = communicator
            .all_reduce(Arc::clone(&input) as _, ReduceOp::Max)
            .unwrap();
        let mut output = OwnedSegments(vec![vec![0.0f32; 3]]);
        work.finish(&mut output).unwrap();
        assert_eq!(output.0[0], [2.0, 4.0, 6.0]);
        drop(later);
        let mut output = OwnedSegments(vec![vec![0.0f32; 6]]);
        let work = communicator.all_gather(input, &[6]).unwrap();
        work.finish(&mut output).unwrap();
        assert_eq!(output.0[0], [1.0, 2.0, 3.0, 1.0, 2.0, 3.0]);
        // From the host to the device.
        let input = Arc::new(OwnedSegments(vec![vec![1.0f32, 5.0]]));
        let mut output = Buffers::full("output", &memory, &[&[0.0; 4]]);
        let work = communicator.all_gather(input, &[4]).unwrap();
        work.finish(&mut output).unwrap();
        assert_eq!(output.read()[0], [1.0, 5.0, 1.0, 5.0]);
        let input = Arc::new(OwnedSegments(vec![vec![1.0f32, 5.0]]));
        let work = communicator.reduce_scatter(input, ReduceOp::Sum).unwrap();
        let mut output = Buffers::full("output", &memory, &[&[0.0]]);
        work.finish(&mut output).unwrap();
        assert_eq!(output.read()[0], if rank == 0 { [2.0] } else { [10.0] });
    })
    .unwrap();
}

/// More than there is page-locked memory for, several times.
#[test]
fn large_segments_on_the_host_go_in_pieces() {
    const NUMEL: usize = 2_100_001;
    spawn(2, LONG, |group, memory| {
        let rank = group.rank();
        let value = |index: usize| (index % 8191 + rank) as f32;
        let input: Vec<f32> = (0..NUMEL).map(value).collect();
        let pinned = memory.pinned();
        let mut sum = input.clone();
        group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
        let sums = |index: usize| (2 * (index % 8191) + 1) as f32;
        assert!((0..NUMEL).all(|index| sum[index] == sums(index)));
        // As 32-bit integers, in pieces of half as many bytes.
        let mut small: Vec<i16> = (0..999).cycle().take(NUMEL).collect();
        group.all_reduce(&mut small, ReduceOp::Sum).unwrap();
        assert!(
            (0..NUMEL).all(|index| usize::from(small[index].unsigned_abs()) == 2 * (index % 999))
        );
        group.broadcast(&mut sum, 1).unwrap();
        assert!((0..NUMEL).all(|index| sum[index] == sums(index)));
        assert_eq!(memory.pinned(), pinned, "allocated once");
    })
    .unwrap();
}

#[test]
fn nothing_is_left_allocated() {
    spawn(2, LONG, |group, memory| {
        let communicator = group.communicator();
        for _ in 0..5 {
            let input = Arc::new(Buffers::full("input", &memory, &[&[1.0; 3]]));
            let mut output = Buffers::full("output", &memory, &[&[0.0; 5]]);
            let work = communicator.all_gather(Arc::clone(&input) as _, &[5]);
            work.unwrap().finish(&mut output).unwrap();
            let mut own = Buffers::full("own", &memory, &[&[0.0; 2]]);
            communicator
                .reduce_scatter(Arc::clone(&input) as _, ReduceOp::Sum)
                .unwrap()
                .finish(&mut own)
                .unwrap();
            drop(communicator.all_reduce(input, ReduceOp::Sum).unwrap());
            group.all_reduce(&mut [1.0f32; 4], ReduceOp::Sum).unwrap();
        }
        group.barrier().unwrap();
        let start = Instant::now();
        while memory.live() > 0 {
            assert!(start.elapsed() < LONG, "{} buffers are left", memory.live());
            finish_stream(&memory);
        }
    })
    .unwrap();
}
