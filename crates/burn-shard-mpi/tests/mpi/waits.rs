//! How long ranks wait for each other: `BURN_SHARD_TIMEOUT`.

use std::{process, thread, time::Duration};

use burn_shard_comm::{ProcessGroup, Transport};
use burn_shard_mpi::{MpiError, MpiTransport, process_group};

use crate::{
    ends::nobody_left,
    exchanges::within,
    job::{self, Outcome, run_with_timeout},
};

/// Longer than the others wait, if they wait as long as they should.
const LONG: Duration = Duration::from_secs(200);

/// Ends the job before `LONG`, and none of its processes is left.
fn ends_early(outcome: &Outcome, said: &[&str]) {
    assert!(!outcome.status.success(), "{}", outcome.output);
    for said in said {
        assert!(outcome.output.contains(said), "{said}: {}", outcome.output);
    }
    assert!(outcome.took < LONG / 2, "{:?}", outcome.took);
    nobody_left(&outcome.output);
}

pub(crate) fn deadlines() {
    let expected = ProcessGroup::deadline_from_env();
    match MpiTransport::init() {
        Ok(mut transport) => {
            assert_eq!(transport.deadline(), expected.unwrap());
            transport.farewell(&[], within(200));
            let group = process_group().unwrap();
            println!("waits {:?}", group.deadline());
        }
        Err(MpiError::Timeout(error)) => {
            assert_eq!(error, expected.unwrap_err());
            println!("{error}");
        }
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn the_variable_sets_the_deadline_of_groups() {
    for (timeout, waits) in [(None, "waits 300s"), (Some("12.5"), "waits 12.5s")] {
        let outcome = run_with_timeout(timeout, 2, "deadlines", 0);
        assert_eq!(
            outcome.output.matches(waits).count(),
            2,
            "{}",
            outcome.output
        );
    }
    let outcome = run_with_timeout(Some("soon"), 1, "deadlines", 0);
    let refused = "BURN_SHARD_TIMEOUT is \"soon\", which is not a number of seconds";
    assert!(outcome.output.contains(refused), "{}", outcome.output);
}

/// All is well, but rank 1 does not come to its end.
pub(crate) fn lingers() {
    let group = process_group().unwrap();
    println!("\npid {}", process::id());
    group.barrier().unwrap();
    let rank = group.rank();
    drop(group);
    if rank == 1 {
        thread::sleep(LONG);
    }
}

#[test]
fn a_rank_that_does_not_come_to_its_end_is_named_and_the_job_ends() {
    let outcome = run_with_timeout(Some("2"), 3, "lingers", 0);
    ends_early(
        &outcome,
        &[
            "at its exit for ranks [1], which did not come to theirs",
            "raise BURN_SHARD_TIMEOUT",
        ],
    );
}

/// Rank 1 does not even join.
pub(crate) fn stays_away() {
    println!("\npid {}", process::id());
    if std::env::var("OMPI_COMM_WORLD_RANK").unwrap() == "1" {
        thread::sleep(LONG);
    }
    process_group().unwrap();
}

#[test]
fn a_rank_that_does_not_join_ends_the_job() {
    let outcome = run_with_timeout(Some("2"), 2, "stays_away", 0);
    ends_early(
        &outcome,
        &["rank 0: waited 2s for the other ranks to join the job"],
    );
}

#[test]
fn a_job_whose_ranks_come_in_time_ends_well() {
    job::succeed(3, "deadlines");
}
