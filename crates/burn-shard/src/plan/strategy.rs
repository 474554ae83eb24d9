//! What a rank holds, and which collective averages the gradients.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::Error;

/// What [`ShardedModule`](crate::ShardedModule) shards over the ranks of its group.
///
/// With `P` parameters of 4 bytes, `N` ranks and Adam (two moments), each rank holds:
///
/// | strategy | parameters | gradients | optimizer state | bytes received per step |
/// |---|---|---|---|---|
/// | [`Replicated`](Self::Replicated) | 4P | 4P | 8P | 2 (N-1)/N 4P |
/// | [`OptimizerState`](Self::OptimizerState) | 4P | 4P | 8P/N | 3 (N-1)/N 4P |
/// | [`Gradients`](Self::Gradients) | 4P | 4P/N | 8P/N | 2 (N-1)/N 4P |
/// | [`Full`](Self::Full) | 4P/N | 4P/N | 8P/N | 3 (N-1)/N 4P |
///
/// # References
///
/// Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
/// <https://arxiv.org/abs/1910.02054>, sections 5 and 7.
///
/// # Examples
///
/// Command lines name strategies by what they are known as:
///
/// ```
/// use burn_shard::ShardingStrategy;
///
/// let strategy: ShardingStrategy = "zero2".parse()?;
/// assert_eq!(strategy, ShardingStrategy::Gradients);
/// assert!("zero4".parse::<ShardingStrategy>().is_err());
/// # Ok::<(), burn_shard::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ShardingStrategy {
    /// Plain data parallel (DDP): gradients are all-reduced in buckets, any optimizer steps the
    /// full parameters on every rank.
    #[doc(alias = "NO_SHARD")]
    #[serde(rename = "ddp")]
    Replicated,
    /// ZeRO-1: gradients are all-reduced, so every rank sees the full average; [`Oss`](crate::Oss)
    /// keeps the state of this rank's shards only, steps them, and all-gathers the parameters.
    ///
    /// The wire carries half as much again as under [`Gradients`](Self::Gradients), which is the
    /// better choice unless the full averaged gradient is needed on every rank.
    #[doc(alias = "ZeRO-1")]
    #[serde(rename = "zero1")]
    OptimizerState,
    /// ZeRO-2 (FairScale's `ShardedDDP` with `OSS`): gradients are reduce-scattered, each rank
    /// keeps the average of its shards only; [`Oss`](crate::Oss) steps them and all-gathers.
    #[doc(alias = "ZeRO-2")]
    #[doc(alias = "SHARD_GRAD_OP")]
    #[serde(rename = "zero2")]
    Gradients,
    /// ZeRO-3 (FSDP): each rank keeps its shards of the parameters only; a group of parameters is
    /// all-gathered when its first member is read, in forward and again in backward, and dropped
    /// after its last use. Any elementwise optimizer steps the shards. Vectors of up to 4 MiB and
    /// matrices of up to 1/400 of a group's cap are not sharded but treated as under
    /// [`Replicated`](Self::Replicated): there is nothing to save.
    #[doc(alias = "ZeRO-3")]
    #[doc(alias = "FULL_SHARD")]
    #[serde(rename = "zero3")]
    Full,
}

impl ShardingStrategy {
    /// All strategies, from the most memory to the least.
    pub const ALL: [Self; 4] = [
        Self::Replicated,
        Self::OptimizerState,
        Self::Gradients,
        Self::Full,
    ];

    /// Whether the stored parameters are shards, to be gathered before use.
    pub(crate) fn shards_parameters(self) -> bool {
        self == Self::Full
    }

    /// Whether gradients end as shards (reduce-scatter) rather than full averages (all-reduce).
    pub(crate) fn shards_gradients(self) -> bool {
        matches!(self, Self::Gradients | Self::Full)
    }

    /// Whether optimizer state covers this rank's shards only.
    pub(crate) fn shards_optimizer(self) -> bool {
        self != Self::Replicated
    }

    /// Whether full parameters must be all-gathered after the optimizer stepped the shards.
    pub(crate) fn gathers_after_step(self) -> bool {
        matches!(self, Self::OptimizerState | Self::Gradients)
    }
}

impl fmt::Display for ShardingStrategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Replicated => "ddp",
            Self::OptimizerState => "zero1",
            Self::Gradients => "zero2",
            Self::Full => "zero3",
        })
    }
}

impl FromStr for ShardingStrategy {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        match name {
            "ddp" | "replicated" => Ok(Self::Replicated),
            "zero1" | "optimizer-state" => Ok(Self::OptimizerState),
            "zero2" | "gradients" => Ok(Self::Gradients),
            "zero3" | "full" | "fsdp" => Ok(Self::Full),
            _ => Err(Error::UnknownStrategy {
                name: name.to_owned(),
            }),
        }
    }
}
