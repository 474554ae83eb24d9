//! The library against plain data parallelism on the same device.
//!
//! Averages are taken in rank order, by the library and by the oracle; so everything up to the gradients
//! has equal bits, unless Burn fuses operations: it does not fuse across our own, and what is fused is
//! contracted (a product and a sum round once). The step itself is one kernel here and a dozen in Burn, and kernels' compilers leave the
//! last bits of a division, a square root and a contracted product open: see [`BOUND`].

use burn::module::Module;
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::prelude::*;
use burn_shard::{
    ElementwiseConfig, Oss, ProcessGroup, ShardConfig, ShardedModule, ShardingStrategy,
};

use super::{
    Batch, Bits, OddNet, assert_bits, bits, gradients, own_gradients, plain_dp_gradients, values,
};

const STEPS: usize = 10;

/// Each step rounds a handful of times, relative to the parameter or to its change (at most `lr`,
/// 0.01 here); 10 steps of 2^-20 leave a wide margin over ten times a dozen halves of 2^-23, and a
/// wrong moment, mean or decay is off by more than 1e-4 after the first of them.
const BOUND: f32 = 1e-5;

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

/// A module to train.
pub trait Net: Module {
    fn init(device: &Device) -> Self;
    fn loss(&self, batch: &Batch, device: &Device) -> Tensor<1>;
}

impl Net for OddNet {
    fn init(device: &Device) -> Self {
        Self::new(device)
    }

    fn loss(&self, batch: &Batch, device: &Device) -> Tensor<1> {
        Self::loss(self, batch, device)
    }
}

/// Trains by the library and by the oracle, on `device` of this rank.
pub fn compare<N: Net, C: ElementwiseConfig>(
    device: &Device,
    group: &ProcessGroup,
    strategy: ShardingStrategy,
    optimizer: &C,
    lr: f64,
    fused: bool,
) {
    let config = ShardConfig::new(strategy).with_group_cap_bytes(400);
    let mut model = ShardedModule::new(N::init(device), config, group).unwrap();
    let mut plain = model.unsharded().train();
    let config = serde_json::to_value(optimizer).unwrap();
    let mut oss = Oss::new(serde_json::from_value::<C>(config).unwrap(), group).unwrap();
    let mut stock: ModuleOptimizer = optimizer.build().into();
    let rank = group.rank();
    let what = format!("{strategy} {} rank {rank}", std::any::type_name::<C>());
    let start = values(&plain);
    for step in 0..STEPS {
        let batch = Batch::new(rank, step, strategy);
        let loss = model.loss(&batch, device);
        let grads = GradientsParams::from_grads(loss.clone().backward(), &model);
        let plain_loss = plain.loss(&batch, device);
        let plain_grads = plain_dp_gradients(&plain_loss, &plain, group);
        if step == 0 {
            // The parameters have the same bits.
            assert_eq!(bits(loss), bits(plain_loss), "{what}");
            let expected = own_gradients(&gradients(&plain, &plain_grads), &model);
            let actual = gradients(&model, &grads);
            if cfg!(feature = "fusion") {
                close(&what, step, &actual, &expected);
            } else {
                assert_bits(&what, step, &actual, &expected);
            }
        }
        model = oss.step(lr, model, grads);
        plain = stock.step(lr, plain, plain_grads);
        close(&what, step, &values(&model.unsharded()), &values(&plain));
    }
    assert_ne!(values(&plain), start, "{what}: nothing was trained");
    let trained = model.params().first().unwrap();
    assert_eq!(oss.is_fused(&trained.path), Some(fused), "{what}");
}
