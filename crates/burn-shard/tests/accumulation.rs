//! Gradient accumulation: `no_sync` sends nothing, and the sum is what plain Burn would have added up.

#![allow(clippy::unwrap_used, reason = "a test ends at the first error")]

mod common;
#[path = "common/mlp.rs"]
mod mlp;

use burn::module::Module;
use burn::optim::{AdamConfig, GradientsAccumulator, GradientsParams};
use burn::prelude::*;
use burn_shard::{
    Collective, Error, Oss, ProcessGroup, ShardConfig, ShardedModule, ShardingStrategy,
};
use common::{Batch, OddNet, PlainDp, assert_bits, device, gradients, own_gradients, values};
use mlp::{Mlp, input};

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

/// The sum of the micro-batches' gradients, averaged over the ranks once.
fn accumulated<M: Module>(
    plain: &M,
    losses: Vec<Tensor<1>>,
    group: &ProcessGroup,
) -> GradientsParams {
    let mut sum = GradientsAccumulator::new();
    for loss in losses {
        sum.accumulate(plain, GradientsParams::from_grads(loss.backward(), plain));
    }
    let mut sum = sum.grads();
    plain.visit(&mut PlainDp {
        group,
        gradients: &mut sum,
    });
    sum
}

/// Different layers in different micro-batches and on different ranks; the last accumulation is shorter.
#[test]
fn micro_batches_under_no_sync_equal_plain_accumulation_bit_for_bit() {
    for_all(|group, strategy| {
        let device = device();
        let mut model =
            ShardedModule::new(OddNet::new(&device), small_groups(strategy), group).unwrap();
        let mut plain = model.unsharded().train();
        let mut oss = Oss::new(AdamConfig::new(), group).unwrap();
        let mut stock = AdamConfig::new().init();
        for (step, (micro_batches, scale)) in [(3, 3.0), (3, 3.0), (1, 1.0), (4, 4.0), (2, 2.0)]
            .into_iter()
            .enumerate()
        {
            let batch = |micro: usize| Batch::new(group.rank(), step + 7 * micro, strategy);
            let loss = |net: &OddNet, micro: usize| net.loss(&batch(micro), &device) / scale;
            {
                let _no_sync = model.no_sync();
                for micro in 0..micro_batches - 1 {
                    let grads = loss(&model, micro).backward();
                    let grads = GradientsParams::from_grads(grads, &model);
                    assert!(gradients(&model, &grads).is_empty(), "{strategy}");
                }
            }
            let last = loss(&model, micro_batches - 1).backward();
            let grads = GradientsParams::from_grads(last, &model);
            let losses = (0..micro_batches)
                .map(|micro| loss(&plain, micro))
                .collect();
            let expected = accumulated(&plain, losses, group);
            let own = own_gradients(&gradients(&plain, &expected), &model);
            assert_bits(
                &format!("{strategy}: gradients"),
                step,
                &gradients(&model, &grads),
                &own,
            );
            model = oss.step(0.01, model, grads);
            plain = stock.step(0.01, plain, expected);
            assert_bits(
                &format!("{strategy}"),
                step,
                &values(&model.unsharded()),
                &values(&plain),
            );
        }
    });
}

/// Burn's own habit: every micro-batch is reduced, and shards are added up.
#[test]
fn gradients_of_several_backwards_add_up_as_shards() {
    for_all(|group, strategy| {
        let device = device();
        let model =
            ShardedModule::new(OddNet::new(&device), small_groups(strategy), group).unwrap();
        let plain = model.unsharded().train();
        let mut sum = GradientsAccumulator::new();
        let mut expected = GradientsAccumulator::new();
        for micro in 0..3 {
            let batch = Batch::new(group.rank(), 3 * micro, strategy);
            let grads = model.loss(&batch, &device).backward();
            sum.accumulate(&*model, GradientsParams::from_grads(grads, &model));
            let loss = plain.loss(&batch, &device);
            expected.accumulate(&plain, common::plain_dp_gradients(&loss, &plain, group));
        }
        let expected = own_gradients(&gradients(&plain, &expected.grads()), &model);
        assert_bits(
            &format!("{strategy}"),
            0,
            &gradients(&model, &sum.grads()),
            &expected,
        );
    });
}

const WIDTH: usize = 16;
const DEPTH: usize = 4;

fn mlp(strategy: ShardingStrategy, group: &ProcessGroup) -> ShardedModule<Mlp> {
    let cap = (WIDTH * WIDTH + WIDTH) * 4;
    let config = ShardConfig::new(strategy).with_group_cap_bytes(cap);
    ShardedModule::new(Mlp::new(DEPTH, WIDTH, &device()), config, group).unwrap()
}

fn loss(model: &Mlp, rank: usize) -> Tensor<1> {
    model.forward(input(2, WIDTH, rank, &device())).mean()
}

#[test]
fn under_no_sync_no_gradient_is_sent() {
    for strategy in ShardingStrategy::ALL {
        ProcessGroup::spawn(2, |group| {
            let model = mlp(strategy, &group);
            let start = group.traffic();
            {
                let _no_sync = model.no_sync();
                for _ in 0..3 {
                    drop(loss(&model, group.rank()).backward());
                }
            }
            let sent = group.traffic() - start;
            for collective in [
                Collective::AllReduce,
                Collective::ReduceScatter,
                Collective::Broadcast,
            ] {
                assert_eq!(sent.get(collective).calls, 0, "{strategy}: {collective}");
            }
            let start = group.traffic();
            drop(loss(&model, group.rank()).backward());
            let sent = group.traffic() - start;
            let reductions =
                sent.get(Collective::AllReduce).calls + sent.get(Collective::ReduceScatter).calls;
            // One per group of parameters, and the parameters that were used.
            assert_eq!(reductions, model.groups().len() as u64 + 1, "{strategy}");
        })
        .unwrap();
    }
}

#[test]
fn a_step_before_the_reduction_is_refused_and_discarding_gives_up_what_was_accumulated() {
    for strategy in ShardingStrategy::ALL {
        ProcessGroup::spawn(2, |group| {
            let model = mlp(strategy, &group);
            let mut oss = Oss::new(AdamConfig::new(), &group).unwrap();
            let accumulate = |model: &ShardedModule<Mlp>| {
                let _no_sync = model.no_sync();
                GradientsParams::from_grads(loss(model, 5).backward(), model)
            };
            let grads = accumulate(&model);
            let failed = oss.try_step(0.1, model, grads).unwrap_err();
            assert!(
                matches!(failed.error, Error::Unreduced { .. }),
                "{:?}",
                failed.error
            );
            let model = *failed.module;
            model.discard_accumulated();
            let grads = |model: &ShardedModule<Mlp>| {
                let grads = loss(model, group.rank()).backward();
                gradients(&**model, &GradientsParams::from_grads(grads, model))
            };
            let expected = grads(&mlp_like(&model, strategy, &group));
            assert_bits(&format!("{strategy}"), 0, &grads(&model), &expected);
        })
        .unwrap();
    }
}

/// Another wrapped module of the same values.
fn mlp_like(
    model: &ShardedModule<Mlp>,
    strategy: ShardingStrategy,
    group: &ProcessGroup,
) -> ShardedModule<Mlp> {
    let cap = (WIDTH * WIDTH + WIDTH) * 4;
    let config = ShardConfig::new(strategy).with_group_cap_bytes(cap);
    ShardedModule::new(model.unsharded().train(), config, group).unwrap()
}

#[test]
fn two_losses_of_separate_forwards_have_gradients_that_add_up() {
    for_all(|group, strategy| {
        let device = device();
        let model =
            ShardedModule::new(OddNet::new(&device), small_groups(strategy), group).unwrap();
        let plain = model.unsharded().train();
        let batch = |step| Batch::new(group.rank(), 3 * step, strategy);
        let first = model.loss(&batch(0), &device);
        model.begin_forward();
        let second = model.loss(&batch(1), &device);
        // The later forward first, and then the other way round in plain Burn: they are independent.
        let second = GradientsParams::from_grads(second.backward(), &model);
        let first = GradientsParams::from_grads(first.backward(), &model);
        for (grads, step) in [(first, 0), (second, 1)] {
            let loss = plain.loss(&batch(step), &device);
            let expected = common::plain_dp_gradients(&loss, &plain, group);
            let expected = own_gradients(&gradients(&plain, &expected), &model);
            assert_bits(
                &format!("{strategy}"),
                step,
                &gradients(&model, &grads),
                &expected,
            );
        }
    });
}
