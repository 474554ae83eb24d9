//! The fused steps against stock Burn on its CPU backend: rung A, equal bits at every step.

#![allow(clippy::unwrap_used, reason = "helpers of tests, which may panic")]

mod common;

use burn::module::{Param, ParamId};
use burn::optim::decay::WeightDecayConfig;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{
    Adam, AdamConfig, AdamState, AdamW, AdamWConfig, AdamWState, GradientsParams, Optimizer,
    SgdConfig,
};
use burn::tensor::{Device, Tensor, TensorData};
use burn_shard_kernels::{
    AdamHyper, Error, MomentumHyper, SgdHyper, WeightDecay, adam_step, adamw_step, sgd_step,
};
use common::{Rng, assert_same_bits, learning_rate};

const STEPS: usize = 20;
const NUMELS: [usize; 4] = [1, 17, 1037, 70_001];
const BETAS: [(f32, f32, f32); 2] = [(0.9, 0.999, 1e-5), (0.87, 0.95, 1e-8)];

fn tensor(values: &[f32]) -> Tensor<1> {
    Tensor::from_data(
        TensorData::new(values.to_vec(), [values.len()]),
        &Device::default(),
    )
}

fn values(tensor: &Tensor<1>) -> Vec<f32> {
    tensor.to_data().try_to_vec().unwrap()
}

/// Moments as Burn keeps them, whichever optimizer they belong to.
trait Moments {
    fn moments(&self) -> [Vec<f32>; 2];
}

impl Moments for AdamState<1> {
    fn moments(&self) -> [Vec<f32>; 2] {
        [
            values(&self.momentum.moment_1),
            values(&self.momentum.moment_2),
        ]
    }
}

impl Moments for AdamWState<1> {
    fn moments(&self) -> [Vec<f32>; 2] {
        [
            values(&self.momentum.moment_1),
            values(&self.momentum.moment_2),
        ]
    }
}

fn check_adaptive<O>(
    stock: &O,
    fused: impl Fn(&mut [f32], &[f32], &mut [f32], &mut [f32], usize, f64) -> Result<(), Error>,
) where
    O: Optimizer,
    O::State<1>: Moments,
{
    for numel in NUMELS {
        let mut rng = Rng(numel as u64);
        let mut param = rng.values_with_special(numel);
        let mut expected = tensor(&param);
        let mut state = None;
        // Not zero: what is there before the first step must not matter.
        let (mut moment_1, mut moment_2) = (vec![5.0; numel], vec![5.0; numel]);
        for time in 1..=STEPS {
            let grad = rng.values_with_special(numel);
            let lr = learning_rate(time);
            (expected, state) = stock.step(lr, expected, tensor(&grad), state);
            fused(&mut param, &grad, &mut moment_1, &mut moment_2, time, lr).unwrap();
            let moments = state
                .as_ref()
                .expect("a step should leave a state")
                .moments();
            assert_same_bits("param", time, &values(&expected), &param);
            assert_same_bits("moment_1", time, &moments[0], &moment_1);
            assert_same_bits("moment_2", time, &moments[1], &moment_2);
        }
    }
}

fn adam(hyper: &AdamHyper) -> Adam {
    let decay = match hyper.weight_decay {
        WeightDecay::L2(penalty) => Some(WeightDecayConfig::new(penalty)),
        WeightDecay::None | WeightDecay::Decoupled(_) => None,
    };
    AdamConfig::new()
        .with_beta_1(hyper.beta_1)
        .with_beta_2(hyper.beta_2)
        .with_epsilon(hyper.epsilon)
        .with_weight_decay(decay)
        .build()
}

fn adamw(hyper: &AdamHyper) -> AdamW {
    let decay = match hyper.weight_decay {
        WeightDecay::Decoupled(decay) => decay,
        WeightDecay::None | WeightDecay::L2(_) => 0.0,
    };
    AdamWConfig::new()
        .with_beta_1(hyper.beta_1)
        .with_beta_2(hyper.beta_2)
        .with_epsilon(hyper.epsilon)
        .with_weight_decay(decay)
        .build()
}

fn hypers(decays: [WeightDecay; 3]) -> impl Iterator<Item = AdamHyper> {
    BETAS
        .into_iter()
        .flat_map(move |(beta_1, beta_2, epsilon)| {
            decays.map(|weight_decay| AdamHyper {
                beta_1,
                beta_2,
                epsilon,
                weight_decay,
            })
        })
}

#[test]
fn adam_has_the_bits_of_stock_burn() {
    for hyper in hypers([
        WeightDecay::None,
        WeightDecay::L2(0.0),
        WeightDecay::L2(0.013),
    ]) {
        check_adaptive(
            &adam(&hyper),
            |param, grad, moment_1, moment_2, time, lr| {
                adam_step(param, grad, moment_1, moment_2, time, lr, &hyper)
            },
        );
    }
}

#[test]
fn adamw_has_the_bits_of_stock_burn() {
    // The last decay takes most of the parameter, where `1 - lr * decay` shows how it was rounded.
    for hyper in hypers([
        WeightDecay::None,
        WeightDecay::Decoupled(1e-4),
        WeightDecay::Decoupled(1900.0),
    ]) {
        check_adaptive(
            &adamw(&hyper),
            |param, grad, moment_1, moment_2, time, lr| {
                adamw_step(param, grad, moment_1, moment_2, time, lr, &hyper)
            },
        );
    }
}

/// Burn keeps the velocity private; a wrong one shows in the parameter of the next step.
#[test]
fn sgd_has_the_bits_of_stock_burn() {
    let momentum = |dampening, nesterov| {
        Some(MomentumHyper {
            momentum: 0.9,
            dampening,
            nesterov,
        })
    };
    let momenta = [
        None,
        Some(MomentumHyper::default()),
        momentum(0.0, false),
        momentum(0.0, true),
        momentum(0.3, true),
    ];
    for momentum in momenta {
        for weight_decay in [None, Some(0.0), Some(0.013)] {
            let hyper = SgdHyper {
                weight_decay,
                momentum,
            };
            let stock = SgdConfig::new()
                .with_weight_decay(weight_decay.map(WeightDecayConfig::new))
                .with_momentum(momentum.map(|m| {
                    MomentumConfig::new()
                        .with_momentum(m.momentum)
                        .with_dampening(m.dampening)
                        .with_nesterov(m.nesterov)
                }))
                .build();
            for numel in NUMELS {
                let mut rng = Rng(numel as u64);
                let mut param = rng.values_with_special(numel);
                let mut expected = tensor(&param);
                let mut state = None;
                let mut velocity = momentum.map(|_| vec![5.0; numel]);
                for time in 1..=STEPS {
                    let grad = rng.values_with_special(numel);
                    let lr = learning_rate(time);
                    (expected, state) = stock.step(lr, expected, tensor(&grad), state);
                    sgd_step(&mut param, &grad, velocity.as_deref_mut(), time, lr, &hyper).unwrap();
                    assert_same_bits("param", time, &values(&expected), &param);
                }
            }
        }
    }
}

/// The same through a module and its optimizer, as training calls it.
#[test]
fn adamw_has_the_bits_of_a_stock_module_optimizer() {
    let numel = 1037;
    let device = Device::default().autodiff();
    let mut rng = Rng(1);
    let mut param = rng.values(numel);
    let (mut moment_1, mut moment_2) = (vec![0.0; numel], vec![0.0; numel]);
    let hyper = AdamHyper {
        weight_decay: WeightDecay::Decoupled(0.01),
        ..AdamHyper::default()
    };
    let mut stock = AdamWConfig::new().with_weight_decay(0.01).init();
    let id = ParamId::new();
    let data = TensorData::new(param.clone(), [numel]);
    let mut module = Param::initialized(id, Tensor::<1>::from_data(data, &device).require_grad());
    for time in 1..=STEPS {
        let grad = rng.values(numel);
        let lr = learning_rate(time);
        let mut grads = GradientsParams::new();
        grads.register(id, tensor(&grad));
        module = stock.step(lr, module, grads);
        adamw_step(
            &mut param,
            &grad,
            &mut moment_1,
            &mut moment_2,
            time,
            lr,
            &hyper,
        )
        .unwrap();
        let expected: Vec<f32> = module.val().to_data().try_to_vec().unwrap();
        assert_same_bits("param", time, &expected, &param);
    }
}
