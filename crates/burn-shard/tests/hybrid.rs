//! Hybrid sharding: shards within a copy, gradients averaged across copies.
//!
//! The order of sums is stated and compared bit for bit: the mean over the ranks of a copy, in rank
//! order, then the mean over the copies. What all ranks hold whole is averaged over all ranks at once.

#![allow(clippy::unwrap_used, reason = "a test ends at the first error")]

mod common;
#[path = "common/mlp.rs"]
mod mlp;

use std::sync::Arc;

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{GradientsParams, SgdConfig};
use burn::prelude::*;
use burn_shard::checkpoint::Checkpoints;
use burn_shard::{
    Collective, Error, Local, MemoryKind, Oss, ProcessGroup, ReduceOp, ShardConfig, ShardedModule,
    ShardingStrategy,
};
use burn_shard_nccl::{Memory, NcclCommunicator};
use burn_shard_nccl_double::{HostMemory, load};
use common::{Batch, OddNet, assert_bits, device, is_whole, values};
use mlp::{Mlp, input};
use serde_json::json;

/// World size, and ranks per copy.
const MESHES: [(usize, usize); 7] = [(4, 2), (6, 3), (6, 2), (4, 1), (4, 4), (2, 1), (1, 1)];

fn momentum() -> SgdConfig {
    SgdConfig::new().with_momentum(Some(MomentumConfig::new().with_momentum(0.9)))
}

/// Averages the gradients of a plain model in the order that is promised.
struct PlainHybrid<'a> {
    model: &'a ShardedModule<OddNet>,
    world: &'a ProcessGroup,
    copy: &'a ProcessGroup,
    across: &'a ProcessGroup,
    path: Vec<String>,
    gradients: &'a mut GradientsParams,
}

impl ModuleVisitor for PlainHybrid<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let gradient = self.gradients.remove::<D>(param.id);
        let mut used = [u8::from(gradient.is_some())];
        self.world.all_reduce(&mut used, ReduceOp::Max).unwrap();
        if used[0] == 0 {
            return;
        }
        let (shape, device) = (param.base().dims(), Device::flex());
        let gradient = gradient.unwrap_or_else(|| Tensor::zeros(shape, &device));
        let mut values: Vec<f32> = gradient.into_data().iter().collect();
        let sharded = [ShardingStrategy::Gradients, ShardingStrategy::Full];
        let whole =
            !sharded.contains(&self.model.strategy()) || is_whole(self.model, &self.path.join("."));
        if whole {
            self.world.all_reduce(&mut values, ReduceOp::Mean).unwrap();
        } else {
            self.copy.all_reduce(&mut values, ReduceOp::Mean).unwrap();
            self.across.all_reduce(&mut values, ReduceOp::Mean).unwrap();
        }
        let data = TensorData::new(values, shape);
        self.gradients
            .register(param.id, Tensor::<D>::from_data(data, &device));
    }
}

#[test]
fn every_mesh_and_strategy_equals_plain_data_parallel_in_the_order_of_its_sums() {
    for (world_size, shard_ranks) in MESHES {
        for strategy in ShardingStrategy::ALL {
            ProcessGroup::spawn(world_size, |group| compare(&group, strategy, shard_ranks))
                .unwrap();
        }
    }
}

/// NCCL's double adds in rank order, as threads do.
#[test]
fn the_same_holds_over_nccl() {
    for strategy in ShardingStrategy::ALL {
        let local = Local::new(4).threads_per_rank(1);
        local
            .spawn(|control| {
                let memory: Arc<dyn Memory> = Arc::new(HostMemory::new(control.rank()));
                let nccl = NcclCommunicator::new(&control, Ok(load()), Ok(memory)).unwrap();
                compare(&ProcessGroup::new(Arc::new(nccl)), strategy, 2);
            })
            .unwrap();
    }
}

/// Trains by the library and by the oracle, in copies of `shard_ranks` ranks.
fn compare(group: &ProcessGroup, strategy: ShardingStrategy, shard_ranks: usize) {
    let world_size = group.world_size();
    let device = device();
    let config = ShardConfig::new(strategy)
        .with_group_cap_bytes(400)
        .with_shard_ranks(Some(shard_ranks));
    let mut model = ShardedModule::new(OddNet::new(&device), config, group).unwrap();
    let mut plain = model.unsharded().train();
    let mut oss = Oss::new(momentum(), group).unwrap();
    let mut stock = momentum().init();
    let rank = group.rank();
    let copy = group
        .split(Some(rank / shard_ranks), rank)
        .unwrap()
        .unwrap();
    let across = group
        .split(Some(rank % shard_ranks), rank)
        .unwrap()
        .unwrap();
    let what = format!("{strategy}, {world_size} ranks, {shard_ranks} per copy");
    for step in 0..10 {
        let batch = Batch::new(rank, step, strategy);
        let loss = model.loss(&batch, &device);
        let plain_loss = plain.loss(&batch, &device);
        assert_eq!(
            common::bits(loss.clone()),
            common::bits(plain_loss.clone()),
            "{what}"
        );
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        let mut expected = GradientsParams::from_grads(plain_loss.backward(), &plain);
        plain.visit(&mut PlainHybrid {
            model: &model,
            world: group,
            copy: &copy,
            across: &across,
            path: Vec::new(),
            gradients: &mut expected,
        });
        model = oss.step(0.05, model, grads);
        plain = stock.step(0.05, plain, expected);
        assert_bits(&what, step, &values(&model.unsharded()), &values(&plain));
    }
}

const WIDTH: usize = 16;
const DEPTH: usize = 4;

#[test]
fn gathers_stay_within_a_copy_and_only_shards_of_gradients_go_across() {
    ProcessGroup::spawn(4, |group| {
        let config = ShardConfig::new(ShardingStrategy::Full)
            .with_group_cap_bytes((WIDTH * WIDTH + WIDTH) * 4)
            .with_prefetch(0)
            .with_shard_ranks(Some(2));
        let mlp = Mlp::new(DEPTH, WIDTH, &device());
        let mut model = ShardedModule::new(mlp, config, &group).unwrap();
        let mut oss = Oss::new(momentum(), &group).unwrap();
        let loss = |net: &Mlp| net.forward(input(2, WIDTH, group.rank(), &device())).mean();
        model = mlp::step(model, &mut oss, loss);
        // Half of the weights, and all of the biases.
        let parameters = model.memory().of(MemoryKind::Parameters).live_bytes;
        assert_eq!(parameters, DEPTH * (WIDTH * WIDTH / 2 + WIDTH) * 4);
        let start = group.traffic();
        drop(mlp::step(model, &mut oss, loss));
        let sent = group.traffic() - start;
        let weights = (DEPTH * WIDTH * WIDTH * 4) as u64;
        // In forward all groups, in backward all but the first and the last.
        let gathers = sent.get(Collective::AllGather);
        let gathered_again = weights / DEPTH as u64 * (DEPTH as u64 - 2);
        assert_eq!(gathers.bytes, (weights + gathered_again) / 2);
        let within = sent.get(Collective::ReduceScatter);
        assert_eq!((within.calls, within.bytes), (DEPTH as u64, weights / 2));
        // Shards across two copies, biases and flags of use over four ranks.
        let biases = (DEPTH * WIDTH * 4) as u64;
        let flags = 2 * DEPTH as u64;
        let all = sent.get(Collective::AllReduce);
        assert_eq!(all.calls, DEPTH as u64 + 2);
        assert_eq!(all.bytes, weights / 2 + 2 * (biases + flags) * 3 / 4);
    })
    .unwrap();
}

#[test]
fn copies_that_do_not_divide_the_ranks_are_refused_on_all_of_them() {
    for error in ProcessGroup::spawn(4, |group| {
        let config = ShardConfig::new(ShardingStrategy::Full).with_shard_ranks(Some(3));
        ShardedModule::new(OddNet::new(&device()), config, &group).unwrap_err()
    })
    .unwrap()
    {
        assert!(
            matches!(error, Error::ShardRanks { shard_ranks: 3, .. }),
            "{error:?}"
        );
    }
}

#[test]
fn a_checkpoint_of_copies_loads_on_one() {
    let root = tempfile::tempdir().unwrap();
    let train = |ranks, shard_ranks, load| {
        let mut trained = ProcessGroup::spawn(ranks, |group| {
            let config = ShardConfig::new(ShardingStrategy::Full)
                .with_group_cap_bytes(400)
                .with_shard_ranks(shard_ranks);
            let mut model = ShardedModule::new(OddNet::new(&device()), config, &group).unwrap();
            let mut oss = Oss::new(momentum(), &group).unwrap();
            let checkpoints = Checkpoints::new(root.path(), &group);
            if load {
                model = checkpoints.load(model, &mut oss).unwrap().model;
            } else {
                let batch = Batch::new(0, 0, ShardingStrategy::Full);
                model = mlp::step(model, &mut oss, |net: &OddNet| net.loss(&batch, &device()));
                checkpoints.save(1, &model, &oss, &json!(null)).unwrap();
            }
            values(&model.unsharded())
        });
        trained.as_mut().unwrap().remove(0)
    };
    let saved = train(4, Some(2), false);
    assert_bits("one copy of three ranks", 1, &train(3, None, true), &saved);
    assert_bits("three copies", 1, &train(6, Some(2), true), &saved);
}
