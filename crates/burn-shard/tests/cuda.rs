//! Whole models on GPUs, over NCCL: equal to plain data parallelism on the same GPUs.
//!
//! `scripts/gpu-check.sh` runs this as one rank, and as ranks whose place is in the environment.

#![allow(clippy::unwrap_used, reason = "a test ends at the first error")]

mod common;

use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamConfig, AdamWConfig, SgdConfig};
use burn::prelude::*;
use burn_shard::{Local, ProcessGroup, ShardingStrategy};
use burn_shard_comm::Placement;
use burn_shard_nccl::process_group;
use common::OddNet;
use common::on_device::compare;

fn check(control: &ProcessGroup, gpu: usize) {
    let group = process_group(control, gpu).unwrap();
    let device = Device::cuda(gpu).autodiff();
    let sgd = SgdConfig::new().with_momentum(Some(MomentumConfig::new().with_momentum(0.9)));
    let adamw = AdamWConfig::new().with_weight_decay(0.1);
    for strategy in ShardingStrategy::ALL {
        compare::<OddNet, _>(&device, &group, strategy, &sgd, 0.01, true);
        compare::<OddNet, _>(&device, &group, strategy, &AdamConfig::new(), 0.01, true);
        compare::<OddNet, _>(&device, &group, strategy, &adamw, 0.01, true);
    }
}

#[test]
#[ignore = "needs 1 GPU"]
fn training_over_nccl_is_plain_data_parallel() {
    match Placement::from_env().unwrap() {
        Some(placement) => check(&ProcessGroup::from_env().unwrap(), placement.local_rank),
        None => drop(Local::new(1).spawn(|control| check(&control, 0)).unwrap()),
    }
}
