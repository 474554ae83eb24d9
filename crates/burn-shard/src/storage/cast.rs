//! Casts between float types in host memory.

use burn_shard_comm::DType;
use half::{bf16, f16};

/// Writes the elements of `from` in another type, rounded to the nearest, ties to even.
///
/// # Panics
///
/// If the lengths do not fit, or a type is none that parameters are cast between.
pub(crate) fn cast_bytes(from: &[u8], from_type: DType, to: &mut [u8], to_type: DType) {
    let numel = from.len() / from_type.size_bytes();
    assert_eq!(
        to.len(),
        numel * to_type.size_bytes(),
        "a cast keeps the number of elements"
    );
    if from_type == to_type {
        to.copy_from_slice(from);
        return;
    }
    #[allow(
        clippy::wildcard_enum_match_arm,
        reason = "the plan has no other pairs"
    )]
    match (from_type, to_type) {
        (DType::F32, DType::BF16) => each(from, to, bf16::from_f32),
        (DType::F32, DType::F16) => each(from, to, f16::from_f32),
        (DType::BF16, DType::F32) => each(from, to, bf16::to_f32),
        (DType::F16, DType::F32) => each(from, to, f16::to_f32),
        (DType::BF16, DType::F16) => each(from, to, |x: bf16| f16::from_f32(x.to_f32())),
        (DType::F16, DType::BF16) => each(from, to, |x: f16| bf16::from_f32(x.to_f32())),
        (from, to) => unreachable!("no parameter is cast from {from} to {to}"),
    }
}

fn each<A: bytemuck::AnyBitPattern, B: bytemuck::Pod>(
    from: &[u8],
    to: &mut [u8],
    f: impl Fn(A) -> B,
) {
    let (from, to) = (
        bytemuck::cast_slice::<u8, A>(from),
        bytemuck::cast_slice_mut::<u8, B>(to),
    );
    for (to, &from) in to.iter_mut().zip(from) {
        *to = f(from);
    }
}
