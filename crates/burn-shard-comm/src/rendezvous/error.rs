//! Why ranks did not find each other.

use std::{net::SocketAddr, time::Duration};

use super::message::JobFault;

/// Why ranks that are processes did not become a group.
///
/// `rank` is the rank that returns the error.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RendezvousError {
    /// The master is on another host, but nothing says where to listen.
    #[error(
        "rank {rank}: the master is {master}, but this process would listen on loopback only (set BURN_SHARD_BIND to an address of this host, or to 0.0.0.0 for all of them)"
    )]
    BindUnset {
        /// The rank.
        rank: usize,
        /// Host of rank 0.
        master: String,
    },

    /// Others could connect, and there is no secret to tell them from members of the job.
    #[error(
        "rank {rank}: will not listen on {address} without a token (set BURN_SHARD_TOKEN to the same secret on all ranks; without one, only loopback is allowed)"
    )]
    TokenUnset {
        /// The rank.
        rank: usize,
        /// Where it was to listen.
        address: String,
    },

    /// Others could connect, and the secret could be guessed.
    #[error(
        "rank {rank}: will not listen on {address} with so weak a token (BURN_SHARD_TOKEN needs at least {} bytes, {} of them different; to make one: head -c 32 /dev/urandom | base64)",
        crate::placement::Token::STRONG_BYTES,
        crate::placement::Token::STRONG_DIFFERENT
    )]
    TokenWeak {
        /// The rank.
        rank: usize,
        /// Where it was to listen.
        address: String,
    },

    /// The connections to the other ranks are more files than this process may open. All ranks are told.
    #[error(
        "rank {rank}: a job of {world_size} ranks takes {needed} open files on this rank, at most {limit} are allowed (raise the hard limit of open files on its host: ulimit -Hn, or LimitNOFILE of the service that starts ranks)"
    )]
    TooFewFiles {
        /// The rank.
        rank: usize,
        /// Ranks in the job.
        world_size: usize,
        /// Files that this rank needs.
        needed: u64,
        /// Files that it may open.
        limit: u64,
    },

    /// The rank is not below the world size.
    #[error("rank {rank} in a job of {world_size} (ranks are 0..{world_size})")]
    RankOutOfRange {
        /// The rank.
        rank: usize,
        /// Ranks in the job.
        world_size: usize,
    },

    /// The job has more ranks than can be told of each other.
    #[error(
        "rank {rank}: a job of {world_size} ranks, at most {max_world_size} are allowed (is WORLD_SIZE right?)"
    )]
    TooManyRanks {
        /// The rank.
        rank: usize,
        /// Ranks in the job.
        world_size: usize,
        /// Ranks it may have.
        max_world_size: usize,
    },

    /// The name of the job is too long to be sent.
    #[error("rank {rank}: the job id has {found_bytes} bytes, at most {max_bytes} are allowed")]
    JobIdTooLong {
        /// The rank.
        rank: usize,
        /// Bytes of the name.
        found_bytes: usize,
        /// Bytes it may have.
        max_bytes: usize,
    },

    /// Nothing can listen there: the port is taken, or the address is not this host's.
    #[error(
        "rank {rank}: cannot listen on {address}: {message} (is MASTER_PORT taken by an earlier run or another job, and is the address one of this host?)"
    )]
    Listen {
        /// The rank.
        rank: usize,
        /// Where it was to listen.
        address: SocketAddr,
        /// What the system said.
        message: String,
    },

    /// Rank 0 was not reached in time.
    #[error(
        "rank {rank}: no master at {address} after {waited:.1?}: {message} (was rank 0 started, are MASTER_ADDR and MASTER_PORT its own, does a firewall let this host through?)"
    )]
    NoMaster {
        /// The rank.
        rank: usize,
        /// Where rank 0 was to be.
        address: String,
        /// How long it was tried.
        waited: Duration,
        /// What the last attempt ended with.
        message: String,
    },

    /// Something else than burn-shard listens at the master's address.
    #[error(
        "rank {rank}: what listens on {address} is not burn-shard, it answers {answer} (is MASTER_PORT right and free on the master's host?)"
    )]
    NotBurnShard {
        /// The rank.
        rank: usize,
        /// Where rank 0 was to be.
        address: String,
        /// The first bytes of what it sent.
        answer: String,
    },

    /// Another version of burn-shard listens at the master's address.
    #[error(
        "rank {rank}: {address} speaks version {found} of the protocol, this process {expected} (run the same build on all ranks)"
    )]
    Version {
        /// The rank.
        rank: usize,
        /// The other end.
        address: String,
        /// Its version.
        found: u16,
        /// That of this process.
        expected: u16,
    },

    /// The other end has another token.
    #[error(
        "rank {rank}: {address} has another token (set BURN_SHARD_TOKEN to the same secret on all ranks, and give each job its own MASTER_PORT)"
    )]
    Token {
        /// The rank.
        rank: usize,
        /// The other end.
        address: String,
    },

    /// The rendezvous failed for all ranks.
    #[error("rank {rank}: {fault}")]
    Job {
        /// The rank.
        rank: usize,
        /// What the store said.
        fault: JobFault,
    },

    /// Rank 0, which serves the store, is gone or silent.
    #[error(
        "rank {rank}: lost the master at {address}: {message} (rank 0 has probably ended: see what it printed last)"
    )]
    MasterLost {
        /// The rank.
        rank: usize,
        /// Where rank 0 was.
        address: SocketAddr,
        /// What happened.
        message: String,
    },

    /// Another rank that has joined cannot be connected to.
    #[error(
        "rank {rank}: cannot reach rank {peer} at {address} after {waited:.1?}: {message} (does BURN_SHARD_BIND name an interface that all hosts reach, does a firewall let this host through?)"
    )]
    Unreachable {
        /// The rank.
        rank: usize,
        /// The other one.
        peer: usize,
        /// Where it listens.
        address: String,
        /// How long it was tried.
        waited: Duration,
        /// What the last attempt ended with.
        message: String,
    },

    /// Other ranks that have joined did not connect to this one.
    #[error(
        "rank {rank}: waited {waited:.1?} on {address} for connections of ranks {peers:?} (does BURN_SHARD_BIND name an interface that all hosts reach, does a firewall let them through?)"
    )]
    Unconnected {
        /// The rank.
        rank: usize,
        /// Those that did not connect.
        peers: Vec<usize>,
        /// Where this rank listens.
        address: SocketAddr,
        /// How long it waited.
        waited: Duration,
    },

    /// No rank has set this key in time.
    #[error("rank {rank}: waited {waited:.1?} for the key \"{key}\", which no rank has set")]
    NoValue {
        /// The rank.
        rank: usize,
        /// The key.
        key: String,
        /// How long it waited.
        waited: Duration,
    },

    /// A key or a value is too long, or the store is full.
    #[error(
        "rank {rank}: cannot store {value_bytes} bytes under a key of {key_bytes} (a key has at most {max_key_bytes}, a value at most {max_value_bytes}, all together 16 MiB)"
    )]
    TooLarge {
        /// The rank.
        rank: usize,
        /// Bytes of the key.
        key_bytes: usize,
        /// Bytes of the value.
        value_bytes: usize,
        /// Bytes a key may have.
        max_key_bytes: usize,
        /// Bytes a value may have.
        max_value_bytes: usize,
    },

    /// The system did not do what it was asked to.
    #[error("rank {rank}: cannot {action}: {message}")]
    System {
        /// The rank.
        rank: usize,
        /// What it was asked to do.
        action: &'static str,
        /// What it said.
        message: String,
    },
}
