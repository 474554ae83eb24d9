//! Lists of buffers that a collective reads and writes.
//!
//! A collective works on a *list* of segments, so that several parameters travel in one call without
//! being copied into one buffer first. Inputs are owned and immutable ([`Segments`], shared by
//! `Arc`), because other ranks may read them for as long as the collective is in flight; outputs are
//! plain borrows ([`SegmentsMut`]), because only their own rank touches them.

use std::{any::Any, fmt};

use crate::dtype::{DType, Element};

/// Buffers that other ranks may read while a collective is in flight. Owned, immutable, shared by
/// `Arc`.
///
/// `bytes(i)` has to return the same `numel(i) * dtype().size_bytes()` bytes each time, and for
/// collectives that reduce it has to be aligned to the element.
pub trait Segments: Send + Sync {
    /// Element type of every segment.
    fn dtype(&self) -> DType;
    /// Number of segments.
    fn count(&self) -> usize;
    /// Elements of segment `index`.
    fn numel(&self, index: usize) -> usize;
    /// Bytes of segment `index`; `None`: this rank contributes zeros (collectives that reduce only).
    fn bytes(&self, index: usize) -> Option<&[u8]>;
    /// What the elements are, as a number of the caller's choice: ranks that call with different
    /// labels disagree, even if all lengths are the same. 0: nothing in particular.
    fn label(&self) -> u64 {
        0
    }
    /// What the elements are, for people: `gradients of encoder.0.weight (14 parameters), step 12`.
    ///
    /// Asked for only when ranks disagree, and then shown in place of the label; never compared.
    fn describe(&self) -> String {
        String::new()
    }
    /// If the elements are in the memory of a device: where, in terms that only the communicator for
    /// such devices understands. `bytes` is not called then; communicators that reach no device refuse.
    fn device(&self) -> Option<&dyn Any> {
        None
    }
}

/// Element type and lengths of a list of segments, without the segments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SegmentLayout {
    /// Element type of every segment.
    pub dtype: DType,
    /// Elements of each segment.
    pub numels: Vec<usize>,
}

impl SegmentLayout {
    /// The layout of `segments`.
    #[must_use]
    pub fn of(segments: &dyn Segments) -> Self {
        Self {
            dtype: segments.dtype(),
            numels: (0..segments.count()).map(|i| segments.numel(i)).collect(),
        }
    }
}

/// Buffers that a collective writes on their own rank.
pub trait SegmentsMut {
    /// Element type of every segment.
    fn dtype(&self) -> DType;
    /// Number of segments.
    fn count(&self) -> usize;
    /// Elements of segment `index`.
    fn numel(&self, index: usize) -> usize;
    /// Bytes of segment `index`, `numel(index) * dtype().size_bytes()` of them.
    fn bytes_mut(&mut self, index: usize) -> &mut [u8];
    /// Where the elements are, as for [`Segments::device`]; if on a device, `bytes_mut` is not called.
    fn device(&self) -> Option<&dyn Any> {
        None
    }
}

/// Segments that own their elements; input and output alike.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OwnedSegments<T>(pub Vec<Vec<T>>);

impl<T: Element> Segments for OwnedSegments<T> {
    fn dtype(&self) -> DType {
        T::DTYPE
    }
    fn count(&self) -> usize {
        self.0.len()
    }
    fn numel(&self, index: usize) -> usize {
        self.0[index].len()
    }
    fn bytes(&self, index: usize) -> Option<&[u8]> {
        Some(bytemuck::cast_slice(&self.0[index]))
    }
}

impl<T: Element> SegmentsMut for OwnedSegments<T> {
    fn dtype(&self) -> DType {
        T::DTYPE
    }
    fn count(&self) -> usize {
        self.0.len()
    }
    fn numel(&self, index: usize) -> usize {
        self.0[index].len()
    }
    fn bytes_mut(&mut self, index: usize) -> &mut [u8] {
        bytemuck::cast_slice_mut(&mut self.0[index])
    }
}

/// Owned segments some of which are absent: their rank contributes zeros without storing them.
#[derive(Clone, Debug, PartialEq)]
pub enum MaybeSegment<T> {
    /// These elements.
    Present(Vec<T>),
    /// Zeros that are not stored, as many as the segment would have elements.
    Absent {
        /// Elements the segment would have.
        numel: usize,
    },
}

/// A list of [`MaybeSegment`]; an input of collectives that reduce.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SparseSegments<T>(pub Vec<MaybeSegment<T>>);

impl<T: Element> Segments for SparseSegments<T> {
    fn dtype(&self) -> DType {
        T::DTYPE
    }
    fn count(&self) -> usize {
        self.0.len()
    }
    fn numel(&self, index: usize) -> usize {
        match &self.0[index] {
            MaybeSegment::Present(elements) => elements.len(),
            MaybeSegment::Absent { numel } => *numel,
        }
    }
    fn bytes(&self, index: usize) -> Option<&[u8]> {
        match &self.0[index] {
            MaybeSegment::Present(elements) => Some(bytemuck::cast_slice(elements)),
            MaybeSegment::Absent { .. } => None,
        }
    }
}

/// Output into a list of disjoint slices.
pub struct SlicesMut<'a, T>(pub Vec<&'a mut [T]>);

impl<T: Element> SegmentsMut for SlicesMut<'_, T> {
    fn dtype(&self) -> DType {
        T::DTYPE
    }
    fn count(&self) -> usize {
        self.0.len()
    }
    fn numel(&self, index: usize) -> usize {
        self.0[index].len()
    }
    fn bytes_mut(&mut self, index: usize) -> &mut [u8] {
        bytemuck::cast_slice_mut(self.0[index])
    }
}

impl<T> fmt::Debug for SlicesMut<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let numels: Vec<usize> = self.0.iter().map(|slice| slice.len()).collect();
        f.debug_tuple("SlicesMut").field(&numels).finish()
    }
}
