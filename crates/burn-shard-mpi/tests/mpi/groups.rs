//! Process groups over the transport: the suite, the bits of ranks that are threads, failures.

use std::{sync::Arc, thread, time::Duration};

use burn_shard_comm::{
    Error, Pairwise, ProcessGroup, ReduceOp,
    conformance::{self, Launcher},
};
use burn_shard_mpi::{MpiTransport, process_group};

use crate::job;

const LONG: Duration = Duration::from_secs(200);

/// Groups of the first ranks of the job. Sizes that the job does not have are not run, on all ranks
/// alike: a job of four has all of the suite's.
struct FirstRanks {
    job_size: usize,
}

impl Launcher for FirstRanks {
    fn run<F: Fn(ProcessGroup) + Sync>(&self, world_size: usize, f: F) {
        if world_size > self.job_size {
            return;
        }
        if let Some(transport) = MpiTransport::first(world_size).unwrap() {
            f(ProcessGroup::new(Arc::new(Pairwise::new(transport, LONG))));
        }
    }
}

type Property = fn(&FirstRanks);

pub(crate) fn conform() {
    let group = process_group().unwrap();
    let launcher = FirstRanks {
        job_size: group.world_size(),
    };
    let properties: [(&str, Property); 25] = [
        ("matches", conformance::collectives_match_a_naive_reference),
        ("large", conformance::large_buffers_match_a_naive_reference),
        ("timing", conformance::results_do_not_depend_on_timing),
        ("lists", conformance::lists_may_mix_lengths),
        ("absent", conformance::absent_contributions_count_as_zeros),
        ("nan", conformance::a_nan_on_any_rank_shows),
        (
            "order",
            conformance::unfinished_collectives_may_be_finished_in_any_order,
        ),
        ("refusals", conformance::refusals_leave_the_group_usable),
        ("mismatches", conformance::mismatches_are_told_to_every_rank),
        ("abort", conformance::an_abort_reaches_every_rank),
        ("failed call", conformance::a_failed_call_reaches_every_rank),
        ("traffic", conformance::traffic_follows_from_the_lengths),
        ("bytes", conformance::bytes_of_any_length_travel),
        ("deadline", conformance::a_deadline_can_be_set),
        (
            "in flight",
            conformance::all_kinds_may_be_in_flight_together,
        ),
        (
            "ended in flight",
            conformance::what_is_in_flight_ends_with_the_group,
        ),
        (
            "descriptions",
            conformance::mismatches_say_what_the_elements_are,
        ),
        (
            "meshes",
            conformance::meshes_sum_in_rows_and_then_in_columns,
        ),
        ("keys", conformance::keys_order_a_sub_group),
        ("siblings", conformance::siblings_do_different_things),
        (
            "traffic of sub-groups",
            conformance::traffic_of_a_sub_group_counts_in_its_parent,
        ),
        (
            "mismatch in a sub-group",
            conformance::a_mismatch_in_a_sub_group_poisons_all,
        ),
        (
            "failure of a sub-group",
            conformance::a_sub_group_fails_with_its_parent,
        ),
        (
            "refusals of a sub-group",
            conformance::refusals_of_a_sub_group_name_it,
        ),
        ("sub-groups", conformance::sub_groups_pass_the_suite),
    ];
    for (name, property) in properties {
        property(&launcher);
        if group.rank() == 0 {
            println!("conforms: {name}");
        }
    }
    group.barrier().unwrap();
}

#[test]
fn the_suite_passes_on_one_to_four_ranks() {
    for ranks in 1..=4 {
        job::succeed(ranks, "conform");
    }
}

/// What a rank ends with after some collectives.
fn program(group: &ProcessGroup) -> Vec<u32> {
    let (rank, world_size) = (group.rank(), group.world_size());
    let mut bits = Vec::new();
    for numel in [1, 7, 1000, 300_001] {
        let own: Vec<f32> = (0..numel)
            .map(|i| ((i * 37 + rank * 101) % 1009) as f32 * 1.1e-3 - 0.4)
            .collect();
        for op in [ReduceOp::Sum, ReduceOp::Mean] {
            let mut all = own.clone();
            group.all_reduce(&mut all, op).unwrap();
            let mut shard = vec![0.0; numel.div_ceil(world_size)];
            group.reduce_scatter(&own, &mut shard, op).unwrap();
            let mut full = vec![0.0; numel];
            group.all_gather(&shard, &mut full).unwrap();
            bits.extend(all.iter().chain(&full).map(|value| value.to_bits()));
        }
    }
    bits
}

pub(crate) fn same_bits() {
    let group = process_group().unwrap();
    let found = program(&group);
    let expected = ProcessGroup::spawn(group.world_size(), |threads| program(&threads)).unwrap();
    assert!(found == expected[group.rank()]);
    // All ranks end with the same.
    let bytes: Vec<u8> = found.iter().flat_map(|bits| bits.to_le_bytes()).collect();
    let all = group.all_gather_bytes(&bytes).unwrap();
    assert!(all.iter().all(|other| *other == bytes));
}

#[test]
fn results_have_the_bits_of_ranks_that_are_threads() {
    for ranks in 1..=4 {
        job::succeed(ranks, "same_bits");
    }
}

/// Rank 1 aborts while the others are in the midst of large collectives.
pub(crate) fn abort() {
    let group = process_group().unwrap();
    if group.rank() == 1 {
        let other = group.clone();
        thread::spawn(move || {
            thread::sleep(Duration::from_millis(100));
            other.abort("the disk is full");
        });
    }
    let mut buffer = vec![1.0f32; 1 << 20];
    let error = loop {
        if let Err(error) = group.all_reduce(&mut buffer, ReduceOp::Mean) {
            break error;
        }
    };
    let Error::Aborted { rank: 1, reason } = error.root_cause() else {
        panic!("{error}")
    };
    assert_eq!(reason, "the disk is full");
    drop(group);
    process_group().unwrap();
}

#[test]
fn an_abort_in_the_midst_of_it_reaches_every_rank() {
    job::succeed(3, "abort");
}

/// Rank 2 does not come to the second collective.
pub(crate) fn late() {
    let group = process_group().unwrap();
    group.barrier().unwrap();
    if group.rank() == 2 {
        // Longer than the others wait, unless the job ends, as it should.
        thread::sleep(LONG);
    }
    group.set_deadline(Duration::from_secs(1));
    let error = group.all_reduce(&mut [1.0f32], ReduceOp::Sum).unwrap_err();
    panic!("{error}");
}

#[test]
fn a_rank_that_is_late_is_named_and_the_job_ends() {
    let outcome = job::run(3, "late", 0);
    assert!(!outcome.status.success(), "{}", outcome.output);
    let named = outcome.output.contains("waited 1") && outcome.output.contains("for ranks [2]");
    assert!(named, "{}", outcome.output);
    assert!(outcome.took < LONG / 2, "{:?}", outcome.took);
}

/// Rank 1 panics.
pub(crate) fn panics() {
    let group = process_group().unwrap();
    group.barrier().unwrap();
    assert!(group.rank() != 1, "out of data");
    panic!("{}", group.barrier().unwrap_err());
}

#[test]
fn a_rank_that_panics_is_named_by_the_others() {
    let outcome = job::run(3, "panics", 0);
    assert!(!outcome.status.success(), "{}", outcome.output);
    let named = outcome.output.contains("rank 1 panicked");
    assert!(named, "{}", outcome.output);
}
