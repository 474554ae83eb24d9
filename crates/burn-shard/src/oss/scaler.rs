//! Dynamic loss scaling for half-precision gradients.

use burn::config::Config;
use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};

use super::{Oss, StepError};
use crate::ShardedModule;

/// How a [`GradScaler`] behaves; the defaults are those of PyTorch's.
#[derive(Config, Debug, Copy, PartialEq)]
pub struct GradScalerConfig {
    /// The factor at first.
    #[config(default = 65536.0)]
    pub init_scale: f64,
    /// What the scale is multiplied by after `growth_interval` steps without an overflow.
    #[config(default = 2.0)]
    pub growth_factor: f64,
    /// What the scale is multiplied by after an overflow.
    #[config(default = 0.5)]
    pub backoff_factor: f64,
    /// Steps in a row without an overflow before the scale grows.
    #[config(default = 2000)]
    pub growth_interval: usize,
}

/// Multiplies losses so that half-precision gradients do not vanish, and leaves out the steps in which
/// they overflow, on all ranks alike. After `ShardedGradScaler` of FairScale and FSDP.
///
/// It can be saved by serde. Steps, scale and counts are the same on every rank.
///
/// # Examples
///
/// ```
/// # use burn::nn::LinearConfig;
/// # use burn::optim::{AdamConfig, GradientsParams};
/// # use burn::prelude::*;
/// # use burn_shard::{GradScaler, GradScalerConfig, Oss, ProcessGroup, ShardedModule, ShardingStrategy};
/// # ProcessGroup::spawn(2, |group| {
/// # let device = Device::flex().autodiff();
/// # let model = LinearConfig::new(4, 1).init(&device);
/// # let mut model = ShardedModule::new(model, ShardingStrategy::Full, &group).unwrap();
/// # let mut optimizer = Oss::new(AdamConfig::new(), &group).unwrap();
/// # let x = Tensor::<2>::ones([2, 4], &device);
/// let mut scaler = GradScaler::new(GradScalerConfig::new());
/// let loss = model.forward(x).mean();
/// let gradients = scaler.scale(loss).backward();
/// let gradients = GradientsParams::from_grads(gradients, &model);
/// model = scaler.step(&mut optimizer, 0.1, model, gradients).unwrap();
/// assert_eq!(scaler.loss_scale(), 65536.0);
/// # drop(model);
/// # }).unwrap();
/// ```
#[doc(alias = "ShardedGradScaler")]
#[doc(alias = "DynamicLossScaler")]
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GradScaler {
    config: GradScalerConfig,
    scale: f64,
    /// Steps in a row without an overflow.
    steady: usize,
    skipped: u64,
}

impl GradScaler {
    /// A scaler at its initial scale.
    #[must_use]
    pub fn new(config: GradScalerConfig) -> Self {
        Self {
            scale: config.init_scale,
            config,
            steady: 0,
            skipped: 0,
        }
    }

    /// The loss times the scale.
    #[must_use]
    pub fn scale(&self, loss: Tensor<1>) -> Tensor<1> {
        loss.mul_scalar(self.scale)
    }

    /// The factor by which losses are multiplied now.
    #[must_use]
    pub fn loss_scale(&self) -> f64 {
        self.scale
    }

    /// Steps that were left out because a gradient had overflown.
    #[must_use]
    pub fn skipped_steps(&self) -> u64 {
        self.skipped
    }

    /// Steps `module` by gradients of a scaled loss, unless one of them is not finite on any rank: then
    /// every rank gets its module back as it was. Adapts the scale.
    ///
    /// # Errors
    ///
    /// The errors of [`Oss::try_step`]; the scale stays as it was.
    pub fn step<M: Module>(
        &mut self,
        optimizer: &mut Oss,
        lr: impl Into<ModuleLearningRate>,
        module: ShardedModule<M>,
        gradients: GradientsParams,
    ) -> Result<ShardedModule<M>, StepError<M>> {
        let skipped = optimizer.skipped_steps();
        let module = optimizer.step_scaled(lr.into(), module, gradients, Some(self.scale))?;
        if optimizer.skipped_steps() > skipped {
            self.skipped += 1;
            self.steady = 0;
            self.scale *= self.config.backoff_factor;
        } else {
            self.steady += 1;
            if self.steady == self.config.growth_interval {
                self.steady = 0;
                self.scale *= self.config.growth_factor;
            }
        }
        Ok(module)
    }
}
