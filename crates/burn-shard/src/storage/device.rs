//! Tensors and flat buffers on a CubeCL device, and the way to the host and back.

use std::sync::Arc;

use burn::backend::tensor::FloatTensor;
use burn::tensor::{Bytes, Shape, Tensor};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{Cube, CubeDevice};
use burn_shard_comm::DType;
use burn_shard_kernels::cube::{Dtype, FlatBuffer, Slot, Strategy, StridedTensor, pack, zero};
use cubecl::client::Client;
use cubecl::server::Handle;

use crate::Error;
use crate::storage::cube_tensor::CubeLike;
use crate::storage::flat::{FlatBackend, FlatTensor};
use crate::storage::host::{HostTensor, aligned, burn_dtype, dtype_of};
use crate::storage::ledger::{Ledger, MemoryKind};

/// A device and the client that queues work on it.
#[derive(Clone)]
pub(crate) struct Accelerator {
    client: Client,
    device: CubeDevice,
}

impl std::fmt::Debug for Accelerator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Accelerator").field(&self.device).finish()
    }
}

impl Accelerator {
    pub(crate) fn new(device: &CubeDevice) -> Self {
        Self {
            client: device.client(),
            device: device.clone(),
        }
    }

    /// Multiple of bytes at which buffers and their views have to begin.
    pub(crate) fn alignment(&self) -> usize {
        usize::try_from(self.client.properties().memory.alignment)
            .expect("an alignment should be small")
    }

    pub(crate) fn client(&self) -> &Client {
        &self.client
    }

    #[cfg(feature = "nccl")]
    pub(crate) fn device(&self) -> &CubeDevice {
        &self.device
    }

    pub(crate) fn upload(&self, bytes: &[u8]) -> DeviceFlat {
        DeviceFlat {
            handle: self.client.create_from_slice(bytes),
            len: bytes.len(),
            accelerator: Box::new(self.clone()),
        }
    }

    /// Zeros, written on the device.
    pub(crate) fn zeros(&self, len: usize) -> DeviceFlat {
        let flat = self.empty(len.next_multiple_of(size_of::<f32>()));
        let buffer = flat.buffer(DType::F32);
        let written = buffer.and_then(|buffer| Ok(zero(&self.client, &buffer)?));
        written.expect("a new buffer of a device should take zeros of f32");
        flat
    }

    /// A buffer with anything in it.
    pub(crate) fn empty(&self, len: usize) -> DeviceFlat {
        DeviceFlat {
            handle: self.client.empty(len),
            len,
            accelerator: Box::new(self.clone()),
        }
    }
}

/// A flat buffer on a device. Clones share it.
#[derive(Clone)]
pub(crate) struct DeviceFlat {
    accelerator: Box<Accelerator>,
    handle: Handle,
    /// In bytes.
    len: usize,
}

impl std::fmt::Debug for DeviceFlat {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DeviceFlat")
            .field("device", &self.accelerator.device)
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}

impl DeviceFlat {
    pub(crate) fn accelerator(&self) -> &Accelerator {
        &self.accelerator
    }

    /// Enters it in a ledger, which does not keep it.
    pub(crate) fn count(&self, ledger: &Ledger, kind: MemoryKind) {
        let buffer = self.handle.memory.clone().binding().downgrade();
        ledger.watch(kind, self.len, buffer);
    }

    /// Whether both are one buffer.
    pub(crate) fn is(&self, other: &Self) -> bool {
        self.handle.service == other.handle.service
            && self.handle.memory.descriptor() == other.handle.memory.descriptor()
    }

    /// A tensor of `shape` that begins at element `offset`.
    pub(crate) fn view(&self, offset: usize, shape: &[usize], dtype: DType) -> DeviceTensor {
        let start = offset * dtype.size_bytes();
        let end = start + shape.iter().product::<usize>() * dtype.size_bytes();
        assert!(
            end <= self.len,
            "a view of {end} bytes should fit into {}",
            self.len
        );
        let handle = self.handle.clone().offset_start(start as u64);
        DeviceTensor::from(CubeTensor::new_contiguous(
            self.accelerator.client.clone(),
            self.accelerator.device.clone(),
            Shape::from(shape.to_vec()),
            handle.offset_end((self.len - end) as u64),
            burn_dtype(dtype),
        ))
    }

    pub(crate) fn download(&self) -> Bytes {
        let len = self.len;
        let read = self.accelerator.client.read_one(self.handle.clone());
        let bytes = read.expect("reading a buffer of the module should succeed");
        aligned(&bytes[..len])
    }

    /// Makes it a copy, if somebody else shares it; whether it did.
    pub(crate) fn make_unique(&mut self) -> bool {
        Cube::drain(&self.accelerator.device);
        let shared = !self.handle.can_mut();
        if shared {
            *self = self.accelerator.upload(&self.download());
        }
        shared
    }

    /// The elements in another type.
    pub(crate) fn cast(&self, from: DType, to: DType) -> Self {
        let numel = self.len / from.size_bytes();
        let cast = self.accelerator.empty(numel * to.size_bytes());
        let whole = self.view(0, &[numel], from);
        let packed = cast.pack(to, &[(0, whole)]);
        packed.expect("a buffer should take a cast of another of as many elements");
        cast
    }

    pub(crate) fn len_bytes(&self) -> usize {
        self.len
    }

    /// The buffer as kernels want it.
    pub(crate) fn buffer(&self, dtype: DType) -> Result<FlatBuffer, Error> {
        let dtype = supported(&self.accelerator.client, dtype)?;
        let numel = self.len / dtype.size_bytes();
        let client = &self.accelerator.client;
        Ok(FlatBuffer::new(client, &self.handle, 0, numel, dtype)?)
    }

    /// Copies each tensor to its offset, both in elements of `dtype`; offsets ascend.
    pub(crate) fn pack(
        &self,
        dtype: DType,
        tensors: &[(usize, DeviceTensor)],
    ) -> Result<(), Error> {
        let client = &self.accelerator.client;
        let flat = self.buffer(dtype)?;
        let mut sources = Vec::new();
        let mut slots = Vec::new();
        for (index, (offset, tensor)) in tensors.iter().enumerate() {
            let numel = tensor.numel();
            if numel == 0 {
                continue;
            }
            let handle = &tensor.0.handle;
            let dtype = supported(client, tensor.dtype())?;
            sources.push(StridedTensor::new(
                client,
                index,
                handle,
                &[numel],
                &[1],
                dtype,
            )?);
            slots.push(Slot {
                offset: *offset,
                padded_numel: numel,
            });
        }
        let strategy = Strategy::fastest(client);
        pack(client, &sources, &flat, &slots, 1.0, strategy)?;
        Ok(())
    }
}

fn supported(client: &Client, dtype: DType) -> Result<Dtype, burn_shard_kernels::Error> {
    kernel_dtype(dtype).ok_or(burn_shard_kernels::Error::UnsupportedDtype {
        dtype: dtype.name(),
        runtime: client.name(),
    })
}

fn kernel_dtype(dtype: DType) -> Option<Dtype> {
    match dtype {
        DType::F32 => Some(Dtype::F32),
        DType::F16 => Some(Dtype::F16),
        DType::BF16 => Some(Dtype::BF16),
        DType::F64
        | DType::I8
        | DType::I16
        | DType::I32
        | DType::I64
        | DType::U8
        | DType::U16
        | DType::U32
        | DType::U64 => None,
    }
}

/// A contiguous tensor on a device. Clones share its memory.
#[derive(Clone, Debug)]
pub(crate) struct DeviceTensor(Box<CubeTensor>);

impl From<CubeTensor> for DeviceTensor {
    fn from(tensor: CubeTensor) -> Self {
        Self(Box::new(tensor))
    }
}

impl DeviceTensor {
    pub(crate) fn dtype(&self) -> DType {
        dtype_of(self.0.dtype).expect("a float tensor should have a float dtype")
    }

    pub(crate) fn numel(&self) -> usize {
        self.0.meta.num_elements()
    }

    /// Where its elements are.
    #[cfg(feature = "nccl")]
    pub(crate) fn handle(&self) -> Handle {
        self.0.handle.clone()
    }

    /// A flat buffer of its own with the same elements.
    pub(crate) fn copied(&self) -> DeviceFlat {
        let accelerator = Accelerator::new(&self.0.device);
        let dtype = self.dtype();
        let flat = accelerator.empty(self.numel() * dtype.size_bytes());
        let packed = flat.pack(dtype, &[(0, self.clone())]);
        packed.expect("a buffer should take a copy of a tensor of as many elements");
        flat
    }

    /// See [`FlatTensor::flat`].
    pub(crate) fn flat(&self, offset: usize, flat_len: usize) -> Option<DeviceFlat> {
        let size = self.dtype().size_bytes();
        let mut handle = self.0.handle.clone();
        let is_view = handle.offset_start.unwrap_or(0) == (offset * size) as u64
            && handle.size() == (flat_len * size) as u64;
        handle.offset_start = None;
        handle.offset_end = None;
        is_view.then(|| DeviceFlat {
            accelerator: Box::new(Accelerator::new(&self.0.device)),
            handle,
            len: flat_len * size,
        })
    }

    fn into_primitive(self) -> FloatTensor<Cube> {
        let device = self.0.device.clone();
        Cube::from_cube(*self.0, &device)
    }

    /// The elements in another shape.
    pub(crate) fn reshaped(self, shape: &[usize]) -> Self {
        let CubeTensor {
            client,
            handle,
            device,
            dtype,
            ..
        } = *self.0;
        let shape = Shape::from(shape.to_vec());
        Self::from(CubeTensor::new_contiguous(
            client, device, shape, handle, dtype,
        ))
    }

    /// Elements `range` of it, as a tensor of one axis that kernels read but Burn may not.
    pub(crate) fn part(&self, range: std::ops::Range<usize>) -> Self {
        let size = self.dtype().size_bytes();
        let numel = self.numel();
        assert!(range.end <= numel, "{range:?} of {numel} elements");
        let handle = self
            .0
            .handle
            .clone()
            .offset_start((range.start * size) as u64);
        Self::from(CubeTensor::new_contiguous(
            self.0.client.clone(),
            self.0.device.clone(),
            Shape::from(vec![range.len()]),
            handle.offset_end(((numel - range.end) * size) as u64),
            self.0.dtype,
        ))
    }

    pub(crate) fn download(self) -> HostTensor {
        let (shape, dtype) = (self.0.meta.shape().clone(), self.dtype());
        let bytes = if shape.num_elements() == 0 {
            aligned(&[])
        } else {
            let descriptor = self.0.handle.copy_descriptor(
                shape.clone(),
                self.0.meta.strides().clone(),
                dtype.size_bytes(),
            );
            let read = self.0.client.read_tensor(vec![descriptor]);
            let mut bytes = read.expect("reading a tensor of the module should succeed");
            aligned(&bytes.remove(0))
        };
        HostTensor::view(Arc::new(bytes), 0, shape.as_slice(), dtype)
    }
}

impl FlatBackend for Cube {
    fn to_flat(tensor: FloatTensor<Self>) -> FlatTensor {
        FlatTensor::Device(DeviceTensor::from(into_contiguous(Cube::into_cube(tensor))))
    }

    fn from_flat(tensor: FlatTensor) -> FloatTensor<Self> {
        match tensor {
            FlatTensor::Device(tensor) => tensor.into_primitive(),
            FlatTensor::Host(_) => unreachable!("a tensor of this backend is on a device"),
        }
    }
}

/// See [`crate::storage::flat::to_flat`]; of a tensor without a graph.
pub(crate) fn to_flat<const D: usize>(tensor: Tensor<D>) -> FlatTensor {
    let primitive = tensor.try_into_primitive::<Cube>();
    Cube::to_flat(primitive.expect("the module's backend was checked when it was wrapped"))
}

/// See [`crate::storage::flat::from_flat`].
pub(crate) fn from_flat<const D: usize>(tensor: DeviceTensor) -> Tensor<D> {
    Tensor::from_primitive::<Cube>(tensor.into_primitive())
}
