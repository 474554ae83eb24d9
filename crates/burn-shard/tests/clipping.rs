//! Clipping by the global norm, and loss scaling: one norm on all ranks, and nothing of a bad one spreads.

#![allow(clippy::unwrap_used, reason = "a test ends at the first error")]

mod common;

use burn::module::Module;
use burn::optim::{AdamConfig, GradientsParams};
use burn::prelude::*;
use burn_shard::{
    Error, GradScaler, GradScalerConfig, GradientNorm, GradientNormClipping, NonFinite, Oss,
    ProcessGroup, ShardConfig, ShardedModule, ShardingStrategy,
};
use common::{Batch, Bits, OddNet, assert_bits, device, gradients, plain_dp_gradients, values};

fn small_groups(strategy: ShardingStrategy) -> ShardConfig {
    ShardConfig::new(strategy).with_group_cap_bytes(400)
}

fn for_all(check: impl Fn(&ProcessGroup, ShardingStrategy) + Sync) {
    for world_size in [1, 2, 3] {
        for strategy in ShardingStrategy::ALL {
            ProcessGroup::spawn(world_size, |group| check(&group, strategy)).unwrap();
        }
    }
}

/// The norm as the library promises it: sums in `f64` of what each rank owns, in rank order.
fn norm_of(full: &Bits, norm: GradientNorm, world_size: usize) -> f64 {
    let of_rank = |rank: usize| -> Vec<f64> {
        full.iter()
            .map(|(_, bits)| {
                let shard = bits.len().div_ceil(world_size);
                let start = (rank * shard).min(bits.len());
                let end = ((rank + 1) * shard).min(bits.len());
                let own = bits[start..end].iter();
                let own = own.map(|&bits| f64::from(f32::from_bits(bits)));
                match norm {
                    GradientNorm::L2 => own.map(|x| x * x).sum::<f64>(),
                    GradientNorm::Max => own.map(f64::abs).fold(0.0, f64::max),
                    GradientNorm::P(p) => own.map(|x| x.abs().powf(p)).sum(),
                }
            })
            .collect()
    };
    let add = |a: f64, b: f64| {
        if norm == GradientNorm::Max {
            a.max(b)
        } else {
            a + b
        }
    };
    let ranks = (0..world_size).map(|rank| of_rank(rank).into_iter().fold(0.0, add));
    let total = ranks.reduce(add).unwrap();
    match norm {
        GradientNorm::L2 => total.sqrt(),
        GradientNorm::Max => total,
        GradientNorm::P(p) => total.powf(1.0 / p),
    }
}

/// The gradients of a plain module times a factor.
fn scaled<M: Module>(plain: &M, gradients: GradientsParams, factor: f64) -> GradientsParams {
    struct Scale {
        from: GradientsParams,
        to: GradientsParams,
        factor: f64,
    }
    impl burn::module::ModuleVisitor for Scale {
        fn visit_float<const D: usize>(&mut self, param: &burn::module::Param<Tensor<D>>) {
            if let Some(gradient) = self.from.remove::<D>(param.id) {
                self.to.register(param.id, gradient.mul_scalar(self.factor));
            }
        }
    }
    let to = GradientsParams::new();
    let mut scale = Scale {
        from: gradients,
        to,
        factor,
    };
    plain.visit(&mut scale);
    scale.to
}

#[test]
fn clipping_by_the_global_norm_equals_plain_data_parallel_bit_for_bit() {
    for norm in [GradientNorm::L2, GradientNorm::Max, GradientNorm::P(3.0)] {
        for_all(|group, strategy| {
            let device = device();
            let mut model =
                ShardedModule::new(OddNet::new(&device), small_groups(strategy), group).unwrap();
            let mut plain = model.unsharded().train();
            // Some steps are clipped, others not.
            let clipping = GradientNormClipping::new(0.5).with_norm(norm);
            let oss = Oss::new(AdamConfig::new(), group).unwrap();
            let mut oss = oss.with_norm_clipping(clipping);
            let mut stock = AdamConfig::new().init();
            let mut clipped = 0;
            for step in 0..8 {
                let batch = Batch::new(group.rank(), step, strategy);
                let grads = model.loss(&batch, &device).backward();
                let grads = GradientsParams::from_grads(grads, &model);
                let loss = plain.loss(&batch, &device);
                let expected = plain_dp_gradients(&loss, &plain, group);
                let full = gradients(&plain, &expected);
                model = oss.step(0.05, model, grads);
                // The library adds squares in another order, in `f64` too.
                let total = oss.gradient_norm().unwrap();
                let reference = norm_of(&full, norm, group.world_size());
                assert!(
                    (total - reference).abs() <= 1e-12 * reference,
                    "{total}, not {reference}"
                );
                let bits = total.to_bits().to_le_bytes();
                let everywhere = group.all_gather_bytes(&bits).unwrap();
                assert!(
                    everywhere.iter().all(|other| other == &bits),
                    "{strategy} {norm:?}"
                );
                #[allow(clippy::cast_possible_truncation, reason = "steps are made in f32")]
                let factor = f64::from((0.5 / (total + 1e-6)).min(1.0) as f32);
                clipped += usize::from(factor < 1.0);
                let expected = if factor < 1.0 {
                    scaled(&plain, expected, factor)
                } else {
                    expected
                };
                plain = stock.step(0.05, plain, expected);
                assert_bits(
                    &format!("{strategy}"),
                    step,
                    &values(&model.unsharded()),
                    &values(&plain),
                );
            }
            assert!(clipped > 0, "{norm:?}: nothing was clipped");
        });
    }
}

/// An infinite loss on rank 0 alone.
fn spoiled(model: &OddNet, group: &ProcessGroup, strategy: ShardingStrategy) -> Tensor<1> {
    let loss = model.loss(&Batch::new(group.rank(), 0, strategy), &device());
    if group.rank() == 0 {
        loss * f32::INFINITY
    } else {
        loss
    }
}

#[test]
fn a_norm_that_is_not_finite_is_refused_or_skipped_on_all_ranks_and_changes_nothing() {
    for_all(|group, strategy| {
        for non_finite in [NonFinite::Refuse, NonFinite::Skip] {
            let device = device();
            let model =
                ShardedModule::new(OddNet::new(&device), small_groups(strategy), group).unwrap();
            let before = values(&model.unsharded());
            let clipping = GradientNormClipping::new(1.0).with_non_finite(non_finite);
            let oss = Oss::new(AdamConfig::new(), group).unwrap();
            let mut oss = oss.with_norm_clipping(clipping);
            let grads = spoiled(&model, group, strategy).backward();
            let grads = GradientsParams::from_grads(grads, &model);
            let stepped = oss.try_step(0.05, model, grads);
            let mut model = match (stepped, non_finite) {
                (Err(failed), NonFinite::Refuse) => {
                    let refused = matches!(failed.error, Error::NonFiniteGradients { .. });
                    assert!(refused, "{:?}", failed.error);
                    *failed.module
                }
                (Ok(model), NonFinite::Skip) => model,
                (stepped, _) => panic!("{non_finite:?}: {stepped:?}"),
            };
            assert_eq!(
                oss.skipped_steps(),
                u64::from(non_finite == NonFinite::Skip)
            );
            assert_bits("not stepped", 0, &values(&model.unsharded()), &before);
            // And training goes on.
            let grads = model
                .loss(&Batch::new(group.rank(), 1, strategy), &device)
                .backward();
            let grads = GradientsParams::from_grads(grads, &model);
            model = oss.step(0.05, model, grads);
            assert!(oss.gradient_norm().unwrap().is_finite());
            assert_ne!(values(&model.unsharded()), before);
        }
    });
}

/// A power of two scales without rounding, so that bits are those of unscaled training.
#[test]
fn a_scaled_loss_trains_as_an_unscaled_one_and_an_overflow_on_one_rank_skips_the_step_on_all() {
    for_all(|group, strategy| {
        let device = device();
        let mut model =
            ShardedModule::new(OddNet::new(&device), small_groups(strategy), group).unwrap();
        let mut plain = model.unsharded().train();
        let mut oss = Oss::new(AdamConfig::new(), group).unwrap();
        let mut stock = AdamConfig::new().init();
        let config = GradScalerConfig::new()
            .with_init_scale(1024.0)
            .with_growth_interval(2);
        let mut scaler = GradScaler::new(config);
        let mut scales = Vec::new();
        for step in 0..6 {
            if step == 3 {
                let loss = scaler.scale(spoiled(&model, group, strategy));
                let grads = GradientsParams::from_grads(loss.backward(), &model);
                model = scaler.step(&mut oss, 0.05, model, grads).unwrap();
                assert_bits(
                    "skipped",
                    step,
                    &values(&model.unsharded()),
                    &values(&plain),
                );
                // It goes on from what was saved.
                let text = serde_json::to_string(&scaler).unwrap();
                assert_eq!(serde_json::from_str::<GradScaler>(&text).unwrap(), scaler);
            }
            let batch = Batch::new(group.rank(), step, strategy);
            let grads = scaler.scale(model.loss(&batch, &device)).backward();
            let grads = GradientsParams::from_grads(grads, &model);
            model = scaler.step(&mut oss, 0.05, model, grads).unwrap();
            let expected = plain_dp_gradients(&plain.loss(&batch, &device), &plain, group);
            plain = stock.step(0.05, plain, expected);
            assert_bits(
                &format!("{strategy}"),
                step,
                &values(&model.unsharded()),
                &values(&plain),
            );
            scales.push(scaler.loss_scale());
        }
        assert_eq!(scales, [1024.0, 2048.0, 2048.0, 1024.0, 2048.0, 2048.0]);
        assert_eq!(scaler.skipped_steps(), 1);
    });
}
