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

use super::collective_io::OutputBuffer;
use super::context::Context;
use super::group::{Gather, Gathered, ParamGroup, Params};
use super::schedule::Schedule;
use crate::Error;
use crate::plan::GroupSpec;
use crate::storage::flat::{Flat, FlatTensor};
use crate::storage::ledger::MemoryKind;

/// Besides the group being read, this many groups that were read in part stay gathered.
const KEPT_GROUPS: usize = 1;

/// The groups of a module, for the time of one call.
pub(super) struct Unsharder<'a> {
    pub(super) context: &'a Context,
    pub(super) groups: &'a mut [ParamGroup],
    pub(super) schedule: &'a mut Schedule,
    pub(super) clock: &'a mut u64,
}

impl Unsharder<'_> {
    /// The full parameter `index` in the compute type, of which `stored` is what this rank stores.
    /// `latest` are the flat buffers that the groups ahead are gathered from.
    pub(super) fn get(
        &mut self,
        index: usize,
        stored: &FlatTensor,
        latest: &[Option<Flat>],
    ) -> Result<FlatTensor, Error> {
        let context = self.context;
        let place = context.plan.place[index];
        let spec = &context.plan.groups[place.group];
        let (offset, _) = spec.stored_slot(place.member);
        let Some(flat) = stored.flat(offset, spec.stored_len()) else {
            // Not bound to its group's buffer: someone put another tensor in its place.
            return unshard_one(context, index, stored);
        };
        *self.clock += 1;
        if self.groups[place.group].gathered_from(&flat).is_none() {
            self.schedule.note_gather(place.group);
            self.make_room(place.group);
            let group = &mut self.groups[place.group];
            let gathered = match group.take_gather_of(&flat) {
                Some(gather) => finish(context, place.group, gather)?,
                None => {
                    group.reshard();
                    unshard(context, place.group, flat.clone())?
                }
            };
            group.params = Params::Gathered(gathered);
        }
        let gathered = self.groups[place.group].gathered_from(&flat);
        let gathered = gathered.expect("the group was just gathered");
        gathered.unread[place.member] = false;
        gathered.last_read = *self.clock;
        let full = gathered.full[place.member].clone();
        self.prefetch(latest)?;
        Ok(full)
    }

    /// Starts the gathers of the groups that come next.
    fn prefetch(&mut self, latest: &[Option<Flat>]) -> Result<(), Error> {
        let upcoming = self.schedule.upcoming(self.context.config.prefetch);
        for &index in upcoming {
            let is_sharded = matches!(self.groups[index].params, Params::Sharded);
            let spec = &self.context.plan.groups[index];
            if let (true, true, Some(flat)) = (is_sharded, spec.shards_parameters(), &latest[index]) {
                let gather = start(self.context, index, flat.clone())?;
                self.groups[index].params = Params::Gathering(gather);
            }
        }
        Ok(())
    }

    /// Drops what is not needed beside the group `next`: groups of which every member was read, the least
    /// recently read of the others, and gathers that were started for nothing.
    fn make_room(&mut self, next: usize) {
        let upcoming = self.schedule.upcoming(self.context.config.prefetch);
        let mut waiting = Vec::new();
        for (index, group) in self.groups.iter_mut().enumerate() {
            if index == next || !self.context.plan.groups[index].reshards_after_use() {
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
fn unshard(context: &Context, group: usize, stored: Flat) -> Result<Gathered, Error> {
    let spec = &context.plan.groups[group];
    if spec.shards_parameters() {
        let gather = start(context, group, stored)?;
        return finish(context, group, gather);
    }
    // Stored whole: a cast is all there is to do.
    let cast = context.cast(MemoryKind::Unsharded, &stored, spec.dtype, spec.compute);
    let members = spec.members.iter().zip(&spec.layout.members);
    let view = |(&index, member): (&usize, &crate::plan::layout::MemberLayout)| {
        cast.view(member.full_offset, &context.plan.params[index].shape, spec.compute)
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
fn start(context: &Context, group: usize, shards: Flat) -> Result<Gather, Error> {
    let spec = &context.plan.groups[group];
    let own = context.readable(&in_compute_type(context, spec, &shards));
    let tensors = spec
        .layout
        .members
        .iter()
        .map(|member| {
            let shard = own.view(member.shard_offset, &[member.shard_numel], spec.compute);
            (member.shard_numel, Some(shard))
        })
        .collect();
    let purpose = context.purpose("gather", &spec.members);
    let input = context.input(spec.compute, purpose, tensors)?;
    let numels: Vec<usize> = spec.layout.members.iter().map(|member| member.numel).collect();
    let work = crate::compat::all_gather(&context.process_group, input.segments(), &numels)
        .map_err(|source| failed(context, spec.members[0], source))?;
    Ok(Gather { shards, work })
}

fn in_compute_type(context: &Context, spec: &GroupSpec, shards: &Flat) -> Flat {
    if spec.is_mixed() {
        context.cast(MemoryKind::Staging, shards, spec.dtype, spec.compute)
    } else {
        shards.clone()
    }
}

fn finish(context: &Context, group: usize, gather: Gather) -> Result<Gathered, Error> {
    let spec = &context.plan.groups[group];
    let full = receive(context, &spec.members, spec.compute, gather.work)?;
    Ok(gathered(gather.shards, full))
}

/// All-gathers one parameter from a stored tensor outside its group's buffer.
fn unshard_one(context: &Context, index: usize, stored: &FlatTensor) -> Result<FlatTensor, Error> {
    let spec = context.plan.group_of(index);
    let param = &context.plan.params[index];
    let flat = stored.copied();
    let cast = if spec.is_mixed() {
        context.cast(MemoryKind::Unsharded, &flat, spec.dtype, spec.compute)
    } else {
        flat
    };
    if !spec.shards_parameters() {
        return Ok(cast.view(0, &param.shape, spec.compute));
    }
    let member = &spec.layout.members[context.plan.place[index].member];
    let shard = context.readable(&cast).view(0, &[member.shard_numel], spec.compute);
    let purpose = context.purpose("gather of one parameter", &[index]);
    let input = context.input(spec.compute, purpose, vec![(member.shard_numel, Some(shard))])?;
    let work = crate::compat::all_gather(&context.process_group, input.segments(), &[member.numel])
        .map_err(|source| failed(context, index, source))?;
    Ok(receive(context, &[index], spec.compute, work)?.remove(0))
}

fn receive(
    context: &Context,
    members: &[usize],
    dtype: DType,
    work: Box<dyn burn_shard_comm::Work>,
) -> Result<Vec<FlatTensor>, Error> {
    let params = members.iter().map(|&index| &context.plan.params[index]);
    let bytes = params.clone().map(|param| param.numel() * dtype.size_bytes());
    let mut buffers: Vec<OutputBuffer> = bytes
        .map(|bytes| context.output_buffer(MemoryKind::Unsharded, bytes))
        .collect();
    let whole = params.clone().map(|param| vec![(0, param.numel())]);
    let mut output = context.output(dtype, buffers.iter_mut().zip(whole).collect())?;
    work.finish(&mut *output)
        .map_err(|source| failed(context, members[0], source))?;
    drop(output);
    let view = |(buffer, param): (OutputBuffer, &crate::ParamSpec)| {
        let flat = context.commit(MemoryKind::Unsharded, buffer);
        flat.view(0, &param.shape, dtype)
    };
    Ok(buffers.into_iter().zip(params).map(view).collect())
}

fn failed(context: &Context, index: usize, source: burn_shard_comm::Error) -> Error {
    Error::Gather {
        rank: context.rank(),
        path: context.plan.params[index].path.clone(),
        source,
    }
}
