//! Checkpointed blocks under every strategy: equal to plain data parallelism without checkpoints, bit for bit.

#![allow(clippy::unwrap_used, reason = "a test ends at the first error")]

mod common;
#[path = "common/mlp.rs"]
mod mlp;

use burn::module::Module;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{GradientsParams, ModuleOptimizer, SgdConfig};
use burn::prelude::*;
use burn::tensor::activation::gelu;
use burn_shard::recompute::{Random, checkpoint_with};
use burn_shard::{Collective, Oss, ProcessGroup, ShardConfig, ShardedModule, ShardingStrategy};
use common::{
    Batch, OddNet, assert_bits, bits, gradients, own_gradients, plain_dp_gradients, values,
};
use mlp::{Block, Blocks, input};

fn small_groups(strategy: ShardingStrategy) -> ShardConfig {
    ShardConfig::new(strategy).with_group_cap_bytes(400)
}

fn devices() -> [Device; 2] {
    let device = Device::flex().autodiff();
    [device.clone(), device.gradient_checkpointing()]
}

/// The oracle's: `Module::train` puts parameters there.
fn plain_device() -> Device {
    Device::flex().autodiff()
}

fn for_all(check: impl Fn(&ProcessGroup, ShardingStrategy, &Device) + Sync) {
    for device in devices() {
        for world_size in [1, 2, 3] {
            for strategy in ShardingStrategy::ALL {
                let run = |group| check(&group, strategy, &device);
                ProcessGroup::spawn(world_size, run).unwrap();
            }
        }
    }
}

/// Trains with `loss` and, as the oracle, with `plain_loss`; both get the step and the rank.
fn compare<M: Module>(
    group: &ProcessGroup,
    strategy: ShardingStrategy,
    module: M,
    loss: impl Fn(&M, usize) -> Tensor<1>,
    plain_loss: impl Fn(&M, usize) -> Tensor<1>,
) {
    let momentum = Some(MomentumConfig::new().with_momentum(0.9));
    let optimizer = || SgdConfig::new().with_momentum(momentum.clone());
    let mut model = ShardedModule::new(module, small_groups(strategy), group).unwrap();
    let mut plain = model.unsharded().train();
    let mut oss = Oss::new(optimizer(), group).unwrap();
    let mut stock: ModuleOptimizer = optimizer().init();
    for step in 0..4 {
        let (now, plain_now) = (loss(&model, step), plain_loss(&plain, step));
        assert_eq!(
            bits(now.clone()),
            bits(plain_now.clone()),
            "{strategy}: loss of step {step}"
        );
        let grads = GradientsParams::from_grads(now.backward(), &model);
        let plain_grads = plain_dp_gradients(&plain_now, &plain, group);
        let own = own_gradients(&gradients(&plain, &plain_grads), &model);
        assert_bits(
            &format!("{strategy}: gradients"),
            step,
            &gradients(&*model, &grads),
            &own,
        );
        model = oss.step(0.05, model, grads);
        plain = stock.step(0.05, plain, plain_grads);
        let full = model.unsharded();
        assert_bits(
            &format!("{strategy}: parameters"),
            step,
            &values(&full),
            &values(&plain),
        );
    }
}

/// Tied, frozen, unused and sometimes unused parameters, all of them read in one block only.
#[test]
fn a_module_that_is_one_block_equals_plain_data_parallelism() {
    for_all(|group, strategy, device| {
        let loss = |net: &OddNet, step: usize| {
            let batch = Batch::new(group.rank(), step, strategy);
            let device = device.clone();
            checkpoint_with(Random::Ignore, net, (), move |net, ()| {
                net.loss(&batch, &device)
            })
        };
        let plain = |net: &OddNet, step: usize| {
            net.loss(&Batch::new(group.rank(), step, strategy), &plain_device())
        };
        compare(group, strategy, OddNet::new(device), loss, plain);
    });
}

fn forward(block: &Block, x: Tensor<2>) -> Tensor<2> {
    gelu(block.norm.forward(block.linear.forward(x)))
}

fn checkpointed(block: &Block, x: Tensor<2>) -> Tensor<2> {
    checkpoint_with(Random::Ignore, block, x, forward)
}

fn mean_square(x: Tensor<2>) -> Tensor<1> {
    x.powi_scalar(2).mean()
}

/// The first block runs without a checkpoint, and the last one twice.
#[test]
fn blocks_beside_plain_layers_equal_plain_data_parallelism() {
    for_all(|group, strategy, device| {
        let x = |step: usize, device: &Device| input(3, 5, group.rank() + 4 * step, device);
        let loss = |net: &Blocks, step: usize| {
            let [first, middle @ .., last] = net.blocks.as_slice() else {
                unreachable!()
            };
            let x = forward(first, x(step, device));
            let x = middle.iter().fold(x, |x, block| checkpointed(block, x));
            mean_square(checkpointed(last, checkpointed(last, x)))
        };
        let plain = |net: &Blocks, step: usize| {
            let x = x(step, &plain_device());
            let x = net.blocks.iter().fold(x, |x, block| forward(block, x));
            mean_square(forward(&net.blocks[3], x))
        };
        compare(group, strategy, Blocks::new(4, 5, device), loss, plain);
    });
}

#[test]
fn nested_blocks_equal_plain_data_parallelism() {
    for_all(|group, strategy, device| {
        let x = |step: usize, device: &Device| input(3, 5, group.rank() + 4 * step, device);
        let loss = |net: &Blocks, step: usize| {
            let x = net.blocks.chunks(2).fold(x(step, device), |x, pair| {
                checkpoint_with(Random::Ignore, &pair.to_vec(), x, |pair, x| {
                    pair.iter().fold(x, |x, block| checkpointed(block, x))
                })
            });
            mean_square(x)
        };
        let plain = |net: &Blocks, step: usize| {
            let x = x(step, &plain_device());
            mean_square(net.blocks.iter().fold(x, |x, block| forward(block, x)))
        };
        compare(group, strategy, Blocks::new(4, 5, device), loss, plain);
    });
}

#[test]
fn micro_batches_of_blocks_under_no_sync_equal_those_of_plain_layers() {
    for_all(|group, strategy, device| {
        let blocks = Blocks::new(3, 5, device);
        let run = |checkpoints: bool| {
            let model = ShardedModule::new(blocks.clone(), small_groups(strategy), group).unwrap();
            let loss = |micro: usize| {
                let x = input(3, 5, group.rank() + 4 * micro, device);
                mean_square(model.blocks.iter().fold(x, |x, block| match checkpoints {
                    true => checkpointed(block, x),
                    false => forward(block, x),
                }))
            };
            {
                let _no_sync = model.no_sync();
                drop(loss(0).backward());
            }
            gradients(
                &*model,
                &GradientsParams::from_grads(loss(1).backward(), &model),
            )
        };
        assert_bits(&format!("{strategy}"), 0, &run(true), &run(false));
    });
}

/// A forward whose backward never comes must not hold up the next one.
#[test]
fn an_abandoned_forward_of_blocks_leaves_the_next_backward_right() {
    for_all(|group, strategy, device| {
        let blocks = Blocks::new(3, 5, device);
        let model = ShardedModule::new(blocks, small_groups(strategy), group).unwrap();
        let run = || {
            let x = input(3, 5, group.rank(), device);
            mean_square(
                model
                    .blocks
                    .iter()
                    .fold(x, |x, block| checkpointed(block, x)),
            )
        };
        let once = gradients(
            &*model,
            &GradientsParams::from_grads(run().backward(), &model),
        );
        drop(run());
        let again = gradients(
            &*model,
            &GradientsParams::from_grads(run().backward(), &model),
        );
        assert_bits(&format!("{strategy}"), 0, &again, &once);
    });
}

/// Each group is gathered once in forward and once in backward, as without checkpoints.
#[test]
fn under_zero3_a_block_is_gathered_twice_a_step() {
    ProcessGroup::spawn(2, |group| {
        let device = Device::flex().autodiff();
        let config = small_groups(ShardingStrategy::Full);
        let model = ShardedModule::new(Blocks::new(6, 8, &device), config, &group).unwrap();
        let calls = |checkpoints: bool| {
            let step = || {
                let x = input(3, 8, group.rank(), &device);
                let y = model.blocks.iter().fold(x, |x, block| match checkpoints {
                    true => checkpointed(block, x),
                    false => forward(block, x),
                });
                drop(mean_square(y).backward());
            };
            step();
            let start = group.traffic();
            step();
            let sent = group.traffic() - start;
            [Collective::AllGather, Collective::ReduceScatter].map(|kind| sent.get(kind).calls)
        };
        let groups = model.groups().len() as u64;
        let checkpointed = calls(true);
        assert!(
            checkpointed[0] <= 2 * groups,
            "{checkpointed:?} of {groups} groups"
        );
        assert_eq!(checkpointed[1], calls(false)[1]);
    })
    .unwrap();
}

#[test]
fn a_layer_that_is_no_part_of_the_block_is_refused_by_name() {
    let failed = ProcessGroup::spawn(1, |group| {
        let device = Device::flex().autodiff();
        let blocks = Blocks::new(2, 5, &device);
        let model = ShardedModule::new(blocks, ShardingStrategy::Full, &group).unwrap();
        let other = model.blocks[1].clone();
        let x = input(3, 5, 0, &device);
        drop(checkpoint_with(
            Random::Ignore,
            &model.blocks[0],
            x,
            move |block, x| forward(&other, forward(block, x)),
        ));
    });
    let text = failed.unwrap_err().to_string();
    assert!(
        text.contains("read `blocks.1.linear.weight` in a checkpointed block"),
        "{text}"
    );
}
