//! Reductions in rank order, one element at a time.

use half::{bf16, f16};

const SUM: i32 = 0;
const MAX: i32 = 2;
const MIN: i32 = 3;
const AVG: i32 = 4;

/// Bytes of an element of NCCL's type `dtype`; none if there is no such type.
pub(crate) const fn size_bytes(dtype: i32) -> Option<usize> {
    match dtype {
        0 | 1 => Some(1),
        6 | 9 => Some(2),
        2 | 3 | 7 => Some(4),
        4 | 5 | 8 => Some(8),
        _ => None,
    }
}

/// Whether NCCL has the operation for the type.
pub(crate) const fn has(op: i32) -> bool {
    matches!(op, SUM | MAX | MIN | AVG)
}

trait Number: bytemuck::Pod {
    type Wide: Copy;
    fn wide(self) -> Self::Wide;
    fn back(wide: Self::Wide) -> Self;
    fn join(op: i32, a: Self::Wide, b: Self::Wide) -> Self::Wide;
    fn over(sum: Self::Wide, ranks: usize) -> Self::Wide;
}

macro_rules! floats {
    ($($float:ty, $wide:ty, $widen:expr, $narrow:expr;)*) => {$(
        impl Number for $float {
            type Wide = $wide;
            fn wide(self) -> $wide { $widen(self) }
            fn back(wide: $wide) -> Self { $narrow(wide) }
            fn join(op: i32, a: $wide, b: $wide) -> $wide {
                match op {
                    MAX => if b > a || b.is_nan() { b } else { a },
                    MIN => if b < a || b.is_nan() { b } else { a },
                    _ => a + b,
                }
            }
            fn over(sum: $wide, ranks: usize) -> $wide { sum / ranks as $wide }
        }
    )*};
}
floats! {
    f32, f32, |x| x, |x| x;
    f64, f64, |x| x, |x| x;
    f16, f32, f16::to_f32, f16::from_f32;
    bf16, f32, bf16::to_f32, bf16::from_f32;
}

macro_rules! integers {
    ($($integer:ty),*) => {$(
        impl Number for $integer {
            type Wide = Self;
            fn wide(self) -> Self { self }
            fn back(wide: Self) -> Self { wide }
            fn join(op: i32, a: Self, b: Self) -> Self {
                match op { MAX => a.max(b), MIN => a.min(b), _ => a.wrapping_add(b) }
            }
            fn over(sum: Self, _: usize) -> Self { sum }
        }
    )*};
}
integers!(i8, u8, i32, u32, i64, u64);

/// The reduction of what all ranks hold, in rank order.
pub(crate) fn reduce(dtype: i32, op: i32, inputs: &[Vec<u8>]) -> Vec<u8> {
    match dtype {
        0 => typed::<i8>(op, inputs),
        1 => typed::<u8>(op, inputs),
        2 => typed::<i32>(op, inputs),
        3 => typed::<u32>(op, inputs),
        4 => typed::<i64>(op, inputs),
        5 => typed::<u64>(op, inputs),
        6 => typed::<f16>(op, inputs),
        7 => typed::<f32>(op, inputs),
        8 => typed::<f64>(op, inputs),
        9 => typed::<bf16>(op, inputs),
        other => unreachable!("type {other} should have been refused"),
    }
}

fn typed<T: Number>(op: i32, inputs: &[Vec<u8>]) -> Vec<u8> {
    let columns: Vec<Vec<T>> = inputs
        .iter()
        .map(|input| bytemuck::pod_collect_to_vec(input))
        .collect();
    let result: Vec<T> = (0..columns[0].len())
        .map(|index| {
            let wide = columns.iter().map(|column| column[index].wide());
            let joined = wide.reduce(|a, b| T::join(op, a, b));
            let joined = joined.expect("a group should have a rank");
            T::back(if op == AVG {
                T::over(joined, columns.len())
            } else {
                joined
            })
        })
        .collect();
    bytemuck::pod_collect_to_vec(&result)
}
