//! The kernels of copy-in and copy-out.

use cubecl::ir::ElemType;
use cubecl::prelude::*;

/// Which way elements move.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Direction {
    /// From a tensor into the flat buffer.
    In,
    /// From the flat buffer into a tensor.
    Out,
}

/// One run of elements that moves, in vectors. The tensor's part is at `base`, the flat buffer's at
/// `flat`, `len` move, and up to `padded` of the flat buffer become 0 on the way in.
#[derive(CubeLaunch, CubeType, Clone, Copy)]
pub(crate) struct Piece {
    pub(crate) base: usize,
    pub(crate) flat: usize,
    pub(crate) len: usize,
    pub(crate) padded: usize,
}

/// Moves one piece of one tensor. `shape` and `strides` are empty where it is contiguous; otherwise
/// they are those of its axes, in vectors.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn move_kernel<I: Float, O: Float, N: Size>(
    from: &[Vector<I, N>],
    to: &mut [Vector<O, N>],
    shape: Sequence<usize>,
    strides: Sequence<usize>,
    piece: Piece,
    run: usize,
    scale: f32,
    #[comptime] scaled: bool,
    #[comptime] direction: Direction,
    #[define(I, O)] _dtypes: [ElemType; 2],
) {
    let first = ABSOLUTE_POS * run;
    let last = min(first + run, piece.padded);
    let axes = comptime!(shape.len());
    for at in first..last {
        if at < piece.len {
            let mut place = piece.base + at;
            if comptime!(axes > 0) {
                place = piece.base;
                let mut rest = at;
                #[unroll]
                for axis in 0..axes {
                    let axis = comptime!(axes - 1 - axis);
                    let len = shape[axis];
                    place += rest % len * strides[axis];
                    rest /= len;
                }
            }
            match comptime!(direction) {
                Direction::In => {
                    to[piece.flat + at] = cast::<I, O, N>(from[place], scale, scaled);
                }
                Direction::Out => {
                    to[place] = cast::<I, O, N>(from[piece.flat + at], scale, scaled);
                }
            }
        } else if comptime!(direction == Direction::In) {
            to[piece.flat + at] = Vector::new(O::from_int(0));
        }
    }
}

/// Moves one piece of each of several contiguous tensors into the flat buffer. Unit `u` works on the
/// piece `k` with `first_units[k] <= u < first_units[k + 1]`: the search is per unit, not per element.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn batch_in_kernel<I: Float, O: Float, N: Size>(
    from: Sequence<Box<[Vector<I, N>]>>,
    to: &mut [Vector<O, N>],
    pieces: Sequence<Piece>,
    first_units: Sequence<usize>,
    run: usize,
    scale: f32,
    #[comptime] scaled: bool,
    #[define(I, O)] _dtypes: [ElemType; 2],
) {
    let count = comptime!(from.len());
    // A grid is rounded up.
    if ABSOLUTE_POS < first_units[count] {
        move_in::<I, O, N>(
            &from,
            to,
            &pieces,
            &first_units,
            run,
            scale,
            scaled,
            0usize,
            count,
        );
    }
}

/// One unit's part of the pieces `first..last`, of which one is its own: a binary search that is
/// unrolled, since buffers have no index at run time.
#[cube]
#[allow(
    clippy::too_many_arguments,
    reason = "what the kernel has, and two more"
)]
fn move_in<I: Float, O: Float, N: Size>(
    from: &Sequence<Box<[Vector<I, N>]>>,
    to: &mut [Vector<O, N>],
    pieces: &Sequence<Piece>,
    first_units: &Sequence<usize>,
    run: usize,
    scale: f32,
    #[comptime] scaled: bool,
    #[comptime] first: usize,
    #[comptime] last: usize,
) {
    let middle = comptime!(first.midpoint(last));
    if comptime!(last - first > 1) {
        if ABSOLUTE_POS < first_units[middle] {
            move_in::<I, O, N>(
                from,
                to,
                pieces,
                first_units,
                run,
                scale,
                scaled,
                first,
                middle,
            );
        } else {
            move_in::<I, O, N>(
                from,
                to,
                pieces,
                first_units,
                run,
                scale,
                scaled,
                middle,
                last,
            );
        }
    } else {
        let piece = &pieces[first];
        let start = (ABSOLUTE_POS - first_units[first]) * run;
        for at in start..min(start + run, piece.padded) {
            if at < piece.len {
                to[piece.flat + at] = cast::<I, O, N>(from[first][piece.base + at], scale, scaled);
            } else {
                to[piece.flat + at] = Vector::new(O::from_int(0));
            }
        }
    }
}

/// The way back of [`batch_in_kernel()`].
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn batch_out_kernel<I: Float, O: Float, N: Size>(
    from: &[Vector<I, N>],
    mut to: Sequence<Box<[Vector<O, N>]>>,
    pieces: Sequence<Piece>,
    first_units: Sequence<usize>,
    run: usize,
    scale: f32,
    #[comptime] scaled: bool,
    #[define(I, O)] _dtypes: [ElemType; 2],
) {
    let count = comptime!(to.len());
    if ABSOLUTE_POS < first_units[count] {
        move_out::<I, O, N>(
            from,
            &mut to,
            &pieces,
            &first_units,
            run,
            scale,
            scaled,
            0usize,
            count,
        );
    }
}

/// The way back of [`move_in()`].
#[cube]
#[allow(
    clippy::too_many_arguments,
    reason = "what the kernel has, and two more"
)]
fn move_out<I: Float, O: Float, N: Size>(
    from: &[Vector<I, N>],
    to: &mut Sequence<Box<[Vector<O, N>]>>,
    pieces: &Sequence<Piece>,
    first_units: &Sequence<usize>,
    run: usize,
    scale: f32,
    #[comptime] scaled: bool,
    #[comptime] first: usize,
    #[comptime] last: usize,
) {
    let middle = comptime!(first.midpoint(last));
    if comptime!(last - first > 1) {
        if ABSOLUTE_POS < first_units[middle] {
            move_out::<I, O, N>(
                from,
                to,
                pieces,
                first_units,
                run,
                scale,
                scaled,
                first,
                middle,
            );
        } else {
            move_out::<I, O, N>(
                from,
                to,
                pieces,
                first_units,
                run,
                scale,
                scaled,
                middle,
                last,
            );
        }
    } else {
        let piece = &pieces[first];
        let to = &mut to[first];
        let start = (ABSOLUTE_POS - first_units[first]) * run;
        for at in start..min(start + run, piece.len) {
            to[piece.base + at] = cast::<I, O, N>(from[piece.flat + at], scale, scaled);
        }
    }
}

/// The value as it arrives. Unscaled, a cast to the same dtype is none, and keeps the bits.
#[cube]
fn cast<I: Float, O: Float, N: Size>(
    value: Vector<I, N>,
    scale: f32,
    #[comptime] scaled: bool,
) -> Vector<O, N> {
    if comptime!(scaled) {
        Vector::cast_from(Vector::<f32, N>::cast_from(value) * Vector::new(scale))
    } else {
        Vector::cast_from(value)
    }
}
