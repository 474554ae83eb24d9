//! Weights and gradients looked at, or changed, between steps.

use std::collections::HashMap;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::prelude::*;
use burn_shard::{Oss, ShardedModule, ShardingStrategy};

use crate::common::{
    assert_bits, assert_near, bits, device, gathered_gradients, gradients, values,
};
use crate::pair::{Net, Pair, for_all, momentum, small_groups, spawn, x};

/// Weights are put back into an interval, as in a WGAN.
struct Clamp;

impl ModuleMapper for Clamp {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|tensor| {
            let tracked = tensor.is_require_grad();
            let clamped = tensor.without_autodiff().clamp(-0.05, 0.05);
            Tensor::from_inner(clamped).set_require_grad(tracked)
        })
    }
}

#[test]
fn clamping_weights_by_map_equals_the_plain_module() {
    for_all(|group, strategy| {
        let mut pair = Pair::new(Net::new(&device()), small_groups(strategy), group);
        for step in 0..3 {
            pair = pair.step(|net| net.loss(x(group, step)));
            let before = values(&pair.plain);
            pair = pair.map(|| Clamp);
            // At first there is something to clamp: the scale is one.
            assert!(step > 0 || before != values(&pair.plain));
        }
    });
}

/// The stored tensors of a module.
#[derive(Default)]
struct Stored(HashMap<ParamId, TensorData>);

impl ModuleVisitor for Stored {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0.insert(param.id, param.val().into_data());
    }
}

/// A moving average of the weights: what it is mapped over, and this.
struct Blend<'a>(&'a Stored);

impl ModuleMapper for Blend<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let new = self.0.0[&param.id].clone();
        param.map(|old| {
            let new = Tensor::from_data(new, &old.device());
            old.mul_scalar(0.75) + new.mul_scalar(0.25)
        })
    }
}

fn stored<M: Module>(module: &M) -> Stored {
    let mut stored = Stored::default();
    module.visit(&mut stored);
    stored
}

#[test]
fn a_moving_average_of_the_weights_equals_that_of_the_plain_module() {
    for_all(|group, strategy| {
        let mut pair = Pair::new(Net::new(&device()), small_groups(strategy), group);
        let (mut average, mut plain) = (pair.model.valid(), pair.plain.valid());
        for step in 0..3 {
            pair = pair.step(|net| net.loss(x(group, step)));
            average = average.map(&mut Blend(&stored(&pair.model)));
            plain = plain.map(&mut Blend(&stored(&pair.plain)));
            let full = average.unsharded();
            assert_bits(&pair.what(), step, &values(&full), &values(&plain));
            let (own, expected) = (
                average.loss(x(group, 9).without_autodiff()),
                plain.loss(x(group, 9).without_autodiff()),
            );
            assert_eq!(bits(own), bits(expected), "{}", pair.what());
        }
    });
}

/// Adds up the magnitudes of what it is shown.
struct Magnitudes(Option<Tensor<1>>);

impl ModuleVisitor for Magnitudes {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let magnitudes = param.val().abs().sum();
        self.0 = Some(match self.0.take() {
            None => magnitudes,
            Some(sum) => sum + magnitudes,
        });
    }
}

/// Burn shows visitors the stored tensor, past this library. Where that is whole, and its gradient, too, the
/// penalty is as without sharding; elsewhere parameters have to be read where the loss is made, as below.
#[test]
fn a_penalty_summed_by_a_visitor_equals_that_of_the_plain_module_where_nothing_is_a_shard() {
    for world_size in [1, 2, 3] {
        for strategy in [
            ShardingStrategy::Replicated,
            ShardingStrategy::OptimizerState,
        ] {
            spawn(world_size, |group| {
                let pair = Pair::new(Net::new(&device()), small_groups(strategy), group);
                let loss = pair.model.loss(x(group, 0)) + penalty(&pair.model);
                let grads = GradientsParams::from_grads(loss.clone().backward(), &pair.model);
                let plain = pair.plain.loss(x(group, 0)) + penalty(&pair.plain);
                let what = pair.what();
                assert_eq!(bits(loss), bits(plain.clone()), "{what}: loss");
                let expected = crate::common::plain_dp_gradients(&plain, &pair.plain, group);
                // Not bits: the penalty is the same on all ranks, and added after the average here.
                assert_near(
                    &what,
                    0,
                    &gathered_gradients(&pair.model, &grads),
                    &gradients(&pair.plain, &expected),
                );
            });
        }
    }
}

fn penalty<M: Module>(module: &M) -> Tensor<1> {
    let mut magnitudes = Magnitudes(None);
    module.visit(&mut magnitudes);
    magnitudes.0.unwrap() * 0.01
}

/// Here the penalty is summed over parameters that are read where the loss is made.
#[test]
fn a_penalty_of_parameters_that_are_read_equals_that_of_the_plain_module() {
    for_all(|group, strategy| {
        let mut pair = Pair::new(Net::new(&device()), small_groups(strategy), group);
        for step in 0..3 {
            pair = pair.step(|net| {
                let weights = [&net.first, &net.second, &net.third];
                let magnitudes = weights.map(|l| l.weight.val().abs().sum());
                let [first, second, third] = magnitudes;
                net.loss(x(group, step)) + (first + second + third) * 0.01
            });
        }
    });
}

#[test]
fn a_gradient_can_be_looked_up_by_the_id_of_its_parameter() {
    for_all(|group, strategy| {
        let net = Net::new(&device());
        let model = ShardedModule::new(net, small_groups(strategy), group).unwrap();
        let grads = GradientsParams::from_grads(model.loss(x(group, 0)).backward(), &model);
        assert_eq!(grads.len(), model.params().len());
        assert!(grads.get::<2>(model.first.weight.id).is_some());
        assert!(grads.get::<1>(model.scale.id).is_some());
    });
}

/// Changes every gradient, element by element.
struct Mask<'a>(&'a mut GradientsParams);

impl ModuleVisitor for Mask<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(gradient) = self.0.remove::<D>(param.id) {
            let masked = gradient.clone().mask_fill(gradient.lower_elem(0.0), 0.0);
            self.0.register(param.id, masked.mul_scalar(0.5));
        }
    }
}

#[test]
fn gradients_that_are_masked_before_the_step_equal_the_plain_ones() {
    for_all(|group, strategy| {
        let mut pair = Pair::new(Net::new(&device()), small_groups(strategy), group);
        for step in 0..3 {
            pair = pair.step_with(
                |net| net.loss(x(group, step)),
                |net, mut grads| {
                    net.visit(&mut Mask(&mut grads));
                    grads
                },
            );
        }
    });
}

#[test]
fn the_gradient_of_the_input_is_that_of_the_plain_module() {
    for_all(|group, strategy| {
        let pair = Pair::new(Net::new(&device()), small_groups(strategy), group);
        let of = |loss: &dyn Fn(Tensor<2>) -> Tensor<1>| {
            let x = x(group, 0).require_grad();
            let grads = loss(x.clone()).backward();
            bits(x.grad(&grads).unwrap())
        };
        let own = of(&|x| pair.model.loss(x));
        assert_eq!(own, of(&|x| pair.plain.loss(x)), "{}", pair.what());
    });
}

#[test]
fn gradients_left_out_on_all_ranks_leave_their_parameters_as_they_are() {
    for_all(|group, strategy| {
        let mut pair = Pair::new(Net::new(&device()), small_groups(strategy), group);
        for step in 0..3 {
            pair = pair.step_with(
                |net| net.loss(x(group, step)),
                |net, mut grads| {
                    grads.remove::<2>(net.second.weight.id).unwrap();
                    grads
                },
            );
        }
    });
}

/// Two modules are trained as an adversarial pair is: each with an optimizer of its own.
#[test]
fn two_wrapped_modules_are_read_stepped_and_differentiated_in_any_order() {
    for_all(|group, strategy| {
        let pair = |shift: usize| {
            let pair = Pair::new(Net::new(&device()), small_groups(strategy), group);
            pair.step(|net| net.loss(x(group, 5 + shift)))
        };
        let (mut a, mut b) = (pair(0), pair(1));
        for (step, turn) in [[0, 0, 0], [1, 0, 1], [0, 1, 1], [1, 1, 0]]
            .into_iter()
            .enumerate()
        {
            let [mut a_loss, mut b_loss] = [None, None];
            for which in [turn[0], 1 - turn[0]] {
                if which == 0 {
                    a_loss = Some(a.model.loss(x(group, step)));
                } else {
                    b_loss = Some(b.model.loss(x(group, step)));
                }
            }
            let [mut a_grads, mut b_grads] = [None, None];
            for which in [turn[1], 1 - turn[1]] {
                if which == 0 {
                    let grads = a_loss.take().unwrap().backward();
                    a_grads = Some(GradientsParams::from_grads(grads, &a.model));
                } else {
                    let grads = b_loss.take().unwrap().backward();
                    b_grads = Some(GradientsParams::from_grads(grads, &b.model));
                }
            }
            for which in [turn[2], 1 - turn[2]] {
                if which == 0 {
                    a.model = a.oss.step(0.1, a.model, a_grads.take().unwrap());
                } else {
                    b.model = b.oss.step(0.1, b.model, b_grads.take().unwrap());
                }
            }
            for pair in [&mut a, &mut b] {
                let loss = pair.plain.loss(x(group, step));
                let grads = crate::common::plain_dp_gradients(&loss, &pair.plain, group);
                pair.plain = pair.stock.step(0.1, pair.plain.clone(), grads);
                pair.compare();
            }
        }
    });
}

#[test]
fn two_wrapped_modules_in_one_loss_equal_the_plain_ones() {
    for_all(|group, strategy| {
        let pair = || Pair::new(Net::new(&device()), small_groups(strategy), group);
        let (mut a, mut b) = (pair(), pair());
        for step in 0..3 {
            let loss = a
                .model
                .loss(b.model.forward(a.model.forward(x(group, step))));
            let mut grads = loss.backward();
            let a_grads = GradientsParams::from_module(&mut grads, &*a.model);
            let b_grads = GradientsParams::from_module(&mut grads, &*b.model);
            b.model = b.oss.step(0.1, b.model, b_grads);
            a.model = a.oss.step(0.1, a.model, a_grads);

            let loss = a
                .plain
                .loss(b.plain.forward(a.plain.forward(x(group, step))));
            let mut grads = loss.backward();
            for pair in [&mut a, &mut b] {
                let mut own = GradientsParams::from_module(&mut grads, &pair.plain);
                pair.plain.visit(&mut crate::common::PlainDp {
                    group,
                    gradients: &mut own,
                });
                pair.plain = pair.stock.step(0.1, pair.plain.clone(), own);
                pair.compare();
            }
        }
    });
}

/// A device that the optimizer made before it was dropped would be found here.
#[test]
fn a_second_optimizer_in_the_middle_of_training_equals_a_second_plain_one() {
    for_all(|group, strategy| {
        let mut pair = Pair::new(Net::new(&device()), small_groups(strategy), group);
        for step in 0..4 {
            if step == 2 {
                pair.oss = Oss::new(momentum(), group).unwrap();
                pair.stock = momentum().init();
            }
            pair = pair.step(|net| net.loss(x(group, step)));
        }
    });
}
