//! Where elements are: flat buffers and the tensors that are views of them, in the memory of the host or
//! of a device, and how many bytes of them live.

pub(crate) mod cast;
#[cfg(feature = "cubecl")]
pub(crate) mod cube_tensor;
#[cfg(feature = "cubecl")]
pub(crate) mod device;
#[cfg(feature = "nccl")]
pub(crate) mod direct;
pub(crate) mod flat;
pub(crate) mod host;
pub(crate) mod ledger;
pub(crate) mod pool;
