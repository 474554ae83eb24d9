//! Sharded data-parallel training for [Burn](https://burn.dev): the same training loop and the same
//! numbers as plain data parallelism, in a fraction of the memory.
//!
//! [`ShardedModule`] wraps any Burn module in one line; [`Oss`] shards the optimizer's state. What
//! is sharded is a [`ShardingStrategy`], from plain DDP to ZeRO-3 (FSDP). Ranks meet in a
//! [`ProcessGroup`]; [`ProcessGroup::spawn`] makes them threads of this process.
//!
//! # Example
//!
//! ```
//! use burn::nn::LinearConfig;
//! use burn::optim::{AdamConfig, GradientsParams};
//! use burn::prelude::*;
//! use burn::tensor::Distribution;
//! use burn_shard::{Oss, ProcessGroup, ShardedModule, ShardingStrategy};
//!
//! let losses = ProcessGroup::spawn(2, |group| {
//!     let device = Device::flex().autodiff();
//!     let model = LinearConfig::new(8, 1).init(&device);
//!     let mut model = ShardedModule::new(model, ShardingStrategy::Gradients, &group)?;
//!     let mut optimizer = Oss::new(AdamConfig::new(), &group)?;
//!
//!     let mut loss = f32::NAN;
//!     for _ in 0..20 {
//!         // Each rank has data of its own.
//!         let x = Tensor::<2>::random([16, 8], Distribution::Default, &device);
//!         let y = x.clone().sum_dim(1);
//!         let error = (model.forward(x) - y).square().mean();
//!         let gradients = GradientsParams::from_grads(error.backward(), &model);
//!         model = optimizer.step(0.05, model, gradients);
//!         loss = error.into_scalar::<f32>();
//!     }
//!     Ok::<_, burn_shard::Error>(loss)
//! })?;
//! assert!(losses.into_iter().all(|loss| loss.is_ok_and(|loss| loss < 2.0)));
//! # Ok::<(), burn_shard::CommError>(())
//! ```
//!
//! # What else a training run needs
//!
//! | for | see |
//! |---|---|
//! | half precision with `f32` master weights | [`MixedPrecision`], [`GradScaler`] |
//! | gradient accumulation | [`ShardedModule::no_sync`] |
//! | clipping by the norm of all gradients | [`Oss::with_norm_clipping`] |
//! | shards within a machine, copies across | [`ShardConfig::shard_ranks`] |
//! | gathers ahead of their use | [`ShardConfig::prefetch`] |
//! | optimizer state to and from Burn's own optimizers | [`Oss::to_record`], [`Oss::load_record`] |
//! | gathers that a step leaves to the next forward | [`ShardConfig::defer_gather`] |
//! | activation checkpointing | [`checkpoint()`] |
//! | ranks with different numbers of batches, means over samples | [`Join`] |
//! | memory and traffic, before training | [`Estimate`] |
//! | means of metrics, decisions made together | [`ProcessGroup::mean`], [`ProcessGroup::any`] |
//! | saving and resuming, on any number of ranks, while training goes on | [`checkpoint::Checkpoints`] |
//!
//! # Design
//!
//! Burn's modules have no hooks, but every parameter may carry a *reparameterization*, applied each
//! time it is read. Ours makes the first read of a pass an autodiff operation: all-gather in forward where
//! parameters are sharded, reduce-scatter (or all-reduce) of the gradient in backward. Unmodified
//! layers, stock optimizers and a plain `loss.backward()` work on top of it.
//!
//! The alternative, a backend that wraps another one, was refused: Burn 0.22's tensors are not
//! generic over a backend, and communication is per parameter, not per tensor operation.
//!
//! # Glossary
//!
//! | word | meaning |
//! |---|---|
//! | rank, `world_size` | member of a process group, number of members |
//! | shard | one rank's part of a parameter: an even cut of its elements, padded |
//! | unshard, reshard | gather the full parameter, drop it again |
//! | group of parameters | neighbours in the module that share one collective (a bucket of DDP) |
//! | pass | a forward and its backward |
//! | read | one use of a parameter in forward, through `Param::val` |

mod autodiff;
pub mod checkpoint;
mod error;
mod estimate;
mod join;
mod module;
mod oss;
mod plan;
mod purpose;
mod runtime;
mod storage;

pub use burn_shard_comm::{
    Collective, Communicator, DType, Error as CommError, Local, ProcessGroup, Recording, ReduceOp,
    Traffic,
};
/// Activation checkpointing; for modules of any kind, wrapped or not.
pub use burn_shard_recompute as recompute;
pub use burn_shard_recompute::checkpoint;
pub use error::Error;
pub use estimate::Estimate;
pub use join::{Join, Turn};
pub use module::sharded_module::{NoSync, ShardedModule};
pub use oss::{
    ElementwiseConfig, GradScaler, GradScalerConfig, GradientNorm, GradientNormClipping, NonFinite,
    Oss, StepError,
};
pub use plan::config::ShardConfig;
pub use plan::layout::ParamSpec;
pub use plan::precision::{MixedPrecision, Precision};
pub use plan::strategy::ShardingStrategy;
pub use storage::ledger::{MemoryKind, MemoryReport, MemoryUse, model_state_bytes};
