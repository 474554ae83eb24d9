//! What Burn's dispatch keeps of a tensor on a CubeCL device: the tensor, or its place in the queue
//! of Burn's `fusion`.
//!
//! Whether `fusion` is on is decided by whoever builds the program, in any crate of it; both compile.
//!
//! With `fusion`, operations run when their results are needed. What this crate writes in place is safe
//! from those that still wait to read the old values: taking a tensor out of the queue
//! ([`CubeLike::into_cube`]) runs what its thread has queued, and operations queued elsewhere, or
//! tensors that are still alive, hold the memory, of which [`DeviceFlat::make_unique`] then makes a copy.
//!
//! [`DeviceFlat::make_unique`]: crate::storage::device::DeviceFlat::make_unique

use burn::backend::Backend;
use burn::backend::tensor::FloatTensor;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeDevice};
use burn_fusion::stream::StreamId;
use burn_fusion::{Fusion, FusionBackend, NoOp, get_client};
use burn_ir::{InitOperationIr, OperationIr, OperationOutput};

/// See the module documentation.
pub(crate) trait CubeLike: Backend {
    /// The tensor, with what is queued before it launched.
    fn into_cube(tensor: FloatTensor<Self>) -> CubeTensor;
    /// `device` is the tensor's own.
    fn from_cube(tensor: CubeTensor, device: &Self::Device) -> FloatTensor<Self>;
    /// Launches what this thread has queued: whatever it has dropped is free then.
    fn drain(device: &Self::Device);
}

impl CubeLike for CubeBackend {
    fn into_cube(tensor: CubeTensor) -> CubeTensor {
        tensor
    }

    fn from_cube(tensor: CubeTensor, _device: &CubeDevice) -> CubeTensor {
        tensor
    }

    fn drain(_device: &CubeDevice) {}
}

/// Generic, because `CubeBackend` is a [`FusionBackend`] only if `burn-cubecl` has the feature `fusion`.
impl<B> CubeLike for Fusion<B>
where
    B: FusionBackend<FloatTensorPrimitive = CubeTensor>,
{
    fn into_cube(tensor: FloatTensor<Self>) -> CubeTensor {
        let client = tensor.client.clone();
        client.resolve_tensor_float::<B>(tensor)
    }

    fn from_cube(tensor: CubeTensor, device: &Self::Device) -> FloatTensor<Self> {
        let client = get_client::<B>(device);
        let (shape, dtype) = (tensor.meta.shape().clone(), tensor.dtype);
        let handle = B::float_tensor_handle(tensor);
        let init = InitOperationIr::create(shape, dtype, || client.register_tensor_handle(handle));
        let operation = NoOp::<B>::new();
        client
            .register(StreamId::current(), OperationIr::Init(init), operation)
            .output()
    }

    fn drain(device: &Self::Device) {
        get_client::<B>(device).sync(|| ());
    }
}
