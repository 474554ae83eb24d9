//! A wrapped module and the plain one, trained side by side.

#![allow(dead_code, unreachable_pub, reason = "each test uses a part of it")]

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use burn::module::{Module, ModuleMapper, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::decay::WeightDecayConfig;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{GradientsParams, ModuleOptimizer, SgdConfig};
use burn::prelude::*;
use burn::tensor::activation::gelu;
use burn_shard::{Local, Oss, ProcessGroup, ShardConfig, ShardedModule, ShardingStrategy};

use crate::common::{
    Bits, assert_bits, bits, device, gathered_gradients, gradients, plain_dp_gradients, values,
};
use crate::fill::Fill;

pub const WIDTH: usize = 6;

const DEADLINE: Duration = Duration::from_secs(20);

/// Three layers and a vector, in groups so small that every matrix is sharded under `Full`.
#[derive(Module, Debug)]
pub struct Net {
    pub first: Linear,
    pub second: Linear,
    pub third: Linear,
    pub scale: Param<Tensor<1>>,
}

impl Net {
    pub fn new(device: &Device) -> Self {
        let linear = || LinearConfig::new(WIDTH, WIDTH).init(device);
        Self {
            first: linear(),
            second: linear(),
            third: linear(),
            scale: Param::from_tensor(Tensor::ones([WIDTH], device)),
        }
    }

    pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let x = gelu(self.second.forward(gelu(self.first.forward(x))));
        self.third.forward(x) * self.scale.val().unsqueeze()
    }

    pub fn loss(&self, x: Tensor<2>) -> Tensor<1> {
        (self.forward(x) - 1.0).powi_scalar(2).mean()
    }
}

/// Input that differs between ranks and steps.
pub fn x(group: &ProcessGroup, step: usize) -> Tensor<2> {
    x_on(&device(), group.rank(), step)
}

pub fn x_on(device: &Device, rank: usize, step: usize) -> Tensor<2> {
    let value = |i: usize| ((i * 7 + rank * 3 + step * 15) % 11) as f32 / 11.0 - 0.5;
    let data: Vec<f32> = (0..3 * WIDTH).map(value).collect();
    Tensor::from_data(TensorData::new(data, [3, WIDTH]), device)
}

pub fn momentum() -> SgdConfig {
    SgdConfig::new()
        .with_momentum(Some(MomentumConfig::new().with_momentum(0.9)))
        .with_weight_decay(Some(WeightDecayConfig { penalty: 0.1 }))
}

pub fn small_groups(strategy: ShardingStrategy) -> ShardConfig {
    ShardConfig::new(strategy).with_group_cap_bytes(200)
}

/// Runs `f` on each rank and returns what it says, all within a deadline.
pub fn spawn<T: Send>(world_size: usize, f: impl Fn(&ProcessGroup) -> T + Sync) -> Vec<T> {
    Local::new(world_size)
        .deadline(DEADLINE)
        .spawn(|group| f(&group))
        .unwrap()
}

/// Under every strategy, on 1 to 3 ranks. Says of all that fail how.
pub fn for_all(check: impl Fn(&ProcessGroup, ShardingStrategy) + Sync) {
    let mut failures = Vec::new();
    for world_size in [1, 2, 3] {
        for strategy in ShardingStrategy::ALL {
            let local = Local::new(world_size).deadline(DEADLINE);
            if let Err(error) = local.spawn(|group| check(&group, strategy)) {
                failures.push(format!("{strategy} of {world_size}: {error}"));
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// What `f` returns, or the text with which it panics.
pub fn outcome<T>(f: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(f)).map_err(|payload: Box<dyn Any + Send>| {
        let text = payload.downcast_ref::<String>().cloned();
        text.unwrap_or_else(|| (*payload.downcast_ref::<&str>().unwrap()).to_owned())
    })
}

#[track_caller]
pub fn assert_says(message: &str, parts: &[&str]) {
    for part in parts {
        assert!(message.contains(part), "`{part}` should be in: {message}");
    }
}

pub struct Pair<M> {
    pub model: ShardedModule<M>,
    pub plain: M,
    pub oss: Oss,
    pub stock: ModuleOptimizer,
    pub steps: usize,
}

impl<M: Module> Pair<M> {
    pub fn new(module: M, config: impl Into<ShardConfig>, group: &ProcessGroup) -> Self {
        let plain = module.clone();
        let model = ShardedModule::new(module, config, group).unwrap();
        Self {
            // Rank 0's values, in a module with all autodiff settings.
            plain: plain.map(&mut Fill::with(values(&model.unsharded()))),
            model,
            oss: Oss::new(momentum(), group).unwrap(),
            stock: momentum().init(),
            steps: 0,
        }
    }

    /// Steps both on the same loss; compares losses, gradients and parameters.
    pub fn step(self, loss: impl Fn(&M) -> Tensor<1>) -> Self {
        self.step_with(loss, |_, grads| grads)
    }

    /// Does what [`step`](Self::step) does, with gradients that are changed before the step.
    pub fn step_with(
        mut self,
        loss: impl Fn(&M) -> Tensor<1>,
        change: impl Fn(&M, GradientsParams) -> GradientsParams,
    ) -> Self {
        let (what, steps) = (self.what(), self.steps);
        let (own, expected) = (loss(&self.model), loss(&self.plain));
        assert_eq!(
            bits(own.clone()),
            bits(expected.clone()),
            "{what}: loss at step {steps}"
        );
        let grads = GradientsParams::from_grads(own.backward(), &self.model);
        let plain_grads = plain_dp_gradients(&expected, &self.plain, self.model.group());
        let grads = change(&self.model, grads);
        let plain_grads = change(&self.plain, plain_grads);
        assert_bits(
            &what,
            steps,
            &gathered_gradients(&self.model, &grads),
            &gradients(&self.plain, &plain_grads),
        );
        self.model = self.oss.step(0.1, self.model, grads);
        self.plain = self.stock.step(0.1, self.plain, plain_grads);
        self.steps += 1;
        self.compare();
        self
    }

    /// Does the same to both modules.
    pub fn map<Mapper: ModuleMapper>(mut self, mut mapper: impl FnMut() -> Mapper) -> Self {
        self.model = self.model.map(&mut mapper());
        self.plain = self.plain.map(&mut mapper());
        self.compare();
        self
    }

    pub fn compare(&self) {
        let full = self.model.unsharded();
        assert_bits(
            &self.what(),
            self.steps,
            &values(&full),
            &values(&self.plain),
        );
    }

    pub fn what(&self) -> String {
        let group = self.model.group();
        format!(
            "{}, rank {} of {}",
            self.model.strategy(),
            group.rank(),
            group.world_size()
        )
    }
}

pub fn bits_of(bits: &Bits, path: &str) -> Vec<u32> {
    let found = bits.iter().find(|(p, _)| p == path);
    found.unwrap_or_else(|| panic!("{path}")).1.clone()
}
