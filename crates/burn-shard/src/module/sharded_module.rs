//! The wrapper users put around their module.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use burn::module::Module;
use burn::optim::GradientsParams;
use burn_shard_comm::ProcessGroup;

use super::bind::{Storage, detach};
use super::buffers;
use super::leaves::note_leaves;
use crate::autodiff::graph::Graph;
use crate::error::or_panic;
use crate::plan::GroupSpec;
use crate::runtime::engine::Engine;
use crate::runtime::instance::Instance;
use crate::runtime::pass::GradientSync;
use crate::storage::flat::Flat;
use crate::storage::ledger::MemoryReport;
use crate::{Error, ParamSpec, ShardConfig, ShardingStrategy};

/// A module whose training is sharded over the ranks of a process group.
///
/// Dereferences to the module, so `model.forward(x)` stays as it is, and so does the training loop:
/// `loss.backward()`, `GradientsParams::from_grads`, optimizer step. During backward, gradients are
/// averaged over the ranks, one collective per group of parameters, while it still runs.
///
/// What a rank holds is said in [`ShardingStrategy`]. Which figures mean the shard:
///
/// | | `Replicated`, `OptimizerState` | `Gradients` | `Full` |
/// |---|---|---|---|
/// | stored parameters (`Param::base`) | full | full | shard, see [`ParamSpec::shard_shape`] |
/// | gradients in `GradientsParams` | full average | shard of the average | shard of the average |
/// | records, display, `num_params` | full | full | full |
///
/// Under mixed precision, and with [`ShardConfig::defer_gather`], stored parameters are shards under every sharding
/// strategy.
///
/// Reading a parameter (`Param::val`, which all of `burn::nn` does) always gives the full tensor.
/// A gradient is the mean over all ranks, counting zeros for ranks that did not use the parameter;
/// a parameter that no rank used has no gradient, so no weight decay and no momentum step either.
///
/// Evaluate with [`valid`](Module::valid), as always in Burn: a forward on the training module whose
/// backward never runs delays the reductions of the next backward to its end. Keep the module until
/// its backward has run: the tape does not keep it, and a backward without it panics.
///
/// # Collectives
///
/// All ranks must read the same parameters in the same order under [`ShardingStrategy::Full`], run
/// backward the same number of times, and step together. What goes wrong inside forward, backward
/// or an optimizer step panics with the error's text (Burn's signatures return no errors);
/// [`ProcessGroup::spawn`] turns the panic into an error and ends the other ranks' waits.
///
/// # Examples
///
/// Two ranks train one layer, of which each keeps half:
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::optim::{AdamConfig, GradientsParams};
/// use burn::prelude::*;
/// use burn_shard::{Error, Oss, ProcessGroup, ShardedModule, ShardingStrategy};
///
/// fn train(group: &ProcessGroup) -> Result<(), Error> {
///     let device = Device::flex().autodiff();
///     let model = LinearConfig::new(512, 128).init(&device);
///     let mut model = ShardedModule::new(model, ShardingStrategy::Full, group)?;
///     let mut optimizer = Oss::new(AdamConfig::new(), group)?;
///     for _ in 0..3 {
///         let loss = model.forward(Tensor::<2>::ones([4, 512], &device)).square().mean();
///         let gradients = GradientsParams::from_grads(loss.backward(), &model);
///         model = optimizer.step(1e-3, model, gradients);
///     }
///     // The stored tensor is this rank's shard; a read gives all of it.
///     assert_eq!(model.weight.base().dims(), [512, 64]);
///     assert_eq!(model.weight.val().dims(), [512, 128]);
///     Ok(())
/// }
///
/// ProcessGroup::spawn(2, |group| train(&group))?.into_iter().collect::<Result<(), _>>()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[doc(alias = "FSDP")]
#[doc(alias = "FullyShardedDataParallel")]
#[doc(alias = "ZeRO")]
#[doc(alias = "fully_shard")]
#[doc(alias = "ShardedDataParallel")]
#[doc(alias = "DDP")]
#[doc(alias = "DistributedDataParallel")]
#[doc(alias = "DeepSpeedEngine")]
#[derive(Clone)]
pub struct ShardedModule<M> {
    inner: M,
    graph: Arc<Graph>,
    /// Which value of the module it is.
    instance: Arc<Instance>,
}

/// What a wrapped module is made of.
pub(crate) struct ModuleParts<M> {
    pub(crate) inner: M,
    pub(crate) graph: Arc<Graph>,
    pub(crate) instance: Arc<Instance>,
}

impl<M: Module> ShardedModule<M> {
    /// Wraps `module`. Every rank ends with rank 0's parameters and buffers, or its shards of them.
    ///
    /// `config` is a [`ShardingStrategy`] or a [`ShardConfig`].
    ///
    /// # Errors
    ///
    /// On every rank, before anything is sent: a parameter reachable by two paths, or with a
    /// reparameterization of its own; a dtype that cannot be communicated; parameters on several
    /// devices, or on a backend this build has not ([`Error::UnsupportedBackend`]); no parameters;
    /// modules that differ between ranks ([`Error::PlanMismatch`]).
    /// After that only failures of the communicator, or [`Error::DTypeChanged`].
    ///
    /// # Examples
    ///
    /// ```
    /// # use burn::nn::LinearConfig;
    /// # use burn::prelude::*;
    /// # use burn_shard::{ProcessGroup, ShardConfig, ShardedModule, ShardingStrategy};
    /// # ProcessGroup::spawn(2, |group| {
    /// # let device = Device::flex().autodiff();
    /// let model = LinearConfig::new(512, 128).init(&device);
    /// let config = ShardConfig::new(ShardingStrategy::Full)
    ///     .with_ignored_params(vec!["weight".to_owned()]);
    /// let model = ShardedModule::new(model, config, &group).unwrap();
    /// assert_eq!(model.weight.base().dims(), [512, 128]);
    /// # }).unwrap();
    /// ```
    pub fn new(
        module: M,
        config: impl Into<ShardConfig>,
        group: &ProcessGroup,
    ) -> Result<Self, Error> {
        let (graph, inner) = super::wrap::wrap(module, config.into(), group)?;
        Ok(Self::from_parts(graph, inner))
    }

    /// The strategy it was wrapped with.
    #[must_use]
    pub fn strategy(&self) -> ShardingStrategy {
        self.config().strategy
    }

    /// The process group it was wrapped with.
    #[must_use]
    pub fn group(&self) -> &ProcessGroup {
        &self.engine().context.mesh.world
    }

    /// Whether collectives read and write the module's tensors where they are. `false`: they are on a
    /// device that the group's communicator does not reach, and are copied to host memory and back.
    #[must_use]
    pub fn collectives_in_place(&self) -> bool {
        self.engine().context.memory.collectives_in_place()
    }

    /// Model-state bytes on this rank, by kind, counted as they live.
    ///
    /// Gradients that an all-reduce left in Burn's own tensors count until they are reduced. On a device
    /// buffers count as what was asked for, not as what its allocator rounds it up to; what Burn's fusion
    /// has queued keeps what it reads. Scratch memory of NCCL is not counted.
    ///
    /// # Examples
    ///
    /// ```
    /// # use burn::nn::LinearConfig;
    /// # use burn::prelude::*;
    /// # use burn_shard::{MemoryKind, ProcessGroup, ShardedModule, ShardingStrategy};
    /// # ProcessGroup::spawn(2, |group| {
    /// # let device = Device::flex().autodiff();
    /// let model = LinearConfig::new(512, 128).with_bias(false).init(&device);
    /// let model = ShardedModule::new(model, ShardingStrategy::Full, &group).unwrap();
    /// let parameters = model.memory().of(MemoryKind::Parameters);
    /// assert_eq!(parameters.live_bytes, 512 * 128 * 4 / 2);
    /// println!("rank {}:\n{}", group.rank(), model.memory());
    /// # }).unwrap();
    /// ```
    #[must_use]
    pub fn memory(&self) -> MemoryReport {
        self.engine().context.ledger.report()
    }

    /// Sets the peaks of [`memory`](Self::memory) to what is live now.
    pub fn reset_memory_peak(&self) {
        self.engine().context.ledger.reset_peak();
    }

    /// Paths, full shapes and dtypes of the parameters, in the order of the plan.
    #[must_use]
    pub fn params(&self) -> &[ParamSpec] {
        &self.engine().plan().params
    }

    /// The parameters that share a collective, as indices into [`params`](Self::params), in plan
    /// order.
    #[must_use]
    pub fn groups(&self) -> Vec<Vec<usize>> {
        self.engine()
            .plan()
            .groups
            .iter()
            .map(|group| group.members.clone())
            .collect()
    }

    /// The plain module with full parameters in the type they are stored in, on every rank: for saving,
    /// or for inference without the group. A collective under every strategy.
    ///
    /// # Panics
    ///
    /// If a collective fails: every rank has to call it.
    ///
    /// # Examples
    ///
    /// Rank 0 alone goes on to use the plain module:
    ///
    /// ```
    /// # use burn::nn::LinearConfig;
    /// # use burn::prelude::*;
    /// # use burn_shard::{ProcessGroup, ShardedModule, ShardingStrategy};
    /// # ProcessGroup::spawn(2, |group| {
    /// # let device = Device::flex().autodiff();
    /// # let model = LinearConfig::new(512, 128).init(&device);
    /// # let model = ShardedModule::new(model, ShardingStrategy::Full, &group).unwrap();
    /// let plain = model.unsharded();
    /// if group.rank() == 0 {
    ///     let y = plain.forward(Tensor::<2>::ones([1, 512], &Device::flex()));
    ///     assert_eq!(y.dims(), [1, 128]);
    /// }
    /// # }).unwrap();
    /// ```
    #[doc(alias = "summon_full_params")]
    #[doc(alias = "GatheredParameters")]
    #[doc(alias = "full_state_dict")]
    #[must_use]
    pub fn unsharded(&self) -> M {
        let engine = self.engine();
        or_panic(engine.context.meet(&self.instance, "unsharded()"));
        engine.read_stored(|| self.inner.valid().materialize())
    }

    /// Begins another forward, with a backward of its own, although the one before has not been
    /// differentiated yet.
    ///
    /// Forwards one after the other are taken for parts of one loss. Of two losses that are
    /// differentiated one after the other, forward, forward, backward, backward, the second forward
    /// has to begin with this; Burn refuses the second backward otherwise. The gradients of both
    /// backwards are averages over the ranks, and add up.
    ///
    /// # Examples
    ///
    /// ```
    /// # use burn::nn::LinearConfig;
    /// # use burn::prelude::*;
    /// # use burn_shard::{ProcessGroup, ShardedModule, ShardingStrategy};
    /// # ProcessGroup::spawn(2, |group| {
    /// # let device = Device::flex().autodiff();
    /// # let model = LinearConfig::new(4, 1).init(&device);
    /// # let model = ShardedModule::new(model, ShardingStrategy::Full, &group).unwrap();
    /// # let (x, y) = (Tensor::<2>::ones([2, 4], &device), Tensor::<2>::zeros([2, 4], &device));
    /// let first = model.forward(x).mean();
    /// model.begin_forward();
    /// let second = model.forward(y).mean();
    /// let (first, second) = (first.backward(), second.backward());
    /// # drop((first, second));
    /// # }).unwrap();
    /// ```
    pub fn begin_forward(&self) {
        self.graph.close_pass();
    }

    /// Until the guard is dropped, backward passes add up their gradients on this rank and send nothing:
    /// gradient accumulation as by `no_sync` of PyTorch's DDP.
    ///
    /// They return no gradients. The first backward of a forward that begins after that reduces the sum
    /// of all of them, its own added last, and returns the average over the ranks; a step before it is
    /// refused. Divide each loss by the number of micro-batches for their mean. All ranks have to do it alike.
    ///
    /// # Memory
    ///
    /// The full gradients, in the type of the stored parameters, under every strategy. Adding up what
    /// several backwards return (Burn's `GradientsAccumulator`) keeps only shards, and sends as often.
    ///
    /// # Examples
    ///
    /// ```
    /// # use burn::nn::LinearConfig;
    /// # use burn::optim::{GradientsParams, SgdConfig};
    /// # use burn::prelude::*;
    /// # use burn_shard::{Oss, ProcessGroup, ShardedModule, ShardingStrategy};
    /// # ProcessGroup::spawn(2, |group| {
    /// # let device = Device::flex().autodiff();
    /// # let model = LinearConfig::new(4, 1).init(&device);
    /// # let mut model = ShardedModule::new(model, ShardingStrategy::Gradients, &group).unwrap();
    /// # let mut optimizer = Oss::new(SgdConfig::new(), &group).unwrap();
    /// # let batches = [Tensor::<2>::ones([2, 4], &device), Tensor::<2>::zeros([2, 4], &device)];
    /// let [first, last] = batches;
    /// {
    ///     let _no_sync = model.no_sync();
    ///     (model.forward(first).mean() / 2).backward();
    /// }
    /// let gradients = (model.forward(last).mean() / 2).backward();
    /// let gradients = GradientsParams::from_grads(gradients, &model);
    /// model = optimizer.step(0.1, model, gradients);
    /// # drop(model);
    /// # }).unwrap();
    /// ```
    #[doc(alias = "set_requires_gradient_sync")]
    #[doc(alias = "set_gradient_accumulation_boundary")]
    #[must_use = "gradients are accumulated as long as the guard lives"]
    pub fn no_sync(&self) -> NoSync<'_> {
        self.graph.close_pass();
        self.engine().set_sync(GradientSync::Accumulate);
        NoSync { graph: &self.graph }
    }

    /// Drops the gradients that were accumulated under [`no_sync`](Self::no_sync), on this rank. All ranks
    /// have to do it alike.
    ///
    /// Nothing else has to be zeroed: each backward of Burn returns gradients of its own.
    #[doc(alias = "zero_grad")]
    pub fn discard_accumulated(&self) {
        self.engine().discard_accumulated();
    }

    /// Gives every rank the buffers of rank 0: running statistics of batch normalization, integers and
    /// booleans. Wrapping does that once, and then each rank's statistics follow its own batches, as in FSDP;
    /// called before an evaluation, or after each step, this is DDP's `broadcast_buffers`. All ranks have to call
    /// it, outside of a forward and its backward. Parameters stay as they are.
    ///
    /// # Errors
    ///
    /// Failures of the communicator, which has then failed for good.
    #[doc(alias = "_sync_buffers")]
    pub fn broadcast_buffers(self) -> Result<Self, Error> {
        let own = buffers::collect(self.engine().plan(), self.inner());
        let received = buffers::broadcast(self.group(), own)?;
        Ok(self.rebuild_with(|inner| buffers::put(inner, received)))
    }

    /// The module with its stored tensors, without what this wrapper adds.
    pub(crate) fn inner(&self) -> &M {
        &self.inner
    }

    /// The module with other stored parameters, by group, after `change`.
    pub(crate) fn with_stored(self, flats: Vec<Flat>, change: impl FnOnce(M) -> M) -> Self {
        let engine = Arc::clone(self.engine());
        self.rebuild_with(|inner| {
            let (skeleton, detached) = detach(&engine, change(inner), &mut GradientsParams::new());
            Storage::new(flats, Storage::states(detached)).bind(&engine, skeleton)
        })
    }

    pub(crate) fn into_parts(self) -> ModuleParts<M> {
        let Self {
            inner,
            graph,
            instance,
        } = self;
        ModuleParts {
            inner,
            graph,
            instance,
        }
    }

    /// The newest value of the module, of the plain module `inner`.
    pub(crate) fn from_parts(graph: Arc<Graph>, inner: M) -> Self {
        note_leaves(&graph, &inner);
        Self {
            inner,
            instance: graph.engine.instance(),
            graph,
        }
    }

    /// This value of the module, with its tensors in another mode.
    pub(super) fn with_inner(&self, inner: M) -> Self {
        Self {
            inner,
            graph: Arc::clone(&self.graph),
            instance: Arc::clone(&self.instance),
        }
    }

    /// Makes a new value of the module, whose tensors `change` may replace.
    pub(super) fn rebuild_with(self, change: impl FnOnce(M) -> M) -> Self {
        let Self {
            inner,
            graph,
            instance,
        } = self;
        let engine = &graph.engine;
        engine.new_instance(instance.history.clone().after_map());
        graph.close_pass();
        let mut inner = change(inner);
        if engine.plan().groups.iter().any(GroupSpec::unshards) {
            // What an optimizer made are separate tensors; the next gather needs flat buffers.
            let (skeleton, detached) = detach(engine, inner, &mut GradientsParams::new());
            inner = Storage::pack(engine, detached).bind(engine, skeleton);
        }
        Self::from_parts(graph, inner)
    }
}

impl<M> ShardedModule<M> {
    pub(crate) fn engine(&self) -> &Arc<Engine> {
        &self.graph.engine
    }

    /// How it was wrapped.
    #[must_use]
    pub fn config(&self) -> &ShardConfig {
        &self.engine().context.config
    }
}

impl<M> Deref for ShardedModule<M> {
    type Target = M;

    fn deref(&self) -> &M {
        &self.inner
    }
}

impl<M: fmt::Debug> fmt::Debug for ShardedModule<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShardedModule")
            .field("strategy", &self.config().strategy)
            .field("rank", &self.engine().rank())
            .field("inner", &self.inner)
            .finish_non_exhaustive()
    }
}

/// Accumulates gradients for as long as it lives, see [`ShardedModule::no_sync`].
#[derive(Debug)]
pub struct NoSync<'a> {
    graph: &'a Graph,
}

impl Drop for NoSync<'_> {
    fn drop(&mut self) {
        self.graph.close_pass();
        self.graph.engine.set_sync(GradientSync::Reduce);
    }
}

#[cfg(test)]
mod tests {
    use burn::nn::LinearConfig;
    use burn::prelude::*;

    use super::*;

    /// The pass in the engine and the steps on Burn's tape must not keep each other.
    #[test]
    fn a_module_dropped_after_a_forward_without_backward_is_freed() {
        for strategy in ShardingStrategy::ALL {
            ProcessGroup::spawn(2, |group| {
                let device = Device::flex().autodiff();
                let linear = LinearConfig::new(3, 2).init(&device);
                let model = ShardedModule::new(linear, strategy, &group).unwrap();
                let engine = Arc::downgrade(model.engine());
                let output = model.forward(Tensor::<2>::ones([1, 3], &device));
                drop((model, output));
                assert!(engine.upgrade().is_none(), "{strategy}");
            })
            .unwrap();
        }
    }
}
