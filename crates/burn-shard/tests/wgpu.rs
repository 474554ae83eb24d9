//! Whole models on wgpu, a logical device per rank: equal to plain data parallelism on the same devices.

#![allow(clippy::unwrap_used, reason = "a test ends at the first error")]

mod common;

use std::sync::OnceLock;

use burn::backend::DispatchDevice;
use burn::module::Module;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamConfig, AdamWConfig, GradientsParams, LionConfig, SgdConfig};
use burn::prelude::*;
use burn_shard::{Oss, ProcessGroup, ShardedModule, ShardingStrategy};
use common::on_device::compare;
use common::{Batch, OddNet, assert_bits, values};
use cubecl::wgpu::{
    AutoGraphicsApi, RuntimeOptions, WgpuDevice, WgpuSetup, try_init_device, try_init_setup, wgpu,
};

/// Logical devices of the default adapter: each has its own queue and memory.
fn device(rank: usize) -> Device {
    static DEVICES: OnceLock<Vec<WgpuDevice>> = OnceLock::new();
    let devices = DEVICES.get_or_init(|| {
        let first = WgpuDevice::default();
        let options = RuntimeOptions::default;
        let setup = try_init_setup::<AutoGraphicsApi>(&first, options()).unwrap();
        let mut devices = vec![first];
        for _ in 1..3 {
            let request = setup.adapter.request_device(&wgpu::DeviceDescriptor {
                required_features: setup.device.features()
                    - wgpu::Features::all_experimental_mask(),
                required_limits: setup.device.limits(),
                ..Default::default()
            });
            let (device, queue) = cubecl::future::block_on(request).unwrap();
            let setup = WgpuSetup {
                instance: setup.instance.clone(),
                adapter: setup.adapter.clone(),
                device,
                queue,
                backend: setup.backend,
            };
            devices.push(try_init_device(setup, options()).unwrap());
        }
        devices
    });
    Device::new(DispatchDevice::from(devices[rank].clone())).autodiff()
}

fn for_all(check: impl Fn(&ProcessGroup, ShardingStrategy) + Sync) {
    for world_size in [1, 2, 3] {
        for strategy in ShardingStrategy::ALL {
            ProcessGroup::spawn(world_size, |group| check(&group, strategy)).unwrap();
        }
    }
}

#[test]
fn sgd_with_momentum_is_plain_data_parallel() {
    let sgd = SgdConfig::new().with_momentum(Some(MomentumConfig::new().with_momentum(0.9)));
    for_all(|group, strategy| {
        compare::<OddNet, _>(&device(group.rank()), group, strategy, &sgd, 0.01, true)
    });
}

#[test]
fn adam_is_plain_data_parallel() {
    for_all(|group, strategy| {
        compare::<OddNet, _>(
            &device(group.rank()),
            group,
            strategy,
            &AdamConfig::new(),
            0.01,
            true,
        )
    });
}

#[test]
fn adamw_is_plain_data_parallel() {
    let adamw = AdamWConfig::new().with_weight_decay(0.1);
    for_all(|group, strategy| {
        compare::<OddNet, _>(&device(group.rank()), group, strategy, &adamw, 0.01, true)
    });
}

#[test]
fn an_optimizer_without_a_kernel_is_plain_data_parallel() {
    for_all(|group, strategy| {
        compare::<OddNet, _>(
            &device(group.rank()),
            group,
            strategy,
            &LionConfig::new(),
            0.001,
            false,
        )
    });
}

/// A clone made before a step keeps its values, though the step is in place.
#[test]
fn a_clone_keeps_its_parameters() {
    for strategy in ShardingStrategy::ALL {
        ProcessGroup::spawn(2, |group| {
            let device = device(group.rank());
            let model = ShardedModule::new(OddNet::new(&device), strategy, &group).unwrap();
            let mut oss = Oss::new(AdamConfig::new(), &group).unwrap();
            let loss = model.loss(&Batch::new(group.rank(), 0, strategy), &device);
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            let (clone, before) = (model.clone(), values(&model));
            let stepped = oss.step(0.1, model, grads);
            assert_bits("the clone", 0, &values(&clone), &before);
            assert_ne!(values(&stepped), before);
        })
        .unwrap();
    }
}

/// A step is in place, also where Burn has queued the operations that read the parameters before.
#[test]
fn what_was_computed_before_a_step_has_the_parameters_of_before() {
    for strategy in ShardingStrategy::ALL {
        ProcessGroup::spawn(2, |group| {
            let device = device(group.rank());
            let mut model = ShardedModule::new(OddNet::new(&device), strategy, &group).unwrap();
            assert!(!model.collectives_in_place());
            let mut oss = Oss::new(AdamConfig::new(), &group).unwrap();
            let batch = Batch::new(group.rank(), 0, strategy);
            let expected = common::bits(model.loss(&batch, &device));
            let loss = model.loss(&batch, &device);
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            // Not read before the step.
            let before = model.valid().loss(&batch, &device);
            model = oss.step(0.1, model, grads);
            let after = common::bits(model.loss(&batch, &device));
            assert_eq!(common::bits(before), expected, "{strategy}");
            assert_ne!(after, expected, "{strategy}: nothing was trained");
        })
        .unwrap();
    }
}
