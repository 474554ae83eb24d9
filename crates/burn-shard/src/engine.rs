//! What one rank knows of its wrapped module between two reads of a parameter.
//!
//! One engine per wrapped module and rank, shared by the module's clones and by the autodiff graph.
//! Only the rank's own thread uses it.

use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use burn::backend::Dispatch;
use burn::backend::autodiff::NodeId;
use burn::tensor::{Device, Tensor};
use burn_shard_comm::ProcessGroup;
use parking_lot::Mutex;

use crate::context::Context;
use crate::host::{HostBackend, HostTensor};
use crate::instance::Instance;
use crate::ops::{Hook, ShardOps};
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
    unsharded: Unsharded,
    reducer: Reducer,
}

/// The tokens of a forward pass and its backward, see [Note: depth and anchors] in `ops`.
#[derive(Debug)]
struct Pass {
    begin: Tensor<1>,
    /// The deepest anchor so far, and the newest node when it was made.
    deepest: Tensor<1>,
    newest_node: u64,
    /// One anchor per group, made at the group's first read: the group's gradients then become
    /// ready together, which is when they are reduced.
    anchors: Vec<Option<Tensor<1>>>,
}

/// More levels than any group of parameters plausibly adds; bounds the cost of a bad estimate.
const MAX_LEVELS: u64 = 4096;

/// Nodes that anchors took, on all ranks of this process.
static ANCHOR_NODES: AtomicU64 = AtomicU64::new(0);

/// Nodes made so far on all ranks of this process, without those of anchors.
fn nodes_so_far() -> u64 {
    let anchors = ANCHOR_NODES.fetch_add(1, Relaxed);
    NodeId::new().value.saturating_sub(anchors)
}

impl Deref for Engine {
    type Target = Context;

    fn deref(&self) -> &Context {
        &self.context
    }
}

impl Engine {
    pub(crate) fn new(group: ProcessGroup, strategy: ShardingStrategy, plan: Plan) -> Arc<Self> {
        let state = State {
            pass: None,
            unsharded: Unsharded::new(&plan),
            reducer: Reducer::new(&plan),
        };
        Arc::new(Self {
            instance: Mutex::new(Instance::new(plan.params.len())),
            context: Context::new(group, strategy, plan),
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
        let state = &mut *state;
        let pass = state.pass.get_or_insert_with(|| {
            let token = Tensor::<1>::zeros([1], device).require_grad();
            let begin = Dispatch::begin_pass(token.into_dispatch(), hook.clone());
            Pass {
                begin: Tensor::from_dispatch(begin),
                deepest: Tensor::zeros([1], device),
                newest_node: nodes_so_far(),
                anchors: vec![None; self.plan.groups.len()],
            }
        });
        if state.reducer.was_read(hook.index) {
            // A later read, of a tied parameter or a layer called again: its own gradient need not
            // wait for that of the first.
            return (pass.deepest.clone(), pass.begin.clone());
        }
        if pass.anchors[group].is_none() {
            // Node ids count the nodes of all ranks in this process, an upper bound of the depth
            // gained since the last anchor; not divided by the number of ranks, which may come here
            // one after the other. Levels that ranks add here are left out, or they would feed on
            // each other. A bad estimate costs time and memory, not correctness: the order of
            // reductions is fixed by the plan.
            let newest = nodes_so_far();
            let levels = (newest.saturating_sub(pass.newest_node) + 1).min(MAX_LEVELS);
            for _ in 0..levels {
                let deeper = Dispatch::deepen(pass.deepest.clone().into_dispatch());
                pass.deepest = Tensor::from_dispatch(deeper);
                ANCHOR_NODES.fetch_add(1, Relaxed);
            }
            pass.newest_node = newest;
            pass.anchors[group] = Some(pass.deepest.clone());
        }
        let anchor = pass.anchors[group]
            .clone()
            .expect("the anchor was just made");
        (anchor, pass.begin.clone())
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
    pub(crate) fn unshard(&self, index: usize, shard: &HostTensor) -> Result<HostTensor, Error> {
        self.state.lock().unsharded.get(self, index, shard)
    }

    /// Takes the gradient of one read; reduces whichever groups are complete by it.
    pub(crate) fn gradient<B: HostBackend>(
        &self,
        hook: &Hook,
        leaf: NodeId,
        number: usize,
        gradient: HostTensor,
    ) -> Result<(), Error> {
        let mut state = self.state.lock();
        let State {
            unsharded, reducer, ..
        } = &mut *state;
        reducer.gradient::<B>(self, &hook.instance, hook.index, leaf, number, gradient);
        reducer.advance(self, unsharded, false)
    }

    /// Ends a backward pass: reduces what is left, and returns the gradients to register.
    pub(crate) fn finish_backward<B: HostBackend>(
        &self,
        hook: &Hook,
    ) -> Result<Vec<(NodeId, HostTensor)>, Error> {
        let mut state = self.state.lock();
        state.pass = None;
        let State {
            unsharded, reducer, ..
        } = &mut *state;
        reducer.close::<B>(self, &hook.instance);
        reducer.advance(self, unsharded, true)?;
        unsharded.clear();
        reducer.finish(self)
    }

    /// Drops gathered parameters, so that the shards they came from can be written in place.
    pub(crate) fn reshard(&self) {
        self.state.lock().unsharded.clear();
    }
}
