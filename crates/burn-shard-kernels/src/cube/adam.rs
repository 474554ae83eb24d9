//! Adam and AdamW over flat buffers on a device, in one pass.

use std::ops::Range;

use cubecl::client::Client;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::buffer::{Dtype, FlatBuffer, StepControl, optional_arg};
use super::geometry::{Geometry, Walk};
use super::step::{check_step, grad_scale, rounded, skipped};
use super::throttle::Throttle;
use crate::adam::{AdamHyper, AdamScalars, AdamWScalars};
use crate::error::{Error, check_numel};

/// What one step reads and writes. All have as many elements as `param`.
#[derive(Clone, Copy, Debug)]
pub struct AdamBuffers<'a> {
    /// The master weights, `f32`, stepped in place.
    pub param: &'a FlatBuffer,
    /// The gradient, of any dtype.
    pub grad: &'a FlatBuffer,
    /// The first moment, of any dtype, updated in place. In half precision it is rounded when
    /// stored; the step itself uses it unrounded.
    pub moment_1: &'a FlatBuffer,
    /// The second moment, of the dtype of `moment_1`, likewise.
    pub moment_2: &'a FlatBuffer,
    /// Where the new weights also go, rounded to the dtype of this buffer.
    pub copy: Option<&'a FlatBuffer>,
}

/// Makes one step of [`crate::adam_step`] on the elements of `ranges`, on the device.
///
/// Elements outside of all ranges are neither read nor written: the ranges are those of the
/// parameters that have a gradient. There is no `amsgrad`, as on the host path. One launch per range, so
/// join neighbours by [`merge_ranges`](crate::merge_ranges) first; ranges that start and end at multiples of
/// 16 elements run at full speed.
///
/// # Ordering
///
/// Returns when the launches are queued; they are ordered as all work of this client's stream. On the
/// CPU runtime some are waited for where they are many.
///
/// # Errors
///
/// All are refusals, before anything is launched: those of [`crate::adam_step`], and
/// [`Error::WrongDtype`], [`Error::Overlap`], [`Error::OtherDevice`], [`Error::NotScalar`],
/// [`Error::RangeOutOfBounds`], [`Error::RangesOverlap`].
pub fn adam_step(
    client: &Client,
    buffers: &AdamBuffers<'_>,
    control: &StepControl<'_>,
    ranges: &[Range<usize>],
    time: usize,
    lr: f64,
    hyper: &AdamHyper,
) -> Result<(), Error> {
    let s = AdamScalars::new(time, lr, hyper)?;
    let scalars = Scalars {
        lr: s.lr,
        beta_1: s.beta_1,
        beta_2: s.beta_2,
        factor_1: s.factor_1,
        factor_2: s.factor_2,
        correction_1: s.combined_factor,
        correction_2: 1.0,
        epsilon: s.epsilon,
        decay: s.penalty.unwrap_or(0.0),
    };
    let variant = AdamVariant {
        first: s.first,
        decoupled: false,
        decay: s.penalty.is_some(),
    };
    step(client, buffers, control, ranges, variant, &scalars)
}

/// Makes one step of [`crate::adamw_step`] on the elements of `ranges`, on the device; as
/// [`adam_step`] otherwise.
///
/// # Errors
///
/// Those of [`adam_step`].
pub fn adamw_step(
    client: &Client,
    buffers: &AdamBuffers<'_>,
    control: &StepControl<'_>,
    ranges: &[Range<usize>],
    time: usize,
    lr: f64,
    hyper: &AdamHyper,
) -> Result<(), Error> {
    let s = AdamWScalars::new(time, lr, hyper)?;
    let scalars = Scalars {
        lr: s.lr,
        beta_1: s.beta_1,
        beta_2: s.beta_2,
        factor_1: s.factor_1,
        factor_2: s.factor_2,
        correction_1: s.correction_1,
        correction_2: s.correction_2,
        epsilon: s.epsilon,
        decay: s.retained.unwrap_or(1.0),
    };
    let variant = AdamVariant {
        first: s.first,
        decoupled: true,
        decay: s.retained.is_some(),
    };
    step(client, buffers, control, ranges, variant, &scalars)
}

struct Scalars {
    lr: f32,
    beta_1: f32,
    beta_2: f32,
    factor_1: f32,
    factor_2: f32,
    correction_1: f32,
    correction_2: f32,
    epsilon: f32,
    decay: f32,
}

fn step(
    client: &Client,
    buffers: &AdamBuffers<'_>,
    control: &StepControl<'_>,
    ranges: &[Range<usize>],
    variant: AdamVariant,
    scalars: &Scalars,
) -> Result<(), Error> {
    let (moment, copy) = check(client, buffers, control, ranges)?;
    let grad = buffers.grad.dtype().elem();
    let mut throttle = Throttle::new(client);
    for range in ranges.iter().filter(|range| !range.is_empty()) {
        let geometry = Geometry::new(client, 4, range.start, range.len());
        let vector = geometry.vector;
        // SAFETY: `check` has made sure that all buffers have the elements of `range`, that those
        // written share none with others, and that they are of this device; the kernel looks at no
        // vector but those of `range`.
        unsafe {
            adam_kernel::launch_unchecked(
                client,
                geometry.cube_count.clone(),
                geometry.cube_dim,
                geometry.address,
                vector,
                buffers.param.arg(vector),
                buffers.moment_1.arg(vector),
                buffers.moment_2.arg(vector),
                buffers.grad.arg(vector),
                optional_arg(buffers.copy, vector).into(),
                optional_arg(control.clip, 1).into(),
                optional_arg(control.loss_scale, 1).into(),
                optional_arg(control.found_inf, 1).into(),
                geometry.walk(),
                AdamArgsLaunch::new(
                    scalars.lr,
                    scalars.beta_1,
                    scalars.beta_2,
                    scalars.factor_1,
                    scalars.factor_2,
                    scalars.correction_1,
                    scalars.correction_2,
                    scalars.epsilon,
                    scalars.decay,
                ),
                variant,
                [grad, moment.elem(), copy.elem()],
            );
        }
        throttle.launched();
    }
    Ok(())
}

/// Checks all there is to check; the dtypes of moments and copy.
fn check(
    client: &Client,
    buffers: &AdamBuffers<'_>,
    control: &StepControl<'_>,
    ranges: &[Range<usize>],
) -> Result<(Dtype, Dtype), Error> {
    let numel = buffers.param.numel();
    check_numel("grad", buffers.grad.numel(), numel)?;
    check_numel("moment_1", buffers.moment_1.numel(), numel)?;
    check_numel("moment_2", buffers.moment_2.numel(), numel)?;
    buffers.param.check_dtype("param", &[Dtype::F32])?;
    let moment = buffers.moment_1.dtype();
    if buffers.moment_2.dtype() != moment {
        return Err(Error::WrongDtype {
            buffer: "moment_2",
            expected: moment.name(),
            found: buffers.moment_2.dtype().name(),
        });
    }
    let written = vec![
        ("param", buffers.param),
        ("moment_1", buffers.moment_1),
        ("moment_2", buffers.moment_2),
    ];
    check_step(client, written, buffers.grad, buffers.copy, control, ranges)?;
    let copy = buffers.copy.map_or(Dtype::F32, FlatBuffer::dtype);
    Ok((moment, copy))
}

/// What a kernel is compiled for, rather than branching on it at each element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct AdamVariant {
    /// Moments are written without being read.
    pub(crate) first: bool,
    /// AdamW rather than Adam.
    pub(crate) decoupled: bool,
    pub(crate) decay: bool,
}

/// The scalars of a step, as [`AdamScalars`] and [`AdamWScalars`] have them: `correction_1` is
/// Adam's `combined_factor`, `decay` the penalty of the one and what the other retains.
#[derive(CubeLaunch, CubeType, Clone, Copy)]
pub(crate) struct AdamArgs {
    pub(crate) lr: f32,
    pub(crate) beta_1: f32,
    pub(crate) beta_2: f32,
    pub(crate) factor_1: f32,
    pub(crate) factor_2: f32,
    pub(crate) correction_1: f32,
    pub(crate) correction_2: f32,
    pub(crate) epsilon: f32,
    pub(crate) decay: f32,
}

#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn adam_kernel<G: Float, M: Float, C: Float, N: Size>(
    param: &mut [Vector<f32, N>],
    moment_1: &mut [Vector<M, N>],
    moment_2: &mut [Vector<M, N>],
    grad: &[Vector<G, N>],
    mut copy: ComptimeOption<&mut [Vector<C, N>]>,
    clip: ComptimeOption<&[f32]>,
    loss_scale: ComptimeOption<&[f32]>,
    found_inf: ComptimeOption<&[f32]>,
    walk: Walk,
    s: AdamArgs,
    #[comptime] variant: AdamVariant,
    #[define(G, M, C)] _dtypes: [ElemType; 3],
) {
    let scaled = comptime!(clip.is_some() || loss_scale.is_some());
    let scale = grad_scale(clip, loss_scale);
    let from = ABSOLUTE_POS * walk.run;
    let mut to = from;
    if from < walk.len && !skipped(found_inf) {
        to = min(from + walk.run, walk.len);
    }
    for at in from..to {
        let i = walk.start + at;
        let mut g = Vector::<f32, N>::cast_from(grad[i]);
        if comptime!(scaled) {
            g = rounded(g * Vector::new(scale));
        }
        let mut p = param[i];
        if comptime!(variant.decay && !variant.decoupled) {
            g += rounded(p * Vector::new(s.decay));
        }
        let mut m1 = rounded(g * Vector::new(s.factor_1));
        let mut m2 = rounded(g * g * Vector::new(s.factor_2));
        if comptime!(!variant.first) {
            m1 += rounded(Vector::<f32, N>::cast_from(moment_1[i]) * Vector::new(s.beta_1));
            m2 += rounded(Vector::<f32, N>::cast_from(moment_2[i]) * Vector::new(s.beta_2));
        }
        let epsilon = Vector::new(s.epsilon);
        let delta = if comptime!(variant.decoupled) {
            let corrected_2 = m2 / Vector::new(s.correction_2);
            m1 / Vector::new(s.correction_1) / (corrected_2.sqrt() + epsilon)
        } else {
            m1 * Vector::new(s.correction_1) / (m2.sqrt() + epsilon)
        };
        if comptime!(variant.decay && variant.decoupled) {
            p = rounded(p * Vector::new(s.decay));
        }
        p -= rounded(delta * Vector::new(s.lr));
        moment_1[i] = Vector::cast_from(m1);
        moment_2[i] = Vector::cast_from(m2);
        param[i] = p;
        #[comptime]
        if let ComptimeOption::Some(copy) = copy.as_mut() {
            copy[i] = Vector::cast_from(p);
        }
    }
}
