//! Flat buffers and the tensors that are views of them, in the memory of the host or of a device.
//!
//! Communicators read and write host memory. What lives on a device is copied to the host before a
//! collective and back after it ([`FlatTensor::into_host`], [`Memory::place`]); for host memory both
//! are free.

use std::sync::Arc;

use burn::backend::flex::{Flex, FlexTensor};
use burn::backend::{Backend, tensor::FloatTensor};
use burn::tensor::{Bytes, Device, Tensor};
use burn_shard_comm::DType;

#[cfg(feature = "cubecl")]
use crate::device::{Accelerator, DeviceFlat, DeviceTensor};
use crate::host::HostTensor;

/// Where the tensors of a module live.
#[derive(Clone, Debug)]
pub(crate) enum Memory {
    Host,
    #[cfg(feature = "cubecl")]
    Device(Accelerator),
}

impl Memory {
    /// `None` if the device is of a backend this build cannot shard on.
    pub(crate) fn of(device: &Device) -> Option<Self> {
        use burn::backend::DispatchDevice;
        #[allow(clippy::wildcard_enum_match_arm, reason = "backends of other features")]
        match device.clone().without_autodiff().as_dispatch() {
            DispatchDevice::Flex(_) => Some(Self::Host),
            #[cfg(feature = "cubecl")]
            DispatchDevice::Cube(device) => Some(Self::Device(Accelerator::new(device))),
            #[allow(unreachable_patterns, reason = "there may be no other backend")]
            _ => None,
        }
    }

    /// Multiple of bytes at which views of a buffer have to begin; 1 if anything goes.
    pub(crate) fn alignment(&self) -> usize {
        match self {
            Self::Host => 1,
            #[cfg(feature = "cubecl")]
            Self::Device(accelerator) => accelerator.alignment(),
        }
    }

    /// Puts a buffer where the module's tensors live.
    pub(crate) fn place(&self, bytes: Arc<Bytes>) -> Flat {
        match self {
            Self::Host => Flat::Host(bytes),
            #[cfg(feature = "cubecl")]
            Self::Device(accelerator) => Flat::Device(accelerator.upload(&bytes)),
        }
    }

    /// Puts a tensor where the module's tensors live.
    pub(crate) fn place_tensor(&self, tensor: HostTensor) -> FlatTensor {
        match self {
            Self::Host => FlatTensor::Host(tensor),
            #[cfg(feature = "cubecl")]
            Self::Device(accelerator) => {
                let flat = accelerator.upload(tensor.as_bytes());
                FlatTensor::Device(flat.view(0, tensor.shape(), tensor.dtype()))
            }
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
    if matches!(Memory::of(&tensor.device()), Some(Memory::Device(_))) {
        return crate::device::to_flat(tensor);
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
        FlatTensor::Device(tensor) => crate::device::from_flat(tensor),
    }
}
