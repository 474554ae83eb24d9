//! Whole models on wgpu, a logical device per rank: equal to plain data parallelism on the same devices.
//!
//! Averages are taken on the host, in rank order, by the library and by the oracle; so everything up to
//! the gradients has equal bits. The step itself is one kernel here and a dozen in Burn, and WGSL leaves
//! the last bits of a division, a square root and a contracted product open: see [`BOUND`].

#![allow(clippy::unwrap_used, reason = "a test ends at the first error")]

mod common;

use std::sync::OnceLock;

use burn::backend::DispatchDevice;
use burn::module::Module;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{
    AdamConfig, AdamWConfig, GradientsParams, LionConfig, ModuleOptimizer, SgdConfig,
};
use burn::prelude::*;
use burn_shard::{
    ElementwiseConfig, Oss, ProcessGroup, ShardConfig, ShardedModule, ShardingStrategy,
};
use common::{
    Batch, Bits, OddNet, assert_bits, gradients, own_gradients, plain_dp_gradients, values,
};
use cubecl::wgpu::{
    AutoGraphicsApi, RuntimeOptions, WgpuDevice, WgpuSetup, try_init_device, try_init_setup, wgpu,
};

const STEPS: usize = 10;

/// Each step rounds a handful of times, relative to the parameter or to its change (at most `lr`,
/// 0.01 here); 10 steps of 2^-20 leave a wide margin over ten times a dozen halves of 2^-23, and a
/// wrong moment, mean or decay is off by more than 1e-4 after the first of them.
const BOUND: f32 = 1e-5;

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

fn close(what: &str, step: usize, actual: &Bits, expected: &Bits) {
    for ((path, actual), (_, expected)) in actual.iter().zip(expected) {
        assert_eq!(
            actual.len(),
            expected.len(),
            "{what}, step {step}: `{path}`"
        );
        for (index, (&a, &e)) in actual.iter().zip(expected).enumerate() {
            let (a, e) = (f32::from_bits(a), f32::from_bits(e));
            assert!(
                (a - e).abs() <= BOUND * (1.0 + e.abs()),
                "{what}, step {step}: `{path}`[{index}] is {a}, expected {e}"
            );
        }
    }
}

/// Trains by the library and by the oracle.
fn compare<C: ElementwiseConfig>(
    group: &ProcessGroup,
    strategy: ShardingStrategy,
    optimizer: &C,
    lr: f64,
    fused: bool,
) {
    let device = device(group.rank());
    let config = ShardConfig::new(strategy).with_group_cap_bytes(400);
    let mut model = ShardedModule::new(OddNet::new(&device), config, group).unwrap();
    let mut plain = model.unsharded().train();
    let config = serde_json::to_value(optimizer).unwrap();
    let mut oss = Oss::new(serde_json::from_value::<C>(config).unwrap(), group).unwrap();
    let mut stock: ModuleOptimizer = optimizer.build().into();
    let rank = group.rank();
    let what = format!("{strategy} {} rank {rank}", std::any::type_name::<C>());
    let start = values(&plain);
    for step in 0..STEPS {
        let batch = Batch::new(rank, step, strategy);
        let loss = model.loss(&batch, &device);
        let grads = GradientsParams::from_grads(loss.clone().backward(), &model);
        let plain_loss = plain.loss(&batch, &device);
        let plain_grads = plain_dp_gradients(&plain_loss, &plain, group);
        if step == 0 {
            // The parameters have the same bits.
            assert_eq!(common::bits(loss), common::bits(plain_loss), "{what}");
            let expected = own_gradients(&gradients(&plain, &plain_grads), &model);
            assert_bits(&what, step, &gradients(&model, &grads), &expected);
        }
        model = oss.step(lr, model, grads);
        plain = stock.step(lr, plain, plain_grads);
        close(&what, step, &values(&model.unsharded()), &values(&plain));
    }
    assert_ne!(values(&plain), start, "{what}: nothing was trained");
    assert_eq!(oss.is_fused("input.weight"), Some(fused), "{what}");
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
    for_all(|group, strategy| compare(group, strategy, &sgd, 0.01, true));
}

#[test]
fn adam_is_plain_data_parallel() {
    for_all(|group, strategy| compare(group, strategy, &AdamConfig::new(), 0.01, true));
}

#[test]
fn adamw_is_plain_data_parallel() {
    let adamw = AdamWConfig::new().with_weight_decay(0.1);
    for_all(|group, strategy| compare(group, strategy, &adamw, 0.01, true));
}

#[test]
fn an_optimizer_without_a_kernel_is_plain_data_parallel() {
    for_all(|group, strategy| compare(group, strategy, &LionConfig::new(), 0.001, false));
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
