//! CubeCL's CPU runtime, whose buffers are host memory: there are no streams to order, so the host waits.

use std::thread;
use std::time::{Duration, Instant};

use burn_shard_nccl::{Memory, NcclError, Owner};
use burn_std::id::StreamId;
use cubecl::client::Client;
use cubecl::cpu::{CpuDevice, CpuRuntime};
use cubecl::server::{Handle, ServerError};
use cubecl_common::device::Device as _;
use cubecl_server::runtime::Runtime;

use super::{Resolved, addresses};

type Server = <CpuRuntime as Runtime>::Server;

pub(super) fn resolve(
    device: &CpuDevice,
    parts: Vec<Option<Handle>>,
    deadline: Duration,
) -> Result<Resolved, ServerError> {
    let addresses = addresses::<Server>(device.to_id(), parts, |resource| {
        resource.get_write_ptr_and_length().0.expose_provenance() as u64
    })?;
    let owner = CpuOwner {
        client: CpuRuntime::client(device),
        stream: StreamId::current(),
        deadline,
    };
    Ok((addresses, Box::new(owner)))
}

struct CpuOwner {
    client: Client,
    /// The stream of the thread that resolved the buffers.
    stream: StreamId,
    deadline: Duration,
}

impl Owner for CpuOwner {
    fn before(&self, _memory: &dyn Memory) -> Result<(), NcclError> {
        let sync = || cubecl::future::block_on(self.client.sync());
        self.stream
            .executes(sync)
            .map_err(|error| NcclError::Owner {
                message: error.to_string(),
            })
    }

    fn after(&self, memory: &dyn Memory) -> Result<(), NcclError> {
        let event = memory.record()?;
        let start = Instant::now();
        while !event.is_over()? {
            if start.elapsed() >= self.deadline {
                return Err(NcclError::Timeout {
                    function: "what other ranks have to start too",
                    waited: start.elapsed(),
                });
            }
            thread::sleep(Duration::from_micros(20));
        }
        Ok(())
    }
}
