//! Ranks that are threads and exchange bytes over a transport in memory.
#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    clippy::wildcard_enum_match_arm,
    reason = "each test uses a part, and ends at the first error"
)]

use std::{sync::Arc, thread, time::Duration};

use burn_shard_comm::{
    Error, Pairwise, ProcessGroup, Transport,
    conformance::{Launcher, MemoryTransport},
};

/// Long enough never to be met by accident; no test waits for it.
pub const LONG: Duration = Duration::from_secs(120);

pub struct Memory;

impl Launcher for Memory {
    fn run<F: Fn(ProcessGroup) + Sync>(&self, world_size: usize, f: F) {
        spawn(world_size, LONG, f);
    }
}

/// Runs `f` once per rank; results in rank order.
pub fn spawn<T: Send>(
    world_size: usize,
    deadline: Duration,
    f: impl Fn(ProcessGroup) -> T + Sync,
) -> Vec<T> {
    over(MemoryTransport::group(world_size), deadline, f)
        .into_iter()
        .map(|result| result.unwrap())
        .collect()
}

/// Runs `f` once per transport; results in rank order, errors for ranks that panicked.
pub fn over<T: Send>(
    transports: Vec<impl Transport>,
    deadline: Duration,
    f: impl Fn(ProcessGroup) -> T + Sync,
) -> Vec<thread::Result<T>> {
    thread::scope(|scope| {
        let f = &f;
        let ranks: Vec<_> = transports
            .into_iter()
            .map(|transport| {
                let pairwise = Pairwise::new(transport, deadline);
                scope.spawn(move || f(ProcessGroup::new(Arc::new(pairwise))))
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join()).collect()
    })
}

/// Whether the first cause of `error` is something that `rank` did or did not do.
pub fn names(error: &Error, rank: usize) -> bool {
    match error.root_cause() {
        Error::RankDied { peer, .. } | Error::OutOfStep { peer, .. } => *peer == rank,
        Error::Deadline { missing, .. } | Error::RankLeft { missing, .. } => *missing == [rank],
        Error::RankPanicked { rank: guilty, .. } | Error::Aborted { rank: guilty, .. } => {
            *guilty == rank
        }
        _ => false,
    }
}
