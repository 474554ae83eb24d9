//! The whole suite, through the calls of NCCL, over its double: bit by bit what ranks as threads give.

#![allow(clippy::unwrap_used, reason = "a test ends at the first error")]

mod common;

use std::{
    sync::{Arc, Barrier},
    thread,
};

use burn_shard_comm::{
    Pairwise, ProcessGroup,
    conformance::{self, Launcher, MemoryTransport},
};

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

/// With a control group that is made of messages, where causes travel.
struct OverMessages;

impl Launcher for OverMessages {
    fn run<F: Fn(ProcessGroup) + Sync>(&self, world_size: usize, f: F) {
        // Words overtake messages: a rank that aborts at once would find others that still join.
        let joined = &Barrier::new(world_size);
        thread::scope(|scope| {
            for transport in MemoryTransport::group(world_size) {
                let f = &f;
                scope.spawn(move || {
                    let control = Pairwise::new(transport, common::LONG);
                    let control = ProcessGroup::new(Arc::new(control));
                    let (communicator, _memory) = common::join(&control);
                    drop(control);
                    joined.wait();
                    f(ProcessGroup::new(Arc::new(communicator)));
                });
            }
        });
    }
}

#[test]
fn failures_travel_over_messages_too() {
    conformance::refusals_leave_the_group_usable(&OverMessages);
    conformance::mismatches_are_told_to_every_rank(&OverMessages);
    conformance::an_abort_reaches_every_rank(&OverMessages);
    conformance::a_failed_call_reaches_every_rank(&OverMessages);
    conformance::announcements_are_compared(&OverMessages);
}

burn_shard_comm::sub_group_tests!(Double);

/// With control groups that share a queue of messages.
mod over_messages {
    use super::OverMessages;

    burn_shard_comm::sub_group_tests!(OverMessages);
}
