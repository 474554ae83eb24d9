//! The suite every communicator has to pass, as library code.
//!
//! A backend says how it starts ranks ([`Launcher`]) and calls the functions below, one test each; a
//! failed property panics. Results are compared bit by bit with a naive reference that shares no
//! code with the reductions of this crate.
//!
//! What depends on how ranks come and go (panics, early returns, deadlines) is left to the tests of
//! the backend.

#![expect(
    clippy::unwrap_used,
    clippy::missing_panics_doc,
    reason = "a suite panics where a property fails"
)]

mod failures;
mod flight;
mod memory;
mod probe;
mod results;
mod sub_groups;

pub use failures::{
    a_failed_call_reaches_every_rank, an_abort_reaches_every_rank, announcements_are_compared,
    mismatches_are_told_to_every_rank, refusals_leave_the_group_usable,
};
pub use flight::{
    all_kinds_may_be_in_flight_together, mismatches_say_what_the_elements_are,
    what_is_in_flight_ends_with_the_group,
};
pub use memory::MemoryTransport;
pub use results::{
    a_deadline_can_be_set, a_nan_on_any_rank_shows, absent_contributions_count_as_zeros,
    bytes_of_any_length_travel, collectives_match_a_naive_reference,
    large_buffers_match_a_naive_reference, lists_may_mix_lengths, results_do_not_depend_on_timing,
    traffic_follows_from_the_lengths, unfinished_collectives_may_be_finished_in_any_order,
};

pub use sub_groups::{
    a_mismatch_in_a_sub_group_poisons_all, a_sub_group_fails_with_its_parent,
    keys_order_a_sub_group, meshes_sum_in_rows_and_then_in_columns,
    refusals_of_a_sub_group_name_it, siblings_do_different_things, sub_groups_pass_the_suite,
    traffic_of_a_sub_group_counts_in_its_parent,
};

use probe::{Probe, bits, reduced, values};

use crate::{Element, ProcessGroup, ReduceOp, shard_numel};

/// How a backend starts ranks.
pub trait Launcher {
    /// Runs `f` once per rank of a new group and waits for all; panics if `f` panics on any rank.
    fn run<F: Fn(ProcessGroup) + Sync>(&self, world_size: usize, f: F);
}

/// Makes one test of each property, for the [`Launcher`] that the expression gives.
///
/// # Examples
///
/// ```
/// # use burn_shard_comm::{Local, ProcessGroup, conformance::Launcher};
/// struct Threads;
/// impl Launcher for Threads {
///     fn run<F: Fn(ProcessGroup) + Sync>(&self, world_size: usize, f: F) {
///         Local::new(world_size).spawn(f).unwrap();
///     }
/// }
/// burn_shard_comm::conformance_tests!(Threads);
/// ```
#[macro_export]
macro_rules! conformance_tests {
    ($launcher:expr) => {
        $crate::conformance_tests!(@each $launcher;
            collectives_match_a_naive_reference,
            large_buffers_match_a_naive_reference,
            results_do_not_depend_on_timing,
            lists_may_mix_lengths,
            absent_contributions_count_as_zeros,
            a_nan_on_any_rank_shows,
            unfinished_collectives_may_be_finished_in_any_order,
            refusals_leave_the_group_usable,
            mismatches_are_told_to_every_rank,
            an_abort_reaches_every_rank,
            a_failed_call_reaches_every_rank,
            traffic_follows_from_the_lengths,
            bytes_of_any_length_travel,
            a_deadline_can_be_set,
            announcements_are_compared,
            all_kinds_may_be_in_flight_together,
            what_is_in_flight_ends_with_the_group,
            mismatches_say_what_the_elements_are,
        );
    };
    (@each $launcher:expr; $($name:ident),* $(,)?) => {$(
        #[test]
        fn $name() {
            $crate::conformance::$name(&$launcher);
        }
    )*};
}

/// Makes tests as [`conformance_tests!`](crate::conformance_tests) does, for communicators that can be split.
#[macro_export]
macro_rules! sub_group_tests {
    ($launcher:expr) => {
        $crate::conformance_tests!(@each $launcher;
            meshes_sum_in_rows_and_then_in_columns,
            keys_order_a_sub_group,
            siblings_do_different_things,
            traffic_of_a_sub_group_counts_in_its_parent,
            a_mismatch_in_a_sub_group_poisons_all,
            a_sub_group_fails_with_its_parent,
            refusals_of_a_sub_group_name_it,
            sub_groups_pass_the_suite,
        );
    };
}

const OPS: [ReduceOp; 4] = [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Max, ReduceOp::Min];
/// The part of `full` that `rank` owns, padded with zeros.
fn shard<T: Element>(full: &[T], rank: usize, world_size: usize) -> Vec<T> {
    let numel = shard_numel(full.len(), world_size);
    let mut shard: Vec<T> = full
        .iter()
        .copied()
        .skip(rank * numel)
        .take(numel)
        .collect();
    shard.resize(numel, T::zeroed());
    shard
}

/// An output in which every element that is not written shows.
fn garbage<T: Probe>(numel: usize) -> Vec<T> {
    values(0xdead, 99, numel)
}

fn check<T: Element>(what: &str, group: &ProcessGroup, found: &[T], expected: &[T]) {
    assert_eq!(found.len(), expected.len());
    if let Some(index) = (0..found.len()).find(|&i| bits(&found[i..=i]) != bits(&expected[i..=i])) {
        panic!(
            "{what} of {} {} on rank {} of {}: element {index} is {:?}, expected {:?}",
            found.len(),
            T::DTYPE,
            group.rank(),
            group.world_size(),
            found[index],
            expected[index],
        );
    }
}

/// Every collective on one buffer of each of `numels`, against the reference.
fn collectives<T: Probe>(group: &ProcessGroup, numels: &[usize]) {
    let (rank, world_size) = (group.rank(), group.world_size());
    for &numel in numels {
        let seed = numel as u64;
        let inputs: Vec<Vec<T>> = (0..world_size)
            .map(|rank| values(seed, rank, numel))
            .collect();

        let mut output = garbage::<T>(numel);
        group
            .all_gather(&shard(&inputs[0], rank, world_size), &mut output)
            .unwrap();
        check("all_gather", group, &output, &inputs[0]);

        for root in 0..world_size {
            let mut buffer = inputs[rank].clone();
            group.broadcast(&mut buffer, root).unwrap();
            check("broadcast", group, &buffer, &inputs[root]);
        }

        for op in OPS {
            let Some(expected) = reduced(op, &inputs) else {
                continue;
            };
            if op == ReduceOp::Mean && !T::DTYPE.is_float() {
                continue; // Without elements, the reference has nothing to refuse.
            }
            let mut output = garbage::<T>(shard_numel(numel, world_size));
            group
                .reduce_scatter(&inputs[rank], &mut output, op)
                .unwrap();
            let expected_shard = shard(&expected, rank, world_size);
            check(
                &format!("reduce_scatter {op}"),
                group,
                &output,
                &expected_shard,
            );

            let mut buffer = inputs[rank].clone();
            group.all_reduce(&mut buffer, op).unwrap();
            check(&format!("all_reduce {op}"), group, &buffer, &expected);
        }
    }
    group.barrier().unwrap();
}
