//! What a user chooses when wrapping a module.

use crate::ShardingStrategy;

/// How a module is sharded.
#[derive(Clone, Debug)]
pub struct ShardConfig {
    pub(crate) strategy: ShardingStrategy,
    pub(crate) group_cap_bytes: usize,
}

impl ShardConfig {
    /// The strategy, with groups of parameters of at most 25 MiB (the default bucket of PyTorch's
    /// DDP).
    #[must_use]
    pub fn new(strategy: ShardingStrategy) -> Self {
        Self {
            strategy,
            group_cap_bytes: 25 << 20,
        }
    }

    /// Sets the most bytes of parameters that share one collective. Larger groups mean fewer
    /// collectives; under [`ShardingStrategy::Full`] about two of them are unsharded at a time.
    /// A parameter that is larger by itself is a group of its own; which ones are too
    /// small to be sharded at all, see [`ShardingStrategy::Full`].
    #[must_use]
    pub fn with_group_cap_bytes(mut self, group_cap_bytes: usize) -> Self {
        self.group_cap_bytes = group_cap_bytes;
        self
    }
}

impl From<ShardingStrategy> for ShardConfig {
    fn from(strategy: ShardingStrategy) -> Self {
        Self::new(strategy)
    }
}
