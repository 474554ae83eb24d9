//! Device memory that a communicator works on as it is, with no copy in host memory.
//!
//! A communicator that reaches a device's memory
//! ([`Communicator::memory_device`](burn_shard_comm::Communicator::memory_device)) is given addresses of
//! CubeCL's buffers. What it asks of their owner ([`burn_shard_nccl::Owner`]) is kept as follows.
//!
//! - *Stay as they are*: a handle is held for as long as a collective may use the memory. CubeCL neither
//!   frees nor moves it meanwhile, and Burn, which writes in place only what has one holder, copies it
//!   first.
//! - *Written before they are read*: buffers are resolved on CubeCL's own thread, behind all launches of
//!   this rank's thread, whose stream by then waits for the streams of other threads that wrote them;
//!   the communicator's stream then waits for that stream.
//! - *Read after they are written*: when a result is taken, this thread's stream waits for the
//!   communicator's. Nothing waits for an input, so that a backward goes on while gradients are reduced.
//!
//! So a rank's modules have to be used from one thread at a time, as everywhere in this crate.

#[cfg(feature = "cpu")]
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;

use std::any::Any;

use burn_cubecl::CubeDevice;
use burn_shard_comm::{DType, ProcessGroup, Segments, SegmentsMut};
use burn_shard_nccl::{DeviceSegments, Owner};
use burn_std::id::StreamId;
use cubecl::server::{Handle, ServerError};
use cubecl_common::device::DeviceId;
use cubecl_common::device_handle::{CallResultExt, DeviceHandle};
use cubecl_server::server::ServerStorage;
use cubecl_server::storage::ComputeStorage;

use crate::Error;
use crate::purpose::Purpose;
use crate::storage::device::{Accelerator, DeviceFlat, DeviceTensor};

/// Shows that the communicator of a group reaches the memory of the module's device.
#[derive(Clone, Debug)]
pub(crate) struct Direct {
    rank: usize,
    accelerator: Accelerator,
    /// The number of the device among those of its kind.
    number: usize,
    /// For where there is no stream to order, and the host has to wait.
    #[cfg(feature = "cpu")]
    deadline: std::time::Duration,
}

impl Direct {
    /// `None`: collectives of the device's tensors go through host memory.
    ///
    /// # Errors
    ///
    /// [`Error::OtherDevice`] if the communicator reaches another device of the kind.
    pub(crate) fn of(
        accelerator: &Accelerator,
        group: &ProcessGroup,
    ) -> Result<Option<Self>, Error> {
        let device = accelerator.device();
        let Some(reached) = group.communicator().memory_device() else {
            return Ok(None);
        };
        #[allow(clippy::wildcard_enum_match_arm, reason = "other kinds of device")]
        let number = match device {
            #[cfg(feature = "cuda")]
            CubeDevice::Cuda(device) => device.index,
            #[cfg(feature = "cpu")]
            CubeDevice::Cpu(_) => 0,
            _ => return Ok(None),
        };
        let rank = group.rank();
        if number != reached {
            return Err(Error::OtherDevice {
                rank,
                device: format!("{device:?}"),
                reached,
            });
        }
        Ok(Some(Self {
            rank,
            accelerator: accelerator.clone(),
            number,
            #[cfg(feature = "cpu")]
            deadline: group.deadline(),
        }))
    }

    pub(crate) fn accelerator(&self) -> &Accelerator {
        &self.accelerator
    }

    /// Whole tensors, as the input of a collective.
    pub(crate) fn tensors(
        &self,
        dtype: DType,
        purpose: Purpose,
        tensors: &[(usize, Option<DeviceTensor>)],
    ) -> Result<DirectSegments, Error> {
        let parts = tensors
            .iter()
            .map(|(numel, tensor)| (*numel, tensor.as_ref().map(DeviceTensor::handle)));
        self.segments(dtype, purpose, parts.collect())
    }

    /// Pieces of buffers, as `(offset, numel)` each, as the output of a collective.
    pub(crate) fn pieces(
        &self,
        dtype: DType,
        parts: &[(&DeviceFlat, Vec<(usize, usize)>)],
    ) -> Result<DirectSegments, Error> {
        let pieces = parts.iter().flat_map(|(flat, ranges)| {
            let piece = |&(offset, numel): &(usize, usize)| {
                (numel, Some(flat.view(offset, &[numel], dtype).handle()))
            };
            ranges.iter().map(piece)
        });
        self.segments(dtype, Purpose::default(), pieces.collect())
    }

    fn segments(
        &self,
        dtype: DType,
        purpose: Purpose,
        parts: Vec<(usize, Option<Handle>)>,
    ) -> Result<DirectSegments, Error> {
        let numels = parts.iter().map(|&(numel, _)| numel).collect();
        // There is nothing at the address of nothing.
        let parts: Vec<Option<Handle>> = parts
            .into_iter()
            .map(|(numel, handle)| handle.filter(|_| numel > 0))
            .collect();
        let held = parts.iter().flatten().cloned().collect();
        let (addresses, owner) = self.resolve(parts).map_err(|error| Error::DeviceMemory {
            rank: self.rank,
            message: error.to_string(),
        })?;
        // SAFETY: CubeCL has just said where the buffers are; they are at least as long as their
        // tensors, and aligned for any element. The handles keep them there while the segments live.
        let device = unsafe { DeviceSegments::new(self.number, addresses, owner) };
        Ok(DirectSegments {
            dtype,
            numels,
            purpose,
            device,
            _held: held,
        })
    }

    fn resolve(&self, parts: Vec<Option<Handle>>) -> Result<Resolved, ServerError> {
        #[allow(clippy::wildcard_enum_match_arm, reason = "see `Direct::of`")]
        match self.accelerator.device() {
            #[cfg(feature = "cuda")]
            CubeDevice::Cuda(device) => cuda::resolve(device, parts),
            #[cfg(feature = "cpu")]
            CubeDevice::Cpu(device) => cpu::resolve(device, parts, self.deadline),
            _ => unreachable!("the kind of device was checked when the module was wrapped"),
        }
    }
}

/// Addresses of buffers, and what orders their use.
type Resolved = (Vec<Option<u64>>, Box<dyn Owner>);

type Resource<S> = <<S as ServerStorage>::Storage as ComputeStorage>::Resource;

/// Where CubeCL has put buffers, asked behind all that this thread has launched.
fn addresses<S: ServerStorage>(
    device: DeviceId,
    parts: Vec<Option<Handle>>,
    address: fn(&Resource<S>) -> u64,
) -> Result<Vec<Option<u64>>, ServerError> {
    let stream = StreamId::current();
    let one = move |server: &mut S, part: Option<Handle>| {
        let Some(handle) = part else { return Ok(None) };
        let resource = server.get_resource(handle.binding(), stream)?;
        Ok(Some(address(resource.resource())))
    };
    DeviceHandle::<S>::new(device)
        .submit_blocking(move |server| parts.into_iter().map(|part| one(server, part)).collect())
        .unwrap_or_resume()
}

/// A list of segments in device memory.
pub(crate) struct DirectSegments {
    dtype: DType,
    numels: Vec<usize>,
    purpose: Purpose,
    device: DeviceSegments,
    _held: Vec<Handle>,
}

impl Segments for DirectSegments {
    fn dtype(&self) -> DType {
        self.dtype
    }

    fn count(&self) -> usize {
        self.numels.len()
    }

    fn numel(&self, index: usize) -> usize {
        self.numels[index]
    }

    fn bytes(&self, _index: usize) -> Option<&[u8]> {
        unreachable!("communicators that reach a device's memory do not ask for bytes")
    }

    fn label(&self) -> u64 {
        self.purpose.label
    }

    fn describe(&self) -> String {
        self.purpose.text.clone()
    }

    fn device(&self) -> Option<&dyn Any> {
        Some(&self.device)
    }
}

impl SegmentsMut for DirectSegments {
    fn dtype(&self) -> DType {
        self.dtype
    }

    fn count(&self) -> usize {
        self.numels.len()
    }

    fn numel(&self, index: usize) -> usize {
        self.numels[index]
    }

    fn bytes_mut(&mut self, _index: usize) -> &mut [u8] {
        unreachable!("communicators that reach a device's memory do not ask for bytes")
    }

    fn device(&self) -> Option<&dyn Any> {
        Some(&self.device)
    }
}
