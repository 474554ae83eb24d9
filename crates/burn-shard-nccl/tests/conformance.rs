//! The whole suite, through the calls of NCCL, over its double: bit by bit what ranks as threads give.

#![allow(clippy::unwrap_used, reason = "a test ends at the first error")]

mod common;

use burn_shard_comm::{
    ProcessGroup,
    conformance::{self, Launcher},
};

struct Double;

impl Launcher for Double {
    fn run<F: Fn(ProcessGroup) + Sync>(&self, world_size: usize, f: F) {
        let result = common::spawn(world_size, common::LONG, |group, _| f(group));
        if let Err(error) = result {
            panic!("{error}");
        }
    }
}

macro_rules! conformance {
    ($($name:ident),* $(,)?) => {$(
        #[test]
        fn $name() {
            conformance::$name(&Double);
        }
    )*};
}
conformance!(
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
);
