//! Ranks as threads, each with NCCL's double and memory of its own.
#![allow(dead_code, reason = "each test binary uses a part")]

use std::{sync::Arc, time::Duration};

use burn_shard_comm::{Error, Local, ProcessGroup};
use burn_shard_nccl::{Memory, NcclCommunicator};
use burn_shard_nccl_double::{HostMemory, load};

/// Long enough never to be met by accident.
pub(crate) const LONG: Duration = Duration::from_secs(120);

/// One rank's communicator over `control`, and its memory.
pub(crate) fn join(control: &ProcessGroup) -> (NcclCommunicator, Arc<HostMemory>) {
    let memory = Arc::new(HostMemory::new(control.rank()));
    let shared: Arc<dyn Memory> = Arc::clone(&memory) as _;
    let communicator = NcclCommunicator::new(control, Ok(load()), Ok(shared)).unwrap();
    (communicator, memory)
}

/// Runs `f` on `world_size` ranks; the first panic is the error.
pub(crate) fn spawn<T: Send>(
    world_size: usize,
    deadline: Duration,
    f: impl Fn(ProcessGroup, Arc<HostMemory>) -> T + Sync,
) -> Result<Vec<T>, Error> {
    let local = Local::new(world_size)
        .threads_per_rank(1)
        .deadline(deadline);
    local.spawn(|control| {
        let (communicator, memory) = join(&control);
        drop(control);
        f(ProcessGroup::new(Arc::new(communicator)), memory)
    })
}
