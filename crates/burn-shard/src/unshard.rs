//! Gathered parameters under [`ShardingStrategy::Full`](crate::ShardingStrategy::Full).
//!
//! The first read of a group's member gathers the whole group, one collective; the other members
//! take their piece. Each gathered parameter has a buffer of its own, so that a consumer that keeps
//! one (Burn's embedding keeps its weight until backward) does not keep its neighbours.
//!
//! What is dropped when depends on the sequence of reads alone, which is the same on every rank,
//! never on which tensors happen to be alive: ranks must agree on every gather.

use std::sync::Arc;

use burn_shard_comm::Segments;

use crate::Error;
use crate::context::Context;
use crate::flat::{Flat, FlatTensor};
use crate::memory::MemoryKind;
use crate::plan::Plan;
use crate::transfer::Fresh;

/// Besides the group being read, this many groups with members still to be read stay gathered.
const KEPT_GROUPS: usize = 1;

/// The groups that are gathered now.
#[derive(Debug)]
pub(crate) struct Unsharded {
    groups: Vec<Option<Gathered>>,
    clock: u64,
}

#[derive(Debug)]
struct Gathered {
    /// The shards these parameters were gathered from; other shards are another value of the module.
    shards: Flat,
    full: Vec<FlatTensor>,
    unread: Vec<bool>,
    last_read: u64,
}

impl Unsharded {
    pub(crate) fn new(plan: &Plan) -> Self {
        Self {
            groups: plan.groups.iter().map(|_| None).collect(),
            clock: 0,
        }
    }

    /// The full parameter `index` of which `shard` is this rank's part.
    pub(crate) fn get(
        &mut self,
        context: &Context,
        index: usize,
        shard: &FlatTensor,
    ) -> Result<FlatTensor, Error> {
        let place = context.plan.place[index];
        let layout = &context.plan.groups[place.group].layout;
        let offset = layout.members[place.member].shard_offset;
        let Some(shards) = shard.flat(offset, layout.shard_len) else {
            // Not bound to its group's buffer: someone put another tensor in its place.
            return gather_one(context, index, shard);
        };
        self.clock += 1;
        let bound = |gathered: &Gathered| gathered.shards.is(&shards);
        if !self.groups[place.group].as_ref().is_some_and(bound) {
            self.groups[place.group] = None;
            self.make_room();
            self.groups[place.group] =
                Some(gather(context, place.group, shards.clone(), self.clock)?);
        }
        let gathered = self.groups[place.group]
            .as_mut()
            .expect("the group was just gathered");
        gathered.unread[place.member] = false;
        gathered.last_read = self.clock;
        Ok(gathered.full[place.member].clone())
    }

    /// Drops groups of which every member was read, and the least recently read of the others.
    fn make_room(&mut self) {
        let mut waiting = Vec::new();
        for (index, slot) in self.groups.iter_mut().enumerate() {
            let Some(gathered) = slot else { continue };
            if gathered.unread.contains(&true) {
                waiting.push((gathered.last_read, index));
            } else {
                *slot = None;
            }
        }
        waiting.sort_unstable();
        let surplus = waiting.len().saturating_sub(KEPT_GROUPS);
        for &(_, index) in &waiting[..surplus] {
            self.groups[index] = None;
        }
    }

    /// Drops one group: its gradients are complete.
    pub(crate) fn drop_group(&mut self, group: usize) {
        self.groups[group] = None;
    }

    /// Drops all groups.
    pub(crate) fn clear(&mut self) {
        self.groups.fill_with(|| None);
    }
}

/// All-gathers a group from its flat shard buffer.
fn gather(context: &Context, group: usize, shards: Flat, clock: u64) -> Result<Gathered, Error> {
    let label = context.plan.label(group);
    let own = context.readable(&shards);
    let group = &context.plan.groups[group];
    let members = group.layout.members.iter();
    let tensors = members
        .map(|m| {
            let shard = own.view(m.shard_offset, &[m.shard_numel], group.dtype);
            (m.shard_numel, Some(shard))
        })
        .collect();
    let input = context.input(group.dtype, label, tensors)?;
    let full = all_gather(context, &group.members, input.segments())?;
    Ok(Gathered {
        shards,
        unread: vec![true; full.len()],
        full,
        last_read: clock,
    })
}

/// All-gathers one parameter from a shard outside its group's buffer.
fn gather_one(context: &Context, index: usize, shard: &FlatTensor) -> Result<FlatTensor, Error> {
    let tensors = vec![(shard.numel(), Some(shard.clone()))];
    let label = context.plan.label_of_param(index);
    let input = context.input(shard.dtype(), label, tensors)?;
    let mut full = all_gather(context, &[index], input.segments())?;
    Ok(full.remove(0))
}

fn all_gather(
    context: &Context,
    members: &[usize],
    input: Arc<dyn Segments>,
) -> Result<Vec<FlatTensor>, Error> {
    let dtype = input.dtype();
    let params = members.iter().map(|&index| &context.plan.params[index]);
    let mut buffers: Vec<Fresh> = params
        .clone()
        .map(|param| context.fresh(MemoryKind::Unsharded, param.size_bytes()))
        .collect();
    let whole = params.clone().map(|param| vec![(0, param.numel())]);
    let numels: Vec<usize> = params.clone().map(crate::ParamSpec::numel).collect();
    let mut output = context.output(dtype, buffers.iter_mut().zip(whole).collect())?;
    context
        .group
        .communicator()
        .all_gather(input, &numels)
        .and_then(|work| work.finish(&mut *output))
        .map_err(|source| {
            let path = context.plan.params[members[0]].path.clone();
            Error::Gather {
                rank: context.rank(),
                path,
                source,
            }
        })?;
    drop(output);
    let view = |(buffer, param): (Fresh, &crate::ParamSpec)| {
        let flat = context.place(MemoryKind::Unsharded, buffer);
        flat.view(0, &param.shape, dtype)
    };
    Ok(buffers.into_iter().zip(params).map(view).collect())
}
