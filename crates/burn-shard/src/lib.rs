//! Sharded data-parallel training for [Burn](https://burn.dev).

mod attach;
mod bind;
mod buffer;
mod engine;
mod error;
mod host;
mod layout;
mod memory;
mod ops;
mod oss;
mod plan;
mod reduce;
mod sharded_module;
mod strategy;
mod unshard;
mod wrap;

pub use burn_shard_comm::Error as CommError;
pub use burn_shard_comm::{
    Collective, Communicator, Local, ProcessGroup, Recording, ReduceOp, Traffic,
};
pub use error::Error;
pub use layout::ParamSpec;
pub use memory::{MemoryKind, MemoryReport, MemoryUse, model_state_bytes};
pub use oss::{ElementwiseConfig, Oss, StepError};
pub use sharded_module::{ShardConfig, ShardedModule};
pub use strategy::ShardingStrategy;
