//! SGD, with or without momentum and weight decay.

use multiversion::multiversion;

use crate::chunk::{Lockstep, in_chunks};
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
    let scalars = SgdScalars::new(time, lr, hyper)?;
    check_numel("grad", grad.len(), param.len())?;
    match (&hyper.momentum, velocity) {
        (None, None) => {
            let slices = PlainSlices { param, grad };
            in_chunks(slices, &|slices| {
                plain_chunk(slices, scalars.lr, scalars.penalty)
            });
        }
        (Some(_), Some(velocity)) => {
            check_numel("velocity", velocity.len(), param.len())?;
            let slices = MomentumSlices {
                param,
                grad,
                velocity,
            };
            in_chunks(slices, &|slices| momentum_chunk(slices, &scalars));
        }
        (Some(_), None) => return Err(Error::MissingVelocity),
        (None, Some(velocity)) => {
            return Err(Error::UnexpectedVelocity {
                numel: velocity.len(),
            });
        }
    }
    Ok(())
}

/// What SGD without momentum walks.
struct PlainSlices<'a> {
    param: &'a mut [f32],
    grad: &'a [f32],
}

impl Lockstep for PlainSlices<'_> {
    fn numel(&self) -> usize {
        self.param.len()
    }

    fn split_at(self, mid: usize) -> (Self, Self) {
        let (param, param_rest) = self.param.split_at_mut(mid);
        let (grad, grad_rest) = self.grad.split_at(mid);
        (
            Self { param, grad },
            Self {
                param: param_rest,
                grad: grad_rest,
            },
        )
    }
}

/// What SGD with momentum walks.
struct MomentumSlices<'a> {
    param: &'a mut [f32],
    grad: &'a [f32],
    velocity: &'a mut [f32],
}

impl Lockstep for MomentumSlices<'_> {
    fn numel(&self) -> usize {
        self.param.len()
    }

    fn split_at(self, mid: usize) -> (Self, Self) {
        let (param, param_rest) = self.param.split_at_mut(mid);
        let (grad, grad_rest) = self.grad.split_at(mid);
        let (velocity, velocity_rest) = self.velocity.split_at_mut(mid);
        (
            Self {
                param,
                grad,
                velocity,
            },
            Self {
                param: param_rest,
                grad: grad_rest,
                velocity: velocity_rest,
            },
        )
    }
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
fn plain_chunk(slices: PlainSlices, lr: f32, penalty: Option<f32>) {
    let PlainSlices { param, grad } = slices;
    match penalty {
        None => {
            for (param, &grad) in param.iter_mut().zip(grad) {
                *param -= grad * lr;
            }
        }
        Some(penalty) => {
            for (param, &grad) in param.iter_mut().zip(grad) {
                *param -= (*param * penalty + grad) * lr;
            }
        }
    }
}

#[multiversion(targets("x86_64+avx512f+avx512vl", "x86_64+avx2"))]
fn momentum_chunk(slices: MomentumSlices, scalars: &SgdScalars) {
    match (scalars.first, scalars.nesterov, scalars.penalty) {
        (true, false, None) => momentum_loop::<true, false, false>(slices, scalars, 0.0),
        (true, false, Some(penalty)) => {
            momentum_loop::<true, false, true>(slices, scalars, penalty);
        }
        (true, true, None) => momentum_loop::<true, true, false>(slices, scalars, 0.0),
        (true, true, Some(penalty)) => momentum_loop::<true, true, true>(slices, scalars, penalty),
        (false, false, None) => momentum_loop::<false, false, false>(slices, scalars, 0.0),
        (false, false, Some(penalty)) => {
            momentum_loop::<false, false, true>(slices, scalars, penalty);
        }
        (false, true, None) => momentum_loop::<false, true, false>(slices, scalars, 0.0),
        (false, true, Some(penalty)) => {
            momentum_loop::<false, true, true>(slices, scalars, penalty);
        }
    }
}

#[inline(always)]
fn momentum_loop<const FIRST: bool, const NESTEROV: bool, const L2: bool>(
    slices: MomentumSlices<'_>,
    s: &SgdScalars,
    penalty: f32,
) {
    let MomentumSlices {
        param,
        grad,
        velocity,
    } = slices;
    for ((param, &grad), velocity) in param.iter_mut().zip(grad).zip(velocity) {
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
