//! This process as a rank of the MPI job: how it joins, and how it leaves.
//!
//! MPI can be initialized once in the life of a process, and every rank has to finalize it, which
//! waits for all others. So a process finalizes it at its exit, whatever transports it had. If a rank
//! has died or stalled, waiting for it would never end: then the job is ended (`MPI_Abort`).

use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::{
    api::{self, Calls, Comm, TURN},
    error::MpiError,
    patience::Patience,
    single_copy::SingleCopy,
};

/// How long a process waits, when it ends, for transports that have not said farewell; and after
/// a failure, for the other ranks.
pub(crate) const EXIT_PATIENCE: Duration = Duration::from_secs(5);

/// Told when a transport has said farewell.
static LEFT: Condvar = Condvar::new();

/// What this process learned when it joined.
static JOB: Mutex<Option<Job>> = Mutex::new(None);

/// This process's place in the job; does not change.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Job {
    pub(crate) rank: usize,
    pub(crate) size: usize,
    pub(crate) local_rank: usize,
    pub(crate) local_size: usize,
    pub(crate) single_copy: SingleCopy,
    /// All ranks, for their last barrier only: one that ends must not be taken for one that asks
    /// for a transport.
    end: Comm,
}

impl Job {
    /// Initializes MPI at the first call. Waits for all ranks of the job.
    pub(crate) fn join() -> Result<Self, MpiError> {
        let mut job = JOB.lock();
        if let Some(job) = *job {
            return Ok(job);
        }
        let mut state = TURN.lock();
        if state.rank.is_none() {
            api::init()?;
            // The rank is not known before the first call; 0 stands for it until then.
            state.rank = Some(0);
            // SAFETY: the handler may be called at exit: it lives as long as the program, unwinds
            // nowhere.
            let code = unsafe { libc::atexit(leave) };
            if code != 0 {
                log::warn!("MPI cannot be finalized at exit: atexit failed");
            }
        }
        let mut calls = Calls::with(state)?;
        calls.return_errors(api::world())?;
        let (rank, size) = calls.place(api::world())?;
        calls.state.rank = Some(rank);
        let neighbours = calls.neighbours()?;
        let (local_rank, local_size) = calls.place(neighbours)?;
        let single_copy = SingleCopy::probe(&mut calls, neighbours)?;
        let end = calls.duplicate_world()?;
        let joined = *job.insert(Self {
            rank,
            size,
            local_rank,
            local_size,
            single_copy,
            end,
        });
        drop(calls);
        log::info!("rank {rank} of {size}, {local_rank} of {local_size} on this host");
        if rank == 0 {
            single_copy.log();
        }
        Ok(joined)
    }

    /// A communicator of all ranks of the job, once all have asked for one.
    pub(crate) fn duplicate(self, deadline: Duration) -> Result<Comm, MpiError> {
        let start = Instant::now();
        let mut duplicate = Calls::take()?.start_duplicate()?;
        let mut patience = Patience::default();
        loop {
            if let Some(comm) = Calls::take()?.duplicate(&mut duplicate)? {
                return Ok(comm);
            }
            let waited = start.elapsed();
            if waited >= deadline {
                failed();
                return Err(MpiError::Deadline {
                    rank: self.rank,
                    job_size: self.size,
                    waited,
                });
            }
            patience.pause(deadline - waited);
        }
    }
}

/// A transport begins.
pub(crate) fn open() {
    TURN.lock().open += 1;
}

/// A transport has said farewell, or is gone.
pub(crate) fn closed() {
    TURN.lock().open -= 1;
    LEFT.notify_all();
}

/// Not all ranks may arrive at the end.
pub(crate) fn failed() {
    TURN.lock().failed = true;
}

/// Runs at exit.
extern "C" fn leave() {
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
        // Not `eprintln`, which panics if nobody reads.
        let _ignored = std::io::Write::write_fmt(
            &mut std::io::stderr(),
            format_args!("rank {rank}: {why}; ending the job\n"),
        );
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
    let Some(Job { end, .. }) = *JOB.lock() else {
        return Err("did not join the job".to_owned());
    };
    let mut barrier = Calls::take()
        .and_then(|mut calls| calls.start_barrier(end))
        .map_err(text)?;
    let mut patience = Patience::default();
    loop {
        let mut calls = Calls::take().map_err(text)?;
        if calls.barrier(&mut barrier).map_err(text)? {
            return calls.finalize().map_err(text);
        }
        // Ranks that left in order may be waited for as long as they have something to do.
        if calls.state.failed && start.elapsed() >= EXIT_PATIENCE {
            return Err(format!(
                "waited {EXIT_PATIENCE:?} at the end, after a failure, for ranks that did not come"
            ));
        }
        drop(calls);
        patience.pause(Duration::from_millis(10));
    }
}
