//! What a kernel is given: a run of elements of one dtype in a device's memory, and the checks that
//! make launching on it sound.

use cubecl::client::Client;
use cubecl::features::TypeUsage;
use cubecl::ir::{ElemType, FloatKind};
use cubecl::prelude::BufferArg;
use cubecl::server::Handle;

use crate::error::Error;

/// The dtypes kernels read and write; arithmetic is always in `f32`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// The upper half of `f32`.
    BF16,
}

impl Dtype {
    /// Bytes of one element.
    #[must_use]
    pub const fn size_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
        }
    }

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::BF16 => "bf16",
        }
    }

    pub(crate) const fn elem(self) -> ElemType {
        ElemType::Float(match self {
            Self::F32 => FloatKind::F32,
            Self::F16 => FloatKind::F16,
            Self::BF16 => FloatKind::BF16,
        })
    }

    /// Whether buffers of this dtype can be read and written on `client`'s runtime.
    #[must_use]
    pub fn is_supported(self, client: &Client) -> bool {
        client
            .properties()
            .type_usage(self.elem())
            .is_superset(TypeUsage::Buffer | TypeUsage::Conversion)
    }
}

/// A view of `numel` contiguous elements on a device, at an aligned offset of its allocation.
///
/// A value of it is a checked promise: the range lies within the allocation, starts at a multiple of
/// the runtime's `memory.alignment`, and the runtime has its dtype. It keeps the allocation alive.
#[derive(Clone, Debug)]
pub struct FlatBuffer {
    handle: Handle,
    numel: usize,
    dtype: Dtype,
}

impl FlatBuffer {
    /// Views `numel` elements of `dtype` from element `offset` of `handle` on.
    ///
    /// # Errors
    ///
    /// [`Error::OtherDevice`], [`Error::UnsupportedDtype`], [`Error::OutOfBounds`] and
    /// [`Error::Misaligned`].
    pub fn new(
        client: &Client,
        handle: &Handle,
        offset: usize,
        numel: usize,
        dtype: Dtype,
    ) -> Result<Self, Error> {
        check_device(client, handle)?;
        if !dtype.is_supported(client) {
            return Err(Error::UnsupportedDtype {
                dtype: dtype.name(),
                runtime: client.name(),
            });
        }
        let size = dtype.size_bytes() as u64;
        let bytes = (offset as u64)
            .checked_add(numel as u64)
            .and_then(|end| end.checked_mul(size));
        let available = handle.size_in_used();
        let Some(end) = bytes.filter(|&end| end <= available) else {
            return Err(Error::OutOfBounds {
                offset,
                numel,
                dtype: dtype.name(),
                available_bytes: available,
            });
        };
        let start = offset as u64 * size;
        let alignment = client.properties().memory.alignment;
        let absolute = handle.offset_start.unwrap_or(0) + start;
        if !absolute.is_multiple_of(alignment) {
            return Err(Error::Misaligned {
                offset_bytes: absolute,
                alignment_bytes: alignment,
            });
        }
        // Runtimes also want the length in whole words: what follows up to the alignment stays in.
        let rest = available - end.next_multiple_of(alignment).min(available);
        Ok(Self {
            handle: handle.clone().offset_start(start).offset_end(rest),
            numel,
            dtype,
        })
    }

    /// Number of elements.
    #[must_use]
    pub fn numel(&self) -> usize {
        self.numel
    }

    /// The dtype of the elements.
    #[must_use]
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// The view as CubeCL's own handle, as it was narrowed.
    #[must_use]
    pub fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Bytes of the allocation that are viewed.
    pub(crate) fn byte_range(&self) -> std::ops::Range<u64> {
        let start = self.handle.offset_start.unwrap_or(0);
        start..start + (self.numel * self.dtype.size_bytes()) as u64
    }

    /// Whether some byte is viewed by both.
    fn overlaps(&self, other: &Self) -> bool {
        let (a, b) = (self.byte_range(), other.byte_range());
        same_memory(&self.handle, &other.handle) && a.start < b.end && b.start < a.end
    }

    /// The argument of a kernel that walks it in vectors of `vector` elements.
    pub(crate) fn arg(&self, vector: usize) -> BufferArg {
        // SAFETY: `new` has checked that `numel` elements lie within the handle.
        unsafe { BufferArg::from_raw_parts(self.handle.clone(), self.numel / vector) }
    }

    pub(crate) fn check_dtype(
        &self,
        buffer: &'static str,
        allowed: &'static [Dtype],
    ) -> Result<(), Error> {
        if allowed.contains(&self.dtype) {
            Ok(())
        } else {
            Err(Error::WrongDtype {
                buffer,
                expected: allowed[0].name(),
                found: self.dtype.name(),
            })
        }
    }
}

/// What a step reads from the device instead of from its arguments. Each is a buffer of one `f32`.
///
/// The gradient is multiplied by `clip / loss_scale` (each 1 where absent; without both it is not
/// touched), and where `found_inf` is not 0 nothing at all is written: the step did not happen.
/// Whoever counts steps learns of it only by reading `found_inf`, later; until then `time` runs
/// ahead by one, and the bias correction is that much closer to 1.
#[derive(Clone, Copy, Debug, Default)]
pub struct StepControl<'a> {
    /// What clipping multiplies gradients with, as [`clip_coefficient`](super::clip_coefficient)
    /// leaves it.
    pub clip: Option<&'a FlatBuffer>,
    /// What the loss was multiplied with before backward.
    pub loss_scale: Option<&'a FlatBuffer>,
    /// 0 if all gradients are finite, as [`norms`](super::norms) leaves it.
    pub found_inf: Option<&'a FlatBuffer>,
}

impl<'a> StepControl<'a> {
    /// Those present, with their names.
    pub(crate) fn named(&self) -> impl Iterator<Item = (&'static str, &'a FlatBuffer)> {
        [
            ("clip", self.clip),
            ("loss_scale", self.loss_scale),
            ("found_inf", self.found_inf),
        ]
        .into_iter()
        .filter_map(|(name, buffer)| buffer.map(|buffer| (name, buffer)))
    }

    pub(crate) fn check(&self) -> Result<(), Error> {
        self.named()
            .try_for_each(|(name, buffer)| check_scalar(name, buffer))
    }
}

/// The argument for a buffer that a kernel may do without.
pub(crate) fn optional_arg(buffer: Option<&FlatBuffer>, vector: usize) -> Option<BufferArg> {
    buffer.map(|buffer| buffer.arg(vector))
}

/// Checks that `buffer` is one `f32`.
pub(crate) fn check_scalar(name: &'static str, buffer: &FlatBuffer) -> Result<(), Error> {
    buffer.check_dtype(name, &[Dtype::F32])?;
    if buffer.numel == 1 {
        Ok(())
    } else {
        Err(Error::NotScalar {
            buffer: name,
            numel: buffer.numel,
        })
    }
}

/// Checks that no buffer of `written` shares a byte with another of `written` or with one of `read`.
pub(crate) fn check_disjoint(
    written: &[(&'static str, &FlatBuffer)],
    read: &[(&'static str, &FlatBuffer)],
) -> Result<(), Error> {
    for (i, (first, a)) in written.iter().enumerate() {
        for (second, b) in written[i + 1..].iter().chain(read) {
            if a.overlaps(b) {
                return Err(Error::Overlap { first, second });
            }
        }
    }
    Ok(())
}

/// Checks that all buffers are of `client`'s device: each was checked against some client.
pub(crate) fn check_devices<'a>(
    client: &Client,
    buffers: impl IntoIterator<Item = &'a FlatBuffer>,
) -> Result<(), Error> {
    buffers
        .into_iter()
        .try_for_each(|buffer| check_device(client, &buffer.handle))
}

pub(crate) fn check_device(client: &Client, handle: &Handle) -> Result<(), Error> {
    if handle.service == client.service_id() {
        Ok(())
    } else {
        Err(Error::OtherDevice {
            runtime: client.name(),
        })
    }
}

pub(crate) fn same_memory(a: &Handle, b: &Handle) -> bool {
    a.service == b.service && a.memory.descriptor() == b.memory.descriptor()
}
