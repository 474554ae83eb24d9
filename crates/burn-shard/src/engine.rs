//! What one rank knows of its wrapped module between two reads of a parameter.
//!
//! One engine per wrapped module and rank, shared by the module's clones and by the autodiff graph.
//! Only the rank's own thread uses it.

use std::ops::Deref;
use std::sync::Arc;

use burn::backend::autodiff::NodeId;
use burn::tensor::{Device, Tensor};
use burn_shard_comm::ProcessGroup;
use parking_lot::Mutex;

use crate::anchor::{Levels, Pass};
use crate::context::Context;
use crate::flat::{FlatBackend, FlatTensor, Memory};
use crate::instance::Instance;
use crate::ops::Hook;
use crate::plan::Plan;
use crate::reduce::Reducer;
use crate::unshard::Unsharded;
use crate::{Error, ShardingStrategy};

/// See the module documentation.
#[derive(Debug)]
pub(crate) struct Engine {
    context: Context,
    state: Mutex<State>,
    /// The instance that modules mapped from now on belong to.
    instance: Mutex<Arc<Instance>>,
}

#[derive(Debug)]
struct State {
    pass: Option<Pass>,
    levels: Levels,
    unsharded: Unsharded,
    reducer: Reducer,
}

impl Deref for Engine {
    type Target = Context;

    fn deref(&self) -> &Context {
        &self.context
    }
}

impl Engine {
    pub(crate) fn new(
        group: ProcessGroup,
        memory: Memory,
        strategy: ShardingStrategy,
        plan: Plan,
    ) -> Arc<Self> {
        let state = State {
            pass: None,
            levels: Levels::new(plan.groups.len()),
            unsharded: Unsharded::new(&plan),
            reducer: Reducer::new(&plan),
        };
        Arc::new(Self {
            instance: Mutex::new(Instance::new(plan.params.len())),
            context: Context::new(group, memory, strategy, plan),
            state: Mutex::new(state),
        })
    }

    /// The instance that newly mapped modules belong to.
    pub(crate) fn instance(&self) -> Arc<Instance> {
        Arc::clone(&self.instance.lock())
    }

    /// Starts a new instance: what is mapped from now on is another value of the module.
    pub(crate) fn new_instance(&self) -> Arc<Instance> {
        let instance = Instance::new(self.plan.params.len());
        *self.instance.lock() = Arc::clone(&instance);
        instance
    }

    /// Anchor and begin token for a read of the hook's parameter on an autodiff device.
    pub(crate) fn tokens(self: &Arc<Self>, hook: &Hook, device: &Device) -> (Tensor<1>, Tensor<1>) {
        let group = self.plan.place[hook.index].group;
        let mut state = self.state.lock();
        let State {
            pass,
            levels,
            reducer,
            ..
        } = &mut *state;
        let pass = pass.get_or_insert_with(|| Pass::new(hook, device));
        let anchor = if reducer.was_read(hook.index) {
            pass.latest()
        } else {
            pass.anchor(group, levels)
        };
        (anchor, pass.begin())
    }

    /// Counts a read whose gradient will come. Returns the number of the read among those of the
    /// same parameter in this pass.
    pub(crate) fn read(&self, hook: &Hook, tracked: bool) -> usize {
        if tracked {
            self.state.lock().reducer.read(hook.index)
        } else {
            0
        }
    }

    /// The full parameter of a shard: from its group if that is gathered, else by gathering it.
    pub(crate) fn unshard(&self, index: usize, shard: &FlatTensor) -> Result<FlatTensor, Error> {
        self.state.lock().unsharded.get(self, index, shard)
    }

    /// Takes the gradient of one read; reduces whichever groups are complete by it.
    pub(crate) fn gradient<B: FlatBackend>(
        &self,
        hook: &Hook,
        leaf: NodeId,
        number: usize,
        gradient: FlatTensor,
    ) -> Result<(), Error> {
        let mut state = self.state.lock();
        let State {
            unsharded, reducer, ..
        } = &mut *state;
        reducer.gradient::<B>(self, &hook.instance, hook.index, leaf, number, gradient);
        reducer.advance(self, unsharded, false)
    }

    /// Ends a backward pass: reduces what is left, and returns the gradients to register.
    pub(crate) fn finish_backward<B: FlatBackend>(
        &self,
        hook: &Hook,
    ) -> Result<Vec<(NodeId, FlatTensor)>, Error> {
        let mut state = self.state.lock();
        state.pass = None;
        let State {
            levels,
            unsharded,
            reducer,
            ..
        } = &mut *state;
        reducer.close::<B>(self, &hook.instance);
        reducer.advance(self, unsharded, true)?;
        unsharded.clear();
        reducer.finish(self, levels)
    }

    /// Drops gathered parameters, so that the shards they came from can be written in place.
    pub(crate) fn reshard(&self) {
        self.state.lock().unsharded.clear();
    }
}
