//! Real jobs under `mpirun`: each test starts this binary again, as the ranks of one.
//!
//! They need an MPI library's `mpirun` on the path; without it they fail.
#![allow(clippy::unwrap_used, reason = "a test ends at the first error")]
#![allow(clippy::print_stdout, reason = "a rank tells the test that started it")]

mod ends;
mod exchanges;
mod groups;
mod job;
mod waits;

/// What a rank does, by name.
const SCENARIOS: [(&str, fn()); 18] = [
    ("exchanges_carry_every_byte", exchanges::carry_every_byte),
    (
        "messages_of_one_group_do_not_reach_the_next",
        exchanges::stay_in_their_group,
    ),
    ("words_reach_every_rank", exchanges::words_reach_every_rank),
    (
        "a_rank_may_leave_once_it_has_sent_all",
        exchanges::a_rank_leaves_in_order,
    ),
    (
        "what_was_sent_does_not_change_later",
        exchanges::sent_bytes_stay,
    ),
    ("an_exchange_can_be_cancelled", exchanges::cancelled),
    ("small_messages_need_no_receiver", exchanges::small_first),
    ("die", ends::die),
    ("stall", ends::stall),
    ("exit", ends::exit),
    ("conform", groups::conform),
    ("same_bits", groups::same_bits),
    ("abort", groups::abort),
    ("late", groups::late),
    ("panics", groups::panics),
    ("deadlines", waits::deadlines),
    ("lingers", waits::lingers),
    ("stays_away", waits::stays_away),
];

/// One rank of a job.
#[test]
#[ignore = "a rank of a job: the other tests start it, under mpirun"]
fn rank() {
    let name =
        std::env::var(job::SCENARIO).expect("should be started by another test, under mpirun");
    let (_, scenario) = SCENARIOS
        .iter()
        .find(|(found, _)| *found == name)
        .expect("the scenario should exist");
    scenario();
}
