//! Ranks that exchange bytes: the conformance suite over a transport in memory.

use std::{sync::Arc, thread, time::Duration};

use burn_shard_comm::{
    Pairwise, ProcessGroup,
    conformance::{Launcher, MemoryTransport},
};

struct Memory;

impl Launcher for Memory {
    fn run<F: Fn(ProcessGroup) + Sync>(&self, world_size: usize, f: F) {
        thread::scope(|scope| {
            for transport in MemoryTransport::group(world_size) {
                let pairwise = Pairwise::new(transport, Duration::from_secs(120));
                let f = &f;
                scope.spawn(move || f(ProcessGroup::new(Arc::new(pairwise))));
            }
        });
    }
}

burn_shard_comm::conformance_tests!(Memory);
