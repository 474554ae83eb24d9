//! Which parameters share a collective, in which order, and that all ranks agree on it.
//!
//! Decided once, from module paths, shapes and dtypes alone: never from parameter ids (random per
//! process) nor from the order in which gradients become ready (different per rank).

pub(crate) mod config;
pub(crate) mod layout;
pub(crate) mod precision;
pub(crate) mod strategy;
pub(crate) mod verify;

use std::collections::HashMap;
use std::ops::Range;

use burn_shard_comm::DType;

use crate::{Error, ShardConfig, ShardingStrategy};
use layout::{GroupLayout, ParamSpec};

/// No vector of more bytes is small. Norms ask the stored vector for its length, and none is longer.
const SMALL_VECTOR_BYTES: usize = 4 << 20;

/// No parameter of several axes of more bytes is small.
const SMALL_BYTES: usize = 64 << 10;

/// A parameter of several axes is small if it takes at most this part of a group as well: the default
/// 25 MiB make it the same.
const SMALL_PART_OF_A_GROUP: usize = 400;

/// The communication plan of one wrapped module.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) params: Vec<ParamSpec>,
    pub(crate) groups: Vec<GroupSpec>,
    /// For each parameter, its group and its place among the group's members.
    pub(crate) place: Vec<Place>,
    pub(crate) world_size: usize,
    /// What tensors in flat buffers are aligned to, at least.
    pub(crate) align_bytes: usize,
    index: HashMap<String, usize>,
}

/// A communication unit: parameters of one dtype, neighbours in the module.
#[derive(Clone, Debug)]
pub(crate) struct GroupSpec {
    /// Indices into [`Plan::params`].
    pub(crate) members: Vec<usize>,
    /// Type of the stored parameters, of the gradients that backward leaves, and of the state of steps.
    pub(crate) dtype: DType,
    /// Type in which reads return parameters and gathers travel.
    pub(crate) compute: DType,
    /// Type in which gradients travel.
    pub(crate) reduce: DType,
    /// The module's, but [`ShardingStrategy::Replicated`] for parameters that stay whole.
    pub(crate) strategy: ShardingStrategy,
    /// Whether stepped parameters are gathered by the next forward, not by the step.
    pub(crate) defers_gather: bool,
    pub(crate) layout: GroupLayout,
}

impl GroupSpec {
    /// Whether parameters are used in another type than they are stored in.
    pub(crate) fn is_mixed(&self) -> bool {
        self.compute != self.dtype
    }

    /// Whether the stored parameters are shards. Under mixed precision, or if the gather after a step is left to the
    /// next forward, every strategy that shards the optimizer stores what it steps, and the
    /// whole parameters are made from that.
    pub(crate) fn shards_parameters(&self) -> bool {
        let steps_shards = self.is_mixed() || self.defers_gather;
        self.strategy.shards_parameters() || (steps_shards && self.strategy.shards_optimizer())
    }

    /// Whether a read has to make the parameter from what is stored, by a gather or a cast.
    pub(crate) fn unshards(&self) -> bool {
        self.shards_parameters() || self.is_mixed()
    }

    /// Whether unsharded parameters are dropped after use, rather than kept until the next step.
    pub(crate) fn reshards_after_use(&self) -> bool {
        self.strategy.shards_parameters()
    }

    /// Whether whole parameters are gathered once for each value of the module, and kept until the next.
    pub(crate) fn gathers_once(&self) -> bool {
        self.shards_parameters() && !self.reshards_after_use()
    }

    /// Whether the full parameters have to be gathered by the step that changed the shards.
    pub(crate) fn gathers_after_step(&self) -> bool {
        self.strategy.gathers_after_step() && !self.shards_parameters()
    }

    /// Where a member's stored tensor lies in the group's flat buffer: offset and elements.
    pub(crate) fn stored_slot(&self, member: usize) -> (usize, usize) {
        let member = &self.layout.members[member];
        if self.shards_parameters() {
            (member.shard_offset, member.slot_numel)
        } else {
            (member.full_offset, member.numel)
        }
    }

    /// Elements of the group's flat buffer of stored tensors.
    pub(crate) fn stored_len(&self) -> usize {
        if self.shards_parameters() {
            self.layout.shard_len
        } else {
            self.layout.full_len
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) group: usize,
    pub(crate) member: usize,
}

impl Plan {
    /// Groups `params`, given in the order in which the module is traversed.
    ///
    /// A subtree of modules that fits into `group_cap_bytes` is one group; a larger one is split
    /// into its children, and neighbouring children are put together as long as they fit. A single
    /// parameter larger than the cap is a group of its own. Groups hold one dtype, and either
    /// trainable or frozen parameters.
    ///
    /// Under [`ShardingStrategy::Full`] small parameters share groups of their own, wherever they are,
    /// and are not sharded (DeepSpeed's `param_persistence_threshold`): norms and biases are nothing
    /// to keep, recomputing activations reads them out of turn, which would gather a whole layer each
    /// time, and some of Burn's norms look at the stored shape instead of reading the parameter. The
    /// same is done with the parameters that the configuration names.
    pub(crate) fn new(
        params: Vec<ParamSpec>,
        config: &ShardConfig,
        align_bytes: usize,
        world_size: usize,
    ) -> Result<Self, Error> {
        let group_cap_bytes = config.group_cap_bytes;
        for param in &params {
            param
                .shape
                .iter()
                .try_fold(param.dtype.size_bytes(), |size, &dim| size.checked_mul(dim))
                .ok_or_else(|| Error::TooLarge {
                    path: param.path.clone(),
                })?;
        }
        let mut units = Vec::new();
        split(&params, 0..params.len(), 0, group_cap_bytes, &mut units);

        let index = params
            .iter()
            .enumerate()
            .map(|(i, param)| (param.path.clone(), i))
            .collect();
        let mut plan = Self {
            place: vec![
                Place {
                    group: 0,
                    member: 0
                };
                params.len()
            ],
            params,
            groups: Vec::new(),
            align_bytes,
            world_size,
            index,
        };
        // Groups of parameters that stay whole come first, so that by default they are reduced last.
        let whole: Vec<bool> = plan
            .params
            .iter()
            .map(|param| stays_whole(param, config))
            .collect();
        let all: Vec<usize> = (0..plan.params.len()).filter(|&i| whole[i]).collect();
        plan.push_groups(&all, ShardingStrategy::Replicated, config)?;
        for unit in units {
            let others: Vec<usize> = unit.filter(|&i| !whole[i]).collect();
            plan.push_groups(&others, config.strategy, config)?;
        }
        Ok(plan)
    }

    /// Number of elements of the whole model.
    pub(crate) fn numel(&self) -> usize {
        self.params.iter().map(ParamSpec::numel).sum()
    }

    /// Adds one group per dtype and trainability of `candidates`.
    fn push_groups(
        &mut self,
        candidates: &[usize],
        strategy: ShardingStrategy,
        config: &ShardConfig,
    ) -> Result<(), Error> {
        let kind = |plan: &Self, i: usize| (plan.params[i].dtype, plan.params[i].trainable);
        let mut kinds: Vec<(DType, bool)> = Vec::new();
        for &i in candidates {
            if !kinds.contains(&kind(self, i)) {
                kinds.push(kind(self, i));
            }
        }
        for of_kind in kinds {
            let members: Vec<usize> = candidates
                .iter()
                .copied()
                .filter(|&i| kind(self, i) == of_kind)
                .collect();
            let params: Vec<&ParamSpec> = members.iter().map(|&i| &self.params[i]).collect();
            let (dtype, is_trainable) = of_kind;
            let mixed = config.mixed_precision.filter(|_| dtype == DType::F32);
            let compute = mixed.map_or(dtype, |mixed| mixed.param.dtype());
            let reduce = mixed.map_or(dtype, |mixed| mixed.reduce.dtype());
            // Offsets are those of buffers of either type.
            let narrow = if compute.size_bytes() < dtype.size_bytes() {
                compute
            } else {
                dtype
            };
            let layout = GroupLayout::new(&params, narrow, self.align_bytes, self.world_size)
                .ok_or_else(|| Error::TooLarge {
                    path: self.params[members[0]].path.clone(),
                })?;
            for (member, &index) in members.iter().enumerate() {
                self.place[index] = Place {
                    group: self.groups.len(),
                    member,
                };
            }
            self.groups.push(GroupSpec {
                members,
                dtype,
                compute,
                reduce,
                strategy,
                defers_gather: config.defer_gather && is_trainable,
                layout,
            });
        }
        Ok(())
    }

    /// The group of a parameter.
    pub(crate) fn group_of(&self, index: usize) -> &GroupSpec {
        &self.groups[self.place[index].group]
    }

    /// Shape of a parameter's stored tensor.
    pub(crate) fn stored_shape(&self, index: usize) -> Vec<usize> {
        let param = &self.params[index];
        if self.group_of(index).shards_parameters() {
            param.shard_shape(self.world_size)
        } else {
            param.shape.clone()
        }
    }

    /// Index of the parameter at a path.
    pub(crate) fn find(&self, path: &str) -> Option<usize> {
        self.index.get(path).copied()
    }
}

/// Whether every rank keeps the whole parameter: small ones under [`ShardingStrategy::Full`], and those
/// that the configuration names.
fn stays_whole(param: &ParamSpec, config: &ShardConfig) -> bool {
    let limit = if param.shape.len() <= 1 {
        SMALL_VECTOR_BYTES
    } else {
        SMALL_BYTES.min(config.group_cap_bytes / SMALL_PART_OF_A_GROUP)
    };
    let small = config.strategy.shards_parameters() && param.size_bytes() <= limit;
    small || config.ignores(&param.path)
}

/// Splits `range` into units of at most `cap` bytes along the module tree, see [`Plan::new`].
fn split(
    params: &[ParamSpec],
    range: Range<usize>,
    depth: usize,
    cap: usize,
    units: &mut Vec<Range<usize>>,
) {
    let bytes = |range: &Range<usize>| -> usize {
        params[range.clone()]
            .iter()
            .fold(0, |sum, p| sum.saturating_add(p.size_bytes()))
    };
    if range.is_empty() {
        return;
    }
    if range.len() == 1 || bytes(&range) <= cap {
        units.push(range);
        return;
    }
    let component = |index: usize| params[index].path.split('.').nth(depth);
    let mut open: Option<Range<usize>> = None;
    let mut start = range.start;
    while start < range.end {
        let end = (start..range.end)
            .find(|&i| component(i) != component(start))
            .unwrap_or(range.end);
        let child = start..end;
        start = end;
        if child.len() > 1 && bytes(&child) > cap {
            units.extend(open.take());
            split(params, child, depth + 1, cap, units);
            continue;
        }
        open = match open.take() {
            Some(unit) if bytes(&(unit.start..child.end)) <= cap => Some(unit.start..child.end),
            unit => {
                units.extend(unit);
                Some(child)
            }
        };
    }
    units.extend(open);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn planned(
        params: Vec<ParamSpec>,
        strategy: ShardingStrategy,
        cap: usize,
        world_size: usize,
    ) -> Result<Plan, Error> {
        let config = ShardConfig::new(strategy).with_group_cap_bytes(cap);
        Plan::new(params, &config, 1, world_size)
    }

    fn spec(path: &str, numel: usize) -> ParamSpec {
        ParamSpec::f32(path, &[numel])
    }

    fn paths(plan: &Plan) -> Vec<Vec<&str>> {
        let of = |g: &GroupSpec| {
            g.members
                .iter()
                .map(|&i| plan.params[i].path.as_str())
                .collect()
        };
        plan.groups.iter().map(of).collect()
    }

    #[test]
    fn groups_follow_the_module_tree_and_respect_the_cap() {
        let params = vec![
            spec("embed.weight", 1000),
            spec("layers.0.a.weight", 40),
            spec("layers.0.a.bias", 4),
            spec("layers.0.b.weight", 40),
            spec("layers.1.a.weight", 40),
            spec("layers.1.a.bias", 4),
            spec("layers.1.b.weight", 40),
            spec("norm.gamma", 4),
            spec("norm.beta", 4),
        ];
        let plan = planned(params.clone(), ShardingStrategy::Gradients, 100 * 4, 2).unwrap();
        assert_eq!(
            paths(&plan),
            vec![
                vec!["embed.weight"],
                vec!["layers.0.a.weight", "layers.0.a.bias", "layers.0.b.weight"],
                vec!["layers.1.a.weight", "layers.1.a.bias", "layers.1.b.weight"],
                vec!["norm.gamma", "norm.beta"],
            ]
        );
        // A smaller cap splits the layers, never a weight from its bias unless it must.
        let plan = planned(params.clone(), ShardingStrategy::Gradients, 50 * 4, 2).unwrap();
        assert_eq!(paths(&plan)[1], ["layers.0.a.weight", "layers.0.a.bias"]);
        assert_eq!(paths(&plan)[2], ["layers.0.b.weight"]);
        // No cap: one group.
        assert_eq!(
            planned(params, ShardingStrategy::Gradients, usize::MAX, 2)
                .unwrap()
                .groups
                .len(),
            1
        );
    }

    #[test]
    fn every_parameter_has_one_place_whatever_the_cap() {
        let mut params = Vec::new();
        for block in 0..5 {
            for (name, numel) in [("w", 97), ("b", 1), ("empty", 0), ("scale", 13)] {
                params.push(spec(&format!("blocks.{block}.inner.{name}"), numel));
            }
        }
        params[3].dtype = DType::BF16;
        params[9].trainable = false;
        for cap in [0, 1, 4, 60, 400, 1000, 5000, usize::MAX] {
            for world_size in 1..=4 {
                let strategy = if world_size % 2 == 0 {
                    ShardingStrategy::Full
                } else {
                    ShardingStrategy::Gradients
                };
                let plan = planned(params.clone(), strategy, cap, world_size).unwrap();
                let mut seen = vec![0; params.len()];
                for (g, group) in plan.groups.iter().enumerate() {
                    for (m, &index) in group.members.iter().enumerate() {
                        seen[index] += 1;
                        assert_eq!((plan.place[index].group, plan.place[index].member), (g, m));
                        assert_eq!(plan.params[index].dtype, group.dtype);
                        let first = &plan.params[group.members[0]];
                        assert_eq!(plan.params[index].trainable, first.trainable);
                        assert_eq!(group.layout.members[m].numel, params[index].numel());
                    }
                }
                assert!(seen.iter().all(|&n| n == 1), "cap {cap}: {seen:?}");
            }
        }
    }

    #[test]
    fn under_full_small_parameters_share_one_group_that_is_not_sharded() {
        let matrix = |path: &str, rows: usize| ParamSpec {
            shape: vec![rows, 10],
            ..spec(path, 0)
        };
        let params = vec![
            matrix("a.weight", 10),
            spec("a.bias", 5),
            matrix("b.weight", 10),
            spec("b.bias", SMALL_VECTOR_BYTES / 4),
            matrix("b.scale", 1),
            spec("b.long", SMALL_VECTOR_BYTES / 4 + 1),
        ];
        let strategies = |plan: &Plan| -> Vec<ShardingStrategy> {
            plan.groups.iter().map(|g| g.strategy).collect()
        };
        let (full, whole) = (ShardingStrategy::Full, ShardingStrategy::Replicated);
        let plan = planned(params.clone(), full, 100 * 4, 2).unwrap();
        assert_eq!(
            paths(&plan),
            vec![
                vec!["a.bias", "b.bias"],
                vec!["a.weight"],
                vec!["b.weight"],
                vec!["b.scale"],
                vec!["b.long"]
            ]
        );
        assert_eq!(strategies(&plan), [whole, full, full, full, full]);
        // What is small beside a group is small, whatever its shape.
        let plan = planned(params.clone(), full, 40 * SMALL_PART_OF_A_GROUP, 2).unwrap();
        assert_eq!(paths(&plan)[0], ["a.bias", "b.bias", "b.scale"]);
        // Under the other strategies nothing is gained by it.
        let plan = planned(params, ShardingStrategy::Gradients, usize::MAX, 2).unwrap();
        assert_eq!(strategies(&plan), [ShardingStrategy::Gradients]);
    }

    #[test]
    fn a_shape_whose_bytes_overflow_is_refused_by_name() {
        let mut huge = spec("head.weight", 0);
        huge.shape = vec![1 << 40, 1 << 30];
        let error = planned(vec![huge], ShardingStrategy::Gradients, usize::MAX, 2).unwrap_err();
        assert!(error.to_string().contains("head.weight"), "{error}");
    }
}
