//! A job on this host, from its first start to its last end.

use std::{
    path::PathBuf,
    sync::{Arc, mpsc::channel},
    time::Instant,
};

use crate::{
    checks::reserve_files,
    environment::{FLIGHT_RECORDER, set},
    error::LaunchError,
    job::Job,
    options::Options,
    outcome::{Ending, Failure, Outcome},
    output::{Remarks, Sink},
    signals,
};

/// Starts the ranks of this host, passes on what they write and the signals that come, and returns when
/// all have ended.
///
/// From here on SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 are the launcher's; they stay without effect
/// afterwards, so a program should end soon after its launch. Children of this process that are not ranks
/// are left alone. If SIGCHLD was ignored, it no longer is; if signals that are passed on were blocked in the
/// calling thread, they no longer are. If this process may open fewer files than the pipes to the ranks take,
/// its limit is raised as far as the system allows.
///
/// If a rank fails, all ranks are started again as [`Options::restarts`] allows, once everything of the attempt
/// before is gone; what they had not saved is lost. A signal to the launcher ends the job for good.
///
/// # Errors
///
/// A rank that fails is an [`Outcome`]. Refusals (see [`LaunchError`]) come before anything is started;
/// if a rank cannot be started, those before it are killed.
pub fn launch(options: &Options) -> Result<Outcome, LaunchError> {
    options.check()?;
    reserve_files(options.local_world_size)?;
    let failed = |source| LaunchError::System {
        what: "start a thread",
        source,
    };
    let sink = Arc::new(Sink::default());
    let remarks = Remarks::start(Arc::clone(&sink)).map_err(failed)?;
    let outcome = run(options, sink, &remarks);
    remarks.finish();
    outcome
}

fn run(options: &Options, sink: Arc<Sink>, remarks: &Remarks) -> Result<Outcome, LaunchError> {
    let (sender, events) = channel();
    let signals = signals::Receiver::start(sender.clone());
    let signals = signals.map_err(|source| LaunchError::System {
        what: "receive signals",
        source,
    })?;
    let mut options = options.clone();
    let mut attempt = 0;
    let outcome = loop {
        let begin = Instant::now();
        let outcome = Job::run(&options, attempt, (&sink, remarks), (&sender, &events))?;
        report(&outcome, remarks);
        if let (Some(_), Some(directory)) = (&outcome.first_failure, flight_recorder(&options)) {
            let directory = directory.display();
            remarks.say(&format!(
                "what each rank did last: burn-shard flight-recorder {directory}"
            ));
        }
        let Some(failure) = outcome.first_failure.as_ref().filter(|_| {
            // Whoever has ended the job wants no other.
            outcome.interruption.is_none() && attempt < options.restarts.max
        }) else {
            break outcome;
        };
        attempt += 1;
        options.local_world_size = options.restarts.ranks(options.local_world_size, failure);
        remarks.say(&format!(
            "restart {attempt} of {}: rank {} failed after {:.1?}; starting {} ranks",
            options.restarts.max,
            failure.rank,
            begin.elapsed(),
            options.local_world_size
        ));
    };
    drop(signals);
    Ok(outcome)
}

/// Where ranks have written their last collectives.
fn flight_recorder(options: &Options) -> Option<PathBuf> {
    let inherited = || set(FLIGHT_RECORDER).map(PathBuf::from);
    options.flight_recorder.clone().or_else(inherited)
}

fn report(outcome: &Outcome, remarks: &Remarks) {
    let list = |but: Option<usize>| {
        let endings = outcome.endings.iter();
        let others = endings.filter(|(rank, _)| Some(*rank) != but);
        let others = others.map(|(rank, ending)| format!("rank {rank}: {ending}"));
        others.collect::<Vec<String>>().join(", ")
    };
    let Some(failure) = &outcome.first_failure else {
        if let Some(signal) = outcome.interruption {
            let signal = Ending::Signaled(signal);
            remarks.say(&format!("the job was ended by {signal}: {}", list(None)));
        }
        return;
    };
    let Failure {
        rank,
        ending,
        last_lines,
    } = failure;
    remarks.say(&format!("rank {rank} was the first to fail: {ending}"));
    let others = list(Some(*rank));
    if !others.is_empty() {
        remarks.say(&format!("the others: {others}"));
    }
    if last_lines.is_empty() {
        remarks.say(&format!("rank {rank} has written nothing"));
        return;
    }
    remarks.say(&format!("last lines of rank {rank}:"));
    for line in last_lines {
        remarks.quote(line);
    }
}
