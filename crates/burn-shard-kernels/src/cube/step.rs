//! What the steps of all optimizers have in common: their last checks, and what their kernels ask of the
//! device.

use std::ops::Range;

use cubecl::client::Client;
use cubecl::prelude::*;

use super::buffer::{FlatBuffer, StepControl, check_devices, check_disjoint};
use crate::error::{Error, check_numel};

/// Checks what is left once the state of an optimizer has been checked: `copy`, `control`, devices,
/// overlaps and `ranges`. The first of `written` are the parameters, `copy` is not among them.
pub(super) fn check_step<'a>(
    client: &Client,
    mut written: Vec<(&'static str, &'a FlatBuffer)>,
    grad: &FlatBuffer,
    copy: Option<&'a FlatBuffer>,
    control: &StepControl<'_>,
    ranges: &[Range<usize>],
) -> Result<(), Error> {
    let numel = written[0].1.numel();
    if let Some(copy) = copy {
        check_numel("copy", copy.numel(), numel)?;
        written.push(("copy", copy));
    }
    control.check()?;
    let read: Vec<_> = std::iter::once(("grad", grad))
        .chain(control.named())
        .collect();
    check_devices(
        client,
        written.iter().chain(&read).map(|(_, buffer)| *buffer),
    )?;
    check_disjoint(&written, &read)?;
    check_ranges(ranges, numel)
}

/// Checks that `ranges` lie in `numel` elements, in order, without sharing any.
fn check_ranges(ranges: &[Range<usize>], numel: usize) -> Result<(), Error> {
    let mut previous_end = 0;
    for &Range { start, end } in ranges {
        if start > end || end > numel {
            return Err(Error::RangeOutOfBounds { start, end, numel });
        }
        if start < previous_end {
            return Err(Error::RangesOverlap {
                start,
                previous_end,
            });
        }
        previous_end = end;
    }
    Ok(())
}

/// A product that is not to be contracted with the sum it goes into.
///
/// CubeCL makes one fused operation of every product that only a sum uses. A step would then round
/// where Burn does not; bits that pass through an integer are out of its sight. LLVM folds the two
/// casts again: they cost nothing, and for CUDA, where LLVM contracts too, change nothing.
#[cube]
pub(super) fn rounded<N: Size>(product: Vector<f32, N>) -> Vector<f32, N> {
    Vector::<f32, N>::reinterpret(Vector::<u32, N>::reinterpret(product))
}

/// What a gradient is multiplied with.
#[cube]
pub(super) fn grad_scale(clip: ComptimeOption<&[f32]>, loss_scale: ComptimeOption<&[f32]>) -> f32 {
    let mut scale = 1.0f32;
    #[comptime]
    if let ComptimeOption::Some(clip) = clip {
        scale = clip[0];
    }
    #[comptime]
    if let ComptimeOption::Some(loss_scale) = loss_scale {
        scale /= loss_scale[0];
    }
    scale
}

/// Whether a step is not to happen.
#[cube]
pub(super) fn skipped(found_inf: ComptimeOption<&[f32]>) -> bool {
    let mut found = 0.0f32;
    #[comptime]
    if let ComptimeOption::Some(found_inf) = found_inf {
        found = found_inf[0];
    }
    // Not by `!=`: in WGSL that is false of a NaN.
    u32::reinterpret(found) & 0x7fff_ffff != 0
}
