//! Which groups are unsharded when: gathered under [`Full`](crate::ShardingStrategy::Full), gathered or
//! cast under mixed precision.
//!
//! The first read of a group's member unshards the whole group, by one collective; the other members
//! take their piece. Each unsharded parameter has a buffer of its own, so that a consumer that keeps
//! one (Burn's embedding keeps its weight until backward) does not keep its neighbours.
//!
//! What is gathered, ahead of time or not, and dropped depends on the sequence of reads alone, which
//! is the same on every rank, never on which tensors happen to be alive: ranks must agree on every
//! gather.

use burn_shard_comm::DType;

use super::context::Context;
use super::group::{Gather, Gathered, ParamGroup, Params};
use super::instance::Instance;
use super::schedule::Schedule;
use crate::Error;
use crate::plan::GroupSpec;
use crate::storage::flat::{Flat, FlatTensor};
use crate::storage::ledger::MemoryKind;

/// Besides the group being read, this many groups that were read in part stay gathered.
const KEPT_GROUPS: usize = 1;

/// In which type parameters are made whole.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum ReadAs {
    /// The one that the module computes in.
    #[default]
    Compute,
    /// The one that is stored: the master weights.
    Stored,
}

/// A value of a module, and how it is read.
#[derive(Clone, Copy)]
pub(super) struct Value<'a> {
    pub(super) context: &'a Context,
    pub(super) instance: &'a Instance,
    pub(super) read_as: ReadAs,
}

impl Value<'_> {
    /// The type in which the group's parameters are made whole.
    fn dtype(&self, spec: &GroupSpec) -> DType {
        match self.read_as {
            ReadAs::Compute => spec.compute,
            ReadAs::Stored => spec.dtype,
        }
    }

    /// What is stored, in the type of the whole parameters.
    fn cast(&self, kind: MemoryKind, spec: &GroupSpec, stored: &Flat) -> Flat {
        if self.dtype(spec) == spec.dtype {
            stored.clone()
        } else {
            self.context
                .cast(kind, stored, spec.dtype, self.dtype(spec))
        }
    }
}

/// The groups of a module, for the time of one call.
pub(super) struct Unsharder<'a> {
    pub(super) value: Value<'a>,
    pub(super) groups: &'a mut [ParamGroup],
    pub(super) schedule: &'a mut Schedule,
    pub(super) clock: &'a mut u64,
}

impl Unsharder<'_> {
    /// The full parameter `index` in the compute type, of which `stored` is what this rank stores.
    pub(super) fn get(&mut self, index: usize, stored: &FlatTensor) -> Result<FlatTensor, Error> {
        let value = self.value;
        let context = value.context;
        let place = context.plan.place[index];
        let spec = &context.plan.groups[place.group];
        let (offset, _) = spec.stored_slot(place.member);
        let Some(flat) = stored.flat(offset, spec.stored_len()) else {
            // Not bound to its group's buffer: someone put another tensor in its place.
            return unshard_one(value, index, stored);
        };
        *self.clock += 1;
        if self.groups[place.group].gathered_from(&flat).is_none() {
            if spec.gathers_once() {
                self.start_once()?;
            } else {
                self.schedule.note_gather(place.group);
                self.make_room(place.group);
            }
            let group = &mut self.groups[place.group];
            let gathered = match group.take_gather_of(&flat) {
                Some(gather) => finish(value, place.group, gather)?,
                None => {
                    group.reshard();
                    unshard(value, place.group, flat.clone())?
                }
            };
            group.params = Params::Gathered(gathered);
        }
        let gathered = self.groups[place.group].gathered_from(&flat);
        let gathered = gathered.expect("the group was just gathered");
        gathered.unread[place.member] = false;
        gathered.last_read = *self.clock;
        let full = gathered.full[place.member].clone();
        self.prefetch()?;
        Ok(full)
    }

    /// Starts the gathers of all groups that are gathered once, unless they have been started. In the
    /// order of the plan, whatever is read first: ranks may read different parameters.
    pub(super) fn start_once(&mut self) -> Result<(), Error> {
        let Value {
            context, instance, ..
        } = self.value;
        for (index, spec) in context.plan.groups.iter().enumerate() {
            let group = &mut self.groups[index];
            if spec.gathers_once()
                && let Some(flat) = instance.flat(index)
                && !group.is_made_from(&flat)
            {
                group.reshard();
                group.params = Params::Gathering(start(self.value, index, flat)?);
            }
        }
        Ok(())
    }

    /// Starts the gathers of the groups that come next.
    fn prefetch(&mut self) -> Result<(), Error> {
        let Value {
            context, instance, ..
        } = self.value;
        for &index in self.schedule.upcoming(context.config.prefetch) {
            let is_sharded = matches!(self.groups[index].params, Params::Sharded);
            if is_sharded
                && context.plan.groups[index].shards_parameters()
                && let Some(flat) = instance.flat(index)
            {
                let gather = start(self.value, index, flat)?;
                self.groups[index].params = Params::Gathering(gather);
            }
        }
        Ok(())
    }

    /// Drops what is not needed beside the group `next`: groups of which every member was read, the least
    /// recently read of the others, and gathers that were started for nothing.
    fn make_room(&mut self, next: usize) {
        let context = self.value.context;
        let upcoming = self.schedule.upcoming(context.config.prefetch);
        let mut waiting = Vec::new();
        for (index, group) in self.groups.iter_mut().enumerate() {
            if index == next || !context.plan.groups[index].reshards_after_use() {
                continue;
            }
            match &group.params {
                Params::Sharded => {}
                Params::Gathering(_) if upcoming.contains(&index) => {}
                Params::Gathered(gathered) if gathered.unread.contains(&true) => {
                    waiting.push((gathered.last_read, index));
                }
                Params::Gathering(_) | Params::Gathered(_) => group.reshard(),
            }
        }
        waiting.sort_unstable();
        let surplus = waiting.len().saturating_sub(KEPT_GROUPS);
        for &(_, index) in &waiting[..surplus] {
            self.groups[index].reshard();
        }
    }
}

/// Makes the whole parameters of a group, at once.
fn unshard(value: Value<'_>, group: usize, stored: Flat) -> Result<Gathered, Error> {
    let plan = &value.context.plan;
    let spec = &plan.groups[group];
    if spec.shards_parameters() {
        let gather = start(value, group, stored)?;
        return finish(value, group, gather);
    }
    // Stored whole: a cast is all there is to do.
    let cast = value.cast(MemoryKind::Unsharded, spec, &stored);
    let members = spec.members.iter().zip(&spec.layout.members);
    let view = |(&index, member): (&usize, &crate::plan::layout::MemberLayout)| {
        cast.view(
            member.full_offset,
            &plan.params[index].shape,
            value.dtype(spec),
        )
    };
    let full = members.map(view).collect();
    Ok(gathered(stored, full))
}

fn gathered(shards: Flat, full: Vec<FlatTensor>) -> Gathered {
    Gathered {
        shards,
        unread: vec![true; full.len()],
        full,
        last_read: 0,
    }
}

/// Starts the all-gather of a group from its flat buffer of shards.
fn start(value: Value<'_>, group: usize, shards: Flat) -> Result<Gather, Error> {
    let Value {
        context, instance, ..
    } = value;
    let spec = &context.plan.groups[group];
    let dtype = value.dtype(spec);
    let own = context.readable(&value.cast(MemoryKind::Staging, spec, &shards));
    let tensors = spec
        .layout
        .members
        .iter()
        .map(|member| {
            let shard = own.view(member.shard_offset, &[member.shard_numel], dtype);
            (member.shard_numel, Some(shard))
        })
        .collect();
    let purpose = context.purpose(instance, "gather", &spec.members);
    let input = context.input(dtype, purpose, tensors)?;
    let numels: Vec<usize> = spec
        .layout
        .members
        .iter()
        .map(|member| member.numel)
        .collect();
    let work = context
        .mesh
        .shard
        .communicator()
        .all_gather(input.segments(), &numels)
        .map_err(|source| failed(context, spec.members[0], source))?;
    Ok(Gather { shards, work })
}

fn finish(value: Value<'_>, group: usize, gather: Gather) -> Result<Gathered, Error> {
    let spec = &value.context.plan.groups[group];
    let (context, dtype) = (value.context, value.dtype(spec));
    let fail = |source| failed(context, spec.members[0], source);
    let kind = MemoryKind::Unsharded;
    let full = context.receive_whole(kind, dtype, &spec.members, gather.work, fail)?;
    Ok(gathered(gather.shards, full))
}

/// All-gathers one parameter from a stored tensor outside its group's buffer.
fn unshard_one(value: Value<'_>, index: usize, stored: &FlatTensor) -> Result<FlatTensor, Error> {
    let Value {
        context, instance, ..
    } = value;
    let spec = context.plan.group_of(index);
    let dtype = value.dtype(spec);
    let cast = value.cast(MemoryKind::Unsharded, spec, &stored.copied());
    if !spec.shards_parameters() {
        return Ok(cast.view(0, &context.plan.params[index].shape, dtype));
    }
    let member = &spec.layout.members[context.plan.place[index].member];
    let shard = context
        .readable(&cast)
        .view(0, &[member.shard_numel], dtype);
    let purpose = context.purpose(instance, "gather of one parameter", &[index]);
    let input = context.input(dtype, purpose, vec![(member.shard_numel, Some(shard))])?;
    let work = context
        .mesh
        .shard
        .communicator()
        .all_gather(input.segments(), &[member.numel])
        .map_err(|source| failed(context, index, source))?;
    let fail = |source| failed(context, index, source);
    let full = context.receive_whole(MemoryKind::Unsharded, dtype, &[index], work, fail)?;
    Ok(full
        .into_iter()
        .next()
        .expect("one parameter should have been received"))
}

fn failed(context: &Context, index: usize, source: burn_shard_comm::Error) -> Error {
    Error::Gather {
        rank: context.rank(),
        path: context.plan.params[index].path.clone(),
        source,
    }
}
