//! How often, when and whether a parameter is read: everything equals the plain model, bit for bit.

#![allow(clippy::unwrap_used, reason = "a test ends at the first error")]

mod common;
#[path = "common/mlp.rs"]
mod mlp;

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::module::{Module, Param};
use burn::nn::{
    BatchNorm, BatchNormConfig, Dropout, DropoutConfig, GroupNorm, GroupNormConfig, Linear,
    LinearConfig, PRelu, PReluConfig, RmsNorm, RmsNormConfig,
};
use burn::optim::decay::WeightDecayConfig;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer, SgdConfig};
use burn::prelude::*;
use burn::tensor::activation::gelu;
use burn::tensor::{DType, FloatDType};
use burn_shard::{MemoryKind, Oss, ProcessGroup, ShardConfig, ShardedModule, ShardingStrategy};
use common::{Batch, OddNet, assert_bits, gradients, own_gradients, plain_dp_gradients, values};
use mlp::{Mlp, input};

const WIDTH: usize = 6;

fn momentum() -> SgdConfig {
    SgdConfig::new()
        .with_momentum(Some(MomentumConfig::new().with_momentum(0.9)))
        .with_weight_decay(Some(WeightDecayConfig { penalty: 0.1 }))
}

fn device() -> Device {
    Device::flex().autodiff()
}

fn small_groups(strategy: ShardingStrategy) -> ShardConfig {
    ShardConfig::new(strategy).with_group_cap_bytes(200)
}

fn for_all(check: impl Fn(&ProcessGroup, ShardingStrategy) + Sync) {
    for world_size in [1, 2, 3] {
        for strategy in ShardingStrategy::ALL {
            ProcessGroup::spawn(world_size, |group| check(&group, strategy)).unwrap();
        }
    }
}

/// A wrapped module and the plain one, trained side by side.
struct Pair<M> {
    model: ShardedModule<M>,
    plain: M,
    oss: Oss,
    stock: ModuleOptimizer,
    steps: usize,
}

impl<M: Module> Pair<M> {
    fn new(module: M, strategy: ShardingStrategy, group: &ProcessGroup) -> Self {
        let plain = module.clone();
        let model = ShardedModule::new(module, small_groups(strategy), group).unwrap();
        Self {
            // Rank 0's values, in a module with all autodiff settings.
            plain: plain.load_record(model.unsharded().into_record()),
            model,
            oss: Oss::new(momentum(), group).unwrap(),
            stock: momentum().init(),
            steps: 0,
        }
    }

    /// Steps both on the same loss; compares losses, gradients and parameters.
    fn step(self, loss: impl Fn(&M) -> Tensor<1>) -> Self {
        let Self {
            mut model,
            mut plain,
            mut oss,
            mut stock,
            steps,
        } = self;
        let what = format!("{} rank {}", model.strategy(), model.group().rank());
        let (own, expected) = (loss(&model), loss(&plain));
        assert_eq!(
            common::bits(own.clone()),
            common::bits(expected.clone()),
            "{what}: loss at step {steps}"
        );
        let grads = GradientsParams::from_grads(own.backward(), &model);
        let plain_grads = plain_dp_gradients(&expected, &plain, model.group());
        let expected = own_gradients(&gradients(&plain, &plain_grads), &model);
        assert_bits(&what, steps, &gradients(&model, &grads), &expected);
        model = oss.step(0.1, model, grads);
        plain = stock.step(0.1, plain, plain_grads);
        assert_bits(&what, steps, &values(&model.unsharded()), &values(&plain));
        Self {
            model,
            plain,
            oss,
            stock,
            steps: steps + 1,
        }
    }
}

/// Rank- and step-dependent input.
fn x(group: &ProcessGroup, step: usize) -> Tensor<2> {
    input(3, WIDTH, group.rank() + 5 * step, &device())
}

#[derive(Module, Debug)]
struct Net {
    first: Linear,
    second: Linear,
    third: Linear,
    scale: Param<Tensor<1>>,
}

impl Net {
    fn new(device: &Device) -> Self {
        let linear = || LinearConfig::new(WIDTH, WIDTH).init(device);
        Self {
            first: linear(),
            second: linear(),
            third: linear(),
            scale: Param::from_tensor(Tensor::ones([WIDTH], device)),
        }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let x = gelu(self.second.forward(gelu(self.first.forward(x))));
        self.third.forward(x) * self.scale.val().unsqueeze()
    }

    fn loss(&self, x: Tensor<2>) -> Tensor<1> {
        (self.forward(x) - 1.0).powi_scalar(2).mean()
    }
}

fn bits_of(bits: &common::Bits, path: &str) -> Vec<u32> {
    let found = bits.iter().find(|(p, _)| p == path);
    found.unwrap_or_else(|| panic!("{path}")).1.clone()
}

#[test]
fn a_parameter_read_twice_gets_the_sum_of_both_gradients() {
    for_all(|group, strategy| {
        let mut pair = Pair::new(Net::new(&device()), strategy, group);
        for step in 0..4 {
            pair = pair.step(|net| {
                let y = net.loss(x(group, step));
                // Tied: transposed, and once more on its own.
                let tied = gelu(x(group, step)).matmul(net.first.weight.val().swap_dims(0, 1));
                y + tied.mean() + net.first.weight.val().powi_scalar(2).mean()
            });
        }
    });
}

#[test]
fn a_module_called_twice_equals_the_plain_one() {
    for_all(|group, strategy| {
        let mut pair = Pair::new(Net::new(&device()), strategy, group);
        for step in 0..4 {
            pair = pair.step(|net| net.loss(gelu(net.forward(x(group, step)))));
        }
    });
}

#[test]
fn a_frozen_parameter_has_no_gradient_and_keeps_its_bits() {
    for_all(|group, strategy| {
        let mut net = Net::new(&device());
        net.second = net.second.freeze();
        let _initialized = net.third.weight.val();
        net.third = net.third.freeze();
        let mut pair = Pair::new(net, strategy, group);
        let before = values(&pair.plain);
        for step in 0..4 {
            let loss = pair.model.loss(x(group, step));
            let grads = GradientsParams::from_grads(loss.backward(), &pair.model);
            assert!(grads.get::<2>(pair.model.second.weight.id).is_none());
            assert!(grads.get::<2>(pair.model.third.weight.id).is_none());
            pair = pair.step(|net| net.loss(x(group, step)));
        }
        let after = values(&pair.model.unsharded());
        for path in ["second.weight", "second.bias", "third.weight"] {
            assert_eq!(bits_of(&before, path), bits_of(&after, path));
        }
        assert_ne!(
            bits_of(&before, "first.weight"),
            bits_of(&after, "first.weight")
        );
    });
}

#[test]
fn a_parameter_no_rank_uses_is_untouched_by_weight_decay_and_momentum() {
    for_all(|group, strategy| {
        let mut pair = Pair::new(Net::new(&device()), strategy, group);
        // Used at first, so that there is a velocity that would move it.
        pair = pair.step(|net| net.loss(x(group, 0)));
        let before = values(&pair.plain);
        for step in 1..4 {
            pair = pair.step(|net| net.third.forward(x(group, step)).mean());
        }
        let after = values(&pair.model.unsharded());
        for path in ["first.weight", "second.bias", "scale"] {
            assert_eq!(bits_of(&before, path), bits_of(&after, path), "{path}");
        }
        assert_ne!(
            bits_of(&before, "third.weight"),
            bits_of(&after, "third.weight")
        );
        pair.step(|net| net.loss(x(group, 5)));
    });
}

#[test]
fn a_parameter_some_ranks_do_not_use_averages_with_their_zeros() {
    for_all(|group, strategy| {
        let mut pair = Pair::new(Net::new(&device()), strategy, group);
        for step in 0..5 {
            pair = pair.step(|net| {
                let x = x(group, step);
                let other = net.second.forward(x.clone()).mean();
                if group.rank() == step % 2 {
                    net.first.forward(x).mean() + other
                } else if strategy == ShardingStrategy::Full {
                    // All ranks have to read it, not to use it.
                    let _unused = net.first.forward(x);
                    other
                } else {
                    other
                }
            });
        }
    });
}

#[test]
fn evaluation_between_steps_changes_no_bit_of_training() {
    for_all(|group, strategy| {
        let mut pair = Pair::new(Net::new(&device()), strategy, group);
        for step in 0..5 {
            // On the training module, and its graph is dropped; on a part of it; by `valid`.
            let _loss = pair.model.loss(x(group, 9));
            let _part = pair.model.second.forward(x(group, 9));
            let evaluated = pair.model.valid().loss(x(group, 9).without_autodiff());
            let expected = pair.plain.valid().loss(x(group, 9).without_autodiff());
            assert_eq!(common::bits(evaluated), common::bits(expected));
            pair = pair.step(|net| net.loss(x(group, step)));
        }
    });
}

#[test]
fn the_valid_module_has_the_bits_of_the_plain_one_after_every_step() {
    for_all(|group, strategy| {
        let device = device();
        let mut model =
            ShardedModule::new(OddNet::new(&device), small_groups(strategy), group).unwrap();
        let mut oss = Oss::new(momentum(), group).unwrap();
        for step in 0..3 {
            let batch = Batch::new(group.rank(), step, strategy);
            model = mlp::step(model, &mut oss, |net: &OddNet| net.loss(&batch, &device));
            let plain = Device::flex();
            let batch = Batch::new(0, step, strategy);
            assert_eq!(
                common::bits(model.valid().loss(&batch, &plain)),
                common::bits(model.unsharded().loss(&batch, &plain))
            );
        }
    });
}

#[test]
fn two_forwards_and_one_backward_of_the_sum_equal_the_plain_module() {
    for_all(|group, strategy| {
        let mut pair = Pair::new(Net::new(&device()), strategy, group);
        for step in 0..4 {
            pair = pair.step(|net| {
                let first = net.loss(x(group, step));
                let second = net.loss(x(group, step + 20));
                first + second
            });
        }
    });
}

/// One pass has one last step, which knows that no gradient will come any more.
#[test]
fn two_forwards_and_two_backwards_are_refused() {
    for_all(|group, strategy| {
        let module = Net::new(&device());
        let model = ShardedModule::new(module, small_groups(strategy), group).unwrap();
        let first = model.loss(x(group, 0));
        let second = model.loss(x(group, 1));
        let _grads = first.backward();
        let again = catch_unwind(AssertUnwindSafe(|| second.backward()));
        let message = again.err().expect("the second backward should be refused");
        let message = message
            .downcast_ref::<String>()
            .cloned()
            .or_else(|| {
                message
                    .downcast_ref::<&str>()
                    .map(|text| (*text).to_owned())
            })
            .unwrap();
        assert!(message.contains("consumed"), "{message}");
    });
}

#[test]
fn clones_and_valid_modules_made_before_a_step_keep_their_values_after_it() {
    for_all(|group, strategy| {
        let device = device();
        let mut model =
            ShardedModule::new(OddNet::new(&device), small_groups(strategy), group).unwrap();
        // In place, if nobody else has the buffer.
        let mut oss = Oss::new(AdamWConfig::new(), group).unwrap();
        for step in 0..4 {
            let batch = Batch::new(group.rank(), step, strategy);
            let (clone, valid) = (model.clone(), model.valid());
            let before = values(&model.unsharded());
            let loss_before = common::bits(valid.loss(&batch, &Device::flex()));
            // Both are read while the step's groups are gathered, and after it.
            let loss = model.loss(&batch, &device);
            assert_bits("clone", step, &values(&clone.unsharded()), &before);
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            model = oss.step(0.01, model, grads);
            assert_bits("clone", step, &values(&clone.unsharded()), &before);
            assert_bits("valid", step, &values(&valid.unsharded()), &before);
            assert_eq!(
                common::bits(valid.loss(&batch, &Device::flex())),
                loss_before
            );
            assert_ne!(values(&model.unsharded()), before);
            // The old value can be trained from, too: another branch with the same bits.
            let loss = clone.loss(&batch, &device);
            let grads = GradientsParams::from_grads(loss.backward(), &clone);
            let mut other = Oss::new(SgdConfig::new(), group).unwrap();
            let branch = other.step(0.01, clone, grads);
            assert_ne!(values(&branch.unsharded()), before);
        }
    });
}

/// What is gathered belongs to one value of the module: another must not be served from it.
#[test]
fn values_before_and_after_a_step_can_be_read_in_turn() {
    for_all(|group, strategy| {
        let module = Net::new(&device());
        let before = ShardedModule::new(module, strategy, group).unwrap();
        let mut oss = Oss::new(momentum(), group).unwrap();
        let loss = |net: &Net| net.loss(x(group, 0));
        let after = mlp::step(before.clone(), &mut oss, loss);
        let plain = [before.unsharded(), after.unsharded()];
        let x = || input(3, WIDTH, 1, &Device::flex());
        let [first, second] = plain.map(|net| common::bits(net.loss(x())));
        assert_ne!(first, second);
        let (before, after) = (before.valid(), after.valid());
        for _ in 0..2 {
            assert_eq!(common::bits(before.loss(x())), first);
            assert_eq!(common::bits(after.loss(x())), second);
        }
    });
}

#[test]
fn an_unshared_module_is_stepped_in_place() {
    for_all(|group, strategy| {
        let device = device();
        let model = ShardedModule::new(Mlp::new(4, 16, &device), strategy, group).unwrap();
        let mut oss = Oss::new(AdamWConfig::new(), group).unwrap();
        let loss = |net: &Mlp| net.forward(input(2, 16, 0, &device)).mean();
        let model = mlp::step(model, &mut oss, loss);
        model.reset_memory_peak();
        let model = mlp::step(model, &mut oss, loss);
        let parameters = model.memory().of(MemoryKind::Parameters);
        assert_eq!(parameters.peak_bytes, parameters.live_bytes);
    });
}

#[test]
fn under_gradient_checkpointing_every_step_equals_the_plain_module() {
    for_all(|group, strategy| {
        let device = Device::flex().autodiff().gradient_checkpointing();
        let x = |step: usize| input(3, WIDTH, group.rank() + 5 * step, &device);
        let mut pair = Pair::new(Net::new(&device), strategy, group);
        for step in 0..4 {
            pair = pair.step(|net| net.loss(gelu(net.forward(x(step)))));
        }
        let mut pair = Pair::new(OddNet::new(&device), strategy, group);
        for step in 0..6 {
            let batch = Batch::new(group.rank(), step, strategy);
            pair = pair.step(|net| net.loss(&batch, &device));
        }
    });
}

/// Parameters of three element types.
#[derive(Module, Debug)]
struct Mixed {
    single: Linear,
    double: Param<Tensor<2>>,
    half: Param<Tensor<2>>,
    bias: Param<Tensor<1>>,
}

impl Mixed {
    fn new(device: &Device) -> Self {
        let of = |dtype: FloatDType, shift: usize| {
            let x = input(WIDTH, WIDTH, shift, &Device::flex()).cast(dtype);
            Param::from_tensor(Tensor::from_data(
                x.into_data(),
                (device, DType::from(dtype)),
            ))
        };
        Self {
            single: LinearConfig::new(WIDTH, WIDTH).init(device),
            double: of(FloatDType::F64, 1),
            half: of(FloatDType::BF16, 2),
            bias: Param::from_tensor(Tensor::zeros([WIDTH], device)),
        }
    }

    fn loss(&self, x: Tensor<2>) -> Tensor<1> {
        let x = gelu(self.single.forward(x)) + self.bias.val().unsqueeze();
        let x = gelu(x.cast(DType::F64).matmul(self.double.val()));
        let x = x.cast(DType::BF16).matmul(self.half.val());
        (x.cast(DType::F32) - 1.0).powi_scalar(2).mean()
    }
}

/// Averages as the communicator defines it, in each parameter's own type: `bf16` is summed in `f32`
/// and rounded once.
fn all_reduced(mixed: &Mixed, mut grads: GradientsParams, group: &ProcessGroup) -> GradientsParams {
    use burn_shard::ReduceOp::Mean;
    let flex = Device::flex();
    let mut average = |id, dtype: DType| {
        let gradient = grads.remove::<2>(id).unwrap();
        let data = gradient.into_data();
        assert_eq!(data.dtype(), dtype);
        let shape = data.shape().clone();
        let data = if dtype == DType::F64 {
            let mut values: Vec<f64> = data.iter().collect();
            group.all_reduce(&mut values, Mean).unwrap();
            TensorData::new(values, shape)
        } else {
            let mut values: Vec<f32> = data.iter().collect();
            group.all_reduce(&mut values, Mean).unwrap();
            TensorData::new(values, shape)
        };
        let tensor = Tensor::<2>::from_data(data.convert_dtype(dtype), (&flex, dtype));
        grads.register(id, tensor);
    };
    average(mixed.double.id, DType::F64);
    average(mixed.half.id, DType::BF16);
    average(mixed.single.weight.id, DType::F32);
    for id in [mixed.single.bias.as_ref().unwrap().id, mixed.bias.id] {
        let gradient = grads.remove::<1>(id).unwrap();
        let mut values: Vec<f32> = gradient.into_data().iter().collect();
        group.all_reduce(&mut values, Mean).unwrap();
        grads.register(id, Tensor::<1>::from_floats(values.as_slice(), &flex));
    }
    grads
}

fn all_bits(mixed: &Mixed) -> Vec<Vec<u8>> {
    [
        mixed.single.weight.val().into_data(),
        mixed.double.val().into_data(),
        mixed.half.val().into_data(),
    ]
    .into_iter()
    .map(|data| data.bytes().to_vec())
    .collect()
}

#[test]
fn parameters_of_several_element_types_train_in_groups_of_one_type_each() {
    for_all(|group, strategy| {
        let device = device();
        let mut model = ShardedModule::new(Mixed::new(&device), strategy, group).unwrap();
        let types: Vec<usize> = model.groups().iter().map(Vec::len).collect();
        assert_eq!(types, [3, 1, 1]);
        let mut plain = model.unsharded().train();
        let mut oss = Oss::new(momentum(), group).unwrap();
        let mut stock = momentum().init();
        for step in 0..4 {
            let loss = model.loss(x(group, step));
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            model = oss.step(0.1, model, grads);
            let loss = plain.loss(x(group, step));
            let grads = GradientsParams::from_grads(loss.backward(), &plain);
            let grads = all_reduced(&plain, grads, group);
            plain = stock.step(0.1, plain, grads);
            assert_eq!(
                all_bits(&model.unsharded()),
                all_bits(&plain),
                "{strategy} {step}"
            );
        }
        assert_eq!(model.unsharded().half.val().dtype(), DType::BF16);
        assert_eq!(oss.is_fused("double"), Some(false));
        assert_eq!(oss.is_fused("single.weight"), Some(true));
    });
}

#[derive(Module, Debug)]
struct Dropped {
    layers: Mlp,
    dropout: Dropout,
}

#[test]
fn with_dropout_the_loss_stays_finite_and_falls() {
    for_all(|group, strategy| {
        let device = device();
        let module = Dropped {
            layers: Mlp::new(2, WIDTH, &device),
            dropout: DropoutConfig::new(0.3).init(),
        };
        let mut model = ShardedModule::new(module, small_groups(strategy), group).unwrap();
        let mut oss = Oss::new(AdamWConfig::new(), group).unwrap();
        let mut losses = Vec::new();
        for _ in 0..60 {
            let x = model
                .dropout
                .forward(input(8, WIDTH, group.rank(), &device));
            let loss = (model.layers.forward(x) - 1.0).powi_scalar(2).mean();
            losses.push(loss.clone().into_scalar::<f32>());
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            model = oss.step(0.01, model, grads);
        }
        let mean = |part: &[f32]| part.iter().sum::<f32>() / part.len() as f32;
        assert!(losses.iter().all(|loss| loss.is_finite()));
        assert!(
            mean(&losses[50..]) < 0.5 * mean(&losses[..10]),
            "{losses:?}"
        );
        // Off under `valid`.
        let evaluate = || {
            model
                .valid()
                .dropout
                .forward(input(2, WIDTH, 0, &Device::flex()))
        };
        assert_eq!(common::bits(evaluate()), common::bits(evaluate()));
    });
}

/// Layers of Burn that look at the shape of a stored parameter before, or instead of, reading it.
#[derive(Module, Debug)]
struct Norms {
    input: Linear,
    rms: RmsNorm,
    batch: BatchNorm,
    group: GroupNorm,
    relu: PRelu,
}

#[test]
fn norms_that_look_at_the_stored_shape_equal_the_plain_module() {
    for_all(|group, strategy| {
        let device = device();
        let norms = Norms {
            input: LinearConfig::new(WIDTH, WIDTH).init(&device),
            rms: RmsNormConfig::new(WIDTH).init(&device),
            batch: BatchNormConfig::new(WIDTH).init(&device),
            group: GroupNormConfig::new(3, WIDTH).init(&device),
            relu: PReluConfig::new().with_num_parameters(WIDTH).init(&device),
        };
        let mut pair = Pair::new(norms, strategy, group);
        for step in 0..4 {
            pair = pair.step(|net| {
                let x = net.rms.forward(net.input.forward(x(group, step)));
                let x = net.batch.forward::<3>(x.reshape([3, WIDTH, 1]));
                let x = net.relu.forward(net.group.forward::<3>(x));
                (x - 1.0).powi_scalar(2).mean()
            });
        }
    });
}
