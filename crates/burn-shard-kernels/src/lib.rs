//! This crate provides fused optimizer steps over flat slices of `f32`: one pass over memory where
//! Burn's stock optimizers make one pass per tensor operation.
//!
//! What lives here: Adam, [AdamW](adamw_step) and SGD on host memory, [norms](sum_of_squares) for
//! clipping, a plain scalar loop for each step in [`mod@reference`], and, with the feature `cubecl`, the
//! same on devices in `cube`, with copy-in and copy-out. What does not: parameters, modules, ranks, learning rate schedules. A step sees
//! only the elements it is given, so a rank may pass its shard of a flat parameter.
//!
//! # Equality with Burn
//!
//! The key design decision is that every step is *bitwise* equal to what Burn 0.22.1 computes with
//! its `flex` backend in `f32`, so that sharded training can be compared with `to_bits`. Each
//! operation rounds on its own (a fused multiply-add would round once for two of them, so it is
//! never used), operations come in Burn's order, scalars are narrowed to `f32` where Burn narrows
//! them, and the first step has no moments to decay. The vector width and the split over threads
//! do not change any bit, because no operation looks at two elements.
//!
//! The one thing left open is the payload and sign of a NaN, which Rust does not specify: where
//! Burn has a NaN, so does this crate, but maybe another one.
//!
//! # Threads
//!
//! Long slices are split over the rayon pool the caller runs in (the global one outside of any
//! pool). Install the step in a pool of one thread to keep it on one core.
//!
//! # Examples
//!
//! ```
//! use burn_shard_kernels::{AdamHyper, WeightDecay, adamw_step};
//!
//! let hyper = AdamHyper {
//!     weight_decay: WeightDecay::Decoupled(0.01),
//!     ..AdamHyper::default()
//! };
//! let mut param = vec![1.0; 4];
//! let (mut moment_1, mut moment_2) = (vec![0.0; 4], vec![0.0; 4]);
//! for time in 1..=3 {
//!     let grad = param.clone();
//!     adamw_step(&mut param, &grad, &mut moment_1, &mut moment_2, time, 1e-3, &hyper)?;
//! }
//! assert!(param[0] < 1.0);
//! # Ok::<(), burn_shard_kernels::Error>(())
//! ```

mod adam;
mod chunk;
mod control;
#[cfg(feature = "cubecl")]
pub mod cube;
mod error;
mod norm;
mod ranges;
pub mod reference;
mod sgd;

pub use adam::{
    AdamHyper, AdamSlices, WeightDecay, adam_step, adam_step_with, adamw_step, adamw_step_with,
};
pub use control::{HalfMut, StepControl};
pub use error::Error;
pub use norm::{clip_coefficient, max_abs, sum_of_powers, sum_of_squares};
pub use ranges::merge_ranges;
pub use sgd::{MomentumHyper, SgdHyper, SgdSlices, sgd_step, sgd_step_with};
