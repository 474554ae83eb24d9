//! Equality with plain data parallelism, bit for bit: losses, gradients, parameters and optimizer
//! state, at every one of twelve steps.
//!
//! SGD with momentum as well as Adam: Adam hides a wrong scale of the gradient.

#![allow(clippy::unwrap_used, reason = "a test ends at the first error")]

mod common;

use std::sync::Arc;

use burn::module::Module;
use burn::optim::decay::WeightDecayConfig;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{
    AdaGradConfig, AdamConfig, AdamWConfig, AdanConfig, GradientsParams, LionConfig,
    ModuleOptimizer, RmsPropConfig, SgdConfig,
};
use burn_shard::{
    ElementwiseConfig, Local, Oss, ProcessGroup, ShardConfig, ShardedModule, ShardingStrategy,
};
use common::{
    Batch, Bits, OddNet, assert_bits, device, gradients, is_whole, own_gradients,
    plain_dp_gradients, stock_state, values,
};

const STEPS: usize = 12;

fn momentum() -> SgdConfig {
    SgdConfig::new()
        .with_momentum(Some(MomentumConfig::new().with_momentum(0.9)))
        .with_weight_decay(Some(WeightDecayConfig { penalty: 0.01 }))
}

/// Small groups, so that there are many; the model has 2 kB of parameters.
fn small_groups(strategy: ShardingStrategy) -> ShardConfig {
    ShardConfig::new(strategy).with_group_cap_bytes(400)
}

/// Trains an [`OddNet`] by the library and by the oracle, and compares them at every step.
fn compare<C: ElementwiseConfig>(
    group: &ProcessGroup,
    config: ShardConfig,
    optimizer: &C,
    lr: f64,
) {
    let device = device();
    let mut model = ShardedModule::new(OddNet::new(&device), config, group).unwrap();
    let mut plain = model.unsharded().train();
    let mut oss = Oss::new(optimizer.clone_config(), group).unwrap();
    let mut stock: ModuleOptimizer = optimizer.build().into();
    let what = format!(
        "{} {} rank {} of {}",
        model.strategy(),
        std::any::type_name::<C>(),
        group.rank(),
        group.world_size()
    );

    for step in 0..STEPS {
        let batch = Batch::new(group.rank(), step, model.strategy());
        let loss = model.loss(&batch, &device);
        let plain_loss = plain.loss(&batch, &device);
        assert_eq!(
            common::bits(loss.clone()),
            common::bits(plain_loss.clone()),
            "{what}: loss at step {step}"
        );
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        let plain_grads = plain_dp_gradients(&plain_loss, &plain, group);
        let expected = gradients(&plain, &plain_grads);
        assert_bits(
            &format!("{what}: gradients"),
            step,
            &gradients(&model, &grads),
            &own_gradients(&expected, &model),
        );

        model = oss.step(lr, model, grads);
        plain = stock.step(lr, plain, plain_grads);
        let full = model.unsharded();
        assert_bits(
            &format!("{what}: parameters"),
            step,
            &values(&full),
            &values(&plain),
        );
        let expected = stock_state(&stock, &plain);
        let actual = oss_state(&oss, &model, &expected);
        let expected = owned_of(&expected, &model);
        assert_bits(
            &format!("{what}: optimizer state"),
            step,
            &actual,
            &expected,
        );
    }
}

/// Configurations are not `Clone` in Burn, but serialize.
trait CloneConfig: Sized {
    fn clone_config(&self) -> Self;
}

impl<C: ElementwiseConfig> CloneConfig for C {
    fn clone_config(&self) -> Self {
        serde_json::from_value(serde_json::to_value(self).unwrap()).unwrap()
    }
}

/// The library's state of the same tensors that the stock optimizer has, by `path.name`.
fn oss_state<M: Module>(oss: &Oss, model: &ShardedModule<M>, expected: &Bits) -> Bits {
    let mut state = Bits::new();
    for param in model.params() {
        for (name, data) in oss.state_of(&param.path).tensors {
            let bits = data.iter::<f32>().map(f32::to_bits).collect();
            state.push((format!("{}.{name}", param.path), bits));
        }
    }
    state.sort();
    // A rank that owns nothing of a parameter has no stock state of it.
    let missing = expected
        .iter()
        .filter(|(path, _)| !state.iter().any(|(p, _)| p == path));
    let missing: Vec<_> = missing
        .map(|(path, _)| (path.clone(), Vec::new()))
        .collect();
    state.extend(missing);
    state.sort();
    state
}

/// The part of the stock optimizer's state that this rank owns.
fn owned_of<M: Module>(full: &Bits, model: &ShardedModule<M>) -> Bits {
    let group = model.group();
    let owned = |path: &str, values: &Vec<u32>| {
        if model.strategy() == ShardingStrategy::Replicated || is_whole(model, path) {
            return values.clone();
        }
        let len = values.len().div_ceil(group.world_size());
        let start = (group.rank() * len).min(values.len());
        values[start..(start + len).min(values.len())].to_vec()
    };
    full.iter()
        .map(|(path, values)| (path.clone(), owned(path, values)))
        .collect()
}

fn for_all_strategies_and_world_sizes<C: ElementwiseConfig + Sync>(optimizer: &C, lr: f64) {
    for world_size in [1, 2, 3, 4] {
        for strategy in ShardingStrategy::ALL {
            ProcessGroup::spawn(world_size, |group| {
                compare(&group, small_groups(strategy), optimizer, lr);
            })
            .unwrap();
        }
    }
}

#[test]
fn sgd_with_momentum_equals_plain_data_parallel() {
    for_all_strategies_and_world_sizes(&momentum(), 0.05);
}

#[test]
fn adam_equals_plain_data_parallel() {
    for_all_strategies_and_world_sizes(&AdamConfig::new(), 1e-2);
}

#[test]
fn adamw_equals_plain_data_parallel() {
    for_all_strategies_and_world_sizes(&AdamWConfig::new().with_weight_decay(0.1), 1e-2);
}

#[test]
fn optimizers_without_a_kernel_equal_plain_data_parallel() {
    for strategy in ShardingStrategy::ALL {
        ProcessGroup::spawn(3, |group| {
            let config = || small_groups(strategy);
            compare(
                &group,
                config(),
                &AdamConfig::new().with_amsgrad(true),
                1e-2,
            );
            compare(&group, config(), &AdaGradConfig::new(), 1e-2);
            compare(&group, config(), &RmsPropConfig::new(), 1e-3);
            compare(&group, config(), &LionConfig::new(), 1e-3);
            compare(&group, config(), &AdanConfig::new(), 1e-2);
        })
        .unwrap();
    }
}

#[test]
fn one_large_group_equals_many_small_ones() {
    for strategy in ShardingStrategy::ALL {
        // The last holds the whole model, and is too small for a matrix to be small beside it.
        for cap in [1, 100, 400, 4000, 16 << 10] {
            ProcessGroup::spawn(2, |group| {
                let config = ShardConfig::new(strategy).with_group_cap_bytes(cap);
                compare(&group, config, &momentum(), 0.05);
            })
            .unwrap();
        }
    }
}

#[test]
fn a_gather_that_is_left_to_the_next_forward_changes_no_bit() {
    for world_size in [1, 2, 3, 4] {
        for strategy in ShardingStrategy::ALL {
            ProcessGroup::spawn(world_size, |group| {
                let config = || small_groups(strategy).with_defer_gather(true);
                compare(&group, config(), &momentum(), 0.05);
                compare(&group, config(), &AdamConfig::new(), 1e-2);
            })
            .unwrap();
        }
    }
}

/// A missing wait would be a race; delays turn it into a difference.
#[test]
fn random_delays_before_every_collective_change_no_bit() {
    for strategy in ShardingStrategy::ALL {
        for seed in 0..3 {
            Local::new(3)
                .wrap(move |inner| {
                    let seed = seed * 100 + inner.rank() as u64;
                    Arc::new(
                        burn_shard::Recording::new(inner)
                            .with_delays(seed, std::time::Duration::from_millis(3)),
                    )
                })
                .spawn(|group| {
                    let config = small_groups(strategy).with_defer_gather(seed == 2);
                    compare(&group, config, &momentum(), 0.05);
                })
                .unwrap();
        }
    }
}

#[test]
fn a_stock_optimizer_steps_under_ddp_and_zero3_with_the_same_bits() {
    for strategy in [ShardingStrategy::Replicated, ShardingStrategy::Full] {
        for world_size in [1, 2, 3, 4] {
            ProcessGroup::spawn(world_size, |group| {
                let device = device();
                let config = small_groups(strategy);
                let mut model = ShardedModule::new(OddNet::new(&device), config, &group).unwrap();
                let mut plain = model.unsharded().train();
                let mut stock = momentum().init();
                let mut plain_stock = momentum().init();
                for step in 0..STEPS {
                    let batch = Batch::new(group.rank(), step, model.strategy());
                    let loss = model.loss(&batch, &device);
                    let grads = GradientsParams::from_grads(loss.backward(), &model);
                    model = stock.step(0.05, model, grads);
                    let loss = plain.loss(&batch, &device);
                    let grads = plain_dp_gradients(&loss, &plain, &group);
                    plain = plain_stock.step(0.05, plain, grads);
                    let full = model.unsharded();
                    assert_bits("parameters", step, &values(&full), &values(&plain));
                }
            })
            .unwrap();
        }
    }
}
