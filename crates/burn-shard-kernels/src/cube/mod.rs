//! The steps of this crate for buffers on a device, written once in CubeCL for every runtime it has.
//!
//! What lives here: fused [Adam and AdamW](adamw_step) and [SGD](sgd_step) over [flat
//! buffers](FlatBuffer), [packing](pack()) of scattered tensors into a flat buffer and back, [`norms`], and
//! [zeros](zero). What does not: a runtime (features `cpu`, `wgpu`, `cuda` link one), allocation,
//! streams, and anything of Burn.
//!
//! # Equality with the host path
//!
//! The arithmetic is that of [`mod@crate::reference`], operation by operation, and the scalars are
//! computed by the same code. On CubeCL's CPU runtime the results have the same bits. CUDA may
//! contract `a * b + c` into one rounding, and WGSL leaves the last bits of division and square
//! root open: there the results agree within the bounds of `docs/numerics.md`.
//!
//! # What is refused
//!
//! Everything that can be known on the host is checked before a kernel is launched: dtypes the
//! runtime lacks, misaligned offsets, views that overlap where one is written, lengths that
//! differ, buffers of another device, hyper-parameters that are not finite. Nothing is read back to
//! the host: what only the device knows (the clip coefficient, the loss scale, overflow) is read
//! there by the kernels themselves, from buffers of one element.

mod adam;
mod buffer;
mod geometry;
mod norm;
mod pack;
mod sgd;
mod step;
mod throttle;
mod zero;

#[cfg(feature = "ptx")]
pub mod ptx;

pub use adam::{AdamBuffers, adam_step, adamw_step};
pub use buffer::{Dtype, FlatBuffer, StepControl};
pub use norm::{NormBuffers, clip_coefficient, norms};
pub use pack::{Slot, Strategy, StridedTensor, pack, unpack};
pub use sgd::{SgdBuffers, sgd_step};
pub use zero::zero;
