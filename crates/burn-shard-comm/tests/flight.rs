//! The flight recorder: what is written when ranks stop, drift apart or die, and what the report says of it.

#![allow(clippy::unwrap_used, reason = "a test ends at the first error")]

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;

use burn_shard_comm::flight::{Dump, DumpError, Failure, FlightReport, State};
use burn_shard_comm::{Error, Local, ProcessGroup, Recording, ReduceOp};

/// Runs ranks whose collectives are kept; returns what the files say.
fn report<T: Send>(
    world_size: usize,
    deadline: Duration,
    run: impl Fn(ProcessGroup) -> T + Sync,
) -> (Vec<Dump>, String) {
    let directory = tempfile::tempdir().unwrap();
    let to = directory.path().to_owned();
    let _panics_are_in_the_files = Local::new(world_size)
        .deadline(deadline)
        .wrap(move |inner| Arc::new(Recording::flight_recorder(inner, &to)))
        .spawn(run);
    let dumps = Dump::read_all(directory.path()).unwrap();
    let report = FlightReport::new(&dumps).to_string();
    (dumps, report)
}

fn sum(group: &ProcessGroup, len: usize) -> Result<(), Error> {
    group.all_reduce(&mut vec![1.0_f32; len], ReduceOp::Sum)
}

const LONG: Duration = Duration::from_secs(60);

#[test]
fn ranks_that_end_in_order_have_finished_the_same() {
    let (dumps, report) = report(3, LONG, |group| {
        for len in [4, 5] {
            sum(&group, len).unwrap();
        }
    });
    assert_eq!(
        report,
        "3 of 3 ranks have written their last collectives\n\
         no rank saw its group fail\n\
         ranks 0, 1, 2 left in order\n\
         all ranks: the last collective that all of them finished is number 1, all_reduce f32 sum [5]"
    );
    for dump in dumps {
        assert_eq!(dump.entries.len(), 2);
        for entry in dump.entries {
            assert_eq!(entry.state, State::Finished);
            assert!(entry.ended_ns >= Some(entry.started_ns));
        }
    }
}

#[test]
fn a_rank_that_leaves_out_a_collective_is_named_with_what_it_did_instead() {
    let (_, report) = report(3, LONG, |group| {
        sum(&group, 4)?;
        if group.rank() != 1 {
            sum(&group, 5)?;
        }
        sum(&group, 6)
    });
    let expected = "all ranks: ranks did different things as number 1\n    \
                    ranks 0, 2: all_reduce f32 sum [5]\n    \
                    rank 1: all_reduce f32 sum [6]";
    assert!(report.contains(expected), "{report}");
    assert!(report.contains("\nfirst, rank "), "{report}");
    let finished =
        "the last collective that all of them finished is number 0, all_reduce f32 sum [4]";
    assert!(report.contains(finished), "{report}");
}

#[test]
fn a_rank_that_stops_is_the_one_that_had_not_started_what_the_others_wait_for() {
    let (failed, others) = mpsc::channel();
    let others = std::sync::Mutex::new(others);
    let failed = std::sync::Mutex::new(failed);
    let (_, report) = report(3, Duration::from_secs(1), |group| {
        sum(&group, 4)?;
        if group.rank() == 2 {
            // Goes on once the others have given up.
            for _ in 0..2 {
                others.lock().unwrap().recv().unwrap();
            }
            return sum(&group, 5);
        }
        let result = sum(&group, 5);
        failed.lock().unwrap().send(()).unwrap();
        result
    });
    let expected = "all ranks: ranks 0, 1 were in number 1, all_reduce f32 sum [5], for 1.";
    assert!(report.contains(expected), "{report}");
    let straggler = "\n    rank 2 had not started it: its last one was number 0, all_reduce f32 sum [4] \
                     (finished), and started this one ";
    assert!(report.contains(straggler), "{report}");
}

#[test]
fn a_rank_that_left_or_panicked_says_so() {
    let (_, left) = report(2, LONG, |group| {
        sum(&group, 4)?;
        match group.rank() {
            0 => sum(&group, 5),
            _ => Ok(()),
        }
    });
    assert!(left.contains("\nfirst, rank 0 failed: "), "{left}");
    assert!(left.contains("\nrank 1 left in order\n"), "{left}");
    let expected = "rank 1 had not started it: its last one was number 0";
    assert!(left.contains(expected), "{left}");

    let (_, panicked) = report(2, LONG, |group| {
        sum(&group, 4).unwrap();
        assert_eq!(group.rank(), 0, "out of luck");
        sum(&group, 5).unwrap();
    });
    assert!(
        panicked.contains("first, rank 1 failed: this rank panicked"),
        "{panicked}"
    );
}

#[test]
fn sub_groups_are_compared_among_their_own_ranks() {
    let (_, report) = report(4, LONG, |group| {
        let half = group.split(Some(group.rank() / 2), 0)?.unwrap();
        sum(&half, 3)?;
        if group.rank() < 2 {
            sum(&half, 7)?;
        }
        group.barrier()?;
        match group.rank() {
            2 => sum(&half, 7),
            _ => Ok(()),
        }
    });
    let expected = "the group of 2 3: rank 2 was in number 1, all_reduce f32 sum [7], for ";
    assert!(report.contains(expected), "{report}");
    let finished = "the group of 0 1: the last collective that all of them finished is number 1, all_reduce f32 \
                    sum [7]";
    assert!(report.contains(finished), "{report}");
}

#[test]
fn only_the_last_thousand_are_kept() {
    let (dumps, _) = report(2, LONG, |group| {
        for _ in 0..1200 {
            sum(&group, 1).unwrap();
        }
    });
    for dump in dumps {
        assert_eq!((dump.forgotten, dump.entries.len()), (200, 1000));
        assert_eq!(dump.entries[0].number, 200);
        assert_eq!(dump.entries[999].number, 1199);
    }
}

/// As a process that is stopped while it sends.
#[test]
fn ranks_that_all_started_what_never_ended_are_said_to() {
    let (mut dumps, _) = report(2, LONG, |group| sum(&group, 4));
    for dump in &mut dumps {
        dump.failure = Some(Failure {
            at_ns: dump.entries[0].started_ns + 3_000_000_000,
            text: "waited".to_owned(),
        });
        dump.entries[0].state = State::Failed;
    }
    let report = FlightReport::new(&dumps).to_string();
    let expected = "all ranks: no collective was finished by all of them\n\
                    all ranks: ranks 0, 1 were in number 0, all_reduce f32 sum [4], for 3.0 s\n    \
                    all of its ranks had started it: ";
    assert!(report.contains(expected), "{report}");
}

/// A collective that was given up, and one that was refused, are told from those that hang.
#[test]
fn collectives_that_were_given_up_or_refused_are_so_noted() {
    let (dumps, _) = report(1, LONG, |group| {
        let input = Arc::new(burn_shard_comm::OwnedSegments(vec![vec![1.0_f32]]));
        drop(group.communicator().all_gather(input, &[1]).unwrap());
        let refused = group.all_gather(&[1.0_f32], &mut [0.0_f32; 2]).unwrap_err();
        assert!(refused.is_refusal());
        group.barrier().unwrap();
    });
    let states: Vec<State> = dumps[0].entries.iter().map(|entry| entry.state).collect();
    assert_eq!(states, [State::Dropped, State::Finished]);
}

#[test]
fn files_that_are_none_are_refused_by_name() {
    let directory = tempfile::tempdir().unwrap();
    let refused = |path: &Path| Dump::read_all(path).unwrap_err();
    assert!(matches!(refused(directory.path()), DumpError::Empty { .. }));
    let nowhere = directory.path().join("nowhere");
    assert!(matches!(refused(&nowhere), DumpError::Read { .. }));

    let whole = {
        let (dumps, _) = report(1, LONG, |group| sum(&group, 1));
        serde_json::to_string(&dumps[0]).unwrap()
    };
    let file = directory.path().join("attempt-0-rank-00000.json");
    for length in 0..whole.len() {
        fs::write(&file, &whole[..length]).unwrap();
        let error = refused(directory.path());
        assert!(
            matches!(error, DumpError::Format { .. }),
            "{length}: {error}"
        );
        assert!(
            error.to_string().contains("attempt-0-rank-00000.json"),
            "{error}"
        );
    }
    for (from, to) in [
        ("\"version\":1", "\"version\":2"),
        ("\"rank\":0", "\"rank\":7"),
        ("\"group\":0", "\"group\":9"),
    ] {
        let changed = whole.replacen(from, to, 1);
        assert_ne!(changed, whole);
        fs::write(&file, changed).unwrap();
        let error = refused(directory.path());
        assert!(matches!(error, DumpError::Content { .. }), "{error}");
    }
    fs::write(&file, whole).unwrap();
    assert_eq!(Dump::read_all(directory.path()).unwrap().len(), 1);
}
