//! What a user chooses when wrapping a module.

use burn::config::Config;

use crate::{MixedPrecision, ShardingStrategy};

/// How a module is sharded. A Burn [`Config`]: it can be saved, loaded and compared.
///
/// ```
/// use burn_shard::{MixedPrecision, ShardConfig, ShardingStrategy};
///
/// let config = ShardConfig::new(ShardingStrategy::Full)
///     .with_mixed_precision(Some(MixedPrecision::bf16()))
///     .with_ignored_params(vec!["head".to_owned()]);
/// assert_eq!(config.group_cap_bytes, 25 << 20);
/// ```
///
/// Eight ranks on each of several machines: shards stay within a machine, and gradients are averaged across.
///
/// ```
/// # use burn_shard::{ShardConfig, ShardingStrategy};
/// let config = ShardConfig::new(ShardingStrategy::Full)
///     .with_shard_ranks(Some(8))
///     .with_prefetch(2);
/// # drop(config);
/// ```
#[derive(Config, Debug, PartialEq, Eq)]
pub struct ShardConfig {
    /// What is sharded over the ranks.
    pub strategy: ShardingStrategy,
    /// Most bytes of stored parameters that share one collective; 25 MiB, as the buckets of PyTorch's
    /// DDP. Larger groups mean fewer collectives; under [`ShardingStrategy::Full`] about two of
    /// them are unsharded at a time. A parameter that is larger by itself is a group of its own.
    /// Which parameters are too small to be sharded at all, see [`ShardingStrategy::Full`].
    #[doc(alias = "bucket_cap_mb")]
    #[doc(alias = "reduce_buffer_size")]
    #[doc(alias = "reduce_bucket_size")]
    #[config(default = 26_214_400)]
    pub group_cap_bytes: usize,
    /// Element types of computation and reduction; `None`: those of the stored parameters.
    #[config(default = "None")]
    pub mixed_precision: Option<MixedPrecision>,
    /// Under [`ShardingStrategy::Full`], the most groups of parameters whose gather is started ahead of
    /// the group in use. The order is learned in the first pass. Each keeps one more group gathered;
    /// 0 gathers each group when it is first read.
    #[doc(alias = "set_modules_to_forward_prefetch")]
    #[config(default = 1)]
    pub prefetch: usize,
    /// Under [`ShardingStrategy::OptimizerState`] and [`ShardingStrategy::Gradients`], whether
    /// [`Oss::step`](crate::Oss::step) only starts to gather the parameters that it has stepped, group by group,
    /// and the next forward waits for each where it is read first: the gather hides behind
    /// computation, as in FSDP's `SHARD_GRAD_OP`. Stored parameters are shards then, beside the whole ones that reads
    /// return: `4 P / N` bytes more in `f32`; and a forward is a collective. Under mixed precision this is always
    /// so, at no cost.
    #[config(default = "false")]
    pub defer_gather: bool,
    /// Hybrid sharding (HSDP): this many neighbouring ranks share one copy of what the strategy shards, and
    /// there are `world_size / shard_ranks` copies, of which gradients are averaged within and then
    /// across. `None`: one copy. The ranks of one machine are the usual choice
    /// ([`ProcessGroup::local_world_size`](crate::ProcessGroup) under a launcher).
    #[config(default = "None")]
    pub shard_ranks: Option<usize>,
    /// Parameters that every rank keeps whole, as under [`ShardingStrategy::Replicated`], whatever the
    /// strategy: module paths such as `encoder.norm`, which cover all that is below them, where
    /// `*` stands for any one component (FSDP's `ignored_params`, but gradients are still averaged).
    #[config(default = "Vec::new()")]
    pub ignored_params: Vec<String>,
}

impl ShardConfig {
    /// Whether `path` is among the parameters that stay whole.
    pub(crate) fn ignores(&self, path: &str) -> bool {
        let matches = |pattern: &String| {
            let mut components = path.split('.');
            pattern.split('.').all(|want| {
                components
                    .next()
                    .is_some_and(|have| want == "*" || want == have)
            })
        };
        self.ignored_params.iter().any(matches)
    }
}

impl From<ShardingStrategy> for ShardConfig {
    fn from(strategy: ShardingStrategy) -> Self {
        Self::new(strategy)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_covers_what_is_below_it_and_nothing_beside_it() {
        let config = ShardConfig::new(ShardingStrategy::Full)
            .with_ignored_params(vec!["layers.*.norm".to_owned(), "head".to_owned()]);
        for path in ["layers.3.norm.gamma", "layers.0.norm", "head.weight"] {
            assert!(config.ignores(path), "{path}");
        }
        for path in [
            "layers.norm",
            "layers.3.normal.gamma",
            "header.weight",
            "body.head",
        ] {
            assert!(!config.ignores(path), "{path}");
        }
    }

    #[test]
    fn a_config_survives_being_saved() {
        let config = ShardConfig::new(ShardingStrategy::Gradients)
            .with_mixed_precision(Some(MixedPrecision::bf16()))
            .with_prefetch(3);
        let text = serde_json::to_string(&config).unwrap();
        assert!(
            text.contains("\"zero2\"") && text.contains("\"bf16\""),
            "{text}"
        );
        assert_eq!(serde_json::from_str::<ShardConfig>(&text).unwrap(), config);
    }
}
