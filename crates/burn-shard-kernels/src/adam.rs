//! Adam and AdamW. They share hyper-parameters and moments, but not the bias correction: Burn's
//! Adam folds it into two scalars, its AdamW divides each moment, and the two round differently.

use multiversion::multiversion;

use crate::chunk::{Lockstep, in_chunks};
use crate::control::{HalfMut, StepControl, check_copy, split_copy};
use crate::error::{Error, check_finite, check_numel, check_time, narrow};

/// How parameters are pulled towards zero.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum WeightDecay {
    /// Not at all. For Adam this is not the same as `L2(0.0)`, which turns a gradient of -0 to 0.
    None,
    /// Adam: the gradient becomes `penalty * param + grad`.
    L2(f32),
    /// AdamW: the parameter is first scaled by `1 - lr * decay`, or left alone if that decay is 0.
    Decoupled(f32),
}

/// Hyper-parameters of [`adam_step`] and [`adamw_step`]; the defaults are those of Burn's
/// `AdamConfig`, without weight decay (`AdamWConfig` has `Decoupled(1e-4)`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamHyper {
    /// Decay of the first moment.
    pub beta_1: f32,
    /// Decay of the second moment.
    pub beta_2: f32,
    /// Added to the denominator.
    pub epsilon: f32,
    /// How parameters are pulled towards zero.
    pub weight_decay: WeightDecay,
}

impl Default for AdamHyper {
    fn default() -> Self {
        Self {
            beta_1: 0.9,
            beta_2: 0.999,
            epsilon: 1e-5,
            weight_decay: WeightDecay::None,
        }
    }
}

/// Makes one step of Burn's `Adam` (without `amsgrad`) on `param`, in place.
///
/// With `t = time`, `g' = penalty * param + grad` (just `grad` without decay), and
/// `c = sqrt(1 - beta_2^t)`, element by element:
///
/// ```text
/// moment_1 = beta_1 * moment_1 + (1 - beta_1) * g'
/// moment_2 = beta_2 * moment_2 + (1 - beta_2) * g'^2
/// param   -= lr * (moment_1 * (c / (1 - beta_1^t)) / (sqrt(moment_2) + epsilon * c))
/// ```
///
/// At time 1 the moments are written without being read.
///
/// # Errors
///
/// All are refusals, before anything is written: [`Error::NumelMismatch`], [`Error::NotFinite`],
/// [`Error::TimeOutOfRange`], and [`Error::UnsupportedWeightDecay`] for
/// [`WeightDecay::Decoupled`].
///
/// # References
///
/// `burn_optim::Adam`, <https://arxiv.org/abs/1412.6980>.
pub fn adam_step(
    param: &mut [f32],
    grad: &[f32],
    moment_1: &mut [f32],
    moment_2: &mut [f32],
    time: usize,
    lr: f64,
    hyper: &AdamHyper,
) -> Result<(), Error> {
    let slices = AdamSlices {
        param,
        grad,
        moment_1,
        moment_2,
        copy: None,
    };
    adam_step_with(slices, &StepControl::default(), time, lr, hyper)
}

/// Makes one step of [`adam_step`] with what `control` says, in the same single pass, and rounds the
/// new parameters to the copy, if there is one.
///
/// # Errors
///
/// Those of [`adam_step`], and [`Error::NotFinite`] for a loss scale of 0 or one that is not finite.
pub fn adam_step_with(
    slices: AdamSlices<'_>,
    control: &StepControl,
    time: usize,
    lr: f64,
    hyper: &AdamHyper,
) -> Result<(), Error> {
    let scalars = AdamScalars::new(time, lr, hyper)?;
    let scale = control.grad_scale()?;
    slices.check()?;
    if !control.found_inf {
        in_chunks(slices, &|slices| {
            slices.step(|slices| adam_chunk(slices, &scalars, scale));
        });
    }
    Ok(())
}

/// Makes one step of Burn's `AdamW` (without `amsgrad` or cautious decay) on `param`, in place.
///
/// With `t = time`, element by element:
///
/// ```text
/// moment_1 = beta_1 * moment_1 + (1 - beta_1) * grad
/// moment_2 = beta_2 * moment_2 + (1 - beta_2) * grad^2
/// delta    = moment_1 / (1 - beta_1^t) / (sqrt(moment_2 / (1 - beta_2^t)) + epsilon)
/// param    = (1 - lr * decay) * param - lr * delta
/// ```
///
/// At time 1 the moments are written without being read. Where `lr * decay` is 0 the parameter is
/// not scaled.
///
/// # Errors
///
/// All are refusals, before anything is written: [`Error::NumelMismatch`], [`Error::NotFinite`],
/// [`Error::TimeOutOfRange`], and [`Error::UnsupportedWeightDecay`] for [`WeightDecay::L2`].
///
/// # References
///
/// `burn_optim::AdamW`, <https://arxiv.org/abs/1711.05101>.
pub fn adamw_step(
    param: &mut [f32],
    grad: &[f32],
    moment_1: &mut [f32],
    moment_2: &mut [f32],
    time: usize,
    lr: f64,
    hyper: &AdamHyper,
) -> Result<(), Error> {
    let slices = AdamSlices {
        param,
        grad,
        moment_1,
        moment_2,
        copy: None,
    };
    adamw_step_with(slices, &StepControl::default(), time, lr, hyper)
}

/// Makes one step of [`adamw_step`] with what `control` says, in the same single pass, and rounds the
/// new parameters to the copy, if there is one.
///
/// # Errors
///
/// Those of [`adamw_step`], and [`Error::NotFinite`] for a loss scale of 0 or one that is not finite.
pub fn adamw_step_with(
    slices: AdamSlices<'_>,
    control: &StepControl,
    time: usize,
    lr: f64,
    hyper: &AdamHyper,
) -> Result<(), Error> {
    let scalars = AdamWScalars::new(time, lr, hyper)?;
    let scale = control.grad_scale()?;
    slices.check()?;
    if !control.found_inf {
        in_chunks(slices, &|slices| {
            slices.step(|slices| adamw_chunk(slices, &scalars, scale));
        });
    }
    Ok(())
}

/// What one step reads and writes. All have as many elements as `param`.
#[derive(Debug)]
pub struct AdamSlices<'a> {
    /// The master weights, stepped in place.
    pub param: &'a mut [f32],
    /// The gradient.
    pub grad: &'a [f32],
    /// The first moment, updated in place.
    pub moment_1: &'a mut [f32],
    /// The second moment, updated in place.
    pub moment_2: &'a mut [f32],
    /// Where the new weights also go, in half precision.
    pub copy: Option<HalfMut<'a>>,
}

impl AdamSlices<'_> {
    fn check(&self) -> Result<(), Error> {
        check_numel("grad", self.grad.len(), self.param.len())?;
        check_numel("moment_1", self.moment_1.len(), self.param.len())?;
        check_numel("moment_2", self.moment_2.len(), self.param.len())?;
        check_copy(self.copy.as_ref(), self.param.len())
    }

    /// Steps one chunk and copies it while it is in a cache.
    fn step(self, step: impl Fn(AdamSlices<'_>)) {
        let Self {
            param,
            grad,
            moment_1,
            moment_2,
            copy,
        } = self;
        step(AdamSlices {
            param: &mut *param,
            grad,
            moment_1,
            moment_2,
            copy: None,
        });
        if let Some(mut copy) = copy {
            copy.round(param);
        }
    }
}

impl Lockstep for AdamSlices<'_> {
    fn numel(&self) -> usize {
        self.param.len()
    }

    fn split_at(self, mid: usize) -> (Self, Self) {
        let (param, param_rest) = self.param.split_at_mut(mid);
        let (grad, grad_rest) = self.grad.split_at(mid);
        let (moment_1, moment_1_rest) = self.moment_1.split_at_mut(mid);
        let (moment_2, moment_2_rest) = self.moment_2.split_at_mut(mid);
        let (copy, copy_rest) = split_copy(self.copy, mid);
        (
            Self {
                param,
                grad,
                moment_1,
                moment_2,
                copy,
            },
            Self {
                param: param_rest,
                grad: grad_rest,
                moment_1: moment_1_rest,
                moment_2: moment_2_rest,
                copy: copy_rest,
            },
        )
    }
}

/// What one Adam step multiplies and adds, each narrowed where Burn narrows it.
pub(crate) struct AdamScalars {
    pub(crate) first: bool,
    pub(crate) lr: f32,
    pub(crate) beta_1: f32,
    pub(crate) beta_2: f32,
    pub(crate) factor_1: f32,
    pub(crate) factor_2: f32,
    pub(crate) combined_factor: f32,
    pub(crate) epsilon: f32,
    pub(crate) penalty: Option<f32>,
}

impl AdamScalars {
    pub(crate) fn new(time: usize, lr: f64, hyper: &AdamHyper) -> Result<Self, Error> {
        let checked_time = check_hyper(time, lr, hyper)?;
        let penalty = match hyper.weight_decay {
            WeightDecay::None => None,
            WeightDecay::L2(penalty) => Some(penalty),
            WeightDecay::Decoupled(_) => {
                return Err(Error::UnsupportedWeightDecay {
                    optimizer: "adam",
                    decay: "decoupled",
                });
            }
        };
        let bias_correction2_sqrt = (1.0 - power(hyper.beta_2, checked_time)).sqrt();
        Ok(Self {
            first: time == 1,
            lr: narrow(lr),
            beta_1: hyper.beta_1,
            beta_2: hyper.beta_2,
            factor_1: 1.0 - hyper.beta_1,
            factor_2: 1.0 - hyper.beta_2,
            combined_factor: bias_correction2_sqrt / (1.0 - power(hyper.beta_1, checked_time)),
            epsilon: hyper.epsilon * bias_correction2_sqrt,
            penalty,
        })
    }
}

/// What one AdamW step multiplies, divides and adds, each narrowed where Burn narrows it.
pub(crate) struct AdamWScalars {
    pub(crate) first: bool,
    pub(crate) lr: f32,
    pub(crate) beta_1: f32,
    pub(crate) beta_2: f32,
    pub(crate) factor_1: f32,
    pub(crate) factor_2: f32,
    pub(crate) correction_1: f32,
    pub(crate) correction_2: f32,
    pub(crate) epsilon: f32,
    /// `None` where Burn does not scale the parameter.
    pub(crate) retained: Option<f32>,
}

impl AdamWScalars {
    pub(crate) fn new(time: usize, lr: f64, hyper: &AdamHyper) -> Result<Self, Error> {
        let checked_time = check_hyper(time, lr, hyper)?;
        let decay = match hyper.weight_decay {
            WeightDecay::None => 0.0,
            WeightDecay::Decoupled(decay) => decay,
            WeightDecay::L2(_) => {
                return Err(Error::UnsupportedWeightDecay {
                    optimizer: "adamw",
                    decay: "l2",
                });
            }
        };
        let decay_rate = lr * f64::from(decay);
        check_finite("lr * weight_decay", decay_rate)?;
        Ok(Self {
            first: time == 1,
            lr: narrow(lr),
            beta_1: hyper.beta_1,
            beta_2: hyper.beta_2,
            factor_1: 1.0 - hyper.beta_1,
            factor_2: 1.0 - hyper.beta_2,
            correction_1: 1.0 - power(hyper.beta_1, checked_time),
            correction_2: 1.0 - power(hyper.beta_2, checked_time),
            epsilon: hyper.epsilon,
            retained: (decay_rate != 0.0).then(|| narrow(1.0 - decay_rate)),
        })
    }
}

fn check_hyper(time: usize, lr: f64, hyper: &AdamHyper) -> Result<i32, Error> {
    check_finite("lr", lr)?;
    check_finite("beta_1", f64::from(hyper.beta_1))?;
    check_finite("beta_2", f64::from(hyper.beta_2))?;
    check_finite("epsilon", f64::from(hyper.epsilon))?;
    match hyper.weight_decay {
        WeightDecay::None => {}
        WeightDecay::L2(decay) | WeightDecay::Decoupled(decay) => {
            check_finite("weight_decay", f64::from(decay))?;
        }
    }
    check_time(time)
}

/// `beta^time`, by the same run-time routine as Burn: never folded at compile time, where another
/// `powi` may round otherwise.
pub(crate) fn power(beta: f32, time: i32) -> f32 {
    std::hint::black_box(beta).powi(std::hint::black_box(time))
}

// Each kernel picks its loop once, outside: inside there is nothing to branch on.

#[multiversion(targets("x86_64+avx512f+avx512vl", "x86_64+avx2"))]
fn adam_chunk(slices: AdamSlices, scalars: &AdamScalars, scale: f32) {
    match (scalars.first, scalars.penalty) {
        (true, None) => adam_loop::<true, false>(slices, scalars, scale, 0.0),
        (true, Some(penalty)) => adam_loop::<true, true>(slices, scalars, scale, penalty),
        (false, None) => adam_loop::<false, false>(slices, scalars, scale, 0.0),
        (false, Some(penalty)) => adam_loop::<false, true>(slices, scalars, scale, penalty),
    }
}

#[inline(always)]
fn adam_loop<const FIRST: bool, const L2: bool>(
    slices: AdamSlices<'_>,
    s: &AdamScalars,
    scale: f32,
    penalty: f32,
) {
    let AdamSlices {
        param,
        grad,
        moment_1,
        moment_2,
        copy: _,
    } = slices;
    let moments = moment_1.iter_mut().zip(moment_2);
    for ((param, &grad), (moment_1, moment_2)) in param.iter_mut().zip(grad).zip(moments) {
        let grad = grad * scale;
        let grad = if L2 { *param * penalty + grad } else { grad };
        let (m1, m2) = if FIRST {
            (grad * s.factor_1, grad * grad * s.factor_2)
        } else {
            (
                *moment_1 * s.beta_1 + grad * s.factor_1,
                *moment_2 * s.beta_2 + grad * grad * s.factor_2,
            )
        };
        let delta = m1 * s.combined_factor / (m2.sqrt() + s.epsilon);
        *moment_1 = m1;
        *moment_2 = m2;
        *param -= delta * s.lr;
    }
}

#[multiversion(targets("x86_64+avx512f+avx512vl", "x86_64+avx2"))]
fn adamw_chunk(slices: AdamSlices, scalars: &AdamWScalars, scale: f32) {
    match (scalars.first, scalars.retained) {
        (true, None) => adamw_loop::<true, false>(slices, scalars, scale, 1.0),
        (true, Some(retained)) => adamw_loop::<true, true>(slices, scalars, scale, retained),
        (false, None) => adamw_loop::<false, false>(slices, scalars, scale, 1.0),
        (false, Some(retained)) => adamw_loop::<false, true>(slices, scalars, scale, retained),
    }
}

#[inline(always)]
fn adamw_loop<const FIRST: bool, const DECAY: bool>(
    slices: AdamSlices<'_>,
    s: &AdamWScalars,
    scale: f32,
    retained: f32,
) {
    let AdamSlices {
        param,
        grad,
        moment_1,
        moment_2,
        copy: _,
    } = slices;
    let moments = moment_1.iter_mut().zip(moment_2);
    for ((param, &grad), (moment_1, moment_2)) in param.iter_mut().zip(grad).zip(moments) {
        let grad = grad * scale;
        let (m1, m2) = if FIRST {
            (grad * s.factor_1, grad * grad * s.factor_2)
        } else {
            (
                *moment_1 * s.beta_1 + grad * s.factor_1,
                *moment_2 * s.beta_2 + grad * grad * s.factor_2,
            )
        };
        let delta = m1 / s.correction_1 / ((m2 / s.correction_2).sqrt() + s.epsilon);
        let decayed = if DECAY { *param * retained } else { *param };
        *moment_1 = m1;
        *moment_2 = m2;
        *param = decayed - delta * s.lr;
    }
}
