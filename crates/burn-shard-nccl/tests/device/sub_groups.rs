//! Buffers on the device in groups that share one stream.

use std::sync::Arc;

use burn_shard_comm::{Error, ProcessGroup, ReduceOp};
use burn_shard_nccl_double::HostMemory;

use crate::{
    buffers::Buffers,
    common::{LONG, spawn},
};

/// A rank starts collectives in its row, in its column and in the whole group, and finishes them in another order.
#[test]
fn groups_that_overlap_may_be_in_flight_together() {
    spawn(4, LONG, |group, memory| {
        let rank = group.rank();
        let row = group.split(Some(rank / 2), rank).unwrap().unwrap();
        let column = group.split(Some(rank % 2), rank).unwrap().unwrap();
        assert_eq!(
            row.communicator().memory_device(),
            group.communicator().memory_device()
        );
        for round in 0..20u8 {
            let one = f32::from(round) + 10f32.powi(i32::try_from(rank).unwrap());
            let input = Arc::new(Buffers::full("input", &memory, &[&[one; 3]]));
            let start = |group: &ProcessGroup| {
                let communicator = group.communicator();
                communicator
                    .all_reduce(Arc::clone(&input) as _, ReduceOp::Sum)
                    .unwrap()
            };
            let works = [start(&row), start(&column), start(&group)];
            let sums = [[11.0, 1100.0][rank / 2], [101.0, 1010.0][rank % 2], 1111.0];
            let ranks = [2.0, 2.0, 4.0];
            for (index, work) in works.into_iter().enumerate().rev() {
                let mut output = Buffers::full("output", &memory, &[&[0.0; 3]]);
                work.finish(&mut output).unwrap();
                assert_eq!(output.log(), ["before output", "after output"]);
                assert_eq!(
                    output.read()[0],
                    [sums[index] + ranks[index] * f32::from(round); 3]
                );
            }
        }
        group.barrier().unwrap();
    })
    .unwrap();
}

#[test]
fn refusals_name_the_sub_group() {
    spawn(4, LONG, |group, memory| {
        let rank = group.rank();
        let half = group.split(Some(rank % 2), rank).unwrap().unwrap();
        let communicator = half.communicator();
        let named = |error: Error| {
            assert!(error.is_refusal(), "{error}");
            let text = error.to_string();
            let ranks = [rank % 2, rank % 2 + 2];
            let name = format!("(in the sub-group of color {}, ranks {ranks:?})", rank % 2);
            assert!(text.starts_with(&format!("rank {rank}: ")), "{text}");
            assert_eq!(text.matches(&name).count(), 1, "{text}");
        };
        let elsewhere = Arc::new(HostMemory::new(7));
        let input = Arc::new(Buffers::full("input", &elsewhere, &[&[1.0; 3]]));
        named(
            communicator
                .all_reduce(input, ReduceOp::Sum)
                .map(drop)
                .unwrap_err(),
        );
        let absent = Arc::new(Buffers::new("input", &memory, &[None], &[3]));
        named(communicator.all_gather(absent, &[6]).map(drop).unwrap_err());
        let input = Arc::new(Buffers::full("input", &memory, &[&[1.0; 3]]));
        let work = communicator.all_reduce(input, ReduceOp::Sum).unwrap();
        let mut output = Buffers::full("output", &memory, &[&[0.0; 4]]);
        named(work.finish(&mut output).unwrap_err());
        half.barrier().unwrap();
        group.barrier().unwrap();
    })
    .unwrap();
}
