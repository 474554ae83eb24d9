//! The naive reference: values to reduce and how, one element at a time.
//!
//! Shares no code with `reduce.rs`.

use half::{bf16, f16};

use crate::{DType, Element, ReduceOp};

/// An element the suite can make up, reduce naively and compare by bits.
pub(super) trait Probe: Element {
    /// A finite value drawn from `bits`.
    fn draw(bits: u64) -> Self;
    /// The values of all ranks, in rank order, as one; `None` where the operation is refused.
    fn naive(op: ReduceOp, values: &[Self]) -> Option<Self>;
}

/// splitmix64, of a position.
pub(super) fn hash(seed: u64) -> u64 {
    let mut bits = seed
        .wrapping_mul(0x9e37_79b9_7f4a_7c15)
        .wrapping_add(0x2545_f491_4f6c_dd1d);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

/// What rank `rank` holds in a buffer of `numel` elements.
pub(super) fn values<T: Probe>(seed: u64, rank: usize, numel: usize) -> Vec<T> {
    let base = hash(seed ^ hash(rank as u64 + 1));
    (0..numel)
        .map(|index| T::draw(hash(base.wrapping_add(index as u64))))
        .collect()
}

/// The naive reduction of what all ranks hold.
pub(super) fn reduced<T: Probe>(op: ReduceOp, inputs: &[Vec<T>]) -> Option<Vec<T>> {
    let mut column = Vec::with_capacity(inputs.len());
    (0..inputs[0].len())
        .map(|index| {
            column.clear();
            column.extend(inputs.iter().map(|input| input[index]));
            T::naive(op, &column)
        })
        .collect()
}

/// The bytes, which tell `-0.0` from `+0.0` and are equal for equal NaNs.
pub(super) fn bits<T: Element>(elements: &[T]) -> &[u8] {
    bytemuck::cast_slice(elements)
}

/// A float of a magnitude between 2^-8 and 2^8, so that sums round; now and then a zero of either sign.
fn float(bits: u64) -> f64 {
    let sign = if bits & 1 == 0 { 1.0 } else { -1.0 };
    if bits & 0xf0 == 0 {
        return sign * 0.0;
    }
    let exponent = f64::from(((bits >> 8) & 15) as u8) - 8.0;
    let fraction = 1.0 + (bits >> 12) as f64 / (1u64 << 52) as f64;
    sign * fraction * exponent.exp2()
}

macro_rules! floats {
    ($($float:ty),*) => {$(
        impl Probe for $float {
            #[expect(clippy::allow_attributes, reason = "one of the casts is the identity")]
            #[allow(clippy::cast_possible_truncation, reason = "rounding is intended")]
            fn draw(bits: u64) -> Self {
                float(bits) as $float
            }
            fn naive(op: ReduceOp, values: &[Self]) -> Option<Self> {
                let mut result = values[0];
                for &value in &values[1..] {
                    result = match op {
                        ReduceOp::Sum | ReduceOp::Mean => result + value,
                        ReduceOp::Max => if value > result { value } else { result },
                        ReduceOp::Min => if value < result { value } else { result },
                    };
                }
                Some(if op == ReduceOp::Mean { result / values.len() as $float } else { result })
            }
        }
    )*};
}
floats!(f32, f64);

macro_rules! halves {
    ($($half:ty),*) => {$(
        impl Probe for $half {
            fn draw(bits: u64) -> Self {
                Self::from_f64(float(bits))
            }
            fn naive(op: ReduceOp, values: &[Self]) -> Option<Self> {
                let values: Vec<f32> = values.iter().map(|value| value.to_f32()).collect();
                f32::naive(op, &values).map(Self::from_f32)
            }
        }
    )*};
}
halves!(f16, bf16);

macro_rules! integers {
    ($($integer:ty),*) => {$(
        impl Probe for $integer {
            #[expect(clippy::allow_attributes, reason = "one of the casts is the identity")]
            #[allow(clippy::cast_possible_truncation, reason = "the low bits are as random")]
            #[allow(clippy::cast_possible_wrap, reason = "the sign is to be random")]
            fn draw(bits: u64) -> Self {
                bits as $integer
            }
            fn naive(op: ReduceOp, values: &[Self]) -> Option<Self> {
                match op {
                    ReduceOp::Sum => values.iter().copied().reduce(Self::wrapping_add),
                    ReduceOp::Mean => None,
                    ReduceOp::Max => values.iter().copied().max(),
                    ReduceOp::Min => values.iter().copied().min(),
                }
            }
        }
    )*};
}
integers!(i8, i16, i32, i64, u8, u16, u32, u64);

/// Something to be done for every element type.
pub(super) trait ForEach {
    fn run<T: Probe>(&self);
}

/// Runs `body` for every element type.
pub(super) fn for_each_dtype(body: &impl ForEach) {
    for dtype in DType::ALL {
        crate::dtype::with_dtype!(dtype, T => body.run::<T>());
    }
}
