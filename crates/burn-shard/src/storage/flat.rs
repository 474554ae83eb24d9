//! Flat buffers and the tensors that are views of them, in the memory of the host or of a device.
//!
//! What a collective reads and writes is the business of `runtime/collective_io.rs`; what lives on a device
//! is copied to the host by [`FlatTensor::into_host`], which is free for host memory.

use std::sync::Arc;

use burn::backend::flex::{Flex, FlexTensor};
use burn::backend::{Backend, DispatchDevice, tensor::FloatTensor};
use burn::tensor::{Bytes, Device, Tensor};
use burn_shard_comm::DType;
#[cfg(feature = "nccl")]
use burn_shard_comm::ProcessGroup;

#[cfg(feature = "nccl")]
use crate::Error;
#[cfg(feature = "cubecl")]
use crate::storage::device::{Accelerator, DeviceFlat, DeviceTensor};
#[cfg(feature = "nccl")]
use crate::storage::direct::Direct;
use crate::storage::host::{HostTensor, aligned, float_dtype};

/// Where the tensors of a module live.
#[derive(Clone, Debug)]
pub(crate) enum Memory {
    Host,
    #[cfg(feature = "cubecl")]
    Device(Accelerator),
    /// On a device whose memory the group's communicator reaches.
    #[cfg(feature = "nccl")]
    Direct(Direct),
}

impl Memory {
    /// The memory of tensors on `device`; `None` if that is of a backend this build cannot shard on.
    pub(crate) fn of(device: &Device) -> Option<Self> {
        #[allow(clippy::wildcard_enum_match_arm, reason = "backends of other features")]
        match device.clone().without_autodiff().as_dispatch() {
            DispatchDevice::Flex(_) => Some(Self::Host),
            #[cfg(feature = "cubecl")]
            DispatchDevice::Cube(device) => Some(Self::Device(Accelerator::new(device))),
            #[allow(unreachable_patterns, reason = "there may be no other backend")]
            _ => None,
        }
    }

    /// This memory, for a group whose communicator may reach the device.
    ///
    /// # Errors
    ///
    /// [`Error::OtherDevice`].
    #[cfg(feature = "nccl")]
    pub(crate) fn reached_by(self, group: &ProcessGroup) -> Result<Self, Error> {
        let Self::Device(accelerator) = self else {
            return Ok(self);
        };
        let direct = Direct::of(&accelerator, group)?;
        Ok(direct.map_or(Self::Device(accelerator), Self::Direct))
    }

    pub(crate) fn collectives_in_place(&self) -> bool {
        matches!(self, Self::Host) || self.is_reached()
    }

    /// Whether the module's tensors are on a device that the group's communicator reaches.
    pub(crate) fn is_reached(&self) -> bool {
        match self {
            Self::Host => false,
            #[cfg(feature = "cubecl")]
            Self::Device(_) => false,
            #[cfg(feature = "nccl")]
            Self::Direct(_) => true,
        }
    }

    /// The communicator's reach into device memory, if it reaches the module's device.
    #[cfg(feature = "nccl")]
    pub(crate) fn direct(&self) -> Option<&Direct> {
        match self {
            Self::Direct(direct) => Some(direct),
            Self::Host | Self::Device(_) => None,
        }
    }

    /// Multiple of bytes at which views of a buffer have to begin; 1 if anything goes.
    pub(crate) fn alignment(&self) -> usize {
        match self {
            Self::Host => 1,
            #[cfg(feature = "cubecl")]
            Self::Device(accelerator) => accelerator.alignment(),
            #[cfg(feature = "nccl")]
            Self::Direct(direct) => direct.accelerator().alignment(),
        }
    }

    /// The device, if the module's tensors live on one.
    #[cfg(feature = "cubecl")]
    pub(crate) fn accelerator(&self) -> Option<&Accelerator> {
        match self {
            Self::Host => None,
            Self::Device(accelerator) => Some(accelerator),
            #[cfg(feature = "nccl")]
            Self::Direct(direct) => Some(direct.accelerator()),
        }
    }
}

/// A flat buffer. Clones share it.
#[derive(Clone, Debug)]
pub(crate) enum Flat {
    Host(Arc<Bytes>),
    #[cfg(feature = "cubecl")]
    Device(DeviceFlat),
}

impl Flat {
    /// Whether both are one buffer.
    pub(crate) fn is(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Host(a), Self::Host(b)) => Arc::ptr_eq(a, b),
            #[cfg(feature = "cubecl")]
            (Self::Device(a), Self::Device(b)) => a.is(b),
            #[cfg(feature = "cubecl")]
            (Self::Host(_), Self::Device(_)) | (Self::Device(_), Self::Host(_)) => false,
        }
    }

    /// A tensor of `shape` that begins at element `offset`.
    pub(crate) fn view(&self, offset: usize, shape: &[usize], dtype: DType) -> FlatTensor {
        match self {
            Self::Host(bytes) => {
                FlatTensor::Host(HostTensor::view(Arc::clone(bytes), offset, shape, dtype))
            }
            #[cfg(feature = "cubecl")]
            Self::Device(flat) => FlatTensor::Device(flat.view(offset, shape, dtype)),
        }
    }

    /// Its contents in host memory.
    pub(crate) fn to_host(&self) -> Arc<Bytes> {
        match self {
            Self::Host(bytes) => Arc::clone(bytes),
            #[cfg(feature = "cubecl")]
            Self::Device(flat) => Arc::new(flat.download()),
        }
    }
}

/// A contiguous tensor. Clones share its memory.
#[derive(Clone, Debug)]
pub(crate) enum FlatTensor {
    Host(HostTensor),
    #[cfg(feature = "cubecl")]
    Device(DeviceTensor),
}

impl FlatTensor {
    pub(crate) fn dtype(&self) -> DType {
        match self {
            Self::Host(tensor) => tensor.dtype(),
            #[cfg(feature = "cubecl")]
            Self::Device(tensor) => tensor.dtype(),
        }
    }

    pub(crate) fn numel(&self) -> usize {
        match self {
            Self::Host(tensor) => tensor.numel(),
            #[cfg(feature = "cubecl")]
            Self::Device(tensor) => tensor.numel(),
        }
    }

    pub(crate) fn size_bytes(&self) -> usize {
        self.numel() * self.dtype().size_bytes()
    }

    /// The flat buffer this tensor is a view of, if it begins at element `offset` of a buffer of
    /// `flat_len` elements.
    pub(crate) fn flat(&self, offset: usize, flat_len: usize) -> Option<Flat> {
        match self {
            Self::Host(tensor) => tensor
                .flat(offset, flat_len)
                .map(|bytes| Flat::Host(Arc::clone(bytes))),
            #[cfg(feature = "cubecl")]
            Self::Device(tensor) => tensor.flat(offset, flat_len).map(Flat::Device),
        }
    }

    #[cfg(feature = "cubecl")]
    pub(crate) fn into_device(self) -> DeviceTensor {
        match self {
            Self::Device(tensor) => tensor,
            Self::Host(_) => unreachable!("the module's tensors are on a device"),
        }
    }

    /// The elements in another type.
    pub(crate) fn cast<B: FlatBackend>(self, dtype: DType) -> Self {
        if self.dtype() == dtype {
            return self;
        }
        B::to_flat(B::float_cast(B::from_flat(self), float_dtype(dtype)))
    }

    /// The sum of two tensors of one type.
    pub(crate) fn add<B: FlatBackend>(self, other: Self) -> Self {
        B::to_flat(B::float_add(B::from_flat(self), B::from_flat(other)))
    }

    /// The elements times a factor, in a tensor of its own.
    pub(crate) fn scaled(&self, factor: f64) -> Self {
        let tensor = from_flat::<1>(self.flattened());
        to_flat(tensor.mul_scalar(factor))
    }

    /// The elements as a tensor of one axis.
    fn flattened(&self) -> Self {
        match self {
            Self::Host(tensor) => Self::Host(tensor.clone().flattened()),
            #[cfg(feature = "cubecl")]
            Self::Device(tensor) => Self::Device(tensor.clone().reshaped(&[tensor.numel()])),
        }
    }

    /// A flat buffer of its own with the same elements.
    pub(crate) fn copied(&self) -> Flat {
        match self {
            Self::Host(tensor) => Flat::Host(Arc::new(aligned(tensor.as_bytes()))),
            #[cfg(feature = "cubecl")]
            Self::Device(tensor) => Flat::Device(tensor.copied()),
        }
    }

    /// The tensor in host memory; of a device's, a copy.
    pub(crate) fn into_host(self) -> HostTensor {
        match self {
            Self::Host(tensor) => tensor,
            #[cfg(feature = "cubecl")]
            Self::Device(tensor) => tensor.download(),
        }
    }
}

/// Backends whose float tensors are flat buffers or views of them.
pub(crate) trait FlatBackend: Backend {
    /// Without a copy where the tensor is contiguous.
    fn to_flat(tensor: FloatTensor<Self>) -> FlatTensor;
    /// Without a copy.
    ///
    /// # Panics
    ///
    /// If the tensor is in another memory than this backend's.
    fn from_flat(tensor: FlatTensor) -> FloatTensor<Self>;
}

impl FlatBackend for Flex {
    fn to_flat(tensor: FlexTensor) -> FlatTensor {
        FlatTensor::Host(HostTensor::from_flex(tensor))
    }

    fn from_flat(tensor: FlatTensor) -> FlexTensor {
        match tensor {
            FlatTensor::Host(tensor) => tensor.into_flex(),
            #[cfg(feature = "cubecl")]
            FlatTensor::Device(_) => unreachable!("a tensor of this backend is in host memory"),
        }
    }
}

/// Takes a tensor of the high-level interface apart, without its graph.
pub(crate) fn to_flat<const D: usize>(tensor: Tensor<D>) -> FlatTensor {
    let tensor = tensor.without_autodiff();
    #[cfg(feature = "cubecl")]
    if !matches!(tensor.device().as_dispatch(), DispatchDevice::Flex(_)) {
        return crate::storage::device::to_flat(tensor);
    }
    let primitive = tensor
        .try_into_primitive::<Flex>()
        .expect("the module's backend was checked when it was wrapped");
    Flex::to_flat(primitive)
}

/// The reverse of [`to_flat`].
pub(crate) fn from_flat<const D: usize>(tensor: FlatTensor) -> Tensor<D> {
    match tensor {
        FlatTensor::Host(tensor) => Tensor::from_primitive::<Flex>(tensor.into_flex()),
        #[cfg(feature = "cubecl")]
        FlatTensor::Device(tensor) => crate::storage::device::from_flat(tensor),
    }
}
