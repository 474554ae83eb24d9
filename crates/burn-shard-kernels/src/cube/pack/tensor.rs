//! A tensor somewhere on a device, and where it goes in a flat buffer.

use std::ops::Range;

use cubecl::client::Client;
use cubecl::server::Handle;

use super::super::buffer::{Dtype, FlatBuffer, check_device, same_memory};
use crate::error::Error;

/// A tensor of any shape and strides, at any element of an allocation.
#[derive(Clone, Debug)]
pub struct StridedTensor {
    /// Bound from an aligned byte on.
    handle: Handle,
    /// First element, from there.
    base: usize,
    /// Axes with more than one element, neighbours merged where one walk does for both. Empty for
    /// one element; `[0]` for none.
    shape: Vec<usize>,
    strides: Vec<usize>,
    dtype: Dtype,
}

impl StridedTensor {
    /// Views the elements of `handle` that `shape` and `strides` (in elements) name, the first of them
    /// at the start of `handle`, wherever that is in its allocation. `index` is what errors call it.
    ///
    /// # Errors
    ///
    /// [`Error::StridesMismatch`], [`Error::OtherDevice`], [`Error::UnsupportedDtype`],
    /// [`Error::Misaligned`] where the start is not a multiple of an element, and
    /// [`Error::OutOfBounds`].
    pub fn new(
        client: &Client,
        index: usize,
        handle: &Handle,
        shape: &[usize],
        strides: &[usize],
        dtype: Dtype,
    ) -> Result<Self, Error> {
        if shape.len() != strides.len() {
            return Err(Error::StridesMismatch {
                index,
                axes: shape.len(),
                strides: strides.len(),
            });
        }
        check_device(client, handle)?;
        if !dtype.is_supported(client) {
            return Err(Error::UnsupportedDtype {
                dtype: dtype.name(),
                runtime: client.name(),
            });
        }
        let size = dtype.size_bytes() as u64;
        let start = handle.offset_start.unwrap_or(0);
        if !start.is_multiple_of(size) {
            return Err(Error::Misaligned {
                offset_bytes: start,
                alignment_bytes: size,
            });
        }
        let extent = extent(shape, strides);
        let available = handle.size_in_used();
        if extent.is_none_or(|extent| extent > available / size) {
            return Err(Error::OutOfBounds {
                offset: 0,
                numel: extent
                    .and_then(|e| usize::try_from(e).ok())
                    .unwrap_or(usize::MAX),
                dtype: dtype.name(),
                available_bytes: available,
            });
        }
        // What a runtime binds starts aligned; the kernel starts further in.
        let aligned = start - start % client.properties().memory.alignment;
        let mut bound = handle.clone();
        bound.offset_start = Some(aligned);
        let base = usize::try_from((start - aligned) / size).unwrap_or(usize::MAX);
        let (shape, strides) = merge_axes(shape, strides);
        Ok(Self {
            handle: bound,
            base,
            shape,
            strides,
            dtype,
        })
    }

    /// Views all of `buffer` as a tensor of one axis.
    #[must_use]
    pub fn of_flat(buffer: &FlatBuffer) -> Self {
        let (shape, strides) = merge_axes(&[buffer.numel()], &[1]);
        Self {
            handle: buffer.handle().clone(),
            base: 0,
            shape,
            strides,
            dtype: buffer.dtype(),
        }
    }

    /// Number of elements.
    #[must_use]
    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }

    /// The dtype of the elements.
    #[must_use]
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    pub(super) fn handle(&self) -> &Handle {
        &self.handle
    }

    pub(super) fn base(&self) -> usize {
        self.base
    }

    pub(super) fn shape(&self) -> &[usize] {
        &self.shape
    }

    pub(super) fn strides(&self) -> &[usize] {
        &self.strides
    }

    /// Elements from the bound byte to its last, both included.
    pub(super) fn reach(&self) -> usize {
        let extent = extent(&self.shape, &self.strides).unwrap_or(u64::MAX);
        self.base
            .saturating_add(usize::try_from(extent).unwrap_or(usize::MAX))
    }

    /// Whether its elements lie one after the other.
    pub(super) fn is_contiguous(&self) -> bool {
        matches!(*self.strides, [] | [1])
    }

    /// Whether some of its elements may share one place. Exact for what slicing, swapping axes and
    /// expanding make.
    pub(super) fn repeats_elements(&self) -> bool {
        let mut axes: Vec<_> = self.strides.iter().zip(&self.shape).collect();
        axes.sort_unstable();
        let mut reach = 1;
        axes.iter().any(|&(&stride, &len)| {
            let repeats = stride < reach;
            reach = stride.saturating_mul(len);
            repeats
        })
    }

    /// Bytes of the allocation between its first element and its last.
    fn byte_range(&self) -> Range<u64> {
        let size = self.dtype.size_bytes() as u64;
        let start = self.handle.offset_start.unwrap_or(0) + self.base as u64 * size;
        start..start + extent(&self.shape, &self.strides).unwrap_or(u64::MAX / size) * size
    }

    /// Whether it may share a byte with `flat`: their ranges meet.
    pub(super) fn overlaps_flat(&self, flat: &FlatBuffer) -> bool {
        let (a, b) = (self.byte_range(), flat.byte_range());
        same_memory(&self.handle, flat.handle()) && a.start.max(b.start) < a.end.min(b.end)
    }
}

/// Whether two of `tensors`, all of one device, may share a byte: their ranges meet.
pub(super) fn some_overlap(tensors: &[StridedTensor]) -> bool {
    let mut ranges: Vec<_> = tensors
        .iter()
        .map(|tensor| (tensor.handle.memory.descriptor().id, tensor.byte_range()))
        .filter(|(_, range)| !range.is_empty())
        .collect();
    // Of ranges in order, some meet where neighbours do.
    ranges.sort_unstable_by_key(|(memory, range)| (*memory, range.start));
    ranges.windows(2).any(|pair| {
        let [(a, before), (b, after)] = pair else {
            return false;
        };
        a == b && after.start < before.end
    })
}

/// Elements from the first to the last, both included; `None` if that overflows.
fn extent(shape: &[usize], strides: &[usize]) -> Option<u64> {
    if shape.contains(&0) {
        return Some(0);
    }
    shape
        .iter()
        .zip(strides)
        .try_fold(1u64, |extent, (&len, &stride)| {
            extent.checked_add((len as u64 - 1).checked_mul(stride as u64)?)
        })
}

/// Drops axes of one element, and merges an axis with the one inside it where that is the same walk.
fn merge_axes(shape: &[usize], strides: &[usize]) -> (Vec<usize>, Vec<usize>) {
    if shape.contains(&0) {
        return (vec![0], vec![1]);
    }
    let (mut merged_shape, mut merged_strides) = (Vec::<usize>::new(), Vec::<usize>::new());
    for (&len, &stride) in shape.iter().zip(strides).filter(|&(&len, _)| len != 1) {
        match (merged_shape.last_mut(), merged_strides.last_mut()) {
            (Some(outer), Some(outer_stride)) if *outer_stride == len * stride => {
                *outer *= len;
                *outer_stride = stride;
            }
            _ => {
                merged_shape.push(len);
                merged_strides.push(stride);
            }
        }
    }
    (merged_shape, merged_strides)
}

/// The place of a tensor in a flat buffer, in elements of the flat buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// First element. Multiples of 16 move fastest.
    pub offset: usize,
    /// Elements up to the end of the padding, which [`pack`](super::pack) fills with 0.
    pub padded_numel: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_merge_where_one_walk_does_for_both() {
        let merged = |shape: &[usize], strides: &[usize]| merge_axes(shape, strides);
        assert_eq!(merged(&[2, 3, 4], &[12, 4, 1]), (vec![24], vec![1]));
        assert_eq!(merged(&[2, 3, 4], &[24, 4, 1]), (vec![2, 12], vec![24, 1]));
        assert_eq!(merged(&[4, 3], &[1, 4]), (vec![4, 3], vec![1, 4]));
        assert_eq!(merged(&[1, 5, 1], &[99, 1, 7]), (vec![5], vec![1]));
        assert_eq!(merged(&[], &[]), (vec![], vec![]));
        assert_eq!(merged(&[3, 0], &[0, 1]), (vec![0], vec![1]));
        assert_eq!(merged(&[3, 5], &[0, 1]), (vec![3, 5], vec![0, 1]));
    }

    #[test]
    fn extents_beyond_32_bits_are_exact_and_overflow_is_noticed() {
        assert_eq!(extent(&[1 << 20, 1 << 20], &[1 << 20, 1]), Some(1 << 40));
        assert_eq!(extent(&[2, 3], &[(1 << 33) + 5, 1]), Some((1 << 33) + 8));
        assert_eq!(extent(&[usize::MAX, 3], &[usize::MAX, 1]), None);
        assert_eq!(extent(&[0, usize::MAX], &[usize::MAX, 1]), Some(0));
    }
}
