//! Many launches in a row on CubeCL's CPU runtime.

use cubecl::client::Client;

use super::geometry::cpu_cores;

/// Launches after which to wait: half of what the client's queue holds.
const LAUNCHES: usize = 16;

/// Waits now and then while one call launches many kernels, on the CPU runtime alone.
///
/// That runtime has a worker pinned to each core, and a client that spins while its queue is full,
/// for milliseconds: on few cores it keeps the worker it waits for from running (350 us per launch
/// of 4 KiB on 2 cores). A client that waits for a flush sleeps (8 us).
pub(super) struct Throttle<'a> {
    client: &'a Client,
    launches: usize,
}

impl<'a> Throttle<'a> {
    pub(super) fn new(client: &'a Client) -> Self {
        Self {
            client,
            launches: 0,
        }
    }

    /// Counts one launch more.
    pub(super) fn launched(&mut self) {
        self.launches += 1;
        if self.launches.is_multiple_of(LAUNCHES) && cpu_cores(self.client).is_some() {
            // Failures of launches are reported where their results are read.
            self.client
                .flush()
                .expect("a flush of the CPU runtime should report nothing");
        }
    }
}
