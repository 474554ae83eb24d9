//! What was foretold of a module is what a rank then holds and receives.

#![allow(clippy::unwrap_used, reason = "a test ends at the first error")]

#[path = "common/mlp.rs"]
mod mlp;

use burn::optim::{AdamConfig, GradientsParams};
use burn::prelude::*;
use burn_shard::{
    Error, Estimate, MemoryKind, MixedPrecision, Oss, ProcessGroup, ShardConfig, ShardedModule,
    ShardingStrategy,
};
use mlp::{Mlp, input};

const DEPTH: usize = 6;
/// Odd, so that there is padding everywhere.
const WIDTH: usize = 61;

fn configs(strategy: ShardingStrategy, world_size: usize) -> Vec<ShardConfig> {
    let config =
        || ShardConfig::new(strategy).with_group_cap_bytes(2 * (WIDTH * WIDTH + WIDTH) * 4);
    let mixed = MixedPrecision::bf16();
    let mut configs = vec![
        config(),
        config().with_prefetch(0),
        config().with_prefetch(2),
        config().with_defer_gather(true),
        config().with_mixed_precision(Some(mixed)),
        config().with_ignored_params(vec!["layers.1".to_owned()]),
    ];
    if world_size == 4 {
        configs.push(config().with_shard_ranks(Some(2)));
    }
    configs
}

#[test]
fn a_rank_holds_and_receives_what_was_foretold() {
    for world_size in [1, 2, 4] {
        for strategy in ShardingStrategy::ALL {
            for config in configs(strategy, world_size) {
                ProcessGroup::spawn(world_size, |group| check(&group, &config)).unwrap();
            }
        }
    }
}

fn check(group: &ProcessGroup, config: &ShardConfig) {
    let what = format!("{config:?} on {} ranks", group.world_size());
    let device = Device::flex().autodiff();
    let module = Mlp::new(DEPTH, WIDTH, &device);
    let estimate = Estimate::new(&module, config, group.world_size()).unwrap();
    let mut model = ShardedModule::new(module, config.clone(), group).unwrap();
    let mut oss = Oss::new(AdamConfig::new(), group).unwrap();
    let loss = |net: &Mlp| {
        let x = input(2, WIDTH, group.rank(), &device).require_grad();
        let x = match config.mixed_precision {
            Some(_) => x.cast(burn::tensor::FloatDType::BF16),
            None => x,
        };
        net.forward(x).mean()
    };
    // The first step agrees on the order.
    model = mlp::step(model, &mut oss, loss);
    model.reset_memory_peak();
    let before = group.traffic();
    let grads = GradientsParams::from_grads(loss(&model).backward(), &model);
    let gradients = model.memory().of(MemoryKind::Gradients).live_bytes;
    model = oss.step(1e-3, model, grads);
    let received = (group.traffic() - before).total_bytes();

    let report = model.memory();
    let live = |kind| report.of(kind).live_bytes;
    assert_eq!(
        live(MemoryKind::Parameters),
        estimate.parameter_bytes,
        "{what}\n{report}"
    );
    assert_eq!(
        live(MemoryKind::OptimizerState),
        estimate.optimizer_bytes,
        "{what}\n{report}"
    );
    // Whole ones are Burn's own tensors.
    if gradients > 0 {
        assert!(
            gradients <= estimate.gradient_bytes,
            "{what}: {gradients}, {estimate}"
        );
    }
    let unsharded = report.of(MemoryKind::Unsharded).peak_bytes;
    assert!(
        unsharded <= estimate.unsharded_bytes,
        "{what}\n{report}\n{estimate}"
    );
    // Groups have one size here. Those that are only gathered ahead are the communicator's.
    let is_full = config.strategy == ShardingStrategy::Full;
    let least = if is_full {
        estimate.unsharded_bytes / (2 + config.prefetch)
    } else {
        estimate.unsharded_bytes
    };
    assert!(unsharded >= least, "{what}\n{report}\n{estimate}");

    // Which parameters were used: a byte each, by all ranks.
    let ranks = group.world_size() as u64;
    let own = (2 * DEPTH as u64).div_ceil(ranks);
    let usage = (ranks - 1) * own + (2 * DEPTH as u64 - own);
    if group.rank() == 0 {
        let received = received - usage;
        assert!(
            received <= estimate.received_bytes,
            "{what}: {received}, {estimate}"
        );
        // All but the groups that backward need not gather again: at most a third.
        let least = if is_full {
            estimate.received_bytes * 2 / 3
        } else {
            estimate.received_bytes
        };
        assert!(received >= least, "{what}: {received}, {estimate}");
    }
}

#[test]
fn what_cannot_be_wrapped_cannot_be_estimated() {
    let module = Mlp::new(1, 4, &Device::flex());
    let config = ShardConfig::new(ShardingStrategy::Full).with_shard_ranks(Some(3));
    let error = Estimate::new(&module, &config, 4).unwrap_err();
    assert!(matches!(
        error,
        Error::ShardRanks {
            world_size: 4,
            shard_ranks: 3,
            ..
        }
    ));
}
