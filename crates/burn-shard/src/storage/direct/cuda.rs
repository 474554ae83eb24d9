//! NVIDIA GPUs: two streams, ordered by events.

use burn_shard_nccl::{Memory, NcclError, Owner};
use burn_std::id::StreamId;
use cubecl::cuda::{CudaDevice, CudaRuntime};
use cubecl::server::{Handle, ServerError};
use cubecl_common::device::{Device as _, DeviceId};
use cubecl_common::device_handle::{CallResultExt, DeviceHandle};
use cubecl_server::runtime::Runtime;
use cubecl_server::stream::WriteScoped;

use super::{Resolved, addresses};

type Server = <CudaRuntime as Runtime>::Server;

pub(super) fn resolve(
    device: &CudaDevice,
    parts: Vec<Option<Handle>>,
) -> Result<Resolved, ServerError> {
    let device = device.to_id();
    let addresses = addresses::<Server>(device, parts, |resource| resource.ptr)?;
    let owner = CudaOwner {
        device,
        stream: StreamId::current(),
    };
    Ok((addresses, Box::new(owner)))
}

struct CudaOwner {
    device: DeviceId,
    /// The stream of the thread that resolved the buffers.
    stream: StreamId,
}

impl CudaOwner {
    /// The `CUstream` behind the thread's stream, with all that the thread has launched on it.
    fn launched(&self) -> Result<u64, NcclError> {
        let id = self.stream;
        // Tasks of one thread run in order, so those that launch are over.
        let stream = DeviceHandle::<Server>::new(self.device)
            .submit_blocking(move |server: &mut Server| {
                let stream = server.write_streams().try_stream_mut(&id)?;
                Some(stream.sys.expose_provenance() as u64)
            })
            .unwrap_or_resume();
        stream.ok_or_else(|| NcclError::Owner {
            message: format!("CubeCL has no stream for {id:?}"),
        })
    }
}

impl Owner for CudaOwner {
    fn before(&self, memory: &dyn Memory) -> Result<(), NcclError> {
        // SAFETY: a stream of the device, which CubeCL keeps for as long as the process lives.
        unsafe { memory.wait_for(self.launched()?) }
    }

    fn after(&self, memory: &dyn Memory) -> Result<(), NcclError> {
        // SAFETY: as above.
        unsafe { memory.hold_up(self.launched()?) }
    }
}
