//! SGD, with or without momentum and weight decay.

use multiversion::multiversion;

use crate::chunk::{Lockstep, in_chunks};
use crate::control::{HalfMut, StepControl, check_copy, split_copy};
use crate::error::{Error, check_finite, check_numel, check_time, narrow};

/// Momentum of [`sgd_step`]; the types and defaults are those of Burn's `MomentumConfig`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MomentumHyper {
    /// Decay of the velocity.
    pub momentum: f64,
    /// The gradient enters the velocity scaled by `1 - dampening`, but whole at time 1.
    pub dampening: f64,
    /// Whether the step looks ahead by `momentum * velocity`.
    pub nesterov: bool,
}

impl Default for MomentumHyper {
    fn default() -> Self {
        Self {
            momentum: 0.9,
            dampening: 0.1,
            nesterov: false,
        }
    }
}

/// Hyper-parameters of [`sgd_step`]; the defaults are those of Burn's `SgdConfig`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SgdHyper {
    /// The gradient becomes `penalty * param + grad`. `None` is not the same as `Some(0.0)`, which
    /// turns a gradient of -0 to 0.
    pub weight_decay: Option<f32>,
    /// Momentum, which needs a velocity.
    pub momentum: Option<MomentumHyper>,
}

/// Makes one step of Burn's `Sgd` on `param`, in place.
///
/// With `g' = penalty * param + grad` (just `grad` without decay), element by element:
///
/// ```text
/// velocity = (1 - dampening) * g' + momentum * velocity
/// update   = velocity, or velocity * momentum + g' with nesterov, or g' without momentum
/// param   -= lr * update
/// ```
///
/// At time 1 the velocity is written without being read: it becomes `g'`.
///
/// # Errors
///
/// All are refusals, before anything is written: [`Error::NumelMismatch`], [`Error::NotFinite`],
/// [`Error::TimeOutOfRange`], and [`Error::MissingVelocity`] or [`Error::UnexpectedVelocity`]
/// where `velocity` does not match `hyper.momentum`.
///
/// # References
///
/// `burn_optim::Sgd`.
pub fn sgd_step(
    param: &mut [f32],
    grad: &[f32],
    velocity: Option<&mut [f32]>,
    time: usize,
    lr: f64,
    hyper: &SgdHyper,
) -> Result<(), Error> {
    let slices = SgdSlices {
        param,
        grad,
        velocity,
        copy: None,
    };
    sgd_step_with(slices, &StepControl::default(), time, lr, hyper)
}

/// What one step reads and writes. All have as many elements as `param`.
#[derive(Debug)]
pub struct SgdSlices<'a> {
    /// The master weights, stepped in place.
    pub param: &'a mut [f32],
    /// The gradient.
    pub grad: &'a [f32],
    /// The velocity, updated in place; there is one where there is momentum.
    pub velocity: Option<&'a mut [f32]>,
    /// Where the new weights also go, in half precision.
    pub copy: Option<HalfMut<'a>>,
}

/// Makes one step of [`sgd_step`] with what `control` says, in the same single pass, and rounds the new
/// parameters to the copy, if there is one.
///
/// # Errors
///
/// Those of [`sgd_step`], and [`Error::NotFinite`] for a loss scale of 0 or one that is not finite.
pub fn sgd_step_with(
    slices: SgdSlices<'_>,
    control: &StepControl,
    time: usize,
    lr: f64,
    hyper: &SgdHyper,
) -> Result<(), Error> {
    let scalars = SgdScalars::new(time, lr, hyper)?;
    let scale = control.grad_scale()?;
    let numel = slices.param.len();
    check_numel("grad", slices.grad.len(), numel)?;
    check_copy(slices.copy.as_ref(), numel)?;
    match (&hyper.momentum, &slices.velocity) {
        (None, None) => {}
        (Some(_), Some(velocity)) => check_numel("velocity", velocity.len(), numel)?,
        (Some(_), None) => return Err(Error::MissingVelocity),
        (None, Some(velocity)) => {
            return Err(Error::UnexpectedVelocity {
                numel: velocity.len(),
            });
        }
    }
    if !control.found_inf {
        in_chunks(slices, &|slices| slices.step(&scalars, scale));
    }
    Ok(())
}

impl SgdSlices<'_> {
    /// Steps one chunk and copies it while it is in a cache.
    fn step(self, scalars: &SgdScalars, scale: f32) {
        let Self {
            param,
            grad,
            velocity,
            copy,
        } = self;
        match velocity {
            None => plain_chunk(param, grad, scalars, scale),
            Some(velocity) => {
                let slices = MomentumSlices {
                    param: &mut *param,
                    grad,
                    velocity,
                };
                momentum_chunk(slices, scalars, scale);
            }
        }
        if let Some(mut copy) = copy {
            copy.round(param);
        }
    }
}

impl Lockstep for SgdSlices<'_> {
    fn numel(&self) -> usize {
        self.param.len()
    }

    fn split_at(self, mid: usize) -> (Self, Self) {
        let (param, param_rest) = self.param.split_at_mut(mid);
        let (grad, grad_rest) = self.grad.split_at(mid);
        let (velocity, velocity_rest) = self
            .velocity
            .map(|velocity| velocity.split_at_mut(mid))
            .unzip();
        let (copy, copy_rest) = split_copy(self.copy, mid);
        (
            Self {
                param,
                grad,
                velocity,
                copy,
            },
            Self {
                param: param_rest,
                grad: grad_rest,
                velocity: velocity_rest,
                copy: copy_rest,
            },
        )
    }
}

/// What a chunk of SGD with momentum walks.
struct MomentumSlices<'a> {
    param: &'a mut [f32],
    grad: &'a [f32],
    velocity: &'a mut [f32],
}

/// What one step multiplies, each narrowed where Burn narrows it.
pub(crate) struct SgdScalars {
    pub(crate) first: bool,
    pub(crate) lr: f32,
    /// 0 without momentum, like `undampened`.
    pub(crate) momentum: f32,
    pub(crate) undampened: f32,
    pub(crate) nesterov: bool,
    pub(crate) penalty: Option<f32>,
}

impl SgdScalars {
    pub(crate) fn new(time: usize, lr: f64, hyper: &SgdHyper) -> Result<Self, Error> {
        check_finite("lr", lr)?;
        let checked_time = check_time(time)?;
        if let Some(penalty) = hyper.weight_decay {
            check_finite("weight_decay", f64::from(penalty))?;
        }
        let (mut momentum, mut undampened, mut nesterov) = (0.0, 0.0, false);
        if let Some(hyper) = &hyper.momentum {
            check_finite("momentum", hyper.momentum)?;
            check_finite("1 - dampening", 1.0 - hyper.dampening)?;
            momentum = narrow(hyper.momentum);
            undampened = narrow(1.0 - hyper.dampening);
            nesterov = hyper.nesterov;
        }
        Ok(Self {
            first: checked_time == 1,
            lr: narrow(lr),
            momentum,
            undampened,
            nesterov,
            penalty: hyper.weight_decay,
        })
    }
}

#[multiversion(targets("x86_64+avx512f+avx512vl", "x86_64+avx2"))]
fn plain_chunk(param: &mut [f32], grad: &[f32], scalars: &SgdScalars, scale: f32) {
    let lr = scalars.lr;
    match scalars.penalty {
        None => {
            for (param, &grad) in param.iter_mut().zip(grad) {
                *param -= grad * scale * lr;
            }
        }
        Some(penalty) => {
            for (param, &grad) in param.iter_mut().zip(grad) {
                *param -= (*param * penalty + grad * scale) * lr;
            }
        }
    }
}

#[multiversion(targets("x86_64+avx512f+avx512vl", "x86_64+avx2"))]
fn momentum_chunk(slices: MomentumSlices, scalars: &SgdScalars, scale: f32) {
    match (scalars.first, scalars.nesterov, scalars.penalty) {
        (true, false, None) => momentum_loop::<true, false, false>(slices, scalars, scale, 0.0),
        (true, false, Some(penalty)) => {
            momentum_loop::<true, false, true>(slices, scalars, scale, penalty);
        }
        (true, true, None) => momentum_loop::<true, true, false>(slices, scalars, scale, 0.0),
        (true, true, Some(penalty)) => {
            momentum_loop::<true, true, true>(slices, scalars, scale, penalty)
        }
        (false, false, None) => momentum_loop::<false, false, false>(slices, scalars, scale, 0.0),
        (false, false, Some(penalty)) => {
            momentum_loop::<false, false, true>(slices, scalars, scale, penalty);
        }
        (false, true, None) => momentum_loop::<false, true, false>(slices, scalars, scale, 0.0),
        (false, true, Some(penalty)) => {
            momentum_loop::<false, true, true>(slices, scalars, scale, penalty);
        }
    }
}

#[inline(always)]
fn momentum_loop<const FIRST: bool, const NESTEROV: bool, const L2: bool>(
    slices: MomentumSlices<'_>,
    s: &SgdScalars,
    scale: f32,
    penalty: f32,
) {
    let MomentumSlices {
        param,
        grad,
        velocity,
    } = slices;
    for ((param, &grad), velocity) in param.iter_mut().zip(grad).zip(velocity) {
        let grad = grad * scale;
        let grad = if L2 { *param * penalty + grad } else { grad };
        let v = if FIRST {
            grad
        } else {
            grad * s.undampened + *velocity * s.momentum
        };
        let update = if NESTEROV { v * s.momentum + grad } else { v };
        *velocity = v;
        *param -= update * s.lr;
    }
}
