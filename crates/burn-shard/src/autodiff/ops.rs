//! The autodiff operations through which a parameter is read: see [Note: depth and anchors].
//!
//! [Note: depth and anchors] Burn runs backward steps by depth, deepest first; a step whose parents
//! are leaves would run last, after the whole backward, and nothing could be reduced meanwhile.
//! So each read of a parameter has three parents: the stored tensor; an untracked *anchor* whose
//! depth keeps up with the activations, so that the read's backward step runs right after those of
//! its consumers; and a tracked *begin* node of depth 1, shared by all reads of a pass, whose own
//! backward step is therefore the last of the pass and knows that no gradient will come any more.

use std::marker::PhantomData;
use std::sync::{Arc, OnceLock};

use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::retro_forward::RetroForward;
use burn::backend::autodiff::checkpoint::state::BackwardStates;
use burn::backend::autodiff::checkpoint::strategy::{BalancedCheckpointing, CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::{
    Autodiff, Backend, Dispatch, backend_extension, flex::Flex, tensor::FloatTensor,
};
use burn::tensor::Tensor;

use super::graph::{ParamHandle, WeakParamHandle};
use crate::error::or_panic;
use crate::runtime::pass::{PassId, PassToken};
use crate::storage::flat::FlatBackend;

/// A read of a parameter, as part of a pass.
#[derive(Clone, Debug)]
pub(crate) struct Read {
    pub(crate) param: ParamHandle,
    /// `None` where nothing is recorded.
    pub(crate) pass: Option<PassId>,
}

/// Operations this crate adds to Burn's backends. Not for users: `ShardedModule` calls them.
#[doc(hidden)]
#[backend_extension(Flex, Cube: cfg(feature = "cubecl"), Autodiff)]
pub(crate) trait ShardOps: Backend {
    /// What this rank stores -> the full parameter in the compute type (a collective where the stored
    /// parameter is a shard). Its adjoint is the reduction of the parameter's gradient.
    fn unshard(
        shard: FloatTensor<Self>,
        anchor: FloatTensor<Self>,
        begin: FloatTensor<Self>,
        read: Read,
    ) -> FloatTensor<Self>;
    /// Identity. Its adjoint is the reduction of the parameter's gradient.
    fn watch(
        parameter: FloatTensor<Self>,
        anchor: FloatTensor<Self>,
        begin: FloatTensor<Self>,
        read: Read,
    ) -> FloatTensor<Self>;
    /// Identity on the untracked anchor, one level deeper.
    fn deepen(anchor: FloatTensor<Self>) -> FloatTensor<Self>;
    /// Identity; its backward step is the last of the pass.
    fn begin_pass(leaf: FloatTensor<Self>, state: BeginState) -> FloatTensor<Self>;
    /// Identity; tells which node of the graph the tensor is, see [`node_of`].
    fn note_node(tensor: FloatTensor<Self>, node: Arc<OnceLock<NodeId>>) -> FloatTensor<Self>;
}

/// Without a graph nothing but the gather is left of the operations.
macro_rules! without_graph {
    ($backend:ty) => {
        impl ShardOps for $backend {
            fn unshard(
                shard: FloatTensor<Self>,
                _anchor: FloatTensor<Self>,
                _begin: FloatTensor<Self>,
                read: Read,
            ) -> FloatTensor<Self> {
                let param = read.param;
                let stored = Self::to_flat(shard);
                let full = param
                    .engine()
                    .unshard(&param.instance, param.index, &stored);
                Self::from_flat(or_panic(full))
            }

            fn watch(
                parameter: FloatTensor<Self>,
                _anchor: FloatTensor<Self>,
                _begin: FloatTensor<Self>,
                _read: Read,
            ) -> FloatTensor<Self> {
                parameter
            }

            fn deepen(anchor: FloatTensor<Self>) -> FloatTensor<Self> {
                anchor
            }

            fn begin_pass(leaf: FloatTensor<Self>, _state: BeginState) -> FloatTensor<Self> {
                leaf
            }

            fn note_node(
                tensor: FloatTensor<Self>,
                _node: Arc<OnceLock<NodeId>>,
            ) -> FloatTensor<Self> {
                tensor
            }
        }
    };
}

without_graph!(Flex);
#[cfg(feature = "cubecl")]
without_graph!(burn_cubecl::Cube);

/// State of the node that ends a pass. Dropping it without a backward gives the pass up.
#[derive(Clone, Debug)]
pub(crate) struct BeginState {
    pub(crate) param: WeakParamHandle,
    pub(crate) pass: PassId,
    pub(crate) _token: PassToken,
}

/// Backward step of a read: hands the gradient to the engine.
#[derive(Debug)]
struct ReadBackward;

/// State of [`ReadBackward`].
#[derive(Clone, Debug)]
struct ReadState {
    param: WeakParamHandle,
    pass: PassId,
}

impl<B: ShardOps + FlatBackend> Backward<B, 3> for ReadBackward {
    type State = ReadState;

    fn backward(self, ops: Ops<ReadState, 3>, grads: &mut Gradients, _: &mut Checkpointer) {
        let grad = grads.consume::<B>(&ops.node);
        let [parameter, _, _] = ops.parents;
        // A frozen parameter is tracked only so that backward can gather it again.
        if parameter.is_some() {
            let ReadState { param, pass } = ops.state;
            let ParamHandle {
                graph,
                instance,
                index,
            } = param.upgrade();
            let taken = graph
                .engine
                .gradient::<B>(pass, &instance, index, B::to_flat(grad));
            or_panic(taken);
        }
    }
}

impl ReadState {
    /// Announces the gradient of a tracked read.
    fn of(read: &Read, tracked: bool) -> Self {
        let pass = read
            .pass
            .expect("a read on an autodiff device should have a pass");
        if tracked {
            read.param.engine().expect(pass, read.param.index);
        }
        Self {
            param: read.param.downgrade(),
            pass,
        }
    }
}

/// Gathers a parameter again when backward needs it, instead of keeping it since forward.
#[derive(Clone, Debug)]
struct Regather<B: ShardOps> {
    source: Source<B>,
    /// Stands for the anchor and the begin token, which the gather itself does not look at.
    unused: FloatTensor<B>,
    param: WeakParamHandle,
    _backend: PhantomData<B>,
}

#[derive(Clone, Debug)]
enum Source<B: Backend> {
    /// A tracked shard, kept by the checkpointer.
    Parent(NodeId),
    /// A frozen shard, which the checkpointer does not keep.
    Frozen(FloatTensor<B>),
}

impl<B: ShardOps> RetroForward for Regather<B> {
    fn forward(&self, states: &mut BackwardStates, out_node: NodeId) {
        let shard = match &self.source {
            Source::Parent(id) => states.get_state::<FloatTensor<B>>(id),
            Source::Frozen(shard) => shard.clone(),
        };
        let (anchor, begin) = (self.unused.clone(), self.unused.clone());
        let read = Read {
            param: self.param.upgrade(),
            pass: None,
        };
        states.save(out_node, B::unshard(shard, anchor, begin, read));
    }
}

impl<B: ShardOps + FlatBackend, C: CheckpointStrategy> ShardOps for Autodiff<B, C> {
    fn unshard(
        shard: FloatTensor<Self>,
        anchor: FloatTensor<Self>,
        begin: FloatTensor<Self>,
        read: Read,
    ) -> FloatTensor<Self> {
        let guards = [shard.node(), anchor.node(), begin.node()];
        let unused = anchor.into_primitive();
        let full = B::unshard(
            shard.primitive().clone(),
            unused.clone(),
            unused.clone(),
            read.clone(),
        );
        let state = ReadState::of(&read, shard.is_tracked());
        let regather = |source| Regather::<B> {
            source,
            unused,
            param: state.param.clone(),
            _backend: PhantomData,
        };
        // Balanced whatever `C` is: consumers must not keep the full parameter. Every tracked
        // parent, and no other, has to be listed.
        let prep = ReadBackward.prepare::<BalancedCheckpointing>(guards);
        let prep = if shard.is_tracked() && !begin.is_tracked() {
            // Not part of a pass's graph: the recomputation of a checkpointed block.
            prep.compute_bound()
        } else if shard.is_tracked() {
            prep.memory_bound()
                .retro_forward(regather(Source::Parent(shard.id())))
                .parents([&shard, &begin])
        } else {
            let source = Source::Frozen(shard.primitive().clone());
            let parents = begin.is_tracked().then_some(&begin);
            prep.memory_bound()
                .retro_forward(regather(source))
                .parents(parents)
        };
        match prep.stateful() {
            OpsKind::Tracked(prep) => prep.finish(state, full),
            OpsKind::UnTracked(prep) => prep.finish(full),
        }
    }

    fn watch(
        parameter: FloatTensor<Self>,
        anchor: FloatTensor<Self>,
        begin: FloatTensor<Self>,
        read: Read,
    ) -> FloatTensor<Self> {
        let guards = [parameter.node(), anchor.node(), begin.node()];
        let state = ReadState::of(&read, parameter.is_tracked());
        let prep = ReadBackward.prepare::<C>(guards).compute_bound();
        match prep.stateful() {
            OpsKind::Tracked(prep) => prep.finish(state, parameter.into_primitive()),
            OpsKind::UnTracked(prep) => prep.finish(parameter.into_primitive()),
        }
    }

    fn deepen(anchor: FloatTensor<Self>) -> FloatTensor<Self> {
        #[derive(Debug)]
        struct Deepen;
        impl<B: Backend> Backward<B, 1> for Deepen {
            type State = ();
            fn backward(self, _: Ops<(), 1>, _: &mut Gradients, _: &mut Checkpointer) {
                unreachable!("the anchor is never tracked")
            }
        }
        let (primitive, guard) = anchor.into_parts();
        Deepen
            .prepare::<C>([guard])
            .compute_bound()
            .stateless(primitive)
    }

    fn begin_pass(leaf: FloatTensor<Self>, state: BeginState) -> FloatTensor<Self> {
        #[derive(Debug)]
        struct BeginBackward;
        impl<B: FlatBackend> Backward<B, 1> for BeginBackward {
            type State = BeginState;
            fn backward(
                self,
                ops: Ops<BeginState, 1>,
                grads: &mut Gradients,
                _: &mut Checkpointer,
            ) {
                // No gradient was ever registered for this node; the step runs all the same.
                let BeginState { param, pass, .. } = ops.state;
                let ParamHandle {
                    graph, instance, ..
                } = param.upgrade();
                let gradients = graph.engine.finish_backward::<B>(pass, &instance);
                for (leaf, gradient) in or_panic(gradients) {
                    grads.register::<B>(leaf, B::from_flat(gradient));
                }
            }
        }
        let (primitive, guard) = leaf.into_parts();
        match BeginBackward
            .prepare::<C>([guard])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(prep) => prep.finish(state, primitive),
            OpsKind::UnTracked(prep) => prep.finish(primitive),
        }
    }

    fn note_node(tensor: FloatTensor<Self>, node: Arc<OnceLock<NodeId>>) -> FloatTensor<Self> {
        let _first = node.set(tensor.id());
        tensor
    }
}

/// The node of the graph that a tensor on an autodiff device is.
pub(crate) fn node_of<const D: usize>(tensor: Tensor<D>) -> Option<NodeId> {
    let node = Arc::new(OnceLock::new());
    drop(Dispatch::note_node(
        tensor.into_dispatch(),
        Arc::clone(&node),
    ));
    node.get().copied()
}
