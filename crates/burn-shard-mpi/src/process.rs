//! This process as a rank of the MPI job: how it joins. How it leaves is in `exit.rs`.
//!
//! MPI can be initialized once in the life of a process, whatever transports it has then.

use std::time::{Duration, Instant};

use burn_shard_comm::{Placement, ProcessGroup};
use parking_lot::Mutex;

use crate::{
    api::{self, Calls, Comm, TURN},
    error::MpiError,
    exit::leave,
    patience::Patience,
    single_copy::SingleCopy,
    watchdog::Watchdog,
};

/// What this process learned when it joined.
pub(crate) static JOB: Mutex<Option<Job>> = Mutex::new(None);

/// This process's place in the job; does not change.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Job {
    pub(crate) rank: usize,
    pub(crate) size: usize,
    pub(crate) local_rank: usize,
    pub(crate) local_size: usize,
    pub(crate) single_copy: SingleCopy,
    /// How long ranks wait for each other.
    pub(crate) deadline: Duration,
    /// All ranks, for when they end only: one that ends must not be taken for one that asks for a
    /// transport.
    pub(crate) end: Comm,
}

impl Job {
    /// Initializes MPI at the first call. Waits for all ranks of the job.
    pub(crate) fn join() -> Result<Self, MpiError> {
        let mut job = JOB.lock();
        if let Some(job) = *job {
            return Ok(job);
        }
        let deadline = ProcessGroup::deadline_from_env()?;
        let watchdog = Watchdog::new(
            deadline,
            format!(
                "{}: waited {deadline:?} for the other ranks to join the job (MPI_Init; was each of them started by the same mpirun, and has it come to its group? slow starts: raise BURN_SHARD_TIMEOUT)",
                presumed_name()
            ),
        );
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
        drop(watchdog);
        let joined = *job.insert(Self {
            rank,
            size,
            local_rank,
            local_size,
            single_copy,
            deadline,
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
    pub(crate) fn duplicate(self) -> Result<Comm, MpiError> {
        let start = Instant::now();
        let mut duplicate = Calls::take()?.start_duplicate()?;
        let mut patience = Patience::default();
        loop {
            if let Some(comm) = Calls::take()?.duplicate(&mut duplicate)? {
                return Ok(comm);
            }
            let waited = start.elapsed();
            if waited >= self.deadline {
                failed();
                return Err(MpiError::Deadline {
                    rank: self.rank,
                    job_size: self.size,
                    waited,
                });
            }
            patience.pause(self.deadline - waited);
        }
    }
}

/// What the launcher's variables call this process, before MPI does.
fn presumed_name() -> String {
    let placement = Placement::from_vars(|name| std::env::var(name).ok());
    placement.ok().flatten().map_or_else(
        || "a rank".to_owned(),
        |placement| format!("rank {}", placement.rank),
    )
}

/// Not all ranks may arrive at the end.
pub(crate) fn failed() {
    TURN.lock().failed = true;
}
