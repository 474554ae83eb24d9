//! What a module will take and send per rank, from its plan alone: nothing is trained, nobody is asked.

use std::fmt;

use burn::module::Module;

use crate::module::inspect::inspect;
use crate::plan::layout::{ALIGN_BYTES, MemberLayout};
use crate::plan::{GroupSpec, Plan};
use crate::runtime::mesh::copies;
use crate::storage::flat::Memory;
use crate::{Error, ShardConfig};

/// What a rank will hold and receive if a module is sharded in some way: [`ShardedModule::memory`] and
/// [`ProcessGroup::traffic`] before the fact.
///
/// Padding and alignment are counted, since the plan is the one that wrapping would make. What is not:
/// activations, the workspace of kernels, buffers kept for the next collective ([`MemoryKind::Staging`]).
///
/// # Examples
///
/// ```
/// use burn::nn::transformer::TransformerEncoderConfig;
/// use burn::prelude::*;
/// use burn_shard::{Estimate, ShardConfig, ShardingStrategy};
///
/// let device = Device::flex().autodiff();
/// let model = TransformerEncoderConfig::new(256, 1024, 4, 2).init(&device);
/// let state = |strategy, ranks| {
///     let config = ShardConfig::new(strategy);
///     Estimate::new(&model, &config, ranks).map(|estimate| estimate.state_bytes())
/// };
/// let alone = state(ShardingStrategy::Replicated, 8)?;
/// // The vectors, which stay whole, and a little padding are what is above one eighth.
/// assert!(state(ShardingStrategy::Full, 8)? < alone / 7);
/// # Ok::<(), burn_shard::Error>(())
/// ```
///
/// # References
///
/// The ZeRO paper's formulas, <https://arxiv.org/abs/1910.02054>, are
/// [`model_state_bytes`](crate::model_state_bytes).
///
/// [`ShardedModule::memory`]: crate::ShardedModule::memory
/// [`ProcessGroup::traffic`]: crate::ProcessGroup::traffic
/// [`MemoryKind::Staging`]: crate::MemoryKind::Staging
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Estimate {
    /// Bytes of stored parameters.
    pub parameter_bytes: usize,
    /// Bytes of gradients once backward has ended.
    pub gradient_bytes: usize,
    /// Bytes of the optimizer's state, with two moments as Adam has them.
    pub optimizer_bytes: usize,
    /// Most bytes of parameters that are unsharded at once: under [`ShardingStrategy::Full`] the largest
    /// groups, as many as are in use (two) and gathered ahead of it ([`ShardConfig::prefetch`], in the
    /// communicator's own memory until they are used); under mixed precision of other strategies all of them, in
    /// the type of computation.
    ///
    /// [`ShardingStrategy::Full`]: crate::ShardingStrategy::Full
    pub unsharded_bytes: usize,
    /// Most bytes that rank 0 receives in a step. Under [`ShardingStrategy::Full`] with each group
    /// gathered in forward and again in backward, of which a few need not be.
    ///
    /// [`ShardingStrategy::Full`]: crate::ShardingStrategy::Full
    pub received_bytes: u64,
}

impl Estimate {
    /// What each of `world_size` ranks would hold of `module`. Nothing is sent.
    ///
    /// # Errors
    ///
    /// What wrapping refuses of the module by itself, such as [`Error::NoParameters`], and
    /// [`Error::ShardRanks`].
    ///
    /// # Panics
    ///
    /// If `world_size` is 0.
    pub fn new<M: Module>(
        module: &M,
        config: &ShardConfig,
        world_size: usize,
    ) -> Result<Self, Error> {
        assert_ne!(world_size, 0, "there should be at least one rank");
        let copies = copies(0, world_size, config.shard_ranks)?;
        let memory = module.devices().first().and_then(Memory::of);
        let align_bytes = memory.unwrap_or(Memory::Host).alignment();
        let plan = Plan::new(
            inspect(module, 0)?,
            config,
            align_bytes,
            world_size / copies,
        )?;
        Ok(Self::of(&plan, config, copies))
    }

    fn of(plan: &Plan, config: &ShardConfig, copies: usize) -> Self {
        let mut estimate = Self {
            parameter_bytes: 0,
            gradient_bytes: 0,
            optimizer_bytes: 0,
            unsharded_bytes: 0,
            received_bytes: 0,
        };
        // By size, of groups that are gathered for a moment.
        let mut moments: Vec<usize> = Vec::new();
        for group in &plan.groups {
            let size = group.dtype.size_bytes();
            estimate.parameter_bytes += group.stored_len() * size;
            let numel: usize = group.members.iter().map(|&i| plan.params[i].numel()).sum();
            let buffer = |&i: &usize| {
                let bytes = plan.params[i].numel() * group.compute.size_bytes();
                bytes.next_multiple_of(ALIGN_BYTES)
            };
            let whole_bytes: usize = group.members.iter().map(buffer).sum();
            if group.unshards() && group.reshards_after_use() {
                moments.push(whole_bytes);
            } else if group.shards_parameters() {
                estimate.unsharded_bytes += whole_bytes;
            } else if group.unshards() {
                // One buffer, cast as it is stored.
                estimate.unsharded_bytes += group.stored_len() * group.compute.size_bytes();
            }
            if group.members.iter().any(|&i| plan.params[i].trainable) {
                let strategy = group.strategy;
                let layout = &group.layout;
                estimate.gradient_bytes += match strategy.shards_gradients() {
                    true => layout.shard_len * size,
                    false => numel * size,
                };
                estimate.optimizer_bytes += match strategy.shards_optimizer() {
                    true => 2 * layout.shard_len * size,
                    false => 2 * layout.full_len * size,
                };
            }
            estimate.received_bytes += received(plan, group, copies);
        }
        moments.sort_unstable();
        let together = moments.iter().rev().take(2 + config.prefetch);
        estimate.unsharded_bytes += together.sum::<usize>();
        estimate
    }

    /// Parameters, gradients and the optimizer's state together: the model state.
    #[must_use]
    pub fn state_bytes(&self) -> usize {
        self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes
    }

    /// The model state, and what is unsharded at once beside it.
    #[must_use]
    pub fn peak_bytes(&self) -> usize {
        self.state_bytes() + self.unsharded_bytes
    }
}

/// Bytes that rank 0 receives for a group in one step.
fn received(plan: &Plan, group: &GroupSpec, copies: usize) -> u64 {
    let is_trained = group.members.iter().any(|&i| plan.params[i].trainable);
    let gathers = match (group.shards_parameters(), group.reshards_after_use()) {
        (true, true) => 1 + usize::from(is_trained),
        (true, false) => 1,
        (false, _) => usize::from(group.gathers_after_step() && is_trained),
    };
    let gather_size = match group.shards_parameters() {
        true => group.compute.size_bytes(),
        false => group.dtype.size_bytes(),
    };
    let member = |member: &MemberLayout| {
        let shard = member.owned(0).len();
        let reduced = match (is_trained, group.strategy.shards_gradients()) {
            (false, _) => 0,
            (true, true) => (plan.world_size - 1) * shard,
            (true, false) => all_reduced(member.numel, plan.world_size * copies),
        };
        gathers * (member.numel - shard) * gather_size + reduced * group.reduce.size_bytes()
    };
    let within = group.layout.members.iter().map(member).sum::<usize>();
    // What was scattered within a copy meets across copies, all of a group in one buffer.
    let across = match is_trained && group.strategy.shards_gradients() {
        true => all_reduced(group.layout.shard_len, copies) * group.reduce.size_bytes(),
        false => 0,
    };
    (within + across) as u64
}

/// Elements that the first of `ranks` ranks receives in an `all_reduce`.
fn all_reduced(numel: usize, ranks: usize) -> usize {
    let own = numel.div_ceil(ranks);
    (ranks - 1) * own + (numel - own)
}

impl fmt::Display for Estimate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, bytes) in [
            ("parameters", self.parameter_bytes),
            ("gradients", self.gradient_bytes),
            ("optimizer state", self.optimizer_bytes),
            ("unsharded", self.unsharded_bytes),
            ("together", self.peak_bytes()),
        ] {
            writeln!(f, "{name:<16} {bytes:>14} B")?;
        }
        write!(
            f,
            "{:<16} {:>14} B per step",
            "received", self.received_bytes
        )
    }
}
