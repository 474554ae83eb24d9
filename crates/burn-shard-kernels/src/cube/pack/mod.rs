//! Copy-in and copy-out: scattered tensors into a padded flat buffer, and back, with a cast and a
//! scale on the way.
//!
//! Contiguous tensors move in vectors, strided ones too where their last axis allows it. How many
//! tensors share a launch is a [`Strategy`], chosen by measurement.

mod kernel;
mod plan;
mod tensor;

use cubecl::client::Client;

pub(super) use kernel::Direction;
#[cfg(feature = "ptx")]
pub(super) use kernel::{PieceCompilationArg, batch_in_kernel, batch_out_kernel, move_kernel};
use tensor::some_overlap;
pub use tensor::{Slot, StridedTensor};

use super::buffer::{FlatBuffer, check_devices};
use crate::error::{Error, check_finite};

/// How many tensors share a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Strategy {
    /// One launch per tensor.
    PerTensor,
    /// Up to so many contiguous tensors of one dtype per launch; strided ones have their own.
    Batched(usize),
}

impl Strategy {
    /// What was fastest on the CPU runtime, and for GPUs what fits their registers (not measured).
    /// `benches/kernels` measures it.
    #[must_use]
    pub fn fastest(client: &Client) -> Self {
        let most = if super::geometry::cpu_cores(client).is_some() {
            // More are hardly faster, and take seconds to compile.
            16
        } else {
            // Takes few registers on CUDA (docs/ptx.md); whether more are faster is not known.
            8
        };
        Self::Batched(Self::largest_batch(client).clamp(1, most))
    }

    /// The most tensors a launch takes: of the buffers a runtime binds, one is the flat one, and one
    /// that of scalars.
    fn largest_batch(client: &Client) -> usize {
        let bindings = client.properties().hardware.max_bindings as usize;
        bindings.saturating_sub(2)
    }

    fn check(self, client: &Client) -> Result<(), Error> {
        let most = Self::largest_batch(client);
        match self {
            Self::Batched(tensors) if tensors > most.max(1) => Err(Error::BatchTooLarge {
                tensors,
                most,
                runtime: client.name(),
            }),
            Self::PerTensor | Self::Batched(_) => Ok(()),
        }
    }
}

/// Copies each of `tensors` into its slot of `flat`, multiplied by `scale` and cast to the dtype of
/// `flat`; what is left of a slot becomes 0.
///
/// The elements of a tensor come in row-major order, whatever its strides. With equal dtypes and a
/// scale of 1 the bits are copied. Otherwise products are taken in `f32` and rounded to the nearest
/// even. Elements of `flat` outside of all slots stay.
///
/// # Ordering
///
/// Returns when the launches are queued; they are ordered as all work of this client's stream. On the
/// CPU runtime some are waited for where they are many.
///
/// # Errors
///
/// All are refusals, before anything is launched: [`Error::SlotCount`], [`Error::SlotTooSmall`],
/// [`Error::RangeOutOfBounds`], [`Error::RangesOverlap`] (slots ascend), [`Error::NotFinite`],
/// [`Error::OtherDevice`], [`Error::Overlap`], [`Error::BatchTooLarge`].
pub fn pack(
    client: &Client,
    tensors: &[StridedTensor],
    flat: &FlatBuffer,
    slots: &[Slot],
    scale: f32,
    strategy: Strategy,
) -> Result<(), Error> {
    strategy.check(client)?;
    check(client, tensors, flat, slots, scale)?;
    plan::launch(client, tensors, flat, slots, scale, strategy, Direction::In);
    Ok(())
}

/// Copies each slot of `flat` into its tensor, multiplied by `scale` and cast to the dtype of the
/// tensor: what [`pack`] does, the other way. Padding is not read.
///
/// # Errors
///
/// Those of [`pack`], and [`Error::SelfOverlap`] where a tensor repeats elements.
pub fn unpack(
    client: &Client,
    flat: &FlatBuffer,
    slots: &[Slot],
    tensors: &[StridedTensor],
    scale: f32,
    strategy: Strategy,
) -> Result<(), Error> {
    strategy.check(client)?;
    check(client, tensors, flat, slots, scale)?;
    for (index, tensor) in tensors.iter().enumerate() {
        if tensor.repeats_elements() {
            return Err(Error::SelfOverlap { index });
        }
    }
    if some_overlap(tensors) {
        return Err(Error::Overlap {
            first: "tensor",
            second: "another tensor",
        });
    }
    plan::launch(
        client,
        tensors,
        flat,
        slots,
        scale,
        strategy,
        Direction::Out,
    );
    Ok(())
}

fn check(
    client: &Client,
    tensors: &[StridedTensor],
    flat: &FlatBuffer,
    slots: &[Slot],
    scale: f32,
) -> Result<(), Error> {
    check_finite("scale", f64::from(scale))?;
    if tensors.len() != slots.len() {
        return Err(Error::SlotCount {
            tensors: tensors.len(),
            slots: slots.len(),
        });
    }
    check_devices(client, [flat])?;
    let mut previous_end = 0;
    for (index, (tensor, slot)) in tensors.iter().zip(slots).enumerate() {
        super::buffer::check_device(client, tensor.handle())?;
        let end = slot.offset.saturating_add(slot.padded_numel);
        if end > flat.numel() {
            return Err(Error::RangeOutOfBounds {
                start: slot.offset,
                end,
                numel: flat.numel(),
            });
        }
        if slot.offset < previous_end {
            return Err(Error::RangesOverlap {
                start: slot.offset,
                previous_end,
            });
        }
        previous_end = end;
        if tensor.numel() > slot.padded_numel {
            return Err(Error::SlotTooSmall {
                index,
                padded_numel: slot.padded_numel,
                numel: tensor.numel(),
            });
        }
        if tensor.overlaps_flat(flat) {
            return Err(Error::Overlap {
                first: "flat",
                second: "tensor",
            });
        }
    }
    Ok(())
}
