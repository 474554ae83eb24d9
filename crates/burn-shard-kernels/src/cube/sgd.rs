//! SGD over flat buffers on a device, in one pass.

use std::ops::Range;

use cubecl::client::Client;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::buffer::{Dtype, FlatBuffer, StepControl, optional_arg};
use super::geometry::{Geometry, Walk};
use super::step::{check_step, grad_scale, rounded, skipped};
use super::throttle::Throttle;
use crate::error::{Error, check_numel};
use crate::sgd::{SgdHyper, SgdScalars};

/// What one step reads and writes. All have as many elements as `param`.
#[derive(Clone, Copy, Debug)]
pub struct SgdBuffers<'a> {
    /// The master weights, `f32`, stepped in place.
    pub param: &'a FlatBuffer,
    /// The gradient, of any dtype.
    pub grad: &'a FlatBuffer,
    /// The velocity, of any dtype, updated in place; there is one where there is momentum.
    pub velocity: Option<&'a FlatBuffer>,
    /// Where the new weights also go, rounded to the dtype of this buffer.
    pub copy: Option<&'a FlatBuffer>,
}

/// Makes one step of [`crate::sgd_step`] on the elements of `ranges`, on the device; ranges, order
/// and control are as in [`adam_step`](super::adam_step).
///
/// # Errors
///
/// All are refusals, before anything is launched: those of [`crate::sgd_step`], and
/// [`Error::WrongDtype`], [`Error::Overlap`], [`Error::OtherDevice`], [`Error::NotScalar`],
/// [`Error::RangeOutOfBounds`], [`Error::RangesOverlap`].
pub fn sgd_step(
    client: &Client,
    buffers: &SgdBuffers<'_>,
    control: &StepControl<'_>,
    ranges: &[Range<usize>],
    time: usize,
    lr: f64,
    hyper: &SgdHyper,
) -> Result<(), Error> {
    let scalars = SgdScalars::new(time, lr, hyper)?;
    check(client, buffers, control, ranges, hyper)?;
    let variant = SgdVariant {
        first: scalars.first,
        momentum: hyper.momentum.is_some(),
        nesterov: scalars.nesterov,
        decay: scalars.penalty.is_some(),
    };
    let dtype = |buffer: Option<&FlatBuffer>| buffer.map_or(Dtype::F32, FlatBuffer::dtype).elem();
    let dtypes = [
        buffers.grad.dtype().elem(),
        dtype(buffers.velocity),
        dtype(buffers.copy),
    ];
    let mut throttle = Throttle::new(client);
    for range in ranges.iter().filter(|range| !range.is_empty()) {
        let geometry = Geometry::new(client, 4, range.start, range.len());
        let vector = geometry.vector;
        // SAFETY: `check` has made sure that all buffers have the elements of `range`, that those
        // written share none with others, and that they are of this device; the kernel looks at no
        // vector but those of `range`.
        unsafe {
            sgd_kernel::launch_unchecked(
                client,
                geometry.cube_count.clone(),
                geometry.cube_dim,
                geometry.address,
                vector,
                buffers.param.arg(vector),
                buffers.grad.arg(vector),
                optional_arg(buffers.velocity, vector).into(),
                optional_arg(buffers.copy, vector).into(),
                optional_arg(control.clip, 1).into(),
                optional_arg(control.loss_scale, 1).into(),
                optional_arg(control.found_inf, 1).into(),
                geometry.walk(),
                SgdArgsLaunch::new(
                    scalars.lr,
                    scalars.momentum,
                    scalars.undampened,
                    scalars.penalty.unwrap_or(0.0),
                ),
                variant,
                dtypes,
            );
        }
        throttle.launched();
    }
    Ok(())
}

fn check(
    client: &Client,
    buffers: &SgdBuffers<'_>,
    control: &StepControl<'_>,
    ranges: &[Range<usize>],
    hyper: &SgdHyper,
) -> Result<(), Error> {
    let numel = buffers.param.numel();
    check_numel("grad", buffers.grad.numel(), numel)?;
    buffers.param.check_dtype("param", &[Dtype::F32])?;
    let mut written = vec![("param", buffers.param)];
    match (buffers.velocity, &hyper.momentum) {
        (None, None) => {}
        (Some(velocity), Some(_)) => {
            check_numel("velocity", velocity.numel(), numel)?;
            written.push(("velocity", velocity));
        }
        (None, Some(_)) => return Err(Error::MissingVelocity),
        (Some(velocity), None) => {
            return Err(Error::UnexpectedVelocity {
                numel: velocity.numel(),
            });
        }
    }
    check_step(client, written, buffers.grad, buffers.copy, control, ranges)
}

/// What a kernel is compiled for, rather than branching on it at each element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct SgdVariant {
    /// The velocity is written without being read.
    pub(crate) first: bool,
    pub(crate) momentum: bool,
    pub(crate) nesterov: bool,
    pub(crate) decay: bool,
}

#[derive(CubeLaunch, CubeType, Clone, Copy)]
pub(crate) struct SgdArgs {
    pub(crate) lr: f32,
    pub(crate) momentum: f32,
    pub(crate) undampened: f32,
    pub(crate) penalty: f32,
}

#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn sgd_kernel<G: Float, M: Float, C: Float, N: Size>(
    param: &mut [Vector<f32, N>],
    grad: &[Vector<G, N>],
    mut velocity: ComptimeOption<&mut [Vector<M, N>]>,
    mut copy: ComptimeOption<&mut [Vector<C, N>]>,
    clip: ComptimeOption<&[f32]>,
    loss_scale: ComptimeOption<&[f32]>,
    found_inf: ComptimeOption<&[f32]>,
    walk: Walk,
    s: SgdArgs,
    #[comptime] variant: SgdVariant,
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
        let p = param[i];
        if comptime!(variant.decay) {
            g += rounded(p * Vector::new(s.penalty));
        }
        #[comptime]
        if let ComptimeOption::Some(velocity) = velocity.as_mut() {
            let mut v = g;
            if comptime!(!variant.first) {
                let kept = Vector::<f32, N>::cast_from(velocity[i]) * Vector::new(s.momentum);
                v = rounded(g * Vector::new(s.undampened)) + rounded(kept);
            }
            velocity[i] = Vector::cast_from(v);
            if comptime!(variant.nesterov) {
                g += rounded(v * Vector::new(s.momentum));
            } else {
                g = v;
            }
        }
        let p = p - rounded(g * Vector::new(s.lr));
        param[i] = p;
        #[comptime]
        if let ComptimeOption::Some(copy) = copy.as_mut() {
            copy[i] = Vector::cast_from(p);
        }
    }
}
