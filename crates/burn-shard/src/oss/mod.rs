//! Optimizer state sharding, after FairScale's `OSS`.

mod clip;
mod config;
#[cfg(feature = "cubecl")]
mod device_step;
mod host_step;
mod record;
mod restore;
mod scaler;
mod state;
mod step;

use std::fmt;

use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::{Module, ParamGroup};
use burn::optim::{GradientsParams, StateSink};
use burn_shard_comm::ProcessGroup;

pub use clip::{GradientNorm, GradientNormClipping, NonFinite};
pub use config::ElementwiseConfig;
pub(crate) use restore::{LoadedState, OptimizerScalars, RestoredState};
pub use scaler::{GradScaler, GradScalerConfig};

use crate::error::or_panic;
use crate::{Error, ShardedModule};
use clip::Control;
use config::Method;
use state::State;

/// An optimizer that keeps, on each rank, the state of that rank's shards only.
///
/// Takes the configuration of any elementwise Burn optimizer. Under
/// [`OptimizerState`](crate::ShardingStrategy::OptimizerState) and
/// [`Gradients`](crate::ShardingStrategy::Gradients) it steps this rank's shard of each parameter
/// and all-gathers the result, one collective per group of parameters; under
/// [`Full`](crate::ShardingStrategy::Full) the stored shards are stepped and nothing is sent; under
/// [`Replicated`](crate::ShardingStrategy::Replicated) every rank steps everything.
///
/// SGD, Adam and AdamW on `f32` take a fused kernel that steps in place in one pass over memory,
/// with the same bits as Burn's own; `amsgrad`, cautious weight decay, other optimizers and other
/// dtypes take Burn's own step on one-dimensional shards.
///
/// # Memory
///
/// `8 P / N` bytes for Adam in `f32` (`P` parameters, `N` ranks), `4 P / N` for momentum; while
/// stepping, one shard of one group more.
///
/// # Examples
///
/// ```
/// use burn::optim::AdamWConfig;
/// use burn_shard::{Oss, ProcessGroup};
///
/// ProcessGroup::spawn(2, |group| {
///     let optimizer = Oss::new(AdamWConfig::new(), &group).unwrap();
///     assert_eq!(optimizer.group().world_size(), 2);
/// })?;
/// # Ok::<(), burn_shard::CommError>(())
/// ```
#[doc(alias = "OSS")]
#[doc(alias = "ZeroRedundancyOptimizer")]
#[doc(alias = "DistributedOptimizer")]
pub struct Oss {
    group: ProcessGroup,
    methods: Vec<Method>,
    state: Option<State>,
    clipping: Option<GradientNormClipping>,
    norm: Option<f64>,
    skipped: u64,
}

impl Oss {
    /// An optimizer for all parameters. Nothing is sent.
    ///
    /// # Errors
    ///
    /// [`Error::NormClipping`] if `config` clips by norm. Optimizers that look at whole tensors do
    /// not compile, see [`ElementwiseConfig`].
    #[allow(
        clippy::needless_pass_by_value,
        reason = "configurations are passed by value in Burn"
    )]
    pub fn new<C: ElementwiseConfig>(config: C, group: &ProcessGroup) -> Result<Self, Error> {
        let methods = vec![Method::new(ParamGroup::all(), &config)?];
        Ok(Self {
            group: group.clone(),
            methods,
            state: None,
            clipping: None,
            norm: None,
            skipped: 0,
        })
    }

    /// Steps the parameters that `params` matches by another configuration. The last matching group
    /// wins, as in `ModuleOptimizer::with_group`; paths are those of the wrapped module.
    ///
    /// # Errors
    ///
    /// The errors of [`new`](Self::new).
    ///
    /// # Panics
    ///
    /// If a step has been made already: the state of those parameters would be lost.
    ///
    /// # Examples
    ///
    /// No weight decay for biases:
    ///
    /// ```
    /// # use burn::module::ParamGroup;
    /// # use burn::optim::AdamWConfig;
    /// # use burn_shard::{Oss, ProcessGroup};
    /// # ProcessGroup::spawn(2, |group| {
    /// let biases = ParamGroup::from_predicate("bias");
    /// let optimizer = Oss::new(AdamWConfig::new().with_weight_decay(0.01), &group)
    ///     .unwrap()
    ///     .with_group(biases, AdamWConfig::new().with_weight_decay(0.0))
    ///     .unwrap();
    /// # drop(optimizer);
    /// # }).unwrap();
    /// ```
    #[doc(alias = "add_param_group")]
    #[allow(
        clippy::needless_pass_by_value,
        reason = "configurations are passed by value in Burn"
    )]
    pub fn with_group<C: ElementwiseConfig>(
        mut self,
        params: ParamGroup,
        config: C,
    ) -> Result<Self, Error> {
        assert!(
            self.state.is_none(),
            "parameter groups should be added before the first step"
        );
        self.methods.push(Method::new(params, &config)?);
        Ok(self)
    }

    /// Clips gradients by the norm of all of them together.
    ///
    /// Burn's own `GradientClippingConfig::Norm` is per tensor, and refused on shards.
    ///
    /// # Examples
    ///
    /// ```
    /// # use burn::optim::AdamWConfig;
    /// # use burn_shard::{GradientNormClipping, Oss, ProcessGroup};
    /// # ProcessGroup::spawn(2, |group| {
    /// let optimizer = Oss::new(AdamWConfig::new(), &group)
    ///     .unwrap()
    ///     .with_norm_clipping(GradientNormClipping::new(1.0));
    /// assert_eq!(optimizer.gradient_norm(), None);
    /// # }).unwrap();
    /// ```
    #[doc(alias = "clip_grad_norm_")]
    #[must_use]
    pub fn with_norm_clipping(mut self, clipping: GradientNormClipping) -> Self {
        self.clipping = Some(clipping);
        self
    }

    /// The norm of all gradients of the last step, before they were clipped; the same bits on every rank.
    /// `None` unless steps clip by norm or are scaled.
    #[must_use]
    pub fn gradient_norm(&self) -> Option<f64> {
        self.norm
    }

    /// Steps that were left out because the norm was not finite.
    #[must_use]
    pub fn skipped_steps(&self) -> u64 {
        self.skipped
    }

    /// The process group it was made for.
    #[must_use]
    pub fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// Steps `module` by the gradients of its own backward. Every rank ends with the same full
    /// parameters, or under [`Full`](crate::ShardingStrategy::Full) with its stepped shards.
    ///
    /// # Panics
    ///
    /// With the text of the error that [`try_step`](Self::try_step) returns.
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
    /// # let x = Tensor::<2>::ones([2, 4], &device);
    /// let loss = model.forward(x).square().mean();
    /// let gradients = GradientsParams::from_grads(loss.backward(), &model);
    /// model = optimizer.step(1e-2, model, gradients);
    /// # drop(model);
    /// # }).unwrap();
    /// ```
    pub fn step<M: Module>(
        &mut self,
        lr: impl Into<ModuleLearningRate>,
        module: ShardedModule<M>,
        gradients: GradientsParams,
    ) -> ShardedModule<M> {
        or_panic(
            self.try_step(lr, module, gradients)
                .map_err(|failed| failed.error),
        )
    }

    /// [`step`](Self::step) with errors returned, and the module with them.
    ///
    /// # Errors
    ///
    /// Before anything is changed or sent: [`Error::OtherGroup`], [`Error::OtherModule`],
    /// [`Error::Unreduced`], [`Error::GradientLength`], [`Error::NonFiniteGradients`]. While stepping: [`Error::Step`] for hyper-parameters that are not
    /// finite, or failures of the communicator; parameters may then differ between ranks.
    ///
    /// # Examples
    ///
    /// ```
    /// # use burn::nn::LinearConfig;
    /// # use burn::optim::{GradientsParams, SgdConfig};
    /// # use burn::prelude::*;
    /// # use burn_shard::{GradientNormClipping, Oss, ProcessGroup, ShardedModule, ShardingStrategy};
    /// # ProcessGroup::spawn(2, |group| {
    /// # let device = Device::flex().autodiff();
    /// # let model = LinearConfig::new(4, 1).init(&device);
    /// # let mut model = ShardedModule::new(model, ShardingStrategy::Gradients, &group).unwrap();
    /// # let mut optimizer = Oss::new(SgdConfig::new(), &group)
    /// #     .unwrap()
    /// #     .with_norm_clipping(GradientNormClipping::new(1.0));
    /// # let x = Tensor::<2>::full([2, 4], f32::INFINITY, &device);
    /// # let gradients = GradientsParams::from_grads(model.forward(x).mean().backward(), &model);
    /// // Every rank gets the same answer, so all of them go on in the same way.
    /// model = match optimizer.try_step(1e-2, model, gradients) {
    ///     Ok(stepped) => stepped,
    ///     Err(refused) => {
    ///         eprintln!("{refused}");
    ///         *refused.module
    ///     }
    /// };
    /// # drop(model);
    /// # }).unwrap();
    /// ```
    pub fn try_step<M: Module>(
        &mut self,
        lr: impl Into<ModuleLearningRate>,
        module: ShardedModule<M>,
        gradients: GradientsParams,
    ) -> Result<ShardedModule<M>, StepError<M>> {
        self.step_scaled(lr.into(), module, gradients, None)
    }

    /// [`try_step`](Self::try_step) with gradients of a loss that was multiplied.
    fn step_scaled<M: Module>(
        &mut self,
        lr: ModuleLearningRate,
        module: ShardedModule<M>,
        gradients: GradientsParams,
        loss_scale: Option<f64>,
    ) -> Result<ShardedModule<M>, StepError<M>> {
        let engine = module.engine();
        let (own, other) = (&self.group, &engine.context.mesh.world);
        if (own.rank(), own.world_size()) != (other.rank(), other.world_size()) {
            let error = Error::OtherGroup {
                optimizer_rank: own.rank(),
                optimizer_world_size: own.world_size(),
                module_rank: other.rank(),
                module_world_size: other.world_size(),
            };
            return Err(StepError::new(module, error));
        }
        if engine.has_accumulated() {
            let rank = own.rank();
            return Err(StepError::new(module, Error::Unreduced { rank }));
        }
        let state = self.state.get_or_insert_with(|| State::new(engine));
        if !state.belongs_to(engine) {
            let rank = own.rank();
            return Err(StepError::new(module, Error::OtherModule { rank }));
        }
        let control = Control {
            clipping: self.clipping,
            loss_scale,
        };
        let step = step::Step {
            methods: &self.methods,
            lr: &lr,
            control,
        };
        let (module, verdict) = step.run(state, module, gradients)?;
        self.norm = verdict.norm;
        self.skipped += u64::from(verdict.factor.is_none());
        Ok(module)
    }

    /// This rank's part of the optimizer state of the parameter at `path`, in Burn's names: for
    /// example `momentum.moment_1`, of as many elements as this rank owns of it. Empty before the
    /// first step.
    #[doc(alias = "local_state_dict")]
    #[must_use]
    pub fn state_of(&self, path: &str) -> StateSink {
        let Some(state) = &self.state else {
            return StateSink::default();
        };
        state.describe(path)
    }

    /// Whether the parameter at `path` was last stepped by a fused kernel. `None` if it has not been
    /// stepped.
    #[must_use]
    pub fn is_fused(&self, path: &str) -> Option<bool> {
        self.state.as_ref()?.is_fused(path)
    }
}

impl fmt::Debug for Oss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Oss")
            .field("group", &self.group)
            .field("methods", &self.methods)
            .finish_non_exhaustive()
    }
}

/// A step that was not made, and the module.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct StepError<M: fmt::Debug> {
    /// The module: as it was, unless a collective failed half-way.
    pub module: Box<ShardedModule<M>>,
    /// Why.
    #[source]
    pub error: Error,
}

impl<M: Module> StepError<M> {
    fn new(module: ShardedModule<M>, error: Error) -> Self {
        Self {
            module: Box::new(module),
            error,
        }
    }
}
