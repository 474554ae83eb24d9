//! What is said between a rank and the store, once the rank was let in.

use std::{fmt, net::SocketAddr, time::Duration};

use serde::{Deserialize, Serialize};

use super::secret::Nonce;

/// Longest key of the store.
pub(super) const MAX_KEY_BYTES: usize = 128;
/// Longest value of the store.
pub(super) const MAX_VALUE_BYTES: usize = 64 << 10;
/// Longest text of a report.
pub(super) const MAX_TEXT_BYTES: usize = 4 << 10;
/// Longest message to the store.
pub(super) const MAX_REQUEST_BYTES: usize = MAX_VALUE_BYTES + 1024;
/// Longest message from the store: a value, or where all ranks listen.
pub(super) const MAX_REPLY_BYTES: usize = 1 << 20;

/// The payload of the handshake with the store.
#[derive(Serialize, Deserialize)]
pub(super) struct Join {
    pub(super) rank: usize,
    pub(super) world_size: usize,
    pub(super) job_id: String,
    /// Where this rank listens for the others, if it does. An unspecified address, on rank 0 only:
    /// that at which the others reach the store.
    pub(super) listens: Option<SocketAddr>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Request {
    /// This rank is at the next barrier.
    Arrive,
    Set {
        key: String,
        value: Vec<u8>,
    },
    Get {
        key: String,
    },
    /// This rank's deadline has passed: the job fails, unless what it waits for is on the way.
    GiveUp {
        waited: Duration,
    },
    /// This rank fails, and says why.
    Report {
        message: String,
    },
    /// This rank needs the store no more.
    Bye,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Reply {
    /// All ranks have joined.
    Everyone {
        session: Nonce,
        listens: Vec<Option<SocketAddr>>,
    },
    /// All ranks are at the barrier.
    Released,
    /// Whether there was room.
    Stored(bool),
    Value(Option<Vec<u8>>),
    Fault(JobFault),
}

/// Why a rendezvous cannot succeed, as the store on rank 0 tells it to every rank.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum JobFault {
    /// A process of another job: told to that process only.
    OtherJob {
        /// Job of the store.
        expected: String,
        /// Job of the process.
        found: String,
    },
    /// Two processes have the same rank.
    DuplicateRank {
        /// The rank that is there twice.
        duplicate: usize,
        /// Where the first one came from.
        first: SocketAddr,
        /// Where the second one came from.
        second: SocketAddr,
    },
    /// Ranks do not agree on how many they are.
    WorldSize {
        /// The rank that differs from rank 0.
        other: usize,
        /// Its world size.
        found: usize,
        /// That of rank 0.
        expected: usize,
    },
    /// A rank that is not below the world size.
    RankOutOfRange {
        /// The rank.
        other: usize,
        /// Ranks in the job.
        world_size: usize,
    },
    /// A rank's process ended, or its connection broke, before the rendezvous was over.
    Died {
        /// The rank.
        other: usize,
        /// What the system said.
        message: String,
    },
    /// A rank has waited as long as it may.
    Missing {
        /// The rank that gave up.
        waiting: usize,
        /// How long it had waited.
        waited: Duration,
        /// Those that had not come.
        missing: Vec<usize>,
        /// Connections that were refused in the meantime; empty if none.
        refused: String,
    },
    /// A rank failed and said why.
    Reported {
        /// The rank.
        other: usize,
        /// What it said.
        message: String,
    },
}

impl fmt::Display for JobFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OtherJob { expected, found } => write!(
                f,
                "this process belongs to job \"{found}\", the store at the master's address to job \"{expected}\" (give each job its own MASTER_PORT)"
            ),
            Self::DuplicateRank {
                duplicate,
                first,
                second,
            } => write!(
                f,
                "two processes are rank {duplicate}: one from {first}, one from {second} (each process needs a RANK of its own; an earlier run may still be there)"
            ),
            Self::WorldSize {
                other,
                found,
                expected,
            } => write!(
                f,
                "rank {other} has a world size of {found}, rank 0 of {expected} (start all ranks with the same WORLD_SIZE)"
            ),
            Self::RankOutOfRange { other, world_size } => write!(
                f,
                "rank {other} in a job of {world_size} (ranks are 0..{world_size})"
            ),
            Self::Died { other, message } => write!(
                f,
                "rank {other} was gone before all ranks were connected: {message} (see what it printed last)"
            ),
            Self::Missing {
                waiting,
                waited,
                missing,
                refused,
            } => {
                write!(
                    f,
                    "rank {waiting} waited {waited:.1?} for ranks {missing:?}, which did not come (see whether they were started and reach the master, or raise BURN_SHARD_TIMEOUT)"
                )?;
                if !refused.is_empty() {
                    write!(f, "; {refused}")?;
                }
                Ok(())
            }
            Self::Reported { other, message } => write!(f, "rank {other} failed: {message}"),
        }
    }
}
