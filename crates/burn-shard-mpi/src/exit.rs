//! How this process leaves the MPI job.
//!
//! Every rank has to finalize MPI, which waits for all others. So a process finalizes it at its exit,
//! whatever transports it had, once all ranks have said that they are at their exit too. If one does not
//! come in time, because it has died, stalled or has more to do, the job is ended (`MPI_Abort`).

use std::time::{Duration, Instant};

use parking_lot::Condvar;

use crate::{
    api::{Calls, Slot, TURN},
    error::MpiError,
    patience::Patience,
    process::{JOB, Job},
    watchdog::{Watchdog, last_words},
};

/// How long a process waits, when it ends, for transports that have not said farewell; and after
/// a failure, for the other ranks.
const EXIT_PATIENCE: Duration = Duration::from_secs(5);

/// Told when a transport has said farewell.
static LEFT: Condvar = Condvar::new();

/// The tag of what ranks say at their exit.
const HERE: i32 = 0;

/// A transport begins.
pub(crate) fn open() {
    TURN.lock().open += 1;
}

/// A transport has said farewell, or is gone.
pub(crate) fn closed() {
    TURN.lock().open -= 1;
    LEFT.notify_all();
}

/// Runs at exit.
pub(crate) extern "C" fn leave() {
    // Held for long only by a thread that still joins the job: then mpirun ends the others.
    let Some(mut state) = TURN.try_lock_for(EXIT_PATIENCE) else {
        return;
    };
    // The threads that drive transports may be about to say farewell.
    let end = Instant::now() + EXIT_PATIENCE;
    while state.open > 0 && !LEFT.wait_until(&mut state, end).timed_out() {}
    let (open, rank) = (state.open, state.rank.unwrap_or(0));
    drop(state);
    let outcome = if open == 0 {
        end_together()
    } else {
        Err(format!(
            "left without a farewell ({open} transports are still open)"
        ))
    };
    if let Err(why) = outcome {
        last_words(format_args!("rank {rank}: {why}; ending the job"));
        if let Ok(mut calls) = Calls::take() {
            calls.abort();
        }
    }
}

/// Finalizes MPI once all ranks are at the end.
///
/// Sleeps while it waits, where `MPI_Finalize` would keep a core busy that another rank may need.
fn end_together() -> Result<(), String> {
    let start = Instant::now();
    let text = |error: MpiError| error.to_string();
    let Some(job) = *JOB.lock() else {
        return Err("did not join the job".to_owned());
    };
    let mut roll = Roll::call(job).map_err(text)?;
    let mut patience = Patience::default();
    loop {
        let mut calls = Calls::take().map_err(text)?;
        if roll.is_complete(&mut calls).map_err(text)? {
            let _watchdog = Watchdog::new(
                job.deadline,
                format!(
                    "rank {}: waited {:?} in MPI_Finalize for the other ranks",
                    job.rank, job.deadline
                ),
            );
            return calls.finalize().map_err(text);
        }
        let waited = start.elapsed();
        let (limit, way_out) = if calls.state.failed {
            (EXIT_PATIENCE.min(job.deadline), "after a failure")
        } else {
            (
                job.deadline,
                "if they are at work: raise BURN_SHARD_TIMEOUT",
            )
        };
        if waited >= limit {
            return Err(format!(
                "waited {waited:.1?} at its exit for ranks {:?}, which did not come to theirs ({way_out})",
                roll.missing()
            ));
        }
        drop(calls);
        patience.pause(Duration::from_millis(10));
    }
}

/// Which ranks are at their exit: each tells all others.
struct Roll {
    said: Vec<Slot>,
    awaited: Vec<(usize, Slot)>,
}

impl Roll {
    fn call(job: Job) -> Result<Self, MpiError> {
        let mut roll = Self {
            said: Vec::new(),
            awaited: Vec::new(),
        };
        for peer in (0..job.size).filter(|&peer| peer != job.rank) {
            let mut calls = Calls::take()?;
            let (mut here, mut theirs) = (Slot::new(0), Slot::new(0));
            calls.receive(&mut theirs, 0, job.end, (peer, HERE))?;
            calls.send(&mut here, 0, job.end, (peer, HERE))?;
            roll.said.push(here);
            roll.awaited.push((peer, theirs));
        }
        Ok(roll)
    }

    /// Whether all are, and have been told of this one.
    fn is_complete(&mut self, calls: &mut Calls<'_>) -> Result<bool, MpiError> {
        let mut result = Ok(());
        let mut under_way = |slot: &mut Slot| match calls.done(slot) {
            Ok(done) => done.is_none(),
            Err(error) => {
                result = Err(error);
                true
            }
        };
        self.said.retain_mut(&mut under_way);
        self.awaited.retain_mut(|(_, slot)| under_way(slot));
        result?;
        Ok(self.said.is_empty() && self.awaited.is_empty())
    }

    fn missing(&self) -> Vec<usize> {
        self.awaited.iter().map(|&(peer, _)| peer).collect()
    }
}
