//! Zeros, written on the device: nothing is sent to it.

use cubecl::client::Client;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::buffer::{FlatBuffer, check_device};
use super::geometry::{Geometry, Walk};
use crate::error::Error;

/// Writes zeros to all of `buffer`, which may hold anything before: what `Client::empty` returns, say.
///
/// # Ordering
///
/// Returns when the launch is queued, as a step does.
///
/// # Errors
///
/// Refuses a buffer of another device: [`Error::OtherDevice`].
pub fn zero(client: &Client, buffer: &FlatBuffer) -> Result<(), Error> {
    check_device(client, buffer.handle())?;
    if buffer.numel() == 0 {
        return Ok(());
    }
    let geometry = Geometry::new(client, buffer.dtype().size_bytes(), 0, buffer.numel());
    let vector = geometry.vector;
    // SAFETY: `buffer` is a checked view of this device; the kernel looks at no vector but its own.
    unsafe {
        zero_kernel::launch_unchecked(
            client,
            geometry.cube_count.clone(),
            geometry.cube_dim,
            geometry.address,
            vector,
            buffer.arg(vector),
            geometry.walk(),
            buffer.dtype().elem(),
        );
    }
    Ok(())
}

#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn zero_kernel<F: Float, N: Size>(
    buffer: &mut [Vector<F, N>],
    walk: Walk,
    #[define(F)] _dtype: ElemType,
) {
    let from = ABSOLUTE_POS * walk.run;
    let mut to = from;
    if from < walk.len {
        to = min(from + walk.run, walk.len);
    }
    for at in from..to {
        buffer[walk.start + at] = Vector::cast_from(Vector::<f32, N>::new(0.0f32));
    }
}
