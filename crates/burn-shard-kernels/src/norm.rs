//! Norms of gradients in host memory, and the coefficient that clips them.
//!
//! A rank has a part of each gradient. What it sums here goes through an `all_reduce` (sums are added, maxima
//! are compared), so that every rank ends with the norm of the whole gradient, and gives the coefficient
//! that follows from it to its steps ([`StepControl::clip`](crate::StepControl::clip)).
//!
//! # Bits
//!
//! Sums are `f64`, whatever a machine's vectors or a pool's threads are: elements go to eight sums by their
//! position, runs of fixed length are summed for themselves, and all is added in the order of position. A
//! square of an `f32` is exact in `f64`, so a sum of `n` squares is off by at most `n * 2^-53` of itself.
//! The kernels for devices (`cube::norms`) sum pairs of `f32` in another order: there the bits differ.

use multiversion::multiversion;
use rayon::prelude::*;

use crate::chunk::CHUNK_NUMEL;
use crate::error::{Error, check_finite, narrow};

/// The sum of the squares of `values`; 0 of none. NaN or infinite if one of them is.
#[must_use]
pub fn sum_of_squares(values: &[f32]) -> f64 {
    in_order(values, squares_chunk)
}

/// The sum of `|value|^p` over `values`; 0 of none. NaN or infinite if one of them is.
///
/// # Errors
///
/// [`Error::NotFinite`] if `p` is not a positive finite number.
pub fn sum_of_powers(values: &[f32], p: f64) -> Result<f64, Error> {
    if !(p.is_finite() && p > 0.0) {
        return Err(Error::NotFinite {
            name: "1 / p",
            value: p.recip(),
        });
    }
    let power = |values: &[f32]| lanes(values, |value| f64::from(value.abs()).powf(p));
    Ok(in_order(values, power))
}

/// The largest magnitude of `values`; 0 of none, NaN if one of them is.
#[must_use]
pub fn max_abs(values: &[f32]) -> f32 {
    let chunks = values.par_chunks(CHUNK_NUMEL).map(max_chunk);
    chunks.reduce(|| 0.0, larger)
}

/// What gradients of this `norm` are multiplied with, so that they are no longer than `max_norm`:
/// `min(1, max_norm / (norm + 1e-6))`, narrowed to `f32`.
///
/// Where the norm is infinite the coefficient is 0, where it is NaN the coefficient is NaN.
///
/// # Errors
///
/// [`Error::NotFinite`] if `max_norm` is not.
///
/// # References
///
/// `torch.nn.utils.clip_grad_norm_`.
///
/// # Examples
///
/// ```
/// use burn_shard_kernels::{clip_coefficient, sum_of_squares};
///
/// let gradient = [3.0, 4.0];
/// let norm = sum_of_squares(&gradient).sqrt();
/// assert_eq!(norm, 5.0);
/// assert!((clip_coefficient(norm, 1.0)? - 0.2).abs() < 1e-6);
/// assert_eq!(clip_coefficient(norm, 10.0)?, 1.0);
/// # Ok::<(), burn_shard_kernels::Error>(())
/// ```
pub fn clip_coefficient(norm: f64, max_norm: f64) -> Result<f32, Error> {
    check_finite("max_norm", max_norm)?;
    let coefficient = max_norm / (norm + 1.0e-6);
    // Not `min`, which would make 1 of NaN.
    Ok(narrow(if coefficient > 1.0 { 1.0 } else { coefficient }))
}

/// The sums of fixed runs of `values`, added in order.
fn in_order(values: &[f32], sum: impl Fn(&[f32]) -> f64 + Sync + Send) -> f64 {
    if values.len() <= CHUNK_NUMEL {
        return sum(values);
    }
    let sums: Vec<f64> = values.par_chunks(CHUNK_NUMEL).map(sum).collect();
    sums.into_iter().sum()
}

const LANES: usize = 8;

#[inline(always)]
fn lanes(values: &[f32], term: impl Fn(f32) -> f64) -> f64 {
    let mut sums = [0.0; LANES];
    let mut runs = values.chunks_exact(LANES);
    for run in &mut runs {
        for (sum, &value) in sums.iter_mut().zip(run) {
            *sum += term(value);
        }
    }
    for (sum, &value) in sums.iter_mut().zip(runs.remainder()) {
        *sum += term(value);
    }
    sums.into_iter().sum()
}

#[multiversion(targets("x86_64+avx512f+avx512vl", "x86_64+avx2"))]
fn squares_chunk(values: &[f32]) -> f64 {
    lanes(values, |value| f64::from(value) * f64::from(value))
}

#[multiversion(targets("x86_64+avx512f+avx512vl", "x86_64+avx2"))]
fn max_chunk(values: &[f32]) -> f32 {
    values
        .iter()
        .fold(0.0, |most, value| larger(most, value.abs()))
}

/// The larger of two magnitudes, or the NaN among them.
#[inline(always)]
fn larger(a: f32, b: f32) -> f32 {
    if b > a || b.is_nan() { b } else { a }
}
