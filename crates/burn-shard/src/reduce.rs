//! Gradients: collected per read, reduced per group while backward still runs.
//!
//! Groups are reduced in an order fixed by the plan, never by which one is ready first here: that
//! differs between ranks, and collectives must not. At first it is the reverse of the module's
//! order; after the first backward, the order in which groups became ready on rank 0.

use std::collections::VecDeque;
use std::sync::Arc;

use burn::backend::autodiff::NodeId;
use burn_shard_comm::{OwnedSegments, ReduceOp, Work};

use crate::Error;
use crate::ParamSpec;
use crate::anchor::Levels;
use crate::context::Context;
use crate::flat::{FlatBackend, FlatTensor};
use crate::host::{HostTensor, PiecesMut};
use crate::instance::Instance;
use crate::memory::MemoryKind;
use crate::plan::Plan;
use crate::transfer::{Fresh, Input};
use crate::unshard::Unsharded;

/// Reductions begun and not finished: a rank may run ahead of its peers by this many groups, and
/// keeps the full gradients of as many.
const MAX_IN_FLIGHT: usize = 1;
/// The same where nobody waits for a device: one more, so that it has work while the host waits here.
const MAX_IN_FLIGHT_ON_DEVICE: usize = 2;

/// The gradients of one backward pass on this rank.
#[derive(Debug)]
pub(crate) struct Reducer {
    params: Vec<Collected>,
    /// Groups in the order of their reduction.
    order: Vec<usize>,
    /// Groups in the order in which they became ready here, until ranks have agreed on `order`.
    observed: Option<Vec<usize>>,
    /// Position in `order` of the next group to reduce.
    next: usize,
    in_flight: VecDeque<InFlight>,
    reduced: Vec<Option<FlatTensor>>,
    leaves: Option<Vec<Option<NodeId>>>,
}

#[derive(Clone, Debug, Default)]
struct Collected {
    reads: usize,
    /// Gradient of each read that has come, with the read's number.
    arrived: Vec<(usize, FlatTensor)>,
    came: usize,
    sum: Option<FlatTensor>,
}

struct InFlight {
    group: usize,
    /// Members that take part: those that require a gradient.
    members: Vec<usize>,
    /// Bytes of this rank's gradients.
    held: usize,
    input: Input,
    work: Box<dyn Work>,
}

impl std::fmt::Debug for InFlight {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("InFlight")
            .field("group", &self.group)
            .finish_non_exhaustive()
    }
}

impl Reducer {
    pub(crate) fn new(plan: &Plan) -> Self {
        Self {
            params: vec![Collected::default(); plan.params.len()],
            order: (0..plan.groups.len()).rev().collect(),
            observed: Some(Vec::new()),
            next: 0,
            in_flight: VecDeque::new(),
            reduced: vec![None; plan.params.len()],
            leaves: None,
        }
    }

    /// Counts a read in forward; returns its number.
    pub(crate) fn read(&mut self, index: usize) -> usize {
        let collected = &mut self.params[index];
        collected.reads += 1;
        collected.reads
    }

    /// Whether the parameter has been read in this pass.
    pub(crate) fn was_read(&self, index: usize) -> bool {
        self.params[index].reads > 0
    }

    /// Takes the gradient of one read.
    pub(crate) fn gradient<B: FlatBackend>(
        &mut self,
        context: &Context,
        instance: &Instance,
        index: usize,
        leaf: NodeId,
        number: usize,
        gradient: FlatTensor,
    ) {
        let leaves = self.leaves.get_or_insert_with(|| instance.leaves());
        leaves[index] = Some(leaf);
        context
            .ledger
            .add(MemoryKind::Gradients, gradient.size_bytes());
        let collected = &mut self.params[index];
        collected.arrived.push((number, gradient));
        collected.came += 1;
        if collected.came == collected.reads {
            collected.add_up::<B>(context);
            let group = context.plan.place[index].group;
            if self.is_complete(context, group)
                && let Some(observed) = &mut self.observed
            {
                observed.push(group);
            }
        }
    }

    /// No gradient will come any more. Reads whose graph was dropped without a backward have left
    /// their parameter's sum unmade.
    pub(crate) fn close<B: FlatBackend>(&mut self, context: &Context, instance: &Instance) {
        self.leaves.get_or_insert_with(|| instance.leaves());
        for collected in &mut self.params {
            collected.add_up::<B>(context);
        }
    }

    /// Begins the reductions of the groups that are next in order and complete; of all, if `last`.
    pub(crate) fn advance(
        &mut self,
        context: &Context,
        unsharded: &mut Unsharded,
        last: bool,
    ) -> Result<(), Error> {
        while let Some(&group) = self.order.get(self.next) {
            if !last && !self.is_complete(context, group) {
                break;
            }
            self.next += 1;
            unsharded.drop_group(group);
            self.start(context, group)?;
            let most = if context.memory.is_reached() {
                MAX_IN_FLIGHT_ON_DEVICE
            } else {
                MAX_IN_FLIGHT
            };
            while self.in_flight.len() > most {
                self.wait_for_oldest(context)?;
                self.complete_oldest(context)?;
            }
        }
        Ok(())
    }

    fn is_complete(&self, context: &Context, group: usize) -> bool {
        let members = &context.plan.groups[group].members;
        members
            .iter()
            .all(|&index| self.params[index].came == self.params[index].reads)
    }

    fn start(&mut self, context: &Context, group: usize) -> Result<(), Error> {
        let leaves = self
            .leaves
            .as_ref()
            .expect("the instance should be known by now");
        let plan = &context.plan.groups[group];
        let members: Vec<usize> = plan
            .members
            .iter()
            .copied()
            .filter(|&index| leaves[index].is_some())
            .collect();
        if members.is_empty() {
            return Ok(());
        }
        let tensors: Vec<_> = members
            .iter()
            .map(|&index| {
                let sum = self.params[index].sum.take();
                (context.plan.params[index].numel(), sum)
            })
            .collect();
        let held = tensors.iter().filter_map(|(_, sum)| sum.as_ref());
        let held = held.map(FlatTensor::size_bytes).sum();
        let input = context.input(plan.dtype, context.plan.label(group), tensors)?;
        let communicator = context.group.communicator();
        let work = if plan.strategy.shards_gradients() {
            communicator.reduce_scatter(input.segments(), ReduceOp::Mean)
        } else {
            communicator.all_reduce(input.segments(), ReduceOp::Mean)
        };
        let work = work.map_err(|source| failed(context, members[0], source))?;
        self.in_flight.push_back(InFlight {
            group,
            members,
            held,
            input,
            work,
        });
        Ok(())
    }

    /// A host that ran ahead of its device would keep the gradients of all groups.
    fn wait_for_oldest(&mut self, context: &Context) -> Result<(), Error> {
        let Some(flight) = self.in_flight.front_mut() else {
            return Ok(());
        };
        let waited = flight.work.wait();
        waited.map_err(|source| failed(context, flight.members[0], source))
    }

    fn complete_oldest(&mut self, context: &Context) -> Result<(), Error> {
        let Some(flight) = self.in_flight.pop_front() else {
            return Ok(());
        };
        let held = flight.held;
        let group = &context.plan.groups[flight.group];
        if group.strategy.shards_gradients() {
            self.finish_reduce_scatter(context, flight)?;
        } else if context.memory.is_reached() {
            self.finish_on_device(context, flight)?;
        } else {
            self.finish_all_reduce(context, flight)?;
        }
        context.ledger.sub(MemoryKind::Gradients, held);
        Ok(())
    }

    /// Each member ends as a view of the group's gradient shard buffer.
    fn finish_reduce_scatter(&mut self, context: &Context, flight: InFlight) -> Result<(), Error> {
        let group = &context.plan.groups[flight.group];
        let layout = |index: usize| &group.layout.members[context.plan.place[index].member];
        let bytes = group.layout.shard_len * group.dtype.size_bytes();
        let mut buffer = context.fresh(MemoryKind::Gradients, bytes);
        let members = flight.members.iter();
        let ranges = members.map(|&i| (layout(i).shard_offset, layout(i).shard_numel));
        let parts = vec![(&mut buffer, ranges.collect())];
        let mut output = context.output(group.dtype, parts)?;
        let first = flight.members[0];
        flight
            .work
            .finish(&mut *output)
            .map_err(|source| failed(context, first, source))?;
        drop((output, flight.input));
        let shards = context.place(MemoryKind::Gradients, buffer);
        for &index in &flight.members {
            let shape = context.plan.params[index].shard_shape(context.plan.world_size);
            let offset = layout(index).shard_offset;
            self.reduced[index] = Some(shards.view(offset, &shape, group.dtype));
        }
        Ok(())
    }

    /// Each member ends as the full average, in the memory of this rank's own gradient.
    fn finish_all_reduce(&mut self, context: &Context, flight: InFlight) -> Result<(), Error> {
        let first = flight.members[0];
        let mut work = flight.work;
        work.wait()
            .map_err(|source| failed(context, first, source))?;
        let dtype = context.plan.groups[flight.group].dtype;
        let tensors = flight.input.into_host().into_iter();
        let mut full: Vec<HostTensor> = tensors
            .zip(&flight.members)
            .map(|((_, tensor), &index)| {
                tensor.unwrap_or_else(|| {
                    context.zeros(
                        MemoryKind::Gradients,
                        index,
                        &context.plan.params[index].shape,
                    )
                })
            })
            .collect();
        let pieces = full.iter_mut().map(HostTensor::as_bytes_mut).collect();
        let mut output = PiecesMut { dtype, pieces };
        work.finish(&mut output)
            .map_err(|source| failed(context, first, source))?;
        for (&index, tensor) in flight.members.iter().zip(full) {
            self.reduced[index] = Some(context.place_tensor(MemoryKind::Gradients, tensor));
        }
        Ok(())
    }

    /// The same where the communicator reaches the module's device, into buffers of their own: on one,
    /// nobody knows when the gradients have been read.
    fn finish_on_device(&mut self, context: &Context, flight: InFlight) -> Result<(), Error> {
        let first = flight.members[0];
        let dtype = context.plan.groups[flight.group].dtype;
        let params = flight.members.iter().map(|&i| &context.plan.params[i]);
        let fresh = |param: &ParamSpec| context.fresh(MemoryKind::Gradients, param.size_bytes());
        let mut buffers: Vec<Fresh> = params.clone().map(fresh).collect();
        let whole = params.clone().map(|param| vec![(0, param.numel())]);
        let parts = buffers.iter_mut().zip(whole).collect();
        let mut output = context.output(dtype, parts)?;
        let finished = flight.work.finish(&mut *output);
        finished.map_err(|source| failed(context, first, source))?;
        drop((output, flight.input));
        for ((&index, param), buffer) in flight.members.iter().zip(params).zip(buffers) {
            let flat = context.place(MemoryKind::Gradients, buffer);
            self.reduced[index] = Some(flat.view(0, &param.shape, dtype));
        }
        Ok(())
    }

    /// Finishes the pass. A parameter that no rank read has no gradient, as in plain Burn; one that
    /// some ranks read has the average with zeros on every rank.
    pub(crate) fn finish(
        &mut self,
        context: &Context,
        levels: &mut Levels,
    ) -> Result<Vec<(NodeId, FlatTensor)>, Error> {
        while !self.in_flight.is_empty() {
            self.complete_oldest(context)?;
        }
        let leaves = self.leaves.take().unwrap_or_default();
        let used = self.used_somewhere(context, &leaves)?;
        self.agree_on_order(context, levels)?;
        let gradients = leaves
            .into_iter()
            .zip(self.reduced.iter_mut().map(Option::take))
            .zip(used)
            .filter(|(_, used)| *used > 0)
            .filter_map(|((leaf, gradient), _)| leaf.zip(gradient))
            .collect();
        self.params.fill(Collected::default());
        self.next = 0;
        Ok(gradients)
    }

    /// Which parameters any rank has a gradient of. A rank that has all of them tells the others, and
    /// does not wait.
    fn used_somewhere(
        &self,
        context: &Context,
        leaves: &[Option<NodeId>],
    ) -> Result<Vec<u8>, Error> {
        let used: Vec<u8> = self.params.iter().map(|c| u8::from(c.came > 0)).collect();
        let has_all = used
            .iter()
            .zip(leaves)
            .all(|(&used, leaf)| used > 0 || leaf.is_none());
        let input = Arc::new(OwnedSegments(vec![used.clone()]));
        let communicator = context.group.communicator();
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
    fn agree_on_order(&mut self, context: &Context, levels: &mut Levels) -> Result<(), Error> {
        let (Some(mut observed), Some(counted)) = (self.observed.take(), levels.take_counted())
        else {
            return Ok(());
        };
        observed.extend(self.order.iter().copied());
        let mut seen = vec![false; self.order.len()];
        observed.retain(|&group| !std::mem::replace(&mut seen[group], true));
        let order = observed.iter().map(|&group| group as u64);
        let mut agreed: Vec<u64> = order.chain(counted).collect();
        context.group.broadcast(&mut agreed, 0)?;
        let (order, counted) = agreed.split_at(observed.len());
        levels.agree(counted);
        self.order = order
            .iter()
            .map(|&group| usize::try_from(group).expect("a group index should fit"))
            .collect();
        Ok(())
    }
}

impl Collected {
    /// Adds the gradients of all reads, the last read first, as Burn does for a plain parameter.
    fn add_up<B: FlatBackend>(&mut self, context: &Context) {
        self.arrived
            .sort_by_key(|(number, _)| std::cmp::Reverse(*number));
        let mut terms = self.arrived.drain(..).map(|(_, gradient)| gradient);
        let Some(mut sum) = terms.next() else { return };
        for term in terms {
            context.ledger.sub(MemoryKind::Gradients, term.size_bytes());
            sum = B::to_flat(B::float_add(B::from_flat(term), B::from_flat(sum)));
        }
        self.sum = Some(sum);
    }
}

fn failed(context: &Context, index: usize, source: burn_shard_comm::Error) -> Error {
    let path = context.plan.params[index].path.clone();
    Error::Reduce {
        rank: context.rank(),
        path,
        source,
    }
}
