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

/// What is said of rank 2, which does nothing until the others have given up waiting for it, and `then` goes on.
fn report_of_a_stop(
    then: impl Fn(&ProcessGroup) -> Result<(), Error> + Sync,
) -> (Vec<Dump>, String) {
    let (failed, others) = mpsc::channel();
    let others = std::sync::Mutex::new(others);
    let failed = std::sync::Mutex::new(failed);
    report(3, Duration::from_secs(1), |group| {
        sum(&group, 4)?;
        if group.rank() == 2 {
            for _ in 0..2 {
                others.lock().unwrap().recv().unwrap();
            }
            return then(&group);
        }
        let result = sum(&group, 5);
        failed.lock().unwrap().send(()).unwrap();
        result
    })
}

#[test]
fn a_rank_that_stops_is_the_one_that_had_not_started_what_the_others_wait_for() {
    let (_, report) = report_of_a_stop(|group| sum(group, 5));
    let expected = "all ranks: ranks 0, 1 were in number 1, all_reduce f32 sum [5], for ";
    assert!(report.contains(expected), "{report}");
    let straggler = "\n    rank 2 had not started it: its last one was number 0, all_reduce f32 sum [4] \
                     (finished), and it started this one after the failure";
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
fn only_the_last_thousand_of_each_group_are_kept() {
    let (dumps, report) = report(2, LONG, |group| {
        for _ in 0..3 {
            sum(&group, 4).unwrap();
        }
        let own = group.split(Some(group.rank()), 0).unwrap().unwrap();
        for _ in 0..1200 {
            sum(&own, 1).unwrap();
        }
    });
    for dump in dumps {
        let of = |group| {
            dump.entries
                .iter()
                .filter(move |entry| entry.group == group)
        };
        assert_eq!((of(0).count(), of(1).count()), (4, 1000));
        assert_eq!(of(1).next().unwrap().number, 200);
        assert_eq!(dump.groups[1].collectives, 1200);
    }
    let expected =
        "all ranks: the last collective that all of them finished is number 3, all_gather u64 [6]";
    assert!(report.contains(expected), "{report}");
}

/// Hosts show different times.
#[test]
fn no_sentence_depends_on_the_clocks_of_two_ranks() {
    let (mut dumps, report) = report_of_a_stop(|_| Ok(()));
    let facts = |report: &str| {
        let lines = report.lines().filter(|line| !line.contains(" failed: "));
        lines.map(ToOwned::to_owned).collect::<Vec<_>>()
    };
    for entry in &mut dumps[1].entries {
        entry.started_ns += 100_000_000_000;
        entry.ended_ns = entry.ended_ns.map(|at| at + 100_000_000_000);
    }
    if let Some(failure) = &mut dumps[1].failure {
        failure.at_ns += 100_000_000_000;
    }
    let skewed = FlightReport::new(&dumps).to_string();
    assert_eq!(facts(&skewed), facts(&report));
    assert!(skewed.contains("ranks 0, 1 were in number 1"), "{skewed}");
}

#[test]
fn a_later_group_of_the_process_leaves_the_file_of_a_failure() {
    let directory = tempfile::tempdir().unwrap();
    let run = |ranks: usize, differs: bool| {
        let to = directory.path().to_owned();
        let ended = Local::new(ranks)
            .deadline(LONG)
            .wrap(move |inner| Arc::new(Recording::flight_recorder(inner, &to)))
            .spawn(|group| sum(&group, if differs { 1 + group.rank() } else { 1 }).is_ok());
        drop(ended);
        FlightReport::new(&Dump::read_all(directory.path()).unwrap()).to_string()
    };
    let failed = run(2, true);
    assert!(
        failed.contains("ranks did different things as number 0"),
        "{failed}"
    );
    assert_eq!(run(2, false), failed);
}

/// The files of ranks that a later job does not have would be taken for its own.
#[test]
fn a_job_of_fewer_ranks_removes_the_files_of_one_of_more() {
    let directory = tempfile::tempdir().unwrap();
    for ranks in [4, 2] {
        let to = directory.path().to_owned();
        let ended = Local::new(ranks)
            .wrap(move |inner| Arc::new(Recording::flight_recorder(inner, &to)))
            .spawn(|group| sum(&group, 1).unwrap());
        ended.unwrap();
        assert_eq!(Dump::read_all(directory.path()).unwrap().len(), ranks);
    }
}

/// A disk that hangs holds up no other rank: they hear of an abort before anything is written.
#[cfg(unix)]
#[test]
fn ranks_hear_of_an_abort_although_the_file_cannot_be_written() {
    let directory = tempfile::tempdir().unwrap();
    let beside = format!("attempt-0-rank-00000.json.{}", std::process::id());
    let pipe = directory.path().join(beside);
    let made = std::process::Command::new("mkfifo").arg(&pipe).status();
    assert!(made.unwrap().success());
    let to = directory.path().to_owned();
    let (heard, hears) = mpsc::channel();
    let heard = std::sync::Mutex::new(heard);
    let job = std::thread::spawn(move || {
        Local::new(2)
            .deadline(LONG)
            .wrap(move |inner| Arc::new(Recording::flight_recorder(inner, &to)))
            .spawn(|group| {
                if group.rank() == 0 {
                    // Waits for a reader of the pipe.
                    return group.abort("enough");
                }
                let error = sum(&group, 1).unwrap_err();
                heard.lock().unwrap().send(error.to_string()).unwrap();
            })
    });
    let error = hears.recv_timeout(LONG).unwrap();
    assert!(error.contains("enough"), "{error}");
    // Lets the writer go.
    drop(fs::read(&pipe));
    job.join().unwrap().unwrap();
}

/// A process that is stopped while it sends leaves its collective so.
#[test]
fn ranks_that_all_started_what_never_ended_are_said_to() {
    let (mut dumps, _) = report(2, LONG, |group| sum(&group, 4));
    for dump in &mut dumps {
        dump.failure = Some(Failure {
            at_ns: dump.entries[0].started_ns + 3_000_000_000,
            text: "waited".to_owned(),
        });
        dump.entries[0].state = State::Started;
        dump.entries[0].ended_ns = None;
    }
    let report = FlightReport::new(&dumps).to_string();
    let expected = "all ranks: no collective was finished by all of them\n\
                    all ranks: ranks 0, 1 were in number 0, all_reduce f32 sum [4], for 3.0 s\n    \
                    all of its ranks had started it: ";
    assert!(report.contains(expected), "{report}");
    // Errors may quote anything.
    dumps[0].failure.as_mut().unwrap().text = "\u{1b}[2Jgone".to_owned();
    let report = FlightReport::new(&dumps).to_string();
    assert!(report.contains("failed: \\u{1b}[2Jgone"), "{report}");
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
        ("\"version\":1,\"rank\":0", "\"version\":2"),
        ("\"world_size\":1", "\"world_size\":20000000000"),
        ("\"rank\":0", "\"rank\":7"),
        ("\"group\":0", "\"group\":9"),
    ] {
        let changed = whole.replacen(from, to, 1);
        assert_ne!(changed, whole);
        fs::write(&file, changed).unwrap();
        let error = refused(directory.path());
        assert!(matches!(error, DumpError::Content { .. }), "{error}");
    }
    fs::write(&file, &whole).unwrap();
    assert_eq!(Dump::read_all(directory.path()).unwrap().len(), 1);
    let other = directory.path().join("attempt-0-rank-00001.json");
    fs::write(&other, &whole).unwrap();
    assert!(matches!(
        refused(directory.path()),
        DumpError::Content { .. }
    ));
    fs::rename(&other, directory.path().join("attempt-0-rank-0.json")).unwrap();
    let twice = refused(directory.path()).to_string();
    assert!(
        twice.ends_with("two of its files are of one rank"),
        "{twice}"
    );
    #[cfg(unix)]
    {
        // Nobody writes into it, and a link may lead to a device.
        fs::remove_file(&file).unwrap();
        let made = std::process::Command::new("mkfifo").arg(&file).status();
        assert!(made.unwrap().success());
        let error = refused(directory.path()).to_string();
        assert!(error.ends_with("it is not a regular file"), "{error}");
    }
}
