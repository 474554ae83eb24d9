//! Mixed precision: parameters are used in half precision, and everything that lasts is `f32`.
//!
//! The oracle writes the same rounding plainly: round the parameters, compute in half precision, widen the
//! gradients, average them in `f32`, step `f32` parameters by Burn's stock optimizer. Equal bit for bit.

#![allow(clippy::unwrap_used, reason = "a test ends at the first error")]

mod common;
#[path = "common/mlp.rs"]
mod mlp;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
use burn::prelude::*;
use burn::tensor::{DType as BurnDType, FloatDType};
use burn_shard::{
    Collective, DType, ElementwiseConfig, Error, MemoryKind, MixedPrecision, Oss, Precision,
    ProcessGroup, ReduceOp, ShardConfig, ShardedModule, ShardingStrategy, model_state_bytes,
};
use common::{Batch, OddNet, assert_bits, device, gradients, values};
use mlp::{Mlp, input};

const STEPS: usize = 10;

/// The parameters in another type, as leaves.
struct Cast(FloatDType);

impl ModuleMapper for Cast {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|tensor| {
            let required = tensor.is_require_grad();
            Tensor::from_inner(tensor.inner().cast(self.0)).set_require_grad(required)
        })
    }
}

/// The averages of half-precision gradients, as gradients of the `f32` parameters.
struct Widen<'a> {
    group: &'a ProcessGroup,
    narrow: GradientsParams,
    wide: GradientsParams,
    /// Rounded once more before it travels, and once after.
    reduce: Option<FloatDType>,
}

impl ModuleVisitor for Widen<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let gradient = self.narrow.remove::<D>(param.id);
        let mut used = [u8::from(gradient.is_some())];
        self.group.all_reduce(&mut used, ReduceOp::Max).unwrap();
        if used[0] == 0 {
            return;
        }
        let shape = param.base().dims();
        let device = Device::flex();
        let gradient = gradient.unwrap_or_else(|| Tensor::zeros(shape, &device));
        let round = |tensor: Tensor<D>| match self.reduce {
            Some(dtype) => tensor.cast(dtype).cast(FloatDType::F32),
            None => tensor.cast(FloatDType::F32),
        };
        let mut sum: Vec<f32> = round(gradient).into_data().iter().collect();
        self.group.all_reduce(&mut sum, ReduceOp::Mean).unwrap();
        let mean = Tensor::<D>::from_data(TensorData::new(sum, shape), &device);
        self.wide.register(param.id, round(mean));
    }
}

fn small_groups(strategy: ShardingStrategy, precision: MixedPrecision) -> ShardConfig {
    ShardConfig::new(strategy)
        .with_group_cap_bytes(400)
        .with_mixed_precision(Some(precision))
}

fn compare(
    group: &ProcessGroup,
    strategy: ShardingStrategy,
    precision: MixedPrecision,
    optimizer: &impl ElementwiseConfig,
) {
    let device = device();
    let config = small_groups(strategy, precision);
    let mut model = ShardedModule::new(OddNet::new(&device), config, group).unwrap();
    let mut plain = model.unsharded().train();
    let optimizer_text = serde_json::to_string(optimizer).unwrap();
    let mut oss = Oss::new(
        serde_json::from_str::<AdamWConfig>(&optimizer_text).unwrap(),
        group,
    )
    .unwrap();
    let mut stock: ModuleOptimizer = optimizer.build().into();
    let dtype = |precision| {
        if precision == Precision::BF16 {
            FloatDType::BF16
        } else {
            FloatDType::F16
        }
    };
    let reduce = (precision.reduce != Precision::F32).then(|| dtype(precision.reduce));
    for step in 0..STEPS {
        let batch = Batch::new(group.rank(), step, strategy);
        let rounded = plain.clone().map(&mut Cast(dtype(precision.param)));
        let (loss, expected) = (model.loss(&batch, &device), rounded.loss(&batch, &device));
        assert_ne!(loss.dtype(), BurnDType::F32);
        let what = format!(
            "{strategy} {precision:?} rank {} of {}",
            group.rank(),
            group.world_size()
        );
        assert_eq!(
            common::bits(loss.clone()),
            common::bits(expected.clone()),
            "{what}: loss at step {step}"
        );
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        let mut widen = Widen {
            group,
            narrow: GradientsParams::from_grads(expected.backward(), &rounded),
            wide: GradientsParams::new(),
            reduce,
        };
        plain.visit(&mut widen);
        let wide = widen.wide;
        let own = common::own_gradients(&gradients(&plain, &wide), &model);
        assert_bits(
            &format!("{what}: gradients"),
            step,
            &gradients(&model, &grads),
            &own,
        );
        model = oss.step(0.01, model, grads);
        plain = stock.step(0.01, plain, wide);
        let full = model.unsharded();
        assert_bits(
            &format!("{what}: masters"),
            step,
            &values(&full),
            &values(&plain),
        );
        full.visit(&mut IsF32);
    }
}

struct IsF32;

impl ModuleVisitor for IsF32 {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        assert_eq!(param.base().dtype(), BurnDType::F32);
    }
}

#[test]
fn every_strategy_equals_plainly_rounded_data_parallel() {
    for world_size in [1, 2, 3] {
        for strategy in ShardingStrategy::ALL {
            for precision in [
                MixedPrecision::bf16(),
                MixedPrecision::new(Precision::BF16, Precision::BF16),
                MixedPrecision::new(Precision::F16, Precision::F32),
            ] {
                ProcessGroup::spawn(world_size, |group| {
                    compare(&group, strategy, precision, &AdamWConfig::new());
                })
                .unwrap();
            }
        }
    }
}

const WIDTH: usize = 64;
const DEPTH: usize = 4;

fn mlp(strategy: ShardingStrategy, group: &ProcessGroup) -> ShardedModule<Mlp> {
    let config = ShardConfig::new(strategy)
        .with_group_cap_bytes((WIDTH * WIDTH + WIDTH) * 4)
        .with_mixed_precision(Some(MixedPrecision::bf16()))
        .with_prefetch(0);
    ShardedModule::new(Mlp::new(DEPTH, WIDTH, &device()), config, group).unwrap()
}

fn loss(net: &Mlp, group: &ProcessGroup) -> Tensor<1> {
    let x = input(4, WIDTH, group.rank(), &device());
    net.forward(x.cast(FloatDType::BF16)).mean()
}

/// One gather per step of half the bytes, where `f32` parameters would be gathered after the step.
#[test]
fn parameters_travel_in_half_the_bytes() {
    for strategy in [
        ShardingStrategy::OptimizerState,
        ShardingStrategy::Gradients,
    ] {
        ProcessGroup::spawn(2, |group| {
            let mut model = mlp(strategy, &group);
            let mut oss = Oss::new(AdamWConfig::new(), &group).unwrap();
            for _ in 0..2 {
                model = mlp::step(model, &mut oss, |net: &Mlp| loss(net, &group));
            }
            let start = group.traffic();
            model = mlp::step(model, &mut oss, |net: &Mlp| loss(net, &group));
            let gathers = (group.traffic() - start).get(Collective::AllGather);
            let numel = model.num_params() as u64;
            assert_eq!(
                (gathers.calls, gathers.bytes),
                (DEPTH as u64, numel * 2 / 2)
            );
        })
        .unwrap();
    }
}

#[test]
fn a_rank_holds_f32_masters_and_state_by_the_formula_and_half_precision_while_it_computes() {
    for strategy in ShardingStrategy::ALL {
        ProcessGroup::spawn(2, |group| {
            let mut model = mlp(strategy, &group);
            let mut oss = Oss::new(AdamWConfig::new(), &group).unwrap();
            model = mlp::step(model, &mut oss, |net: &Mlp| loss(net, &group));
            let live = |model: &ShardedModule<Mlp>, kind| model.memory().of(kind).live_bytes;
            let numel = model.num_params();
            // Vectors stay whole under `Full`.
            let whole = if strategy == ShardingStrategy::Full {
                DEPTH * WIDTH
            } else {
                0
            };
            let part = |whole_bytes: usize| {
                if strategy == ShardingStrategy::Replicated {
                    whole_bytes
                } else {
                    whole_bytes / 2 + whole * 4 / 2
                }
            };
            assert_eq!(
                live(&model, MemoryKind::Parameters),
                part(numel * 4),
                "{strategy}"
            );
            let state = live(&model, MemoryKind::OptimizerState);
            assert_eq!(state, 2 * part(numel * 4), "{strategy}");
            assert_eq!(live(&model, MemoryKind::Unsharded), 0);
            let loss = loss(&model, &group);
            let unsharded = live(&model, MemoryKind::Unsharded);
            if strategy == ShardingStrategy::Full {
                assert!(unsharded < numel * 2);
            } else {
                assert_eq!(unsharded, numel * 2, "{strategy}");
            }
            drop(loss.backward());
            let formula = model_state_bytes(strategy, numel, 2, 4);
            assert!(state < formula);
        })
        .unwrap();
    }
}

#[derive(Module, Debug)]
struct WithBuffers {
    linear: Linear,
    norm: BatchNorm,
}

#[test]
fn running_statistics_beside_half_precision_are_refused_by_name() {
    for strategy in ShardingStrategy::ALL {
        ProcessGroup::spawn(2, |group| {
            let module = WithBuffers {
                linear: LinearConfig::new(4, 4).init(&device()),
                norm: BatchNormConfig::new(4).init(&device()),
            };
            let config = small_groups(strategy, MixedPrecision::bf16());
            let error = ShardedModule::new(module, config, &group).unwrap_err();
            let Error::BufferPrecision {
                path, dtype, param, ..
            } = &error
            else {
                panic!("{error:?}")
            };
            assert_eq!(
                (path.as_str(), *dtype, *param),
                ("norm.running_mean", DType::F32, DType::BF16)
            );
        })
        .unwrap();
    }
}
