//! The properties of the conformance suite that fit the ranks there are.

use std::{
    cell::Cell,
    panic::{AssertUnwindSafe, catch_unwind},
    process::ExitCode,
    time::Instant,
};

use burn_shard_comm::{
    ProcessGroup, ReduceOp,
    conformance::{self, Launcher},
};

use super::{Library, join, processes, spawn};

/// Runs a property where it fits this many ranks.
struct Ranks {
    under: Library,
    world_size: usize,
    /// How often a property had ranks to run on.
    runs: Cell<usize>,
}

impl Launcher for Ranks {
    fn run<F: Fn(ProcessGroup) + Sync>(&self, world_size: usize, f: F) {
        if world_size != self.world_size {
            return;
        }
        self.runs.set(self.runs.get() + 1);
        let library = self.under;
        let result = spawn(world_size, |control| f(join(control, library).0));
        if let Err(error) = result {
            panic!("{error}");
        }
    }
}

pub(crate) fn conformance(library: Library, world_size: usize) -> ExitCode {
    let ranks = Ranks {
        under: library,
        world_size,
        runs: Cell::new(0),
    };
    type Property = fn(&Ranks);
    let properties: [(&str, Property); 9] = [
        (
            "collectives",
            conformance::collectives_match_a_naive_reference,
        ),
        (
            "large buffers",
            conformance::large_buffers_match_a_naive_reference,
        ),
        ("lists", conformance::lists_may_mix_lengths),
        ("absent", conformance::absent_contributions_count_as_zeros),
        (
            "any order",
            conformance::unfinished_collectives_may_be_finished_in_any_order,
        ),
        ("refusals", conformance::refusals_leave_the_group_usable),
        ("bytes", conformance::bytes_of_any_length_travel),
        ("traffic", conformance::traffic_follows_from_the_lengths),
        ("sub-groups", sub_groups),
    ];
    let mut failed = 0;
    for (name, property) in properties {
        let start = Instant::now();
        let passed = catch_unwind(AssertUnwindSafe(|| property(&ranks))).is_ok();
        failed += usize::from(!passed);
        let verdict = match (passed, ranks.runs.take()) {
            (false, _) => "FAILED",
            (true, 0) => "needs other numbers of ranks",
            (true, _) => "ok",
        };
        if processes().is_none_or(|group| group.rank() == 0) {
            println!(
                "{name:<16} {world_size} ranks {:>6.1} s  {verdict}",
                start.elapsed().as_secs_f64()
            );
        }
    }
    ExitCode::from(u8::from(failed > 0))
}

/// Collectives of several NCCL communicators in turn, on one stream.
fn sub_groups(ranks: &Ranks) {
    ranks.run(ranks.world_size, |group| {
        let (rank, world_size) = (group.rank(), group.world_size());
        let reversed = group.split(Some(5), world_size - rank).unwrap().unwrap();
        let alone = reversed.split(Some(rank), 0).unwrap().unwrap();
        let expected: Vec<u64> = (0..world_size as u64).rev().collect();
        for _ in 0..20 {
            let mut all = vec![99; world_size];
            reversed.all_gather(&[rank as u64], &mut all).unwrap();
            assert_eq!(all, expected);
            for (group, sum) in [(&group, world_size), (&alone, 1), (&reversed, world_size)] {
                let mut ones = vec![1.0f32; 100_003];
                group.all_reduce(&mut ones, ReduceOp::Sum).unwrap();
                assert!(ones.iter().all(|&one| one == sum as f32));
            }
        }
        group.barrier().unwrap();
    });
}
