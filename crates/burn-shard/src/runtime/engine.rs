//! One rank's part of a wrapped module: groups of parameters, the schedule, and what they work with.
//!
//! One engine per wrapped module and rank, shared by the module's clones and by the autodiff graph.
//! Only the rank's own thread uses it.

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

use burn::backend::autodiff::NodeId;
use parking_lot::Mutex;

use super::context::Context;
use super::group::ParamGroup;
use super::history::History;
use super::instance::Instance;
use super::mesh::Mesh;
use super::pass::{GradientSync, Pass, PassId, PassToken};
use super::reduce::{Backward, Reducer};
use super::schedule::Schedule;
use super::unshard::{ReadAs, Unsharder, Value};
use crate::plan::{Place, Plan};
use crate::storage::flat::{FlatBackend, FlatTensor, Memory};
use crate::storage::ledger::MemoryKind;
use crate::{Error, ShardConfig};

/// Everything that one rank knows of its wrapped module.
#[derive(Debug)]
pub(crate) struct Engine {
    pub(crate) context: Context,
    state: Mutex<State>,
    /// The instance that modules mapped from now on belong to.
    instance: Mutex<Arc<Instance>>,
}

#[derive(Debug)]
struct State {
    groups: Vec<ParamGroup>,
    schedule: Schedule,
    /// Passes whose backward has not ended. Reads belong to the last one, while it is open.
    passes: Vec<Pass>,
    next_pass: u64,
    backward: Backward,
    clock: u64,
    sync: GradientSync,
    read_as: ReadAs,
}

impl State {
    fn pass(&mut self, id: PassId) -> Option<&mut Pass> {
        self.passes.iter_mut().find(|pass| pass.id == id)
    }
}

impl Engine {
    pub(crate) fn new(mesh: Mesh, memory: Memory, config: ShardConfig, plan: Plan) -> Arc<Self> {
        let groups = plan.groups.len();
        // Every rank has made as many calls by now, and no other module has seen as many.
        let history = History::new(mesh.world.traffic().total_calls());
        let state = State {
            groups: (0..groups).map(|_| ParamGroup::default()).collect(),
            schedule: Schedule::new(groups),
            passes: Vec::new(),
            next_pass: 0,
            backward: Backward::default(),
            clock: 0,
            sync: GradientSync::Reduce,
            read_as: ReadAs::Compute,
        };
        Arc::new(Self {
            instance: Mutex::new(Instance::new(history)),
            context: Context::new(mesh, memory, config, plan),
            state: Mutex::new(state),
        })
    }

    pub(crate) fn plan(&self) -> &Plan {
        &self.context.plan
    }

    pub(crate) fn rank(&self) -> usize {
        self.context.rank()
    }

    /// The number of this rank among those that share one copy.
    pub(crate) fn shard_rank(&self) -> usize {
        self.context.shard_rank()
    }

    /// The elements of a parameter that this rank owns: its shard without padding, where anything of it is
    /// sharded, and what this rank writes into a checkpoint.
    pub(crate) fn owned(&self, index: usize) -> Range<usize> {
        let Place { group, member } = self.plan().place[index];
        self.plan().groups[group].layout.members[member].owned(self.shard_rank())
    }

    /// The elements of a parameter that this rank stores.
    pub(crate) fn stored(&self, index: usize) -> Range<usize> {
        if self.plan().group_of(index).shards_parameters() {
            self.owned(index)
        } else {
            0..self.plan().params[index].numel()
        }
    }

    /// The elements of a parameter that this rank steps, and whose optimizer state it keeps.
    pub(crate) fn stepped(&self, index: usize) -> Range<usize> {
        if self.plan().group_of(index).strategy.shards_optimizer() {
            self.owned(index)
        } else {
            0..self.plan().params[index].numel()
        }
    }

    /// The instance that newly mapped modules belong to.
    pub(crate) fn instance(&self) -> Arc<Instance> {
        Arc::clone(&self.instance.lock())
    }

    /// Starts a new instance: what is mapped from now on is another value of the module.
    pub(crate) fn new_instance(&self, history: History) -> Arc<Instance> {
        let instance = Instance::new(history);
        *self.instance.lock() = Arc::clone(&instance);
        instance
    }

    /// Begins a pass: a forward whose gradients come in a backward of its own, unless the token is dropped
    /// before.
    pub(crate) fn begin_pass(&self) -> (PassId, PassToken) {
        let mut state = self.state.lock();
        let id = PassId(state.next_pass);
        state.next_pass += 1;
        let plan = self.plan();
        let (pass, token) = Pass::new(id, plan.groups.len(), plan.params.len(), state.sync);
        state.passes.retain(Pass::may_end);
        state.passes.push(pass);
        state.schedule.begin_pass();
        (id, token)
    }

    /// Whether the pass's backward has yet to end.
    pub(crate) fn is_open(&self, pass: PassId) -> bool {
        self.state.lock().pass(pass).is_some()
    }

    /// Whether the passes that begin from now on reduce their gradients.
    pub(crate) fn set_sync(&self, sync: GradientSync) {
        self.state.lock().sync = sync;
    }

    /// Levels by which an anchor grows at a group's first read; `count` says what they should be.
    pub(crate) fn anchor_levels(&self, group: usize, count: impl FnOnce() -> u64) -> u64 {
        self.state.lock().schedule.levels(group, count)
    }

    /// How often a group has been resharded.
    pub(crate) fn reshards(&self, group: usize) -> u64 {
        self.state.lock().groups[group].reshards()
    }

    /// Announces a gradient of a parameter that this pass's backward will bring.
    pub(crate) fn expect(&self, pass: PassId, index: usize) {
        let group = self.plan().place[index].group;
        if let Some(pass) = self.state.lock().pass(pass) {
            pass.expect(group);
        }
    }

    /// Takes an announcement back.
    pub(crate) fn no_longer_expect(&self, pass: PassId, index: usize) {
        let group = self.plan().place[index].group;
        if let Some(pass) = self.state.lock().pass(pass) {
            pass.arrived(group);
        }
    }

    /// The read of a parameter that the pass has made of the stored tensor `key`.
    pub(crate) fn cached_read(
        &self,
        pass: PassId,
        index: usize,
        key: u64,
    ) -> Option<Arc<dyn Any + Send + Sync>> {
        let place = self.plan().place[index];
        self.state.lock().groups[place.group].cached_read(pass, place.member, key)
    }

    /// Keeps a read for later ones of the pass, as long as the parameter is not resharded.
    pub(crate) fn cache_read(
        &self,
        pass: PassId,
        index: usize,
        key: u64,
        read: Arc<dyn Any + Send + Sync>,
    ) {
        let place = self.plan().place[index];
        self.state.lock().groups[place.group].cache_read(pass, place.member, key, read);
    }

    /// The full parameter in the compute type, of which `stored` is what this rank stores.
    pub(crate) fn unshard(
        &self,
        instance: &Instance,
        index: usize,
        stored: &FlatTensor,
    ) -> Result<FlatTensor, Error> {
        self.unsharder(instance, |mut unsharder| unsharder.get(index, stored))
    }

    /// Starts the gathers of a value of the module that has just been made, where its parameters are
    /// gathered once for all reads.
    pub(crate) fn start_gathers(&self, instance: &Instance) -> Result<(), Error> {
        self.unsharder(instance, |mut unsharder| unsharder.start_once())
    }

    fn unsharder<T>(&self, instance: &Instance, with: impl FnOnce(Unsharder<'_>) -> T) -> T {
        let mut state = self.state.lock();
        let State {
            groups,
            schedule,
            clock,
            read_as,
            ..
        } = &mut *state;
        let value = Value {
            context: &self.context,
            instance,
            read_as: *read_as,
        };
        with(Unsharder {
            value,
            groups,
            schedule,
            clock,
        })
    }

    /// Takes the gradient of one read; reduces whichever groups are complete by it.
    pub(crate) fn gradient<B: FlatBackend>(
        &self,
        pass: PassId,
        instance: &Instance,
        index: usize,
        gradient: FlatTensor,
    ) -> Result<(), Error> {
        self.reduce(pass, instance, |mut reducer| {
            reducer.collect::<B>(index, gradient);
            reducer.arrived(reducer.context.plan.place[index].group);
            reducer.advance::<B>()
        })
    }

    /// Ends a backward: reduces what is left, and returns the gradients to register.
    pub(crate) fn finish_backward<B: FlatBackend>(
        &self,
        pass: PassId,
        instance: &Instance,
    ) -> Result<Vec<(NodeId, FlatTensor)>, Error> {
        let gradients = self.reduce(pass, instance, |mut reducer| {
            reducer.flush::<B>()?;
            reducer.finish::<B>()
        })?;
        let mut state = self.state.lock();
        state.passes.retain(|open| open.id != pass);
        state.backward = Backward::default();
        state.schedule.end_pass();
        for (group, spec) in state.groups.iter_mut().zip(&self.plan().groups) {
            group.forget_reads();
            if spec.reshards_after_use() {
                group.reshard();
            }
        }
        Ok(gradients)
    }

    fn reduce<T>(
        &self,
        pass: PassId,
        instance: &Instance,
        with: impl FnOnce(Reducer<'_>) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let mut state = self.state.lock();
        let State {
            groups,
            schedule,
            passes,
            backward,
            ..
        } = &mut *state;
        let pass = passes.iter_mut().find(|open| open.id == pass);
        with(Reducer {
            context: &self.context,
            instance,
            groups,
            schedule,
            backward,
            pass: pass.expect("a pass should be open until its backward has ended"),
        })
    }

    /// Drops whole parameters.
    pub(crate) fn reshard(&self) {
        self.state
            .lock()
            .groups
            .iter_mut()
            .for_each(ParamGroup::reshard);
    }

    /// Runs `read`, in which parameters are read in the type they are stored in.
    pub(crate) fn read_stored<T>(&self, read: impl FnOnce() -> T) -> T {
        let set = |read_as| {
            // What was unsharded in the other type is of no use.
            self.reshard();
            self.state.lock().read_as = read_as;
        };
        set(ReadAs::Stored);
        let value = read();
        set(ReadAs::Compute);
        value
    }

    /// Whether gradients were accumulated that have not been reduced.
    pub(crate) fn has_accumulated(&self) -> bool {
        let state = self.state.lock();
        state
            .groups
            .iter()
            .any(|group| !group.accumulated.is_empty())
    }

    /// Drops the gradients that were accumulated.
    pub(crate) fn discard_accumulated(&self) {
        for group in &mut self.state.lock().groups {
            for gradient in group.accumulated.drain(..).flatten() {
                self.context
                    .ledger
                    .sub(MemoryKind::Gradients, gradient.size_bytes());
            }
        }
    }
}
