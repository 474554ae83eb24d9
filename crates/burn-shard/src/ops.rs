//! The autodiff operations through which a parameter is read: see [Note: depth and anchors].
//!
//! [Note: depth and anchors] Burn runs backward steps by depth, deepest first; a step whose parents
//! are leaves would run last, after the whole backward, and nothing could be reduced meanwhile.
//! So each read of a parameter has three parents: the stored tensor; an untracked *anchor* whose
//! depth keeps up with the activations, so that the read's backward step runs right after those of
//! its consumers; and a tracked *begin* node of depth 1, shared by all reads of a pass, whose own
//! backward step is therefore the last of the pass and knows that no gradient will come any more.

use std::marker::PhantomData;
use std::sync::{Arc, Weak};

use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::retro_forward::RetroForward;
use burn::backend::autodiff::checkpoint::state::BackwardStates;
use burn::backend::autodiff::checkpoint::strategy::{BalancedCheckpointing, CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::{Autodiff, Backend, backend_extension, flex::Flex, tensor::FloatTensor};

use crate::engine::Engine;
use crate::error::or_panic;
use crate::flat::FlatBackend;
use crate::instance::Instance;

/// Which parameter an operation reads, and on whose behalf.
#[derive(Clone, Debug)]
pub(crate) struct Hook {
    pub(crate) engine: Arc<Engine>,
    pub(crate) instance: Arc<Instance>,
    /// Index into the plan's parameters.
    pub(crate) index: usize,
}

impl Hook {
    /// The same for the tape, which must not keep the module alive: a forward whose backward never
    /// runs stays on Burn's tape until a later backward, and its pass in the engine.
    fn for_tape(&self) -> TapeHook {
        TapeHook {
            engine: Arc::downgrade(&self.engine),
            instance: Arc::clone(&self.instance),
            index: self.index,
        }
    }
}

/// See [`Hook::for_tape`].
#[derive(Clone, Debug)]
struct TapeHook {
    engine: Weak<Engine>,
    instance: Arc<Instance>,
    index: usize,
}

impl TapeHook {
    fn hook(&self) -> Hook {
        let engine = self.engine.upgrade();
        Hook {
            engine: engine.expect("the sharded module should live until its backward has run"),
            instance: Arc::clone(&self.instance),
            index: self.index,
        }
    }
}

/// Operations this crate adds to Burn's backends. Not for users: `ShardedModule` calls them.
#[doc(hidden)]
#[backend_extension(Flex, Cube: cfg(feature = "cubecl"), Autodiff)]
pub(crate) trait ShardOps: Backend {
    /// This rank's shard -> the full parameter (a collective). Its adjoint is the reduce-scatter.
    fn unshard(
        shard: FloatTensor<Self>,
        anchor: FloatTensor<Self>,
        begin: FloatTensor<Self>,
        hook: Hook,
    ) -> FloatTensor<Self>;
    /// Identity. Its adjoint is the reduction of the parameter's gradient.
    fn watch(
        parameter: FloatTensor<Self>,
        anchor: FloatTensor<Self>,
        begin: FloatTensor<Self>,
        hook: Hook,
    ) -> FloatTensor<Self>;
    /// Identity on the untracked anchor, one level deeper.
    fn deepen(anchor: FloatTensor<Self>) -> FloatTensor<Self>;
    /// Identity; its backward step is the last of the pass.
    fn begin_pass(token: FloatTensor<Self>, hook: Hook) -> FloatTensor<Self>;
    /// Identity; tells the instance under which node the parameter's gradient is registered.
    fn note_leaf(parameter: FloatTensor<Self>, hook: Hook) -> FloatTensor<Self>;
}

/// Without a graph nothing but the gather is left of the operations.
macro_rules! without_graph {
    ($backend:ty) => {
        impl ShardOps for $backend {
            fn unshard(
                shard: FloatTensor<Self>,
                _anchor: FloatTensor<Self>,
                _begin: FloatTensor<Self>,
                hook: Hook,
            ) -> FloatTensor<Self> {
                let full = hook.engine.unshard(hook.index, &Self::to_flat(shard));
                Self::from_flat(or_panic(full))
            }

            fn watch(
                parameter: FloatTensor<Self>,
                _anchor: FloatTensor<Self>,
                _begin: FloatTensor<Self>,
                _hook: Hook,
            ) -> FloatTensor<Self> {
                parameter
            }

            fn deepen(anchor: FloatTensor<Self>) -> FloatTensor<Self> {
                anchor
            }

            fn begin_pass(token: FloatTensor<Self>, _hook: Hook) -> FloatTensor<Self> {
                token
            }

            fn note_leaf(parameter: FloatTensor<Self>, _hook: Hook) -> FloatTensor<Self> {
                parameter
            }
        }
    };
}

without_graph!(Flex);
#[cfg(feature = "cubecl")]
without_graph!(burn_cubecl::Cube);

/// Backward step of a read: hands the gradient of one use to the engine.
#[derive(Debug)]
struct Read;

/// State of [`Read`]: the parameter, and the number of this use in the pass.
#[derive(Clone, Debug)]
struct Use {
    hook: TapeHook,
    number: usize,
    leaf: NodeId,
}

impl<B: ShardOps + FlatBackend> Backward<B, 3> for Read {
    type State = Use;

    fn backward(self, ops: Ops<Use, 3>, grads: &mut Gradients, _: &mut Checkpointer) {
        let grad = grads.consume::<B>(&ops.node);
        let [parameter, _, _] = ops.parents;
        // A frozen parameter is tracked only so that backward can gather it again.
        if parameter.is_some() {
            let Use { hook, number, leaf } = ops.state;
            let hook = hook.hook();
            or_panic(
                hook.engine
                    .gradient::<B>(&hook, leaf, number, B::to_flat(grad)),
            );
        }
    }
}

/// Gathers a parameter again when backward needs it, instead of keeping it since forward.
#[derive(Clone, Debug)]
struct Regather<B: ShardOps> {
    source: Source<B>,
    /// Stands for the anchor and the begin token, which the gather itself does not look at.
    unused: FloatTensor<B>,
    hook: TapeHook,
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
        states.save(out_node, B::unshard(shard, anchor, begin, self.hook.hook()));
    }
}

impl<B: ShardOps + FlatBackend, C: CheckpointStrategy> ShardOps for Autodiff<B, C> {
    fn unshard(
        shard: FloatTensor<Self>,
        anchor: FloatTensor<Self>,
        begin: FloatTensor<Self>,
        hook: Hook,
    ) -> FloatTensor<Self> {
        let guards = [shard.node(), anchor.node(), begin.node()];
        let unused = anchor.into_primitive();
        let full = B::unshard(
            shard.primitive().clone(),
            unused.clone(),
            unused.clone(),
            hook.clone(),
        );
        let state = Use {
            number: hook.engine.read(&hook, shard.is_tracked()),
            leaf: shard.id(),
            hook: hook.for_tape(),
        };
        let regather = |source| Regather::<B> {
            source,
            unused,
            hook: state.hook.clone(),
            _backend: PhantomData,
        };
        // Balanced whatever `C` is: consumers must not keep the full parameter. Every tracked
        // parent, and no other, has to be listed.
        let prep = Read.prepare::<BalancedCheckpointing>(guards).memory_bound();
        let prep = if shard.is_tracked() {
            prep.retro_forward(regather(Source::Parent(shard.id())))
                .parents([&shard, &begin])
        } else {
            let source = Source::Frozen(shard.primitive().clone());
            prep.retro_forward(regather(source)).parents([&begin])
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
        hook: Hook,
    ) -> FloatTensor<Self> {
        let guards = [parameter.node(), anchor.node(), begin.node()];
        let leaf = parameter.id();
        let state = Use {
            number: hook.engine.read(&hook, parameter.is_tracked()),
            leaf,
            hook: hook.for_tape(),
        };
        let prep = Read.prepare::<C>(guards).compute_bound();
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

    fn begin_pass(token: FloatTensor<Self>, hook: Hook) -> FloatTensor<Self> {
        #[derive(Debug)]
        struct Begin;
        impl<B: FlatBackend> Backward<B, 1> for Begin {
            type State = TapeHook;
            fn backward(self, ops: Ops<TapeHook, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
                // No gradient was ever registered for this node; the step runs all the same.
                let hook = ops.state.hook();
                for (leaf, gradient) in or_panic(hook.engine.finish_backward::<B>(&hook)) {
                    grads.register::<B>(leaf, B::from_flat(gradient));
                }
            }
        }
        let (primitive, guard) = token.into_parts();
        match Begin.prepare::<C>([guard]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(hook.for_tape(), primitive),
            OpsKind::UnTracked(prep) => prep.finish(primitive),
        }
    }

    fn note_leaf(parameter: FloatTensor<Self>, hook: Hook) -> FloatTensor<Self> {
        let leaf = parameter.is_tracked().then(|| parameter.id());
        hook.instance.note_leaf(hook.index, leaf);
        parameter
    }
}
