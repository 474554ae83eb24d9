//! Clipping and loss scales on the host: what norms are, and what steps do with what follows from them.

#![allow(clippy::unwrap_used, reason = "helpers of tests, which may panic")]

mod common;

use burn_shard_kernels::{
    AdamHyper, AdamSlices, Error, HalfMut, MomentumHyper, SgdHyper, SgdSlices, StepControl,
    WeightDecay, adam_step_with, adamw_step, adamw_step_with, clip_coefficient, max_abs, reference,
    sgd_step_with, sum_of_powers, sum_of_squares,
};
use common::{Rng, assert_same_bits};
use half::{bf16, f16};

const NUMELS: [usize; 7] = [0, 1, 17, 1000, 65_535, 65_537, 200_003];

fn pool(threads: usize) -> rayon::ThreadPool {
    rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .build()
        .unwrap()
}

/// Sums of integers are exact, so every order gives them; others are off by no more than they may.
#[test]
fn norms_are_what_they_say() {
    for numel in NUMELS {
        let integers: Vec<f32> = (0..numel).map(|i| (i % 100) as f32 - 50.0).collect();
        let exact: u64 = (0..numel)
            .map(|i| (i as u64 % 100).abs_diff(50).pow(2))
            .sum();
        assert_eq!(sum_of_squares(&integers), exact as f64);
        let cubes: u64 = (0..numel)
            .map(|i| (i as u64 % 100).abs_diff(50).pow(3))
            .sum();
        assert_eq!(sum_of_powers(&integers, 3.0).unwrap(), cubes as f64);
        let most = (0..numel).map(|i| (i % 100).abs_diff(50)).max();
        assert_eq!(max_abs(&integers), most.unwrap_or(0) as f32);

        let values = Rng(numel as u64).values(numel);
        // Summed from the smallest up, with what each sum loses.
        let mut squares: Vec<f64> = values
            .iter()
            .map(|&x| f64::from(x) * f64::from(x))
            .collect();
        squares.sort_by(f64::total_cmp);
        let (mut sum, mut lost) = (0.0, 0.0);
        for square in squares {
            let total: f64 = sum + square;
            lost += square - (total - sum);
            sum = total;
        }
        let error = (sum_of_squares(&values) - (sum + lost)).abs();
        assert!(
            error <= sum * numel as f64 * 2f64.powi(-53),
            "{error:e} of {sum:e}"
        );
        let by_powers = sum_of_powers(&values, 2.0).unwrap();
        assert!((by_powers - sum).abs() <= sum * (numel + 4) as f64 * 2f64.powi(-52));
    }
}

#[test]
fn norms_have_the_same_bits_in_any_number_of_threads() {
    let values = Rng(7).values(700_001);
    let all = || {
        let powers = sum_of_powers(&values, 1.5).unwrap();
        (
            sum_of_squares(&values).to_bits(),
            powers.to_bits(),
            max_abs(&values).to_bits(),
        )
    };
    let one = pool(1).install(all);
    for threads in [2, 3, 8] {
        assert_eq!(pool(threads).install(all), one, "{threads} threads");
    }
}

#[test]
fn what_is_not_finite_is_seen_in_every_norm() {
    for place in [0, 5, 99_999, 199_999] {
        let mut values = vec![1.0f32; 200_000];
        values[place] = f32::NAN;
        assert!(sum_of_squares(&values).is_nan());
        assert!(sum_of_powers(&values, 3.0).unwrap().is_nan());
        assert!(max_abs(&values).is_nan());
        values[place] = f32::NEG_INFINITY;
        assert_eq!(sum_of_squares(&values), f64::INFINITY);
        assert_eq!(max_abs(&values), f32::INFINITY);
    }
    // Where squares of `f32` overflow, those of `f64` do not.
    assert!(sum_of_squares(&[f32::MAX; 8]).is_finite());
    for p in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        assert!(matches!(
            sum_of_powers(&[1.0], p),
            Err(Error::NotFinite { .. })
        ));
    }
}

#[test]
fn the_coefficient_shortens_and_never_lengthens() {
    assert_eq!(clip_coefficient(0.5, 1.0).unwrap(), 1.0);
    assert_eq!(clip_coefficient(0.0, 1.0).unwrap(), 1.0);
    let quarter: f32 = 1.0 / 4.000_001;
    assert_eq!(clip_coefficient(4.0, 1.0).unwrap(), quarter);
    assert_eq!(clip_coefficient(f64::INFINITY, 1.0).unwrap(), 0.0);
    assert!(clip_coefficient(f64::NAN, 1.0).unwrap().is_nan());
    assert!(clip_coefficient(1.0, f64::NAN).is_err());
}

fn hypers() -> Vec<AdamHyper> {
    [
        WeightDecay::None,
        WeightDecay::L2(0.013),
        WeightDecay::Decoupled(0.013),
    ]
    .map(|weight_decay| AdamHyper {
        weight_decay,
        ..AdamHyper::default()
    })
    .to_vec()
}

/// A coefficient of 1 changes no bit; another gives the bits of a step with gradients that were multiplied
/// before.
#[test]
fn steps_scale_gradients_as_they_read_them() {
    let controls = [
        StepControl::default(),
        StepControl {
            clip: Some(1.0),
            loss_scale: Some(1.0),
            found_inf: false,
        },
        StepControl {
            clip: Some(0.3),
            loss_scale: None,
            found_inf: false,
        },
        StepControl {
            clip: Some(0.7),
            loss_scale: Some(1024.0),
            found_inf: false,
        },
    ];
    for control in controls {
        let scale = control.clip.unwrap_or(1.0) / control.loss_scale.unwrap_or(1.0);
        for numel in NUMELS {
            for hyper in hypers() {
                let mut rng = Rng(numel as u64);
                let mut expected = [
                    rng.values_with_special(numel),
                    vec![0.0; numel],
                    vec![0.0; numel],
                ];
                let mut got = expected.clone();
                for time in 1..=3 {
                    let grad = rng.values_with_special(numel);
                    let scaled: Vec<f32> = grad.iter().map(|g| g * scale).collect();
                    let decoupled = matches!(hyper.weight_decay, WeightDecay::Decoupled(_));
                    let [param, moment_1, moment_2] = &mut expected;
                    let by_loop = if decoupled {
                        reference::adamw_step
                    } else {
                        reference::adam_step
                    };
                    by_loop(param, &scaled, moment_1, moment_2, time, 0.01, &hyper);
                    let [param, moment_1, moment_2] = &mut got;
                    let slices = AdamSlices {
                        param,
                        grad: &grad,
                        moment_1,
                        moment_2,
                        copy: None,
                    };
                    let step = if decoupled {
                        adamw_step_with
                    } else {
                        adam_step_with
                    };
                    step(slices, &control, time, 0.01, &hyper).unwrap();
                    for (what, (expected, got)) in expected.iter().zip(&got).enumerate() {
                        assert_same_bits(&what.to_string(), time, expected, got);
                    }
                }
            }
            for momentum in [None, Some(MomentumHyper::default())] {
                let hyper = SgdHyper {
                    weight_decay: Some(0.01),
                    momentum,
                };
                let mut rng = Rng(numel as u64);
                let mut expected = [rng.values_with_special(numel), vec![0.0; numel]];
                let mut got = expected.clone();
                for time in 1..=3 {
                    let grad = rng.values_with_special(numel);
                    let scaled: Vec<f32> = grad.iter().map(|g| g * scale).collect();
                    let [param, velocity] = &mut expected;
                    let velocity = momentum.is_some().then_some(&mut velocity[..]);
                    reference::sgd_step(param, &scaled, velocity, time, 0.01, &hyper);
                    let [param, velocity] = &mut got;
                    let slices = SgdSlices {
                        param,
                        grad: &grad,
                        velocity: momentum.is_some().then_some(&mut velocity[..]),
                        copy: None,
                    };
                    sgd_step_with(slices, &control, time, 0.01, &hyper).unwrap();
                    assert_same_bits("param", time, &expected[0], &got[0]);
                    assert_same_bits("velocity", time, &expected[1], &got[1]);
                }
            }
        }
    }
}

#[test]
fn an_overflow_leaves_everything_as_it_was() {
    let control = StepControl {
        found_inf: true,
        ..StepControl::default()
    };
    let before = Rng(1).values(1000);
    let (mut param, mut first, mut second) = (before.clone(), before.clone(), before.clone());
    let mut copy = vec![bf16::from_f32(7.0); 1000];
    let slices = AdamSlices {
        param: &mut param,
        grad: &before,
        moment_1: &mut first,
        moment_2: &mut second,
        copy: Some(HalfMut::BF16(&mut copy)),
    };
    adamw_step_with(slices, &control, 1, 0.1, &AdamHyper::default()).unwrap();
    assert_eq!((&param, &first, &second), (&before, &before, &before));
    assert!(copy.iter().all(|&value| value == bf16::from_f32(7.0)));
}

#[test]
fn the_copy_is_the_new_parameters_rounded() {
    for numel in NUMELS {
        let mut rng = Rng(numel as u64);
        let param = rng.values_with_special(numel);
        let grad = rng.values(numel);
        let zeros = vec![0.0; numel];
        let hyper = AdamHyper::default();
        let [mut expected, mut first, mut second] = [param.clone(), zeros.clone(), zeros.clone()];
        adamw_step(
            &mut expected,
            &grad,
            &mut first,
            &mut second,
            1,
            0.01,
            &hyper,
        )
        .unwrap();
        let mut got = param.clone();
        let mut copy = vec![bf16::ZERO; numel];
        let slices = AdamSlices {
            param: &mut got,
            grad: &grad,
            moment_1: &mut zeros.clone(),
            moment_2: &mut zeros.clone(),
            copy: Some(HalfMut::BF16(&mut copy)),
        };
        pool(3)
            .install(|| adamw_step_with(slices, &StepControl::default(), 1, 0.01, &hyper))
            .unwrap();
        assert_same_bits("param", 1, &expected, &got);
        let rounded = expected.iter().map(|&value| bf16::from_f32(value));
        for (expected, got) in rounded.zip(&copy) {
            assert!(expected.to_bits() == got.to_bits() || (expected.is_nan() && got.is_nan()));
        }
        let mut copy = vec![f16::ZERO; numel];
        let mut got = param;
        let slices = SgdSlices {
            param: &mut got,
            grad: &grad,
            velocity: None,
            copy: Some(HalfMut::F16(&mut copy)),
        };
        sgd_step_with(
            slices,
            &StepControl::default(),
            1,
            0.01,
            &SgdHyper::default(),
        )
        .unwrap();
        for (expected, got) in got.iter().map(|&value| f16::from_f32(value)).zip(&copy) {
            assert!(expected.to_bits() == got.to_bits() || (expected.is_nan() && got.is_nan()));
        }
    }
}

#[test]
fn a_copy_of_another_length_and_a_scale_of_zero_are_refused() {
    let mut copy = vec![f16::ZERO; 3];
    let slices = SgdSlices {
        param: &mut [1.0; 4],
        grad: &[1.0; 4],
        velocity: None,
        copy: Some(HalfMut::F16(&mut copy)),
    };
    let error = sgd_step_with(
        slices,
        &StepControl::default(),
        1,
        0.1,
        &SgdHyper::default(),
    );
    assert!(matches!(
        error,
        Err(Error::NumelMismatch { slice: "copy", .. })
    ));
    let control = StepControl {
        loss_scale: Some(0.0),
        ..StepControl::default()
    };
    let mut param = [1.0; 4];
    let slices = SgdSlices {
        param: &mut param,
        grad: &[1.0; 4],
        velocity: None,
        copy: None,
    };
    let error = sgd_step_with(slices, &control, 1, 0.1, &SgdHyper::default());
    assert!(matches!(error, Err(Error::NotFinite { .. })));
    assert_eq!(param, [1.0; 4]);
}
