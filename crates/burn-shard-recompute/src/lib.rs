//! Activation checkpointing for [Burn](burn): a block of a model runs without keeping its activations, and
//! runs again in backward, when they are needed.
//!
//! ```
//! use burn::module::Module;
//! use burn::nn::{Linear, LinearConfig};
//! use burn::tensor::activation::gelu;
//! use burn::tensor::{Device, Tensor};
//! use burn_shard_recompute::checkpoint;
//!
//! #[derive(Module, Debug)]
//! struct Model {
//!     blocks: Vec<Linear>,
//! }
//!
//! impl Model {
//!     fn forward(&self, x: Tensor<2>) -> Tensor<2> {
//!         self.blocks.iter().fold(x, |x, block| {
//!             // Without checkpointing: gelu(block.forward(x))
//!             checkpoint(block, x, |block, x| gelu(block.forward(x)))
//!         })
//!     }
//! }
//!
//! let device = Device::flex().autodiff();
//! let blocks = (0..4).map(|_| LinearConfig::new(8, 8).init(&device)).collect();
//! let model = Model { blocks };
//! let gradients = model.forward(Tensor::ones([2, 8], &device)).sum().backward();
//! assert!(model.blocks[0].weight.grad(&gradients).is_some());
//! ```
//!
//! # What it saves and costs
//!
//! Between forward and backward a checkpointed block keeps its inputs and outputs. Backward holds, beside
//! them, the activations of one block at a time. The price is one more forward of each
//! checkpointed block, a third of a step's compute if all of the model is in such blocks. Blocks nest: a
//! block of blocks keeps less still, and its inner blocks run once more.
//!
//! This goes further than `Device::gradient_checkpointing` of Burn, which recomputes cheap operations
//! only; both may be on.
//!
//! # What is equal
//!
//! Losses and gradients have the bits of a run without checkpoints, on a backend whose kernels repeat:
//!
//! - A tensor that is used in the block and outside gets its gradients summed in the same order, as long as
//!   the uses outside are all later than the block or all earlier.
//! - With three or more uses this may fail, and sums may round differently: if they are
//!   in branches of different depth; if a block has several inputs that differ in depth, or several outputs
//!   that feed each other; and for parameters whose uses go through a view of their own, as a `Linear`'s bias, of
//!   which some uses are in the block and some outside; and for tensors of a single element, used inside and outside.
//! - Dropout: see [`Random`]. The numbers drawn are not those of a run without checkpoints (but see
//!   [`seeded`]).
//!
//! What lives here: the public functions (`checkpoint.rs`), what may go in and out (`tensors.rs`), random
//! numbers (`random.rs`), the [`scope`] that tells other code about a block's phase (`scope.rs`), cutting a block off
//! the tape and making leaves of it (`leaves.rs`), and the autodiff operations (`ops.rs`).

mod checkpoint;
mod leaves;
mod ops;
mod random;
pub mod scope;
mod tensors;

pub use checkpoint::{checkpoint, checkpoint_with};
pub use random::{Random, seeded};
pub use tensors::{TensorMapper, Tensors};
