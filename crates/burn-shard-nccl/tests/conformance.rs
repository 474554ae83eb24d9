//! The whole suite, through the calls of NCCL, over its double: bit by bit what ranks as threads give.

#![allow(clippy::unwrap_used, reason = "a test ends at the first error")]

mod common;

use burn_shard_comm::{ProcessGroup, conformance::Launcher};

struct Double;

impl Launcher for Double {
    fn run<F: Fn(ProcessGroup) + Sync>(&self, world_size: usize, f: F) {
        let result = common::spawn(world_size, common::LONG, |group, _| f(group));
        if let Err(error) = result {
            panic!("{error}");
        }
    }
}

burn_shard_comm::conformance_tests!(Double);
