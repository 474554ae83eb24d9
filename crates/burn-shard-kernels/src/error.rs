//! Why a step is refused. Every refusal comes before anything is written.

/// Why a step was refused; nothing has been written.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A slice does not have as many elements as the parameter.
    #[error("{slice} has {numel} elements where the parameter has {param_numel}")]
    NumelMismatch {
        /// The slice that differs.
        slice: &'static str,
        /// Its number of elements.
        numel: usize,
        /// The number of elements of the parameter.
        param_numel: usize,
    },
    /// A hyper-parameter is NaN or infinite, or becomes so when narrowed to `f32`.
    #[error("{name} is {value}, which is not finite in f32")]
    NotFinite {
        /// The hyper-parameter.
        name: &'static str,
        /// Its value.
        value: f64,
    },
    /// The step count is zero or does not fit Burn's `i32`.
    #[error(
        "time is {time}, expected 1..={} (the first step has time 1)",
        i32::MAX
    )]
    TimeOutOfRange {
        /// The step count that was given.
        time: usize,
    },
    /// Adam was given decoupled decay, or AdamW an L2 penalty.
    #[error("{optimizer} has no {decay} weight decay")]
    UnsupportedWeightDecay {
        /// The optimizer that was called.
        optimizer: &'static str,
        /// The kind of decay that was asked for.
        decay: &'static str,
    },
    /// SGD with momentum was given no velocity to update.
    #[error("sgd with momentum needs a velocity")]
    MissingVelocity,
    /// SGD without momentum was given a velocity, which it would leave stale.
    #[error("sgd without momentum was given a velocity of {numel} elements")]
    UnexpectedVelocity {
        /// The number of elements of the velocity.
        numel: usize,
    },
}

pub(crate) fn check_numel(
    slice: &'static str,
    numel: usize,
    param_numel: usize,
) -> Result<(), Error> {
    if numel == param_numel {
        Ok(())
    } else {
        Err(Error::NumelMismatch {
            slice,
            numel,
            param_numel,
        })
    }
}

pub(crate) fn check_finite(name: &'static str, value: f64) -> Result<(), Error> {
    if narrow(value).is_finite() {
        Ok(())
    } else {
        Err(Error::NotFinite { name, value })
    }
}

pub(crate) fn check_time(time: usize) -> Result<i32, Error> {
    match i32::try_from(time) {
        Ok(checked) if checked > 0 => Ok(checked),
        Ok(_) | Err(_) => Err(Error::TimeOutOfRange { time }),
    }
}

/// Narrows a scalar as Burn does at each scalar operation: to the nearest `f32`.
#[allow(
    clippy::cast_possible_truncation,
    reason = "the rounding is the point, as in burn-flex"
)]
pub(crate) fn narrow(value: f64) -> f32 {
    value as f32
}
