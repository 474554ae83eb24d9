//! Activation checkpointing for [Burn](burn).

mod checkpoint;
mod leaves;
mod ops;
mod random;
pub mod scope;
mod tensors;

pub use checkpoint::{checkpoint, checkpoint_with};
pub use random::{Random, seeded};
pub use tensors::{TensorMapper, Tensors};
