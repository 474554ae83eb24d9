//! Gradients: summed over the reads of a parameter as they come, reduced per group while backward
//! still runs.
//!
//! Groups are reduced in an order that all ranks share, never by which one is ready first here: that
//! differs between ranks, and collectives must not. At first it is the reverse of the module's
//! order; after the first backward, the order in which groups became ready on rank 0.

use std::collections::VecDeque;
use std::sync::Arc;

use burn::backend::autodiff::NodeId;
use burn_shard_comm::{OwnedSegments, ReduceOp};

use super::context::Context;
use super::group::{Grads, ParamGroup, Reduction};
use super::instance::Instance;
use super::mesh::Mesh;
use super::pass::{GradientSync, Pass};
use super::schedule::Schedule;
use crate::Error;
use crate::plan::GroupSpec;
use crate::plan::layout::MemberLayout;
use crate::storage::flat::{FlatBackend, FlatTensor};
use crate::storage::host::{HostTensor, PiecesMut};
use crate::storage::ledger::MemoryKind;

/// Reductions begun and not finished: a rank may run ahead of its peers by this many groups, and
/// keeps the full gradients of as many.
const MAX_IN_FLIGHT: usize = 1;
/// Where collectives run on a device, one more, so that the device has work while the host waits here.
const MAX_IN_FLIGHT_ON_DEVICE: usize = 2;

/// What the backward that is running has come to.
#[derive(Debug, Default)]
pub(super) struct Backward {
    /// Position in the order of reductions of the next group.
    next: usize,
    /// Groups whose reductions are in flight, the oldest first.
    in_flight: VecDeque<usize>,
}

/// The gradients of a module, for the time of one call.
pub(super) struct Reducer<'a> {
    pub(super) context: &'a Context,
    pub(super) instance: &'a Instance,
    pub(super) groups: &'a mut [ParamGroup],
    pub(super) schedule: &'a mut Schedule,
    pub(super) backward: &'a mut Backward,
    pub(super) pass: &'a mut Pass,
}

impl Reducer<'_> {
    /// Takes the gradient of one read.
    pub(super) fn collect<B: FlatBackend>(&mut self, index: usize, gradient: FlatTensor) {
        let context = self.context;
        let place = context.plan.place[index];
        let spec = &context.plan.groups[place.group];
        let sum = self.groups[place.group]
            .grads
            .collect(spec.members.len(), place.member);
        let gradient = match sum.take() {
            None => gradient,
            Some(sum) => {
                context.ledger.sub(MemoryKind::Gradients, sum.size_bytes());
                // The later read's comes first, as the gradients of a plain parameter do.
                sum.add::<B>(gradient)
            }
        };
        context
            .ledger
            .add(MemoryKind::Gradients, gradient.size_bytes());
        *sum = Some(gradient);
        self.pass.came[index] = true;
    }

    /// One gradient less is to come of a group.
    pub(super) fn arrived(&mut self, group: usize) {
        self.pass.arrived(group);
        if self.pass.is_complete(group) {
            self.schedule.note_ready(group);
        }
    }

    /// Begins the reductions of the groups that are next in order and complete.
    pub(super) fn advance<B: FlatBackend>(&mut self) -> Result<(), Error> {
        self.reduce_while::<B>(|pass, group| pass.is_complete(group))
    }

    /// Begins the reductions of all groups that are left: no gradient will come any more.
    pub(super) fn flush<B: FlatBackend>(&mut self) -> Result<(), Error> {
        self.reduce_while::<B>(|_, _| true)
    }

    fn reduce_while<B: FlatBackend>(
        &mut self,
        ready: impl Fn(&Pass, usize) -> bool,
    ) -> Result<(), Error> {
        while let Some(&group) = self.schedule.reductions.get(self.backward.next) {
            if !ready(self.pass, group) {
                break;
            }
            self.backward.next += 1;
            if self.context.plan.groups[group].reshards_after_use() {
                self.groups[group].reshard();
            }
            match self.pass.sync {
                GradientSync::Accumulate => self.accumulate::<B>(group),
                GradientSync::Reduce => self.start::<B>(group)?,
            }
            let most = if self.context.memory.is_reached() {
                MAX_IN_FLIGHT_ON_DEVICE
            } else {
                MAX_IN_FLIGHT
            };
            while self.backward.in_flight.len() > most {
                self.wait_for_oldest()?;
                self.complete_oldest::<B>()?;
            }
        }
        Ok(())
    }

    /// Adds this pass's gradients to what was accumulated.
    fn accumulate<B: FlatBackend>(&mut self, group: usize) {
        let spec = &self.context.plan.groups[group];
        let ParamGroup {
            grads, accumulated, ..
        } = &mut self.groups[group];
        let collected = grads.take_collected(spec.members.len());
        accumulated.resize(spec.members.len(), None);
        for (kept, gradient) in accumulated.iter_mut().zip(collected) {
            let Some(gradient) = gradient else { continue };
            let ledger = &self.context.ledger;
            ledger.sub(MemoryKind::Gradients, gradient.size_bytes());
            let gradient = gradient.cast::<B>(spec.dtype);
            let sum = match kept.take() {
                None => gradient,
                Some(kept) => {
                    ledger.sub(MemoryKind::Gradients, kept.size_bytes());
                    kept.add::<B>(gradient)
                }
            };
            ledger.add(MemoryKind::Gradients, sum.size_bytes());
            *kept = Some(sum);
        }
    }

    /// Begins the reduction of a group.
    fn start<B: FlatBackend>(&mut self, group: usize) -> Result<(), Error> {
        let context = self.context;
        let spec = &context.plan.groups[group];
        if !self.groups[group].accumulated.is_empty() {
            // What came last is added last.
            self.accumulate::<B>(group);
        }
        let state = &mut self.groups[group];
        let mut sums = match std::mem::take(&mut state.accumulated) {
            accumulated if accumulated.is_empty() => state.grads.take_collected(spec.members.len()),
            accumulated => accumulated,
        };
        let members: Vec<usize> = spec
            .members
            .iter()
            .copied()
            .filter(|&index| self.instance.leaf(index).is_some())
            .collect();
        if members.is_empty() {
            return Ok(());
        }
        let mut held_bytes = 0;
        let tensors: Vec<_> = members
            .iter()
            .map(|&index| {
                let sum = sums[context.plan.place[index].member].take().map(|sum| {
                    self.pass.came[index] = true;
                    context.ledger.sub(MemoryKind::Gradients, sum.size_bytes());
                    let sum = sum.cast::<B>(spec.reduce);
                    context.ledger.add(MemoryKind::Gradients, sum.size_bytes());
                    held_bytes += sum.size_bytes();
                    sum
                });
                (context.plan.params[index].numel(), sum)
            })
            .collect();
        let purpose = context.purpose(self.instance, "gradients", &members);
        let input = context.input(spec.reduce, purpose, tensors)?;
        let Mesh { world, shard, .. } = &context.mesh;
        let work = if spec.strategy.shards_gradients() {
            let communicator = shard.communicator();
            communicator.reduce_scatter(input.segments(), ReduceOp::Mean)
        } else {
            world
                .communicator()
                .all_reduce(input.segments(), ReduceOp::Mean)
        };
        let work = work.map_err(|source| failed(context, members[0], source))?;
        state.grads = Grads::Reducing(Reduction {
            members,
            held_bytes,
            input,
            work,
        });
        self.backward.in_flight.push_back(group);
        Ok(())
    }

    /// A host that ran ahead of its device would keep the gradients of all groups.
    fn wait_for_oldest(&mut self) -> Result<(), Error> {
        let oldest = self.backward.in_flight.front();
        if let Some(Grads::Reducing(reduction)) = oldest.map(|&group| &mut self.groups[group].grads)
        {
            let waited = reduction.work.wait();
            waited.map_err(|source| failed(self.context, reduction.members[0], source))?;
        }
        Ok(())
    }

    fn complete_oldest<B: FlatBackend>(&mut self) -> Result<(), Error> {
        let Some(group) = self.backward.in_flight.pop_front() else {
            return Ok(());
        };
        let context = self.context;
        let spec = &context.plan.groups[group];
        let reduction = self.groups[group].grads.take_reduction();
        let held_bytes = reduction.held_bytes;
        let reduced = if spec.strategy.shards_gradients() {
            finish_reduce_scatter((context, self.instance), spec, reduction)
        } else if context.memory.is_reached() {
            finish_all_reduce_on_device(context, spec, reduction)
        } else {
            finish_all_reduce(context, spec, reduction)
        };
        let mut averages = vec![None; spec.members.len()];
        for (index, average) in reduced? {
            averages[context.plan.place[index].member] = Some(average.cast::<B>(spec.dtype));
        }
        self.groups[group].grads = Grads::Reduced(averages);
        context.ledger.sub(MemoryKind::Gradients, held_bytes);
        Ok(())
    }

    /// Finishes the backward. A parameter that no rank used has no gradient, as in plain Burn; one that
    /// some ranks used has the average with zeros on every rank.
    pub(super) fn finish<B: FlatBackend>(mut self) -> Result<Vec<(NodeId, FlatTensor)>, Error> {
        if self.pass.sync == GradientSync::Accumulate {
            return Ok(Vec::new());
        }
        while !self.backward.in_flight.is_empty() {
            self.complete_oldest::<B>()?;
        }
        let used = self.used_somewhere()?;
        self.agree_on_order()?;
        let mut gradients = Vec::new();
        for (spec, state) in self.context.plan.groups.iter().zip(self.groups.iter_mut()) {
            let averages = state.grads.take_reduced().unwrap_or_default();
            for (&index, average) in spec.members.iter().zip(averages) {
                if used[index] > 0 {
                    gradients.extend(self.instance.leaf(index).zip(average));
                }
            }
        }
        Ok(gradients)
    }

    /// Which parameters any rank has a gradient of. A rank that has all of them tells the others, and
    /// does not wait.
    fn used_somewhere(&self) -> Result<Vec<u8>, Error> {
        let used: Vec<u8> = self.pass.came.iter().map(|&came| u8::from(came)).collect();
        let has_all = used
            .iter()
            .enumerate()
            .all(|(index, &used)| used > 0 || self.instance.leaf(index).is_none());
        let input = Arc::new(OwnedSegments(vec![used.clone()]));
        let communicator = self.context.mesh.world.communicator();
        let work = communicator.all_reduce(input, ReduceOp::Max)?;
        if has_all {
            return Ok(used);
        }
        let mut used = OwnedSegments(vec![used]);
        work.finish(&mut used)?;
        Ok(used.0.remove(0))
    }

    /// Once: the order in which groups became ready on rank 0 replaces the module's own, and its
    /// count of levels the constant.
    fn agree_on_order(&mut self) -> Result<(), Error> {
        if let Some(mut proposal) = self.schedule.take_proposal() {
            self.context.mesh.world.broadcast(&mut proposal, 0)?;
            self.schedule.agree(&proposal);
        }
        Ok(())
    }
}

/// Averages by parameter.
type Averages = Vec<(usize, FlatTensor)>;

/// Each member ends as a view of the group's gradient shard buffer.
fn finish_reduce_scatter(
    (context, instance): (&Context, &Instance),
    spec: &GroupSpec,
    reduction: Reduction,
) -> Result<Averages, Error> {
    let layout = |index: usize| &spec.layout.members[context.plan.place[index].member];
    let bytes = spec.layout.shard_len * spec.reduce.size_bytes();
    let has_gaps = |&index: &usize| layout(index).slot_numel > layout(index).shard_numel;
    let mut buffer = if reduction.members.iter().any(has_gaps) {
        context.zeroed_output_buffer(MemoryKind::Gradients, bytes)
    } else {
        context.output_buffer(MemoryKind::Gradients, bytes)
    };
    let range = |member: &MemberLayout| (member.shard_offset, member.shard_numel);
    let ranges = reduction
        .members
        .iter()
        .map(|&index| range(layout(index)))
        .collect();
    let mut output = context.output(spec.reduce, vec![(&mut buffer, ranges)])?;
    let finished = reduction.work.finish(&mut *output);
    finished.map_err(|source| failed(context, reduction.members[0], source))?;
    drop((output, reduction.input));
    let mut shards = context.commit(MemoryKind::Gradients, buffer);
    if spec.reduce != spec.dtype {
        shards = context.cast(MemoryKind::Gradients, &shards, spec.reduce, spec.dtype);
    }
    if let Some(replicate) = &context.mesh.replicate {
        let purpose = context.purpose(instance, "gradients of all copies", &reduction.members);
        let numel = spec.layout.shard_len;
        let own = context.readable(&shards).view(0, &[numel], spec.dtype);
        let input = context.input(spec.dtype, purpose, vec![(numel, Some(own))])?;
        let failed = |source| failed(context, reduction.members[0], source);
        let communicator = replicate.communicator();
        let work = communicator
            .all_reduce(input.segments(), ReduceOp::Mean)
            .map_err(failed)?;
        let bytes = numel * spec.dtype.size_bytes();
        let mut buffer = context.output_buffer(MemoryKind::Gradients, bytes);
        let mut output = context.output(spec.dtype, vec![(&mut buffer, vec![(0, numel)])])?;
        work.finish(&mut *output).map_err(failed)?;
        drop((output, input));
        shards = context.commit(MemoryKind::Gradients, buffer);
    }
    let members = reduction.members.into_iter();
    Ok(members
        .map(|index| {
            let shape = context.plan.params[index].shard_shape(context.plan.world_size);
            (
                index,
                shards.view(layout(index).shard_offset, &shape, spec.dtype),
            )
        })
        .collect())
}

/// Each member ends as the full average, in the memory of this rank's own gradient.
fn finish_all_reduce(
    context: &Context,
    spec: &GroupSpec,
    mut reduction: Reduction,
) -> Result<Averages, Error> {
    let first = reduction.members[0];
    let waited = reduction.work.wait();
    waited.map_err(|source| failed(context, first, source))?;
    let tensors = reduction.input.into_host().into_iter();
    let mut full: Vec<HostTensor> = tensors
        .zip(&reduction.members)
        .map(|((_, tensor), &index)| {
            let shape = &context.plan.params[index].shape;
            tensor.unwrap_or_else(|| context.zeros(MemoryKind::Gradients, shape, spec.reduce))
        })
        .collect();
    let pieces = full.iter_mut().map(HostTensor::as_bytes_mut).collect();
    let mut output = PiecesMut {
        dtype: spec.reduce,
        pieces,
    };
    let finished = reduction.work.finish(&mut output);
    finished.map_err(|source| failed(context, first, source))?;
    let place = |tensor| context.place_tensor(MemoryKind::Gradients, tensor);
    Ok(reduction
        .members
        .into_iter()
        .zip(full.into_iter().map(place))
        .collect())
}

/// Where the communicator reaches the module's device, members end in buffers of their own: nobody
/// knows there when the gradients have been read.
fn finish_all_reduce_on_device(
    context: &Context,
    spec: &GroupSpec,
    reduction: Reduction,
) -> Result<Averages, Error> {
    let Reduction {
        members,
        work,
        input,
        ..
    } = reduction;
    let fail = |source| failed(context, members[0], source);
    let received =
        context.receive_whole(MemoryKind::Gradients, spec.reduce, &members, work, fail)?;
    drop(input);
    Ok(members.into_iter().zip(received).collect())
}

fn failed(context: &Context, index: usize, source: burn_shard_comm::Error) -> Error {
    Error::Reduce {
        rank: context.rank(),
        path: context.plan.params[index].path.clone(),
        source,
    }
}
