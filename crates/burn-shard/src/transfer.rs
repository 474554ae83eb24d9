//! What collectives read and write: tensors in host memory; copies there of tensors on a device; or
//! the device's memory itself, where the group's communicator reaches it.

use std::sync::Arc;

use burn_shard_comm::{DType, Segments, SegmentsMut};

use crate::Error;
use crate::buffer::Buffer;
use crate::context::Context;
#[cfg(feature = "cubecl")]
use crate::device::DeviceFlat;
#[cfg(feature = "nccl")]
use crate::direct::DirectSegments;
use crate::flat::{Flat, FlatTensor};
use crate::host::{HostTensor, PiecesMut, TensorSegments, pieces_mut};
use crate::memory::MemoryKind;

/// What a collective reads.
pub(crate) enum Input {
    Host(Arc<TensorSegments>),
    #[cfg(feature = "nccl")]
    Direct(Arc<DirectSegments>),
}

impl Input {
    pub(crate) fn segments(&self) -> Arc<dyn Segments> {
        match self {
            Self::Host(segments) => Arc::clone(segments) as _,
            #[cfg(feature = "nccl")]
            Self::Direct(segments) => Arc::clone(segments) as _,
        }
    }

    /// The tensors in host memory; those that nobody else reads any more are free to be written.
    pub(crate) fn into_host(self) -> Vec<(usize, Option<HostTensor>)> {
        match self {
            Self::Host(segments) => match Arc::try_unwrap(segments) {
                Ok(segments) => segments.tensors,
                Err(shared) => shared.tensors.clone(),
            },
            #[cfg(feature = "nccl")]
            Self::Direct(_) => unreachable!("what the communicator reaches is on the device"),
        }
    }
}

/// A buffer that a collective is to write.
pub(crate) enum Fresh {
    Host(Buffer),
    #[cfg(feature = "cubecl")]
    Device(DeviceFlat),
}

/// A buffer, and the `(offset, numel)` of each of its pieces that a collective writes, ascending.
pub(crate) type Part<'a> = (&'a mut Fresh, Vec<(usize, usize)>);

impl Context {
    /// Tensors as the input of a collective; `None` contributes zeros to a reduction.
    pub(crate) fn input(
        &self,
        dtype: DType,
        label: u64,
        tensors: Vec<(usize, Option<FlatTensor>)>,
    ) -> Result<Input, Error> {
        #[cfg(feature = "nccl")]
        if let Some(direct) = self.memory.direct() {
            let tensors: Vec<_> = tensors
                .into_iter()
                .map(|(numel, tensor)| (numel, tensor.map(FlatTensor::into_device)))
                .collect();
            let segments = direct.tensors(dtype, label, &tensors)?;
            return Ok(Input::Direct(Arc::new(segments)));
        }
        let tensors = tensors
            .into_iter()
            .map(|(numel, tensor)| (numel, tensor.map(FlatTensor::into_host)))
            .collect();
        Ok(Input::Host(Arc::new(TensorSegments {
            dtype,
            tensors,
            label,
        })))
    }

    /// The same contents where collectives read them, so that tensors cut from it need no copy each.
    pub(crate) fn readable(&self, flat: &Flat) -> Flat {
        if self.memory.collectives_in_place() {
            flat.clone()
        } else {
            Flat::Host(flat.to_host())
        }
    }

    /// A buffer of `bytes` bytes with anything in them, where a collective can write it.
    pub(crate) fn fresh(&self, kind: MemoryKind, bytes: usize) -> Fresh {
        #[cfg(feature = "nccl")]
        if let Some(direct) = self.memory.direct() {
            let flat = direct.accelerator().empty(bytes);
            flat.count(&self.ledger, kind);
            return Fresh::Device(flat);
        }
        Fresh::Host(self.pool.take(kind, bytes))
    }

    /// The pieces of buffers as the output of a collective.
    pub(crate) fn output<'a>(
        &self,
        dtype: DType,
        parts: Vec<Part<'a>>,
    ) -> Result<Box<dyn SegmentsMut + 'a>, Error> {
        #[cfg(feature = "nccl")]
        if let Some(direct) = self.memory.direct() {
            let parts: Vec<_> = parts
                .iter()
                .map(|(fresh, ranges)| (fresh.device(), ranges.clone()))
                .collect();
            return Ok(Box::new(direct.pieces(dtype, &parts)?));
        }
        let mut pieces = Vec::new();
        for (fresh, ranges) in parts {
            let cut = pieces_mut(fresh.bytes_mut(), dtype, ranges.into_iter());
            pieces.extend(cut.pieces);
        }
        Ok(Box::new(PiecesMut { dtype, pieces }))
    }

    /// The buffer where the module's tensors live.
    pub(crate) fn place(&self, kind: MemoryKind, fresh: Fresh) -> Flat {
        match fresh {
            Fresh::Host(buffer) => self.place_host(kind, buffer),
            #[cfg(feature = "cubecl")]
            Fresh::Device(flat) => Flat::Device(flat),
        }
    }
}

impl Fresh {
    fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Host(buffer) => buffer.bytes_mut(),
            #[cfg(feature = "cubecl")]
            Self::Device(_) => unreachable!("what the communicator does not reach is on the host"),
        }
    }

    #[cfg(feature = "nccl")]
    fn device(&self) -> &DeviceFlat {
        match self {
            Self::Device(flat) => flat,
            Self::Host(_) => unreachable!("what the communicator reaches is on the device"),
        }
    }
}
