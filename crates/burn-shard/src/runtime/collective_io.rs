//! What collectives read and write: tensors in host memory; copies there of tensors on a device; or
//! the device's memory itself, where the process group's communicator reaches it.

use std::sync::Arc;

use burn_shard_comm::{DType, Error as CommError, Segments, SegmentsMut, Work};

use super::context::Context;
use crate::Error;
use crate::plan::layout::ParamSpec;
use crate::purpose::Purpose;
#[cfg(feature = "cubecl")]
use crate::storage::device::DeviceFlat;
#[cfg(feature = "nccl")]
use crate::storage::direct::DirectSegments;
use crate::storage::flat::{Flat, FlatTensor};
use crate::storage::host::{HostTensor, PiecesMut, TensorSegments, pieces_mut};
use crate::storage::ledger::MemoryKind;
use crate::storage::pool::Buffer;

/// What a collective reads.
pub(crate) enum CollectiveInput {
    Host(Arc<TensorSegments>),
    #[cfg(feature = "nccl")]
    Direct(Arc<DirectSegments>),
}

impl CollectiveInput {
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
pub(crate) enum OutputBuffer {
    Host(Buffer),
    #[cfg(feature = "cubecl")]
    Device(DeviceFlat),
}

/// A buffer, and the `(offset, numel)` of each of its pieces that a collective writes, ascending.
pub(crate) type OutputPiece<'a> = (&'a mut OutputBuffer, Vec<(usize, usize)>);

impl Context {
    /// Tensors as the input of a collective; `None` contributes zeros to a reduction.
    pub(crate) fn input(
        &self,
        dtype: DType,
        purpose: Purpose,
        tensors: Vec<(usize, Option<FlatTensor>)>,
    ) -> Result<CollectiveInput, Error> {
        #[cfg(feature = "nccl")]
        if let Some(direct) = self.memory.direct() {
            let tensors: Vec<_> = tensors
                .into_iter()
                .map(|(numel, tensor)| (numel, tensor.map(FlatTensor::into_device)))
                .collect();
            let segments = direct.tensors(dtype, purpose, &tensors)?;
            return Ok(CollectiveInput::Direct(Arc::new(segments)));
        }
        let tensors = tensors
            .into_iter()
            .map(|(numel, tensor)| (numel, tensor.map(FlatTensor::into_host)))
            .collect();
        Ok(CollectiveInput::Host(Arc::new(TensorSegments {
            dtype,
            tensors,
            purpose,
        })))
    }

    /// A buffer of zeros, where a collective can write it.
    pub(crate) fn zeroed_output_buffer(&self, kind: MemoryKind, bytes: usize) -> OutputBuffer {
        #[cfg(feature = "nccl")]
        if let Some(direct) = self.memory.direct() {
            let flat = direct.accelerator().zeros(bytes);
            flat.count(&self.ledger, kind);
            return OutputBuffer::Device(flat);
        }
        OutputBuffer::Host(self.pool.zeros(kind, bytes))
    }

    /// The contents of `flat` where collectives read them, so that tensors cut from there need no copy each.
    pub(crate) fn readable(&self, flat: &Flat) -> Flat {
        if self.memory.collectives_in_place() {
            flat.clone()
        } else {
            Flat::Host(flat.to_host())
        }
    }

    /// A buffer of `bytes` bytes of arbitrary contents, where a collective can write it.
    pub(crate) fn output_buffer(&self, kind: MemoryKind, bytes: usize) -> OutputBuffer {
        #[cfg(feature = "nccl")]
        if let Some(direct) = self.memory.direct() {
            let flat = direct.accelerator().empty(bytes);
            flat.count(&self.ledger, kind);
            return OutputBuffer::Device(flat);
        }
        OutputBuffer::Host(self.pool.take(kind, bytes))
    }

    /// The pieces of buffers as the output of a collective.
    pub(crate) fn output<'a>(
        &self,
        dtype: DType,
        parts: Vec<OutputPiece<'a>>,
    ) -> Result<Box<dyn SegmentsMut + 'a>, Error> {
        #[cfg(feature = "nccl")]
        if let Some(direct) = self.memory.direct() {
            let parts: Vec<_> = parts
                .iter()
                .map(|(buffer, ranges)| (buffer.device(), ranges.clone()))
                .collect();
            return Ok(Box::new(direct.pieces(dtype, &parts)?));
        }
        let mut pieces = Vec::new();
        for (buffer, ranges) in parts {
            let cut = pieces_mut(buffer.bytes_mut(), dtype, ranges.into_iter());
            pieces.extend(cut.pieces);
        }
        Ok(Box::new(PiecesMut { dtype, pieces }))
    }

    /// Ends a collective whose outputs are whole parameters, in this order, each in a buffer of its own.
    ///
    /// # Errors
    ///
    /// `failed` says what the communicator's mean here.
    pub(crate) fn receive_whole(
        &self,
        kind: MemoryKind,
        dtype: DType,
        members: &[usize],
        work: Box<dyn Work>,
        failed: impl FnOnce(CommError) -> Error,
    ) -> Result<Vec<FlatTensor>, Error> {
        let params: Vec<&ParamSpec> = members.iter().map(|&i| &self.plan.params[i]).collect();
        let buffer =
            |param: &&ParamSpec| self.output_buffer(kind, param.numel() * dtype.size_bytes());
        let mut buffers: Vec<OutputBuffer> = params.iter().map(buffer).collect();
        let whole = params.iter().map(|param| vec![(0, param.numel())]);
        let mut output = self.output(dtype, buffers.iter_mut().zip(whole).collect())?;
        work.finish(&mut *output).map_err(failed)?;
        drop(output);
        let view = |(buffer, param): (OutputBuffer, &ParamSpec)| {
            self.commit(kind, buffer).view(0, &param.shape, dtype)
        };
        Ok(buffers.into_iter().zip(params).map(view).collect())
    }

    /// Puts what a collective has written where the module's tensors live.
    pub(crate) fn commit(&self, kind: MemoryKind, buffer: OutputBuffer) -> Flat {
        match buffer {
            OutputBuffer::Host(buffer) => self.place_host(kind, buffer),
            #[cfg(feature = "cubecl")]
            OutputBuffer::Device(flat) => Flat::Device(flat),
        }
    }
}

impl OutputBuffer {
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
