//! How often a step communicates and how many bytes it receives, exactly.
//!
//! `P` parameters of 4 bytes, `N` ranks, all sizes divisible by `N` so that there is no padding.

#![allow(clippy::unwrap_used, reason = "a test ends at the first error")]

#[path = "common/mlp.rs"]
mod mlp;

use burn::module::Module;
use burn::optim::{AdamConfig, GradientsParams};
use burn::prelude::*;
use burn_shard::Traffic;
use burn_shard::{Collective, Oss, ProcessGroup, ShardConfig, ShardedModule, ShardingStrategy};
use mlp::{Mlp, input};

const DEPTH: u64 = 8;
const WIDTH: usize = 16;
/// Weight and bias of one layer.
const LAYER_BYTES: u64 = (WIDTH * WIDTH + WIDTH) as u64 * 4;
const MODEL_BYTES: u64 = DEPTH * LAYER_BYTES;
/// What `Full` leaves whole, in one group, and what it shards.
const BIAS_BYTES: u64 = DEPTH * WIDTH as u64 * 4;
const WEIGHT_BYTES: u64 = MODEL_BYTES - BIAS_BYTES;

/// One group per layer, each of two tensors; every gather when it is needed.
fn one_group_per_layer(strategy: ShardingStrategy) -> ShardConfig {
    ShardConfig::new(strategy)
        .with_group_cap_bytes(usize::try_from(LAYER_BYTES).unwrap())
        .with_prefetch(0)
}

/// What one training step did, by phase.
struct Step {
    forward: Traffic,
    backward: Traffic,
    optimizer: Traffic,
}

/// The first and the third step of an [`Mlp`] on this rank.
fn steps(group: &ProcessGroup, config: ShardConfig, tracked_input: bool) -> [Step; 2] {
    let device = Device::flex().autodiff();
    let depth = usize::try_from(DEPTH).unwrap();
    let mut model = ShardedModule::new(Mlp::new(depth, WIDTH, &device), config, group).unwrap();
    let mut oss = Oss::new(AdamConfig::new(), group).unwrap();
    let mut steps = Vec::new();
    for _ in 0..3 {
        let x = input(4, WIDTH, group.rank(), &device);
        let x = if tracked_input { x.require_grad() } else { x };
        let start = group.traffic();
        let loss = model.forward(x).mean();
        let forward = group.traffic();
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        let backward = group.traffic();
        model = oss.step(1e-3, model, grads);
        steps.push(Step {
            forward: forward - start,
            backward: backward - forward,
            optimizer: group.traffic() - backward,
        });
    }
    let third = steps.pop().unwrap();
    [steps.swap_remove(0), third]
}

/// `(calls, bytes)` of one kind.
fn of(traffic: Traffic, collective: Collective) -> (u64, u64) {
    let count = traffic.get(collective);
    (count.calls, count.bytes)
}

#[track_caller]
fn assert_traffic(what: &str, traffic: Traffic, expected: &[(Collective, u64, u64)]) {
    for collective in Collective::ALL {
        let found = of(traffic, collective);
        let expected = expected
            .iter()
            .filter(|(kind, ..)| *kind == collective)
            .fold((0, 0), |sum, (_, calls, bytes)| {
                (sum.0 + calls, sum.1 + bytes)
            });
        assert_eq!(found, expected, "{what}: {collective} (calls, bytes)");
    }
}

/// Bytes that one rank receives of `bytes` when each rank's `N`-th is sent to all others.
fn shares(bytes: u64, world_size: u64) -> u64 {
    assert_eq!(bytes % world_size, 0);
    bytes / world_size * (world_size - 1)
}

fn for_world_sizes(check: impl Fn(&ProcessGroup, u64) + Sync) {
    for world_size in [1, 2, 4] {
        ProcessGroup::spawn(world_size, |group| check(&group, world_size as u64)).unwrap();
    }
}

/// One byte per parameter: which parameters any rank used.
fn usage(world_size: u64) -> (Collective, u64, u64) {
    (Collective::AllReduce, 1, 2 * shares(2 * DEPTH, world_size))
}

#[test]
fn ddp_receives_2_shares_of_the_model_in_one_all_reduce_per_group() {
    for_world_sizes(|group, n| {
        let [_, step] = steps(
            group,
            one_group_per_layer(ShardingStrategy::Replicated),
            false,
        );
        assert_traffic("forward", step.forward, &[]);
        let gradients = (Collective::AllReduce, DEPTH, 2 * shares(MODEL_BYTES, n));
        assert_traffic("backward", step.backward, &[gradients, usage(n)]);
        assert_traffic("optimizer", step.optimizer, &[]);
    });
}

#[test]
fn zero1_receives_3_shares_of_the_model_in_an_all_reduce_and_an_all_gather_per_group() {
    for_world_sizes(|group, n| {
        let config = one_group_per_layer(ShardingStrategy::OptimizerState);
        let [_, step] = steps(group, config, false);
        assert_traffic("forward", step.forward, &[]);
        let gradients = (Collective::AllReduce, DEPTH, 2 * shares(MODEL_BYTES, n));
        assert_traffic("backward", step.backward, &[gradients, usage(n)]);
        let parameters = (Collective::AllGather, DEPTH, shares(MODEL_BYTES, n));
        assert_traffic("optimizer", step.optimizer, &[parameters]);
    });
}

#[test]
fn zero2_receives_2_shares_of_the_model_in_a_reduce_scatter_and_an_all_gather_per_group() {
    for_world_sizes(|group, n| {
        let [_, step] = steps(
            group,
            one_group_per_layer(ShardingStrategy::Gradients),
            false,
        );
        assert_traffic("forward", step.forward, &[]);
        let gradients = (Collective::ReduceScatter, DEPTH, shares(MODEL_BYTES, n));
        assert_traffic("backward", step.backward, &[gradients, usage(n)]);
        let parameters = (Collective::AllGather, DEPTH, shares(MODEL_BYTES, n));
        assert_traffic("optimizer", step.optimizer, &[parameters]);
    });
}

/// The figure of the strategy's table is an upper bound: backward gathers again what it needs and
/// does not have. The last group read in forward is still gathered, and the weight of a layer whose
/// input requires no gradient is not needed.
#[test]
fn zero3_receives_3_shares_of_the_model_less_what_backward_need_not_gather_again() {
    for_world_sizes(|group, n| {
        for (tracked_input, gathered_again) in [(false, DEPTH - 2), (true, DEPTH - 1)] {
            let config = one_group_per_layer(ShardingStrategy::Full);
            let [_, step] = steps(group, config, tracked_input);
            let forward = (Collective::AllGather, DEPTH, shares(WEIGHT_BYTES, n));
            assert_traffic("forward", step.forward, &[forward]);
            let again = shares(gathered_again * WEIGHT_BYTES / DEPTH, n);
            let again = (Collective::AllGather, gathered_again, again);
            let weights = (Collective::ReduceScatter, DEPTH, shares(WEIGHT_BYTES, n));
            let biases = (Collective::AllReduce, 1, 2 * shares(BIAS_BYTES, n));
            let backward = [again, weights, biases, usage(n)];
            assert_traffic("backward", step.backward, &backward);
            assert_traffic("optimizer", step.optimizer, &[]);
        }
    });
}

/// They are other collectives of the same step, not more of them.
#[test]
fn gathers_ahead_of_their_use_are_as_many_as_without() {
    for_world_sizes(|group, _| {
        for prefetch in 0..4 {
            let config = one_group_per_layer(ShardingStrategy::Full).with_prefetch(prefetch);
            let [_, step] = steps(group, config, true);
            let gathers = [step.forward, step.backward, step.optimizer];
            let gathers = gathers.map(|phase| of(phase, Collective::AllGather).0);
            let ahead = u64::try_from(prefetch).unwrap().min(DEPTH - 1);
            assert_eq!(gathers, [DEPTH + ahead, DEPTH - 1 - ahead, 0], "{prefetch}");
        }
    });
}

#[test]
fn only_the_first_backward_agrees_on_the_order_by_one_broadcast() {
    for strategy in ShardingStrategy::ALL {
        for_world_sizes(|group, n| {
            let [first, third] = steps(group, one_group_per_layer(strategy), false);
            let groups = DEPTH + u64::from(strategy == ShardingStrategy::Full);
            let received = if group.rank() == 0 { 0 } else { groups * 16 };
            assert_eq!(
                of(first.backward, Collective::Broadcast),
                (1, received),
                "{n}"
            );
            assert_eq!(of(third.backward, Collective::Broadcast), (0, 0));
        });
    }
}

#[test]
fn collectives_are_counted_by_groups_and_bytes_do_not_depend_on_groups() {
    for strategy in [
        ShardingStrategy::Replicated,
        ShardingStrategy::OptimizerState,
        ShardingStrategy::Gradients,
    ] {
        for_world_sizes(|group, _| {
            let config = |layers: u64| {
                let cap = usize::try_from(layers * LAYER_BYTES).unwrap();
                ShardConfig::new(strategy).with_group_cap_bytes(cap)
            };
            let [_, by_layer] = steps(group, config(1), false);
            for layers in [2, 4, 8] {
                let [_, step] = steps(group, config(layers), false);
                let groups = DEPTH / layers;
                let calls = |phase: Traffic| phase.total_calls();
                // The usage of parameters is one more.
                assert_eq!(calls(step.backward) - 1, groups);
                let gathers = u64::from(strategy != ShardingStrategy::Replicated) * groups;
                assert_eq!(calls(step.optimizer), gathers);
                let bytes =
                    |step: &Step| step.backward.total_bytes() + step.optimizer.total_bytes();
                assert_eq!(bytes(&step), bytes(&by_layer));
            }
        });
    }
}

#[test]
fn reading_the_full_module_gathers_each_group_once_under_zero3_only() {
    for strategy in ShardingStrategy::ALL {
        for_world_sizes(|group, n| {
            let device = Device::flex().autodiff();
            let depth = usize::try_from(DEPTH).unwrap();
            let module = Mlp::new(depth, WIDTH, &device);
            let config = one_group_per_layer(strategy);
            let model = ShardedModule::new(module, config, group).unwrap();
            let start = group.traffic();
            let _full = model.unsharded();
            // That all ranks are there is made sure of under every strategy.
            let mut expected = vec![(Collective::AllReduce, 1, 0)];
            if strategy == ShardingStrategy::Full {
                expected.push((Collective::AllGather, DEPTH, shares(WEIGHT_BYTES, n)));
            }
            assert_traffic("unsharded", group.traffic() - start, &expected);
            let start = group.traffic();
            let _clone = model.valid().clone();
            assert_traffic("valid", group.traffic() - start, &[]);
        });
    }
}
