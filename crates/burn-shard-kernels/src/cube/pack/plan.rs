//! Which pieces move, and in how many launches.

use cubecl::client::Client;
use cubecl::prelude::*;

use super::kernel::{Direction, PieceLaunch, batch_in_kernel, batch_out_kernel, move_kernel};
use super::{Slot, Strategy, StridedTensor};
use crate::cube::buffer::{Dtype, FlatBuffer};
use crate::cube::geometry::{Geometry, address_type, vector_width};
use crate::cube::throttle::Throttle;

/// What moves in vectors of one width: all of a tensor, or its whole vectors, or the rest.
#[derive(Clone, Copy)]
struct Move<'a> {
    tensor: &'a StridedTensor,
    vector: usize,
    /// In elements.
    base: usize,
    flat: usize,
    len: usize,
    padded: usize,
}

/// Launches all there is to move. The caller has checked everything.
pub(super) fn launch(
    client: &Client,
    tensors: &[StridedTensor],
    flat: &FlatBuffer,
    slots: &[Slot],
    scale: f32,
    strategy: Strategy,
    direction: Direction,
) {
    let moves: Vec<_> = tensors
        .iter()
        .zip(slots)
        .flat_map(|(tensor, slot)| split(client, tensor, flat.dtype(), *slot, direction))
        .collect();
    let batch = match strategy {
        Strategy::PerTensor => 1,
        Strategy::Batched(tensors) => tensors.max(1),
    };
    let mover = Mover {
        client,
        flat,
        scale,
        direction,
    };
    let (mut alike, single): (Vec<_>, Vec<_>) = moves
        .into_iter()
        .partition(|piece| batch > 1 && piece.tensor.is_contiguous());
    let mut throttle = Throttle::new(client);
    for piece in &single {
        mover.one(piece);
        throttle.launched();
    }
    // Sorting is stable: of one kind, pieces keep the order of the flat buffer.
    let kind = |piece: &Move<'_>| (piece.tensor.dtype() as u8, piece.vector);
    alike.sort_by_key(kind);
    for group in alike.chunk_by(|a, b| kind(a) == kind(b)) {
        for pieces in group.chunks(batch) {
            match pieces {
                [piece] => mover.one(piece),
                pieces => mover.batch(pieces),
            }
            throttle.launched();
        }
    }
}

/// The pieces of one tensor: with all its elements in vectors, one; otherwise the rest is another.
fn split<'a>(
    client: &Client,
    tensor: &'a StridedTensor,
    flat_dtype: Dtype,
    slot: Slot,
    direction: Direction,
) -> Vec<Move<'a>> {
    let widest = tensor.dtype().size_bytes().max(flat_dtype.size_bytes());
    let numel = tensor.numel();
    let padded = match direction {
        Direction::In => slot.padded_numel,
        Direction::Out => numel,
    };
    let whole = Move {
        tensor,
        vector: 1,
        base: tensor.base(),
        flat: slot.offset,
        len: numel,
        padded,
    };
    let mut pieces = Vec::new();
    if tensor.is_contiguous() {
        let vector = vector_width(client, widest, &[whole.base, whole.flat]);
        let head = numel - numel % vector;
        // All in one where padding ends with a vector too.
        let head_padded = if head == numel && padded % vector == 0 {
            padded
        } else {
            head
        };
        pieces.push(Move {
            vector,
            len: head,
            padded: head_padded,
            ..whole
        });
        pieces.push(Move {
            base: whole.base + head,
            flat: whole.flat + head_padded,
            len: numel - head,
            padded: padded - head_padded,
            ..whole
        });
    } else {
        let inner = match (tensor.strides(), tensor.shape()) {
            ([outer @ .., 1], [.., inner]) => {
                let mut divisors = outer.to_vec();
                divisors.extend([*inner, whole.base, whole.flat, padded]);
                vector_width(client, widest, &divisors)
            }
            _ => 1,
        };
        pieces.push(Move {
            vector: inner,
            ..whole
        });
    }
    pieces.retain(|piece| piece.padded > 0);
    pieces
}

struct Mover<'a> {
    client: &'a Client,
    flat: &'a FlatBuffer,
    scale: f32,
    direction: Direction,
}

impl Mover<'_> {
    fn one(&self, piece: &Move<'_>) {
        let Move { tensor, vector, .. } = *piece;
        let geometry = Geometry::whole_vectors(self.client, vector, piece.padded / vector);
        let (mut shape, mut strides) = (SequenceArg::new(), SequenceArg::new());
        if !tensor.is_contiguous() {
            let axes = tensor.shape().len();
            for (axis, (&len, &stride)) in tensor.shape().iter().zip(tensor.strides()).enumerate() {
                // Inside a vector there is no axis left to walk.
                let inner = axis + 1 == axes;
                shape.push(if inner { len / vector } else { len });
                strides.push(if inner && vector > 1 {
                    1
                } else {
                    stride / vector
                });
            }
        }
        let (from, to) = match self.direction {
            Direction::In => (tensor_arg(piece), self.flat.arg(vector)),
            Direction::Out => (self.flat.arg(vector), tensor_arg(piece)),
        };
        // SAFETY: `StridedTensor::new` and `FlatBuffer::new` have checked that their elements lie
        // within their handles, `check` that the slot lies within the flat buffer and that the two do
        // not overlap; `split` makes pieces of no other elements.
        unsafe {
            move_kernel::launch_unchecked(
                self.client,
                geometry.cube_count.clone(),
                geometry.cube_dim,
                self.address([piece]),
                vector,
                from,
                to,
                shape,
                strides,
                piece.arg(),
                geometry.run,
                self.scale,
                self.is_scaled(),
                self.direction,
                self.dtypes(tensor),
            );
        }
    }

    fn batch(&self, pieces: &[Move<'_>]) {
        let vector = pieces[0].vector;
        let tensor = pieces[0].tensor;
        let vectors: usize = pieces.iter().map(|piece| piece.padded / vector).sum();
        let run = Geometry::whole_vectors(self.client, vector, vectors).run;
        let mut units = 0;
        let mut first_units = SequenceArg::new();
        for piece in pieces {
            first_units.push(units);
            units += (piece.padded / vector).div_ceil(run);
        }
        first_units.push(units);
        let cube_dim = CubeDim::new(self.client, units);
        let cube_count = cubecl::calculate_cube_count_elemwise(self.client, units, cube_dim);
        let address = self.address(pieces);
        let args = || pieces.iter().map(tensor_arg);
        let places = pieces.iter().map(Move::arg).collect();
        match self.direction {
            // SAFETY: as in `one`, for each of the pieces; their slots do not overlap.
            Direction::In => unsafe {
                batch_in_kernel::launch_unchecked(
                    self.client,
                    cube_count,
                    cube_dim,
                    address,
                    vector,
                    args().collect(),
                    self.flat.arg(vector),
                    places,
                    first_units,
                    run,
                    self.scale,
                    self.is_scaled(),
                    self.dtypes(tensor),
                );
            },
            // SAFETY: likewise; `unpack` has checked that the tensors do not overlap either.
            Direction::Out => unsafe {
                batch_out_kernel::launch_unchecked(
                    self.client,
                    cube_count,
                    cube_dim,
                    address,
                    vector,
                    self.flat.arg(vector),
                    args().collect(),
                    places,
                    first_units,
                    run,
                    self.scale,
                    self.is_scaled(),
                    self.dtypes(tensor),
                );
            },
        }
    }

    fn is_scaled(&self) -> bool {
        self.scale.to_bits() != 1f32.to_bits()
    }

    /// From, to.
    fn dtypes(&self, tensor: &StridedTensor) -> [cubecl::ir::ElemType; 2] {
        let (tensor, flat) = (tensor.dtype().elem(), self.flat.dtype().elem());
        match self.direction {
            Direction::In => [tensor, flat],
            Direction::Out => [flat, tensor],
        }
    }

    /// Indices that reach the last element of all that moves.
    fn address<'a>(&self, pieces: impl IntoIterator<Item = &'a Move<'a>>) -> AddressType {
        pieces
            .into_iter()
            .map(|piece| address_type((piece.flat + piece.padded).max(piece.tensor.reach())))
            .max()
            .unwrap_or_default()
    }
}

fn tensor_arg(piece: &Move<'_>) -> BufferArg {
    let vectors = piece.tensor.reach() / piece.vector;
    // SAFETY: `StridedTensor::new` has checked that its last element lies within the handle.
    unsafe { BufferArg::from_raw_parts(piece.tensor.handle().clone(), vectors) }
}

impl Move<'_> {
    fn arg(&self) -> PieceLaunch {
        PieceLaunch::new(
            self.base / self.vector,
            self.flat / self.vector,
            self.len / self.vector,
            self.padded / self.vector,
        )
    }
}
