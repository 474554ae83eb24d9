//! Records of wrapped modules, and what else a module holds besides float parameters.

#![allow(clippy::unwrap_used, reason = "a test ends at the first error")]

mod common;
#[path = "common/mlp.rs"]
mod mlp;

use burn::module::{Module, Param, ParamId};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{GradientsParams, SgdConfig};
use burn::prelude::*;
use burn_shard::{Oss, ProcessGroup, ShardConfig, ShardedModule, ShardingStrategy};
use common::{Batch, OddNet, assert_bits, device, values};
use mlp::input;

fn small_groups(strategy: ShardingStrategy) -> ShardConfig {
    ShardConfig::new(strategy).with_group_cap_bytes(400)
}

fn oss(group: &ProcessGroup) -> Oss {
    let config = SgdConfig::new().with_momentum(Some(MomentumConfig::new()));
    Oss::new(config, group).unwrap()
}

fn step(model: ShardedModule<OddNet>, oss: &mut Oss, step: usize) -> ShardedModule<OddNet> {
    let batch = Batch::new(model.group().rank(), step, model.strategy());
    let loss = model.loss(&batch, &device());
    let grads = GradientsParams::from_grads(loss.backward(), &model);
    oss.step(0.05, model, grads)
}

/// A model after two steps.
fn trained(strategy: ShardingStrategy, group: &ProcessGroup) -> ShardedModule<OddNet> {
    let mut model =
        ShardedModule::new(OddNet::new(&device()), small_groups(strategy), group).unwrap();
    let mut oss = oss(group);
    for i in 0..2 {
        model = step(model, &mut oss, i);
    }
    model
}

#[test]
fn a_record_of_a_wrapped_module_loads_into_the_plain_one_where_parameters_are_whole() {
    for strategy in [
        ShardingStrategy::Replicated,
        ShardingStrategy::OptimizerState,
        ShardingStrategy::Gradients,
    ] {
        ProcessGroup::spawn(3, |group| {
            let model = trained(strategy, &group);
            let full = model.unsharded();
            let bytes = model.into_record().into_bytes().unwrap();
            let record = burn::store::ModuleRecord::from_bytes(bytes).unwrap();
            let plain = OddNet::new(&device()).load_record(record);
            assert_bits("record", 0, &values(&plain), &values(&full));
        })
        .unwrap();
    }
}

#[test]
fn a_record_of_the_unsharded_module_loads_into_the_plain_one_under_every_strategy() {
    for strategy in ShardingStrategy::ALL {
        ProcessGroup::spawn(3, |group| {
            let model = trained(strategy, &group);
            let plain = OddNet::new(&device()).load_record(model.unsharded().into_record());
            assert_bits("record", 0, &values(&plain), &values(&model.unsharded()));
            let batch = Batch::new(0, 0, strategy);
            assert_eq!(
                common::bits(plain.valid().loss(&batch, &Device::flex())),
                common::bits(model.valid().loss(&batch, &Device::flex()))
            );
        })
        .unwrap();
    }
}

#[test]
fn a_wrapped_module_loads_its_own_record_and_training_goes_on_as_before() {
    for strategy in ShardingStrategy::ALL {
        for world_size in [1, 2, 3] {
            ProcessGroup::spawn(world_size, |group| {
                let model = trained(strategy, &group);
                let record = model.clone().into_record();
                // Elsewhere: another module of other values, which this rank's record replaces.
                let other = OddNet::new(&device());
                let other = ShardedModule::new(other, small_groups(strategy), &group).unwrap();
                let loaded = other.load_record(record);
                assert_bits("loaded", 0, &values(&loaded), &values(&model));
                let model = step(model, &mut oss(&group), 3);
                let loaded = step(loaded, &mut oss(&group), 3);
                assert_bits("stepped", 3, &values(&loaded), &values(&model));
                let (loaded, model) = (loaded.unsharded(), model.unsharded());
                assert_bits("full", 3, &values(&loaded), &values(&model));
            })
            .unwrap();
        }
    }
}

/// A normalization with running statistics, and parameters that are not floats.
#[derive(Module, Debug)]
struct Mixed {
    input: Linear,
    norm: BatchNorm,
    counts: Param<Tensor<1, Int>>,
    mask: Param<Tensor<1, Bool>>,
}

impl Mixed {
    /// Every value differs between ranks.
    fn new(rank: usize, device: &Device) -> Self {
        let rank = i32::try_from(rank).unwrap();
        Self {
            input: LinearConfig::new(6, 6).init(device),
            norm: BatchNormConfig::new(6).init(device),
            counts: Param::initialized(
                ParamId::new(),
                Tensor::from_ints([rank + 5, -rank, 1 << 20], device),
            ),
            mask: Param::initialized(
                ParamId::new(),
                Tensor::from_data([rank == 0, rank == 1], device),
            ),
        }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let [rows, width] = x.dims();
        let x = self
            .norm
            .forward::<3>(self.input.forward(x).reshape([rows, width, 1]));
        x.reshape([rows, width])
    }
}

#[test]
fn integers_and_flags_are_those_of_rank_0() {
    for strategy in ShardingStrategy::ALL {
        ProcessGroup::spawn(3, |group| {
            let module = Mixed::new(group.rank(), &device());
            let model = ShardedModule::new(module, small_groups(strategy), &group).unwrap();
            for module in [&*model, &model.unsharded()] {
                let counts: Vec<i64> = module.counts.val().into_data().iter().collect();
                assert_eq!(counts, [5, 0, 1 << 20]);
                let mask: Vec<bool> = module.mask.val().into_data().iter().collect();
                assert_eq!(mask, [true, false]);
            }
        })
        .unwrap();
    }
}

#[test]
fn statistics_that_drifted_apart_are_rank_0s_once_they_are_broadcast() {
    for strategy in ShardingStrategy::ALL {
        ProcessGroup::spawn(3, |group| {
            let (device, rank) = (device(), group.rank());
            let statistics = |module: &Mixed| {
                let norm = &module.norm;
                let both = [&norm.running_mean, &norm.running_var];
                let both = both.map(|statistic| common::bits(statistic.value_sync()));
                both.concat()
            };
            let all_ranks = |model: &ShardedModule<Mixed>| {
                let mut all = vec![0_u32; 3 * 12];
                group.all_gather(&statistics(model), &mut all).unwrap();
                [all[..12].to_vec(), all[12..24].to_vec(), all[24..].to_vec()]
            };
            let step = |model: ShardedModule<Mixed>, oss: &mut Oss| {
                let grads = mixed_loss(&model, rank, &device).backward();
                let grads = GradientsParams::from_grads(grads, &model);
                oss.step(0.1, model, grads)
            };
            let module = Mixed::new(rank, &device);
            let model = ShardedModule::new(module, small_groups(strategy), &group).unwrap();
            let mut oss = oss(&group);
            let model = step(model, &mut oss);
            let [first, second, third] = all_ranks(&model);
            assert!(first != second && second != third, "{strategy}");
            let parameters =
                |model: &ShardedModule<Mixed>| common::bits(model.unsharded().input.weight.val());
            let before = parameters(&model);

            let model = model.broadcast_buffers().unwrap();
            assert_eq!(
                all_ranks(&model),
                [first.clone(), first.clone(), first],
                "{strategy}"
            );
            assert_eq!(parameters(&model), before, "{strategy}");
            // Training goes on, and so does drifting.
            let model = step(model, &mut oss);
            let [first, second, _] = all_ranks(&model);
            assert_ne!(first, second, "{strategy}");
        })
        .unwrap();
    }
}

#[test]
fn running_statistics_are_those_of_rank_0_and_stay_usable() {
    for strategy in ShardingStrategy::ALL {
        ProcessGroup::spawn(2, |group| {
            let device = device();
            let rank = group.rank();
            let module = Mixed::new(rank, &device);
            // Statistics that differ between ranks before wrapping.
            let _output = module.forward(input(4, 6, rank, &device) + rank as f32);
            let own = module.norm.running_mean.value_sync();
            let model = ShardedModule::new(module, small_groups(strategy), &group).unwrap();
            let statistics = |module: &Mixed| common::bits(module.norm.running_mean.value_sync());
            let mut all = vec![0_u32; 12];
            group.all_gather(&statistics(&model), &mut all).unwrap();
            assert_eq!(all[..6], all[6..], "{strategy}");
            assert_eq!(statistics(&model) == common::bits(own), rank == 0);

            // They go on with this rank's own batches, as the plain module's do.
            let plain = model.unsharded().train();
            let mut model = model;
            let mut oss = oss(&group);
            let before = statistics(&model);
            for _ in 0..2 {
                let grads = mixed_loss(&model, rank, &device).backward();
                let grads = GradientsParams::from_grads(grads, &model);
                model = oss.step(0.0, model, grads);
                let _loss = mixed_loss(&plain, rank, &device);
            }
            assert_ne!(statistics(&model), before);
            assert_eq!(statistics(&model), statistics(&plain), "{strategy}");
            // Evaluation uses them and does not change them.
            let before = statistics(&model);
            let x = || input(4, 6, 5, &Device::flex());
            let valid = common::bits(model.valid().forward(x()));
            assert_eq!(valid, common::bits(plain.valid().forward(x())));
            assert_eq!(statistics(&model), before);
        })
        .unwrap();
    }
}

#[test]
fn a_record_brings_its_running_statistics_integers_and_flags() {
    for strategy in ShardingStrategy::ALL {
        ProcessGroup::spawn(2, |group| {
            let device = device();
            let rank = group.rank();
            let wrap = |module| ShardedModule::new(module, small_groups(strategy), &group).unwrap();
            // One record for all ranks.
            let source = wrap(Mixed::new(7, &device)).unsharded().train();
            let _output = source.forward(input(4, 6, 9, &device));
            let saved = source.valid();
            let model = wrap(Mixed::new(rank, &device)).load_record(saved.clone().into_record());
            let statistics = |module: &Mixed| {
                let [mean, var] = [&module.norm.running_mean, &module.norm.running_var];
                [
                    common::bits(mean.value_sync()),
                    common::bits(var.value_sync()),
                ]
            };
            for module in [&*model, &model.unsharded()] {
                assert_eq!(statistics(module), statistics(&saved), "{strategy}");
                let counts: Vec<i64> = module.counts.val().into_data().iter().collect();
                assert_eq!(counts, [12, -7, 1 << 20], "{strategy}");
                let mask: Vec<bool> = module.mask.val().into_data().iter().collect();
                assert_eq!(mask, [false, false], "{strategy}");
            }
        })
        .unwrap();
    }
}

/// Burn keeps the latest update of a running statistic aside until someone asks for it.
#[test]
fn an_update_still_pending_on_a_rank_does_not_replace_rank_0s_statistics() {
    for strategy in ShardingStrategy::ALL {
        ProcessGroup::spawn(2, |group| {
            let device = device();
            let module = Mixed::new(group.rank(), &device);
            let x = input(4, 6, group.rank(), &device) + group.rank() as f32;
            let _output = module.forward(x);
            let model = ShardedModule::new(module, strategy, &group).unwrap();
            let own = common::bits(model.norm.running_var.value_sync());
            let mut all = vec![0_u32; 12];
            group.all_gather(&own, &mut all).unwrap();
            assert_eq!(all[..6], all[6..], "{strategy}");
            let full = model.unsharded();
            assert_eq!(common::bits(full.norm.running_var.value_sync()), own);
        })
        .unwrap();
    }
}

fn mixed_loss(module: &Mixed, rank: usize, device: &Device) -> Tensor<1> {
    (module.forward(input(4, 6, rank, device)) - 1.0)
        .powi_scalar(2)
        .mean()
}
