//! The arithmetic of reductions: elements of all ranks in, one result out.
//!
//! No groups, no waiting. Work goes block by block over all ranks, so that a result is written to
//! memory once and partial sums stay in the first-level cache.

use half::{bf16, f16};
use multiversion::multiversion;

use crate::{
    communicator::ReduceOp,
    dtype::{Element, with_dtype},
};

/// Elements per block: 8 KiB of `f32`.
const BLOCK: usize = 2048;

/// Writes the reduction of `sources`, one per rank in rank order, to `out`.
///
/// Every source has as many bytes as `out`; `None` stands for zeros. All are aligned to the element.
pub(crate) fn reduce(
    dtype: crate::dtype::DType,
    op: ReduceOp,
    sources: &[Option<&[u8]>],
    out: &mut [u8],
) {
    if out.is_empty() {
        return; // An empty slice of bytes need not be aligned.
    }
    with_dtype!(dtype, T => {
        let sources: Vec<Option<&[T]>> =
            sources.iter().map(|source| source.map(bytemuck::cast_slice)).collect();
        T::reduce(op, &sources, bytemuck::cast_slice_mut(out));
    });
}

/// An element with arithmetic.
trait Reduce: Element {
    fn reduce(op: ReduceOp, sources: &[Option<&[Self]>], out: &mut [Self]);
}

/// What the accumulator of a reduction can do.
trait Accumulator: Copy + 'static {
    const ZERO: Self;
    fn plus(self, other: Self) -> Self;
    fn largest(self, other: Self) -> Self;
    fn smallest(self, other: Self) -> Self;
    /// Division by the world size; never called for integers.
    fn over(self, divisor: Self) -> Self;
    fn times(self, factor: Self) -> Self;
    fn from_usize(value: usize) -> Self;
    fn reciprocal(self) -> Self;
}

macro_rules! float_accumulators {
    ($($float:ty),*) => {$(
        impl Accumulator for $float {
            const ZERO: Self = 0.0;
            #[inline(always)]
            fn plus(self, other: Self) -> Self { self + other }
            #[inline(always)]
            fn largest(self, other: Self) -> Self {
                if other > self || other.is_nan() { other } else { self }
            }
            #[inline(always)]
            fn smallest(self, other: Self) -> Self {
                if other < self || other.is_nan() { other } else { self }
            }
            #[inline(always)]
            fn over(self, divisor: Self) -> Self { self / divisor }
            #[inline(always)]
            fn times(self, factor: Self) -> Self { self * factor }
            #[inline(always)]
            fn from_usize(value: usize) -> Self { value as $float }
            #[inline(always)]
            fn reciprocal(self) -> Self { self.recip() }
        }
    )*};
}
float_accumulators!(f32, f64);

macro_rules! integer_accumulators {
    ($($integer:ty),*) => {$(
        impl Accumulator for $integer {
            const ZERO: Self = 0;
            #[inline(always)]
            fn plus(self, other: Self) -> Self { self.wrapping_add(other) }
            #[inline(always)]
            fn largest(self, other: Self) -> Self { self.max(other) }
            #[inline(always)]
            fn smallest(self, other: Self) -> Self { self.min(other) }
            // The mean of integers is refused before it gets here.
            fn over(self, _: Self) -> Self { self }
            fn times(self, _: Self) -> Self { self }
            fn from_usize(_: usize) -> Self { 1 }
            fn reciprocal(self) -> Self { self }
        }
        impl Reduce for $integer {
            fn reduce(op: ReduceOp, sources: &[Option<&[Self]>], out: &mut [Self]) {
                reduce_in_place(op, sources, out);
            }
        }
    )*};
}
integer_accumulators!(i8, i16, i32, i64, u8, u16, u32, u64);

impl Reduce for f32 {
    fn reduce(op: ReduceOp, sources: &[Option<&[Self]>], out: &mut [Self]) {
        reduce_in_place(op, sources, out);
    }
}
impl Reduce for f64 {
    fn reduce(op: ReduceOp, sources: &[Option<&[Self]>], out: &mut [Self]) {
        reduce_in_place(op, sources, out);
    }
}
impl Reduce for f16 {
    fn reduce(op: ReduceOp, sources: &[Option<&[Self]>], out: &mut [Self]) {
        reduce_widened(op, sources, out, load_f16, store_f16);
    }
}
impl Reduce for bf16 {
    fn reduce(op: ReduceOp, sources: &[Option<&[Self]>], out: &mut [Self]) {
        reduce_widened(op, sources, out, load_bf16, store_bf16);
    }
}

/// For elements that are their own accumulator: the output is the accumulator.
///
/// Bound by memory with the baseline's instructions already: wider ones were measured and do not help.
fn reduce_in_place<T: Accumulator>(op: ReduceOp, sources: &[Option<&[T]>], out: &mut [T]) {
    let zeros = [T::ZERO; BLOCK];
    let mut blocks: Vec<&[T]> = Vec::with_capacity(sources.len());
    let mut start = 0;
    for out in out.chunks_mut(BLOCK) {
        let range = start..start + out.len();
        blocks.clear();
        blocks.extend(
            sources
                .iter()
                .map(|source| source.map_or(&zeros[..out.len()], |s| &s[range.clone()])),
        );
        match op {
            ReduceOp::Sum => fold(&blocks, out, T::plus, |sum| sum),
            ReduceOp::Mean => mean(&blocks, out),
            ReduceOp::Max => fold(&blocks, out, T::largest, |largest| largest),
            ReduceOp::Min => fold(&blocks, out, T::smallest, |smallest| smallest),
        }
        start = range.end;
    }
}

#[inline(always)]
fn mean<T: Accumulator>(blocks: &[&[T]], out: &mut [T]) {
    let world_size = T::from_usize(blocks.len());
    if blocks.len().is_power_of_two() {
        // Its reciprocal is exact, so both round the same real number: equal bits, no division.
        let factor = world_size.reciprocal();
        fold(blocks, out, T::plus, |sum| sum.times(factor));
    } else {
        fold(blocks, out, T::plus, |sum| sum.over(world_size));
    }
}

/// `out = last(((b0 . b1) . b2) . ...)`, with as few passes as there are operations.
#[inline(always)]
fn fold<T: Copy>(blocks: &[&[T]], out: &mut [T], step: impl Fn(T, T) -> T, last: impl Fn(T) -> T) {
    match blocks {
        [] => {}
        [only] => {
            for (out, &a) in out.iter_mut().zip(*only) {
                *out = last(a);
            }
        }
        [first, second] => {
            for ((out, &a), &b) in out.iter_mut().zip(*first).zip(*second) {
                *out = last(step(a, b));
            }
        }
        [first, second, middle @ .., end] => {
            for ((out, &a), &b) in out.iter_mut().zip(*first).zip(*second) {
                *out = step(a, b);
            }
            for block in middle {
                for (out, &b) in out.iter_mut().zip(*block) {
                    *out = step(*out, b);
                }
            }
            for (out, &b) in out.iter_mut().zip(*end) {
                *out = last(step(*out, b));
            }
        }
    }
}

/// For half precision: accumulates in `f32`, rounds once.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512vl+f16c", "x86_64+avx2+f16c"))]
fn reduce_widened<T: Copy>(
    op: ReduceOp,
    sources: &[Option<&[T]>],
    out: &mut [T],
    load: impl Fn(&[T], &mut [f32]),
    store: impl Fn(&[f32], &mut [T]),
) {
    let (mut sum, mut term) = ([0.0f32; BLOCK], [0.0f32; BLOCK]);
    let mut start = 0;
    for out in out.chunks_mut(BLOCK) {
        let range = start..start + out.len();
        let (sum, term) = (&mut sum[..out.len()], &mut term[..out.len()]);
        for (rank, source) in sources.iter().enumerate() {
            let target: &mut [f32] = if rank == 0 { &mut *sum } else { &mut *term };
            match source {
                Some(source) => load(&source[range.clone()], target),
                None => target.fill(0.0),
            }
            if rank > 0 {
                match op {
                    ReduceOp::Sum | ReduceOp::Mean => accumulate(sum, term, f32::plus),
                    ReduceOp::Max => accumulate(sum, term, f32::largest),
                    ReduceOp::Min => accumulate(sum, term, f32::smallest),
                }
            }
        }
        if op == ReduceOp::Mean {
            let world_size = f32::from_usize(sources.len());
            for sum in &mut *sum {
                *sum = sum.over(world_size);
            }
        }
        store(sum, out);
        start = range.end;
    }
}

#[inline(always)]
fn accumulate(sum: &mut [f32], term: &[f32], step: impl Fn(f32, f32) -> f32) {
    for (sum, &term) in sum.iter_mut().zip(term) {
        *sum = step(*sum, term);
    }
}

#[inline(always)]
fn load_f16(source: &[f16], target: &mut [f32]) {
    use half::slice::HalfFloatSliceExt;
    source.convert_to_f32_slice(target);
}

#[inline(always)]
fn store_f16(source: &[f32], target: &mut [f16]) {
    use half::slice::HalfFloatSliceExt;
    target.convert_from_f32_slice(source);
}

#[inline(always)]
fn load_bf16(source: &[bf16], target: &mut [f32]) {
    for (target, source) in target.iter_mut().zip(source) {
        *target = f32::from_bits(u32::from(source.to_bits()) << 16);
    }
}

/// Rounds to nearest, ties to even, as `bf16::from_f32`, but without a branch per element.
#[inline(always)]
fn store_bf16(source: &[f32], target: &mut [bf16]) {
    for (target, source) in target.iter_mut().zip(source) {
        let bits = source.to_bits();
        let odd = (bits >> 16) & 1;
        let rounded = bits.wrapping_add(0x7fff + odd) >> 16;
        let quiet = (bits >> 16) | 0x40;
        let chosen = if source.is_nan() { quiet } else { rounded };
        #[expect(clippy::cast_possible_truncation, reason = "shifted to 16 bits above")]
        let chosen = chosen as u16;
        *target = bf16::from_bits(chosen);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_rounds_as_half_does() {
        // Every upper half with lower halves around a tie, zero and the carry; NaNs among them.
        for low in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
            let source: Vec<f32> = (0..=0xffffu32)
                .map(|high| f32::from_bits(high << 16 | low))
                .collect();
            let mut rounded = vec![bf16::ZERO; source.len()];
            store_bf16(&source, &mut rounded);
            for (source, rounded) in source.iter().zip(&rounded) {
                let expected = bf16::from_f32(*source);
                assert_eq!(
                    rounded.to_bits(),
                    expected.to_bits(),
                    "{:#x}",
                    source.to_bits()
                );
            }
            let mut widened = vec![0.0; source.len()];
            load_bf16(&rounded, &mut widened);
            for (rounded, widened) in rounded.iter().zip(&widened) {
                assert_eq!(u32::from(rounded.to_bits()) << 16, widened.to_bits());
            }
        }
    }

    #[test]
    fn a_mean_over_a_power_of_two_is_a_division() {
        for world_size in 1..=9usize {
            for bits in (0..=u32::MAX).step_by(65_521) {
                let value = f32::from_bits(bits);
                let zero = -0.0f32; // Adding it changes no value but signalling NaNs.
                let mut column = vec![[zero]; world_size];
                column[0] = [value];
                let blocks: Vec<&[f32]> = column.iter().map(|c| c.as_slice()).collect();
                let mut out = [0.0];
                mean(&blocks, &mut out);
                let expected = value / world_size as f32;
                assert!(
                    out[0].to_bits() == expected.to_bits() || value.is_nan(),
                    "{value}"
                );
            }
        }
    }
}
