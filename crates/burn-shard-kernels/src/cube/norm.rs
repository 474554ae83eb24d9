//! The sum of squares, the largest magnitude and whether all is finite, of flat buffers on a device.
//!
//! Two passes: each unit of the first sums a run of its own into one slot, then ever fewer units sum
//! the slots. Which element goes where depends on lengths alone, never on who comes first, and sums
//! are pairs of `f32`; so the bits are the same from run to run.

use cubecl::client::Client;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::buffer::{Dtype, FlatBuffer, check_devices, check_disjoint, check_scalar};
use super::geometry::{address_type, cpu_cores, vector_width};
use super::throttle::Throttle;
use crate::error::{Error, check_finite};

/// Slots per buffer of the first pass: enough units for a large GPU, and for the cores of a CPU.
const GPU_SLOTS: usize = 16 * 1024;
const CPU_SLOTS: usize = 256;
/// Vectors below which a unit of the first pass is not worth while.
const MIN_RUN: usize = 16;
/// Slots one unit of the second pass takes.
const FAN_IN: usize = 128;
/// What a slot holds: sum, its error, largest magnitude, 1 if something was not finite.
const FIELDS: usize = 4;

/// Where results go: buffers of one `f32` each.
#[derive(Clone, Copy, Debug)]
pub struct NormBuffers<'a> {
    /// The sum of squares. Infinite where squares overflow, though elements may be finite.
    pub sum_of_squares: &'a FlatBuffer,
    /// The largest magnitude of the finite elements.
    pub max_abs: &'a FlatBuffer,
    /// 1 if an element is infinite or NaN, otherwise 0.
    pub found_inf: &'a FlatBuffer,
}

/// Takes the norms of all elements of `buffers` together, of any dtypes, on the device.
///
/// With `n` elements in all, `sum_of_squares` is off by at most `2^-22` of itself where `f32` pairs
/// work (CPU, CUDA), by at most `2^-24 * (run + 300)` on runtimes that reassociate, with `run` the
/// elements of one unit, `n / 16384` or 64 on GPUs. Its bits depend on the lengths of `buffers` and the
/// runtime, not on the run.
///
/// # Memory
///
/// 256 KiB for each of `buffers` while it runs, at most.
///
/// # Errors
///
/// All are refusals, before anything is launched: [`Error::WrongDtype`], [`Error::NotScalar`],
/// [`Error::OtherDevice`], [`Error::Overlap`].
pub fn norms(client: &Client, buffers: &[&FlatBuffer], out: &NormBuffers<'_>) -> Result<(), Error> {
    let written = [
        ("sum_of_squares", out.sum_of_squares),
        ("max_abs", out.max_abs),
        ("found_inf", out.found_inf),
    ];
    for (name, buffer) in written {
        check_scalar(name, buffer)?;
    }
    let read: Vec<_> = buffers.iter().map(|buffer| ("input", *buffer)).collect();
    check_devices(
        client,
        written.iter().chain(&read).map(|(_, buffer)| *buffer),
    )?;
    check_disjoint(&written, &read)?;

    let plans: Vec<_> = buffers
        .iter()
        .filter(|buffer| buffer.numel() > 0)
        .map(|buffer| (*buffer, FirstPass::new(client, buffer)))
        .collect();
    let mut slots: usize = plans.iter().map(|(_, plan)| plan.units).sum();
    let partials = |slots: usize| {
        let numel = slots.max(1) * FIELDS;
        let handle = client.empty(numel * Dtype::F32.size_bytes());
        FlatBuffer::new(client, &handle, 0, numel, Dtype::F32)
    };
    let mut from = partials(slots)?;
    let mut first_slot = 0;
    let mut throttle = Throttle::new(client);
    for (buffer, plan) in &plans {
        let cube_dim = CubeDim::new(client, plan.units);
        // SAFETY: `buffer` is a checked view of this device, of which the units look at `len`
        // vectors; each writes the one slot that is its own, of those `from` was made for.
        unsafe {
            sum_kernel::launch_unchecked(
                client,
                cubecl::calculate_cube_count_elemwise(client, plan.units, cube_dim),
                cube_dim,
                address_type(buffer.numel()),
                plan.vector,
                buffer.arg(plan.vector),
                from.arg(1),
                first_slot,
                plan.units,
                plan.len,
                plan.run,
                plan.contiguous,
                buffer.dtype().elem(),
            );
        }
        first_slot += plan.units;
        throttle.launched();
    }
    while slots > FAN_IN {
        let units = slots.div_ceil(FAN_IN);
        let to = partials(units)?;
        let cube_dim = CubeDim::new(client, units);
        // SAFETY: the units read the `slots` slots `from` was made for, and write one slot each.
        unsafe {
            fold_kernel::launch_unchecked(
                client,
                cubecl::calculate_cube_count_elemwise(client, units, cube_dim),
                cube_dim,
                AddressType::U32,
                from.arg(1),
                to.arg(1),
                slots,
                units,
                FAN_IN,
            );
        }
        from = to;
        slots = units;
    }
    // SAFETY: one unit reads the slots that are left and writes the first element of each output.
    unsafe {
        finish_kernel::launch_unchecked(
            client,
            CubeCount::new_single(),
            CubeDim::new_single(),
            AddressType::U32,
            from.arg(1),
            out.sum_of_squares.arg(1),
            out.max_abs.arg(1),
            out.found_inf.arg(1),
            slots,
        );
    }
    Ok(())
}

/// Leaves in `out` what makes gradients of this sum of squares no longer than `max_norm`:
/// `min(1, max_norm / (norm + 1e-6))`, where `norm` is that of the gradients divided by `loss_scale`.
///
/// All are buffers of one `f32`. The sum of squares is that of all ranks. Where it is infinite the
/// coefficient is 0, where it is NaN the coefficient is NaN.
///
/// # Errors
///
/// All are refusals, before anything is launched: [`Error::NotFinite`], [`Error::WrongDtype`],
/// [`Error::NotScalar`], [`Error::OtherDevice`], [`Error::Overlap`].
///
/// # References
///
/// `torch.nn.utils.clip_grad_norm_`.
pub fn clip_coefficient(
    client: &Client,
    sum_of_squares: &FlatBuffer,
    loss_scale: Option<&FlatBuffer>,
    max_norm: f32,
    out: &FlatBuffer,
) -> Result<(), Error> {
    check_finite("max_norm", f64::from(max_norm))?;
    let mut read = vec![("sum_of_squares", sum_of_squares)];
    read.extend(loss_scale.map(|scale| ("loss_scale", scale)));
    let written = [("out", out)];
    for (name, buffer) in read.iter().chain(&written) {
        check_scalar(name, buffer)?;
    }
    check_devices(
        client,
        written.iter().chain(&read).map(|(_, buffer)| *buffer),
    )?;
    check_disjoint(&written, &read)?;
    // SAFETY: one unit looks at the one element each of these has.
    unsafe {
        clip_kernel::launch_unchecked(
            client,
            CubeCount::new_single(),
            CubeDim::new_single(),
            AddressType::U32,
            sum_of_squares.arg(1),
            loss_scale.map(|scale| scale.arg(1)).into(),
            out.arg(1),
            max_norm,
        );
    }
    Ok(())
}

/// Who sums what in the first pass. Of lengths alone but for the width of vectors, which is the
/// runtime's.
struct FirstPass {
    vector: usize,
    len: usize,
    run: usize,
    units: usize,
    /// Whether a unit's vectors are neighbours, as CPUs like it; otherwise those of neighbouring units
    /// are.
    contiguous: bool,
}

impl FirstPass {
    fn new(client: &Client, buffer: &FlatBuffer) -> Self {
        let vector = vector_width(client, Dtype::F32.size_bytes(), &[buffer.numel()]);
        let len = buffer.numel() / vector;
        let contiguous = cpu_cores(client).is_some();
        let slots = if contiguous { CPU_SLOTS } else { GPU_SLOTS };
        let run = len.div_ceil(slots).max(MIN_RUN);
        Self {
            vector,
            len,
            run,
            units: len.div_ceil(run),
            contiguous,
        }
    }
}

/// Adds `value` to the pair `sum`, `error`: what rounding takes from the sum is kept in `error`, and
/// not lost once for each of many elements.
#[cube]
fn add<N: Size>(sum: &mut Vector<f32, N>, error: &mut Vector<f32, N>, value: Vector<f32, N>) {
    // Knuth's two-sum: exact whichever is larger.
    let total = *sum + value;
    let part = total - *sum;
    *error += (*sum - (total - part)) + (value - part);
    *sum = total;
}

#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn sum_kernel<I: Float, N: Size>(
    input: &[Vector<I, N>],
    slots: &mut [f32],
    first_slot: usize,
    units: usize,
    len: usize,
    run: usize,
    #[comptime] contiguous: bool,
    #[define(I)] _dtype: ElemType,
) {
    if ABSOLUTE_POS < units {
        let mut sum = Vector::<f32, N>::new(0.0f32);
        let mut error = Vector::<f32, N>::new(0.0f32);
        let mut largest = Vector::<f32, N>::new(0.0f32);
        // Not `x - x`, which a compiler that ignores NaN may take for 0.
        let mut beyond = Vector::<f32, N>::new(0.0f32);
        for at in 0..run {
            let i = if comptime!(contiguous) {
                ABSOLUTE_POS * run + at
            } else {
                at * units + ABSOLUTE_POS
            };
            if i < len {
                let x = Vector::<f32, N>::cast_from(input[i]);
                add::<N>(&mut sum, &mut error, x * x);
                let magnitude = x.abs();
                let finite = magnitude.less_equal(&Vector::new(f32::MAX));
                largest = largest.max(select_many(finite, magnitude, Vector::new(0.0f32)));
                beyond = select_many(finite, beyond, Vector::new(1.0f32));
            }
        }
        let slot = (first_slot + ABSOLUTE_POS) * 4;
        let mut total = Vector::<f32, Const<1>>::new(sum.extract(0usize));
        let mut rest = Vector::<f32, Const<1>>::new(error.extract(0usize));
        let mut most = largest.extract(0usize);
        let mut found = beyond.extract(0usize);
        #[unroll]
        for lane in 1..N::value() {
            add::<Const<1>>(&mut total, &mut rest, Vector::new(sum.extract(lane)));
            rest += Vector::new(error.extract(lane));
            most = max(most, largest.extract(lane));
            found = max(found, beyond.extract(lane));
        }
        slots[slot] = total.extract(0usize);
        slots[slot + 1] = rest.extract(0usize);
        slots[slot + 2] = most;
        slots[slot + 3] = found;
    }
}

/// Sums slots `first..last` of `from`: the four fields.
#[cube]
fn fold(from: &[f32], first: usize, last: usize) -> (f32, f32, f32, f32) {
    let mut sum = Vector::<f32, Const<1>>::new(0.0f32);
    let mut error = Vector::<f32, Const<1>>::new(0.0f32);
    let mut most = 0.0f32;
    let mut found = 0.0f32;
    for slot in first..last {
        add::<Const<1>>(&mut sum, &mut error, Vector::new(from[slot * 4]));
        error += Vector::new(from[slot * 4 + 1]);
        most = max(most, from[slot * 4 + 2]);
        found = max(found, from[slot * 4 + 3]);
    }
    (sum.extract(0usize), error.extract(0usize), most, found)
}

#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn fold_kernel(from: &[f32], to: &mut [f32], slots: usize, units: usize, fan_in: usize) {
    if ABSOLUTE_POS < units {
        let first = ABSOLUTE_POS * fan_in;
        let (sum, error, most, found) = fold(from, first, min(first + fan_in, slots));
        to[ABSOLUTE_POS * 4] = sum;
        to[ABSOLUTE_POS * 4 + 1] = error;
        to[ABSOLUTE_POS * 4 + 2] = most;
        to[ABSOLUTE_POS * 4 + 3] = found;
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn finish_kernel(
    from: &[f32],
    sum_of_squares: &mut [f32],
    max_abs: &mut [f32],
    found_inf: &mut [f32],
    slots: usize,
) {
    let (sum, error, most, found) = fold(from, 0usize, slots);
    // An infinite sum leaves NaN in the error.
    sum_of_squares[0] = select(sum <= f32::MAX, sum + error, sum);
    max_abs[0] = most;
    found_inf[0] = found;
}

#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn clip_kernel(
    sum_of_squares: &[f32],
    loss_scale: ComptimeOption<&[f32]>,
    out: &mut [f32],
    max_norm: f32,
) {
    let mut norm = sum_of_squares[0].sqrt();
    #[comptime]
    if let ComptimeOption::Some(loss_scale) = loss_scale {
        norm /= loss_scale[0];
    }
    let coefficient = max_norm / (norm + 1.0e-6f32);
    // Not `min`, which would make 1 of NaN.
    out[0] = select(coefficient > 1.0f32, 1.0f32, coefficient);
}
