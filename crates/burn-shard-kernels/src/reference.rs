//! The same steps as plain scalar loops: read these first.
//!
//! Each line is one tensor operation of Burn's stock optimizer, in its order. There are no checks,
//! no vectors and no threads; the fused steps are tested bitwise against these, and both against
//! Burn.

use crate::adam::{AdamHyper, WeightDecay, power};
use crate::error::narrow;
use crate::sgd::SgdHyper;

/// [`adam_step`](crate::adam_step), one element at a time. [`WeightDecay::Decoupled`] counts as no
/// decay.
///
/// # Panics
///
/// If a slice is shorter than `param`, or `time` is over `i32::MAX`.
pub fn adam_step(
    param: &mut [f32],
    grad: &[f32],
    moment_1: &mut [f32],
    moment_2: &mut [f32],
    time: usize,
    lr: f64,
    hyper: &AdamHyper,
) {
    let exponent = exponent(time);
    let correction_2_sqrt = (1.0 - power(hyper.beta_2, exponent)).sqrt();
    let combined_factor = correction_2_sqrt / (1.0 - power(hyper.beta_1, exponent));
    for i in 0..param.len() {
        let mut g = grad[i];
        if let WeightDecay::L2(penalty) = hyper.weight_decay {
            let decay = param[i] * penalty;
            g += decay;
        }
        moments(g, &mut moment_1[i], &mut moment_2[i], time, hyper);
        let numerator = moment_1[i] * combined_factor;
        let root = moment_2[i].sqrt();
        let denominator = root + hyper.epsilon * correction_2_sqrt;
        let update = numerator / denominator;
        let delta = update * narrow(lr);
        param[i] -= delta;
    }
}

/// [`adamw_step`](crate::adamw_step), one element at a time. [`WeightDecay::L2`] counts as no
/// decay.
///
/// # Panics
///
/// If a slice is shorter than `param`, or `time` is over `i32::MAX`.
pub fn adamw_step(
    param: &mut [f32],
    grad: &[f32],
    moment_1: &mut [f32],
    moment_2: &mut [f32],
    time: usize,
    lr: f64,
    hyper: &AdamHyper,
) {
    let exponent = exponent(time);
    let correction_1 = 1.0 - power(hyper.beta_1, exponent);
    let correction_2 = 1.0 - power(hyper.beta_2, exponent);
    let decay_rate = match hyper.weight_decay {
        WeightDecay::Decoupled(decay) => lr * f64::from(decay),
        WeightDecay::None | WeightDecay::L2(_) => 0.0,
    };
    for i in 0..param.len() {
        moments(grad[i], &mut moment_1[i], &mut moment_2[i], time, hyper);
        let corrected_1 = moment_1[i] / correction_1;
        let corrected_2 = moment_2[i] / correction_2;
        let root = corrected_2.sqrt();
        let denominator = root + hyper.epsilon;
        let update = corrected_1 / denominator;
        if decay_rate != 0.0 {
            param[i] *= narrow(1.0 - decay_rate);
        }
        let delta = update * narrow(lr);
        param[i] -= delta;
    }
}

/// [`sgd_step`](crate::sgd_step), one element at a time.
///
/// # Panics
///
/// If a slice is shorter than `param`, or there is momentum but no velocity.
pub fn sgd_step(
    param: &mut [f32],
    grad: &[f32],
    mut velocity: Option<&mut [f32]>,
    time: usize,
    lr: f64,
    hyper: &SgdHyper,
) {
    for i in 0..param.len() {
        let mut g = grad[i];
        if let Some(penalty) = hyper.weight_decay {
            let decay = param[i] * penalty;
            g += decay;
        }
        if let Some(momentum) = &hyper.momentum {
            let v = &mut velocity
                .as_mut()
                .expect("momentum should come with a velocity")[i];
            if time == 1 {
                *v = g;
            } else {
                let fresh = g * narrow(1.0 - momentum.dampening);
                let kept = *v * narrow(momentum.momentum);
                *v = fresh + kept;
            }
            if momentum.nesterov {
                let ahead = *v * narrow(momentum.momentum);
                g += ahead;
            } else {
                g = *v;
            }
        }
        let delta = g * narrow(lr);
        param[i] -= delta;
    }
}

/// The moments of Adam and AdamW alike.
fn moments(grad: f32, moment_1: &mut f32, moment_2: &mut f32, time: usize, hyper: &AdamHyper) {
    let fresh_1 = grad * (1.0 - hyper.beta_1);
    let square = grad * grad;
    let fresh_2 = square * (1.0 - hyper.beta_2);
    if time == 1 {
        *moment_1 = fresh_1;
        *moment_2 = fresh_2;
    } else {
        let kept_1 = *moment_1 * hyper.beta_1;
        *moment_1 = kept_1 + fresh_1;
        let kept_2 = *moment_2 * hyper.beta_2;
        *moment_2 = kept_2 + fresh_2;
    }
}

fn exponent(time: usize) -> i32 {
    i32::try_from(time).expect("time should fit an i32")
}
