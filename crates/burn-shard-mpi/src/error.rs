//! What keeps a rank from joining the job.

use std::time::Duration;

use burn_shard_comm::PlacementError;

/// Why there is no transport. What goes wrong later is a [`Fault`](burn_shard_comm::Fault).
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MpiError {
    /// A call of the MPI library failed.
    #[error("{}{call} failed with code {code}: {message}", of(*.rank))]
    Call {
        /// This rank, once it is known.
        rank: Option<usize>,
        /// The call.
        call: &'static str,
        /// What it returned.
        code: i32,
        /// What the library says about it.
        message: String,
    },

    /// Refusal: `BURN_SHARD_TIMEOUT` is no number of seconds. MPI is not initialized.
    #[error(transparent)]
    Timeout(#[from] PlacementError),

    /// The library does not let different threads of one process call it, not even in turn.
    #[error(
        "MPI offers thread level {provided}, but {required} (MPI_THREAD_SERIALIZED) is needed (use an MPI library built with thread support)"
    )]
    ThreadLevel {
        /// What is needed.
        required: i32,
        /// What `MPI_Init_thread` provided.
        provided: i32,
    },

    /// Another part of the program has called `MPI_Init`, or `MPI_Finalize`.
    #[error(
        "MPI was initialized by another part of this program (let MpiTransport do it, before anything else calls MPI)"
    )]
    NotOurs,

    /// The process is about to end.
    #[error("rank {rank}: MPI is finalized, this process is about to end")]
    Finalized {
        /// This rank.
        rank: usize,
    },

    /// More ranks were asked for than there are.
    #[error(
        "rank {rank}: a group of {world_size} ranks, but the job has {job_size} (mpirun -n {world_size})"
    )]
    GroupSize {
        /// This rank.
        rank: usize,
        /// What was asked for.
        world_size: usize,
        /// Ranks of the job.
        job_size: usize,
    },

    /// Some rank of the job did not ask for a transport in time.
    #[error(
        "rank {rank}: waited {waited:.1?} for all {job_size} ranks of the job to ask for a transport (slow starts: raise BURN_SHARD_TIMEOUT)"
    )]
    Deadline {
        /// This rank.
        rank: usize,
        /// Ranks of the job.
        job_size: usize,
        /// How long it waited.
        waited: Duration,
    },
}

fn of(rank: Option<usize>) -> String {
    rank.map_or_else(String::new, |rank| format!("rank {rank}: "))
}
