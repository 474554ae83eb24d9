//! The fused steps against the scalar loops: same bits at every length, value and split.

#![allow(clippy::unwrap_used, reason = "helpers of tests, which may panic")]

mod common;

use burn_shard_kernels::{
    AdamHyper, Error, MomentumHyper, SgdHyper, WeightDecay, adam_step, adamw_step, reference,
    sgd_step,
};
use common::{Rng, assert_same_bits, learning_rate};

const NUMELS: [usize; 13] = [
    0, 1, 3, 7, 15, 16, 17, 31, 33, 1000, 65_535, 65_537, 200_003,
];
const STEPS: usize = 20;

type FusedAdam =
    fn(&mut [f32], &[f32], &mut [f32], &mut [f32], usize, f64, &AdamHyper) -> Result<(), Error>;
type ReferenceAdam = fn(&mut [f32], &[f32], &mut [f32], &mut [f32], usize, f64, &AdamHyper);

fn pool(threads: usize) -> rayon::ThreadPool {
    rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .build()
        .unwrap()
}

/// Steps that fit the time of a test: all of them, fewer where the slices are long.
fn steps(numel: usize) -> usize {
    if numel > 100_000 { 4 } else { STEPS }
}

fn check_adam(fused: FusedAdam, reference: ReferenceAdam, hyper: &AdamHyper) {
    for threads in [1, 3] {
        let pool = pool(threads);
        for numel in NUMELS {
            let mut rng = Rng(numel as u64);
            let mut expected = [
                rng.values_with_special(numel),
                vec![5.0; numel],
                vec![5.0; numel],
            ];
            let mut got = expected.clone();
            for time in 1..=steps(numel) {
                let grad = rng.values_with_special(numel);
                let lr = learning_rate(time);
                let [param, moment_1, moment_2] = &mut expected;
                reference(param, &grad, moment_1, moment_2, time, lr, hyper);
                let [param, moment_1, moment_2] = &mut got;
                pool.install(|| fused(param, &grad, moment_1, moment_2, time, lr, hyper))
                    .unwrap();
                assert_same_bits("param", time, &expected[0], &got[0]);
                assert_same_bits("moment_1", time, &expected[1], &got[1]);
                assert_same_bits("moment_2", time, &expected[2], &got[2]);
            }
        }
    }
}

fn check_sgd(hyper: &SgdHyper) {
    for threads in [1, 3] {
        let pool = pool(threads);
        for numel in NUMELS {
            let mut rng = Rng(numel as u64);
            let mut expected = [rng.values_with_special(numel), vec![5.0; numel]];
            let mut got = expected.clone();
            for time in 1..=steps(numel) {
                let grad = rng.values_with_special(numel);
                let lr = learning_rate(time);
                let [param, velocity] = &mut expected;
                let velocity = hyper.momentum.is_some().then_some(&mut velocity[..]);
                reference::sgd_step(param, &grad, velocity, time, lr, hyper);
                let [param, velocity] = &mut got;
                let velocity = hyper.momentum.is_some().then_some(&mut velocity[..]);
                pool.install(|| sgd_step(param, &grad, velocity, time, lr, hyper))
                    .unwrap();
                assert_same_bits("param", time, &expected[0], &got[0]);
                assert_same_bits("velocity", time, &expected[1], &got[1]);
            }
        }
    }
}

#[test]
fn adam_has_the_bits_of_its_scalar_loop() {
    for weight_decay in [WeightDecay::None, WeightDecay::L2(0.013)] {
        let hyper = AdamHyper {
            weight_decay,
            ..AdamHyper::default()
        };
        check_adam(adam_step, reference::adam_step, &hyper);
    }
}

#[test]
fn adamw_has_the_bits_of_its_scalar_loop() {
    for weight_decay in [
        WeightDecay::None,
        WeightDecay::Decoupled(0.0),
        WeightDecay::Decoupled(0.013),
    ] {
        let hyper = AdamHyper {
            weight_decay,
            ..AdamHyper::default()
        };
        check_adam(adamw_step, reference::adamw_step, &hyper);
    }
}

#[test]
fn sgd_has_the_bits_of_its_scalar_loop() {
    for weight_decay in [None, Some(0.013)] {
        check_sgd(&SgdHyper {
            weight_decay,
            momentum: None,
        });
        for nesterov in [false, true] {
            let momentum = Some(MomentumHyper {
                nesterov,
                ..MomentumHyper::default()
            });
            check_sgd(&SgdHyper {
                weight_decay,
                momentum,
            });
        }
    }
}

/// A refusal must come before anything is written: a half-made step cannot be undone.
#[test]
fn a_refused_step_writes_nothing() {
    let fine = AdamHyper::default();
    let with = |weight_decay| AdamHyper {
        weight_decay,
        ..fine
    };
    let adam_cases: [(FusedAdam, [usize; 3], usize, f64, AdamHyper, Error); 13] = [
        (adam_step, [3, 4, 4], 1, 0.1, fine, mismatch("grad", 3)),
        (adam_step, [4, 5, 4], 1, 0.1, fine, mismatch("moment_1", 5)),
        (adam_step, [4, 4, 0], 1, 0.1, fine, mismatch("moment_2", 0)),
        (
            adam_step,
            [4, 4, 4],
            0,
            0.1,
            fine,
            Error::TimeOutOfRange { time: 0 },
        ),
        (
            adamw_step,
            [4, 4, 4],
            0,
            0.1,
            fine,
            Error::TimeOutOfRange { time: 0 },
        ),
        (
            adamw_step,
            [4, 4, 4],
            1 << 31,
            0.1,
            fine,
            Error::TimeOutOfRange { time: 1 << 31 },
        ),
        (adamw_step, [3, 4, 4], 1, 0.1, fine, mismatch("grad", 3)),
        (adamw_step, [4, 4, 4], 1, 1e39, fine, not_finite("lr", 1e39)),
        (
            adam_step,
            [4, 4, 4],
            1,
            f64::INFINITY,
            fine,
            not_finite("lr", f64::INFINITY),
        ),
        (
            adam_step,
            [4, 4, 4],
            1,
            0.1,
            AdamHyper {
                beta_2: f32::INFINITY,
                ..fine
            },
            not_finite("beta_2", f64::INFINITY),
        ),
        (
            adamw_step,
            [4, 4, 4],
            1,
            0.1,
            with(WeightDecay::Decoupled(f32::NEG_INFINITY)),
            not_finite("weight_decay", f64::NEG_INFINITY),
        ),
        (
            adam_step,
            [4, 4, 4],
            1,
            0.1,
            with(WeightDecay::Decoupled(0.1)),
            Error::UnsupportedWeightDecay {
                optimizer: "adam",
                decay: "decoupled",
            },
        ),
        (
            adamw_step,
            [4, 4, 4],
            1,
            0.1,
            with(WeightDecay::L2(0.1)),
            Error::UnsupportedWeightDecay {
                optimizer: "adamw",
                decay: "l2",
            },
        ),
    ];
    for (step, [grad, moment_1, moment_2], time, lr, hyper, refusal) in adam_cases {
        let mut param = vec![1.0; 4];
        let grad = vec![1.0; grad];
        let (mut moment_1, mut moment_2) = (vec![1.0; moment_1], vec![1.0; moment_2]);
        let got = step(
            &mut param,
            &grad,
            &mut moment_1,
            &mut moment_2,
            time,
            lr,
            &hyper,
        );
        assert_eq!(got, Err(refusal));
        assert!(
            param
                .iter()
                .chain(&moment_1)
                .chain(&moment_2)
                .all(|&x| x == 1.0)
        );
    }
    let momentum = MomentumHyper::default();
    let plain = SgdHyper::default();
    let heavy = SgdHyper {
        momentum: Some(momentum),
        ..plain
    };
    let overflowing = SgdHyper {
        momentum: Some(MomentumHyper {
            momentum: 1e39,
            ..momentum
        }),
        ..plain
    };
    let decayed = SgdHyper {
        weight_decay: Some(f32::INFINITY),
        ..plain
    };
    let sgd_cases: [(usize, Option<usize>, usize, f64, SgdHyper, Error); 8] = [
        (3, None, 1, 0.1, plain, mismatch("grad", 3)),
        (4, Some(3), 1, 0.1, heavy, mismatch("velocity", 3)),
        (4, None, 0, 0.1, plain, Error::TimeOutOfRange { time: 0 }),
        (
            4,
            None,
            1,
            f64::INFINITY,
            plain,
            not_finite("lr", f64::INFINITY),
        ),
        (
            4,
            Some(4),
            1,
            0.1,
            overflowing,
            not_finite("momentum", 1e39),
        ),
        (
            4,
            None,
            1,
            0.1,
            decayed,
            not_finite("weight_decay", f64::INFINITY),
        ),
        (4, None, 1, 0.1, heavy, Error::MissingVelocity),
        (
            4,
            Some(4),
            1,
            0.1,
            plain,
            Error::UnexpectedVelocity { numel: 4 },
        ),
    ];
    for (grad, velocity, time, lr, hyper, refusal) in sgd_cases {
        let mut param = vec![1.0; 4];
        let grad = vec![1.0; grad];
        let mut velocity = velocity.map(|numel| vec![1.0; numel]);
        let got = sgd_step(&mut param, &grad, velocity.as_deref_mut(), time, lr, &hyper);
        assert_eq!(got, Err(refusal));
        assert!(
            param
                .iter()
                .chain(velocity.iter().flatten())
                .all(|&x| x == 1.0)
        );
    }
}

fn mismatch(slice: &'static str, numel: usize) -> Error {
    Error::NumelMismatch {
        slice,
        numel,
        param_numel: 4,
    }
}

fn not_finite(name: &'static str, value: f64) -> Error {
    Error::NotFinite { name, value }
}
