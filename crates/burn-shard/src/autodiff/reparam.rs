//! How reads of parameters reach the engine: Burn's reparameterization, on every parameter.

use std::sync::Arc;

use burn::backend::Dispatch;
use burn::backend::tensor::FloatTensor;
use burn::module::{
    Module, ModuleMapper, ModuleVisitor, Param, Reparameterization, Reparameterizer,
};
use burn::tensor::{Device, Tensor};
use burn_shard_recompute::scope::{self, Phase};

use super::graph::{Graph, ParamHandle, Tokens};
use super::ops::{Read, ShardOps, node_of};
use super::recompute;
use crate::runtime::instance::Instance;

/// The reparameterization of one parameter: it has no state of its own.
#[derive(Clone, Debug)]
pub(crate) struct ShardReparam {
    handle: ParamHandle,
}

impl Reparameterization for ShardReparam {
    const NAME: &'static str = "shard";

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        let param = self.handle.clone();
        let unshards = param.engine().plan().group_of(param.index).unshards();
        if !base.is_autodiff() {
            return recompute::read_untracked(&param, base);
        }
        match scope::phase() {
            Some(Phase::Forward) => recompute::read_in_forward(&param, base),
            Some(Phase::Recompute) if !base.is_require_grad() => {
                recompute::read_untracked(&param, base)
            }
            Some(Phase::Recompute) => {
                let tokens = recompute::tokens(&param, &base.device());
                read(param, base, tokens)
            }
            None if !unshards && !base.is_require_grad() => base,
            None => {
                let tokens = param.tokens(&base.device());
                read(param, base, tokens)
            }
        }
    }
}

/// Records a read of a parameter whose gradient goes to the runtime.
fn read<const D: usize>(param: ParamHandle, base: Tensor<D>, tokens: Tokens) -> Tensor<D> {
    let graph = Arc::clone(&param.graph);
    let (engine, index) = (&graph.engine, param.index);
    let key = node_of(base.clone()).map_or(0, |node| node.value);
    let cached = engine.cached_read(tokens.pass, index, key);
    if let Some(read) = cached.and_then(|read| read.downcast::<FloatTensor<Dispatch>>().ok()) {
        // One node per parameter: Burn adds the gradients of all reads as they come.
        return Tensor::from_dispatch(FloatTensor::<Dispatch>::clone(&read));
    }
    let read = Read {
        param,
        pass: Some(tokens.pass),
    };
    let (stored, anchor) = (base.into_dispatch(), tokens.anchor.into_dispatch());
    let begin = tokens.begin.into_dispatch();
    let full = if engine.plan().group_of(index).unshards() {
        Dispatch::unshard(stored, anchor, begin, read)
    } else {
        Dispatch::watch(stored, anchor, begin, read)
    };
    engine.cache_read(tokens.pass, index, key, Arc::new(full.clone()));
    Tensor::from_dispatch(full)
}

impl ShardReparam {
    /// Belongs to the value of the module that is being made.
    fn with_current_instance(mut self) -> Self {
        self.handle.instance = self.handle.engine().instance();
        self
    }
}

impl Module for ShardReparam {
    fn collect_devices(&self, devices: Vec<Device>) -> Vec<Device> {
        devices
    }

    fn fork(self, _device: &Device) -> Self {
        self.with_current_instance()
    }

    fn to_device(self, _device: &Device) -> Self {
        self.with_current_instance()
    }

    fn train(self) -> Self {
        self.with_current_instance()
    }

    fn valid(&self) -> Self {
        self.clone()
    }

    fn materialize(self) -> Self {
        self
    }

    fn visit<V: ModuleVisitor>(&self, _visitor: &mut V) {}

    fn map<M: ModuleMapper>(self, _mapper: &mut M) -> Self {
        self.with_current_instance()
    }
}

/// Attaches [`ShardReparam`] to each parameter of the plan.
struct Attach<'a> {
    graph: &'a Arc<Graph>,
    instance: Arc<Instance>,
}

impl Reparameterizer for Attach<'_> {
    type Reparam = ShardReparam;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<ShardReparam>) {
        let index = self.graph.engine.plan().find(path);
        let reparam = index.map(|index| ShardReparam {
            handle: ParamHandle {
                graph: Arc::clone(self.graph),
                instance: Arc::clone(&self.instance),
                index,
            },
        });
        (param, reparam)
    }
}

/// Makes every read of the module's parameters go through `graph`.
pub(crate) fn attach<M: Module>(graph: &Arc<Graph>, module: M) -> M {
    let instance = graph.engine.instance();
    module.apply_reparameterization(Attach { graph, instance })
}
