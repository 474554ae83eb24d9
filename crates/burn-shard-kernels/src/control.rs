//! What a step on the host does beside stepping: scaled gradients, a step that is skipped, a copy of the
//! parameters in half precision.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::error::{Error, check_finite, check_numel};

/// The host's counterpart of `cube::StepControl`: what gradients are multiplied
/// with, and whether the step happens.
///
/// The gradient is multiplied by `clip / loss_scale` (each 1 where absent) as it is read, in `f32`, before
/// anything else; a product with 1 changes no bit. Where `found_inf` is true nothing at all is written.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepControl {
    /// What clipping multiplies gradients with, as [`clip_coefficient`](crate::clip_coefficient) returns it.
    pub clip: Option<f32>,
    /// What the loss was multiplied with before backward.
    pub loss_scale: Option<f32>,
    /// Whether some rank's gradient is infinite or NaN.
    pub found_inf: bool,
}

impl StepControl {
    /// What a gradient is multiplied with.
    pub(crate) fn grad_scale(&self) -> Result<f32, Error> {
        let mut scale = self.clip.unwrap_or(1.0);
        if let Some(loss_scale) = self.loss_scale {
            check_finite("1 / loss_scale", f64::from(loss_scale).recip())?;
            scale /= loss_scale;
        }
        Ok(scale)
    }
}

/// Where stepped parameters also go, rounded to the nearest (even) number of half precision.
#[derive(Debug)]
pub enum HalfMut<'a> {
    /// IEEE half precision.
    F16(&'a mut [f16]),
    /// The upper half of `f32`.
    BF16(&'a mut [bf16]),
}

impl<'a> HalfMut<'a> {
    /// Number of elements.
    #[must_use]
    pub fn numel(&self) -> usize {
        match self {
            Self::F16(values) => values.len(),
            Self::BF16(values) => values.len(),
        }
    }

    pub(crate) fn split_at(self, mid: usize) -> (Self, Self) {
        match self {
            Self::F16(values) => {
                let (left, right) = values.split_at_mut(mid);
                (Self::F16(left), Self::F16(right))
            }
            Self::BF16(values) => {
                let (left, right) = values.split_at_mut(mid);
                (Self::BF16(left), Self::BF16(right))
            }
        }
    }

    pub(crate) fn round(&mut self, param: &[f32]) {
        match self {
            Self::F16(values) => values.convert_from_f32_slice(param),
            Self::BF16(values) => values.convert_from_f32_slice(param),
        }
    }
}

pub(crate) fn check_copy(copy: Option<&HalfMut<'_>>, numel: usize) -> Result<(), Error> {
    copy.map_or(Ok(()), |copy| check_numel("copy", copy.numel(), numel))
}

/// Splits a copy, if there is one, where all is split.
pub(crate) fn split_copy(
    copy: Option<HalfMut<'_>>,
    mid: usize,
) -> (Option<HalfMut<'_>>, Option<HalfMut<'_>>) {
    copy.map(|copy| copy.split_at(mid)).unzip()
}
