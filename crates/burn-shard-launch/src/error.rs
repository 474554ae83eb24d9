//! Why a job was not started, or could not be ended.

use std::{ffi::OsString, io, time::Duration};

/// What [`launch`](crate::launch()) refuses or fails with. A rank that fails is not among it: see
/// [`Outcome`](crate::Outcome).
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// Refusal: this system has neither process groups nor signals.
    #[error(
        "processes are launched on Unix only (run ranks as threads, ProcessGroup::spawn, or start each process with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT set)"
    )]
    NotUnix,

    /// Refusal: nothing to start.
    #[error("no ranks to start (-n is 0)")]
    NoRanks,

    /// Refusal: this host is not among those of the job.
    #[error("node rank {node_rank} of {nnodes} nodes (nodes are counted from 0)")]
    NodeRankOutOfRange {
        /// Number of this host.
        node_rank: usize,
        /// Hosts in the job.
        nnodes: usize,
    },

    /// Refusal: more ranks than a job may have.
    #[error(
        "{local_world_size} ranks on each of {nnodes} nodes, but a job has at most {max_world_size} (is -n right?)"
    )]
    TooManyRanks {
        /// Ranks on this host.
        local_world_size: usize,
        /// Hosts in the job.
        nnodes: usize,
        /// Ranks that a job may have.
        max_world_size: usize,
    },

    /// Refusal: the launcher may not open as many files as the pipes to its ranks take.
    #[error(
        "{ranks} ranks need {needed} open files in the launcher, but at most {limit} are allowed (raise the hard limit, see ulimit -Hn, or start fewer ranks)"
    )]
    TooFewFiles {
        /// Ranks on this host.
        ranks: usize,
        /// Files that are needed.
        needed: usize,
        /// Files that are allowed.
        limit: u64,
    },

    /// Refusal: the token cannot be one.
    #[error("the token is {reason} (to make one: head -c 32 /dev/urandom | base64)")]
    BadToken {
        /// What is wrong with it.
        reason: &'static str,
    },

    /// Refusal: ranks of several hosts without a shared secret.
    #[error(
        "{nnodes} nodes need one secret: set BURN_SHARD_TOKEN to the same value on each, or pass --token-file (to make one: head -c 32 /dev/urandom | base64)"
    )]
    NoToken {
        /// Hosts in the job.
        nnodes: usize,
    },

    /// Refusal: several hosts, and nowhere to meet.
    #[error("{nnodes} nodes need a place to meet: --master HOST:PORT, on each node the same")]
    NoMaster {
        /// Hosts in the job.
        nnodes: usize,
    },

    /// Refusal: ranks would have to listen on more than loopback, and nobody said so.
    #[error(
        "the master {master} is not on loopback, and nothing says where ranks may listen: pass --bind ADDRESS (an address of this host in the network of the job; 0.0.0.0 for all), or set BURN_SHARD_BIND"
    )]
    NoBind {
        /// The master.
        master: String,
    },

    /// Refusal: not a place to meet.
    #[error(
        "the master is {value:?}, which is not HOST:PORT (such as gpu001:29500, or [::1]:29500)"
    )]
    BadMaster {
        /// What was given.
        value: String,
    },

    /// Refusal: restarts of a job that other launchers take part in.
    #[error(
        "restarts are for a job on one host: of {nnodes} nodes the launchers do not tell each other of failures (without --max-restarts; let the cluster's scheduler queue the job again)"
    )]
    RestartsAcrossNodes {
        /// Hosts in the job.
        nnodes: usize,
    },

    /// Refusal: a least number of ranks that no restart could keep.
    #[error(
        "at least {min_ranks} of {ranks} ranks with {max_restarts} restarts (--min-ranks is from 1 to -n, and takes --max-restarts)"
    )]
    BadMinRanks {
        /// The least number of ranks.
        min_ranks: usize,
        /// Ranks at the first start.
        ranks: usize,
        /// Restarts that are allowed.
        max_restarts: usize,
    },

    /// Failure: no free port, no random numbers, no pipe or thread.
    #[error("cannot {what}: {source}")]
    System {
        /// What was tried.
        what: &'static str,
        /// What the system said.
        source: io::Error,
    },

    /// Failure: a rank could not be started; those before it were killed.
    #[error("rank {rank}: cannot start {program:?}: {source}{}", hint(.source))]
    Start {
        /// The rank.
        rank: usize,
        /// The program.
        program: OsString,
        /// What the system said.
        source: io::Error,
    },

    /// Failure: a rank lives on after SIGKILL, waiting in the kernel.
    #[error(
        "rank {rank} (process {pid}) has not ended {waited:?} after SIGKILL (a driver or a file system may hold it)"
    )]
    Undead {
        /// The rank.
        rank: usize,
        /// Its process.
        pid: u32,
        /// Time since the signal.
        waited: Duration,
    },
}

impl LaunchError {
    /// What a command exits with: 2 for a refusal, 127 and 126 as shells do when a program is not found
    /// or cannot be run, 1 otherwise.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::NotUnix
            | Self::NoRanks
            | Self::NodeRankOutOfRange { .. }
            | Self::TooManyRanks { .. }
            | Self::TooFewFiles { .. }
            | Self::BadToken { .. }
            | Self::NoToken { .. }
            | Self::NoMaster { .. }
            | Self::NoBind { .. }
            | Self::BadMaster { .. }
            | Self::RestartsAcrossNodes { .. }
            | Self::BadMinRanks { .. } => 2,
            Self::Start { source, .. } if source.kind() == io::ErrorKind::NotFound => 127,
            Self::Start { .. } => 126,
            Self::System { .. } | Self::Undead { .. } => 1,
        }
    }
}

fn hint(source: &io::Error) -> &'static str {
    if source.kind() == io::ErrorKind::NotFound {
        " (not in PATH: give its path, as ./program)"
    } else {
        ""
    }
}
