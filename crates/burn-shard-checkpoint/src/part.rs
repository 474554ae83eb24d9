//! What a rank hands over to be written: its ranges of one tensor.

use std::borrow::Cow;
use std::collections::HashSet;
use std::fmt;
use std::ops::Range;

use crate::{DType, Error, TensorName};

/// What a source of bytes may fail with.
pub type SourceError = Box<dyn std::error::Error + Send + Sync>;

type Fetch<'a> = Box<dyn FnOnce() -> Result<Vec<u8>, SourceError> + Send + 'a>;

/// The elements of one tensor that one rank writes.
///
/// Over all ranks each element of a tensor is written exactly once. What is replicated is written by
/// one rank, or cut by [`even_range`] so that all of them write.
pub struct TensorPart<'a> {
    pub(crate) name: TensorName,
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<usize>,
    pub(crate) ranges: Vec<Range<usize>>,
    source: Source<'a>,
}

enum Source<'a> {
    Bytes(Cow<'a, [u8]>),
    Fetch(Fetch<'a>),
}

impl<'a> TensorPart<'a> {
    /// All of a tensor, of which `bytes` are the elements in row-major order, little-endian.
    pub fn full(
        name: TensorName,
        dtype: DType,
        shape: &[usize],
        bytes: impl Into<Cow<'a, [u8]>>,
    ) -> Self {
        // An overflow is refused when the part is written.
        let numel = numel(shape).unwrap_or(usize::MAX);
        Self::ranges(name, dtype, shape, vec![0..numel], bytes)
    }

    /// The elements `ranges` of a tensor of full shape `shape`, flattened in row-major order.
    ///
    /// Ranges ascend and do not overlap; `bytes` are their elements, one range after the other,
    /// little-endian. Empty ranges are left out. A rank that holds nothing of a tensor may pass
    /// no range at all, or leave the tensor out.
    pub fn ranges(
        name: TensorName,
        dtype: DType,
        shape: &[usize],
        ranges: Vec<Range<usize>>,
        bytes: impl Into<Cow<'a, [u8]>>,
    ) -> Self {
        Self::new(name, dtype, shape, ranges, Source::Bytes(bytes.into()))
    }

    /// A part like that of [`ranges`](Self::ranges), of which the bytes are fetched when their turn comes,
    /// and dropped once written: from a device, for example, one tensor at a time.
    pub fn lazy(
        name: TensorName,
        dtype: DType,
        shape: &[usize],
        ranges: Vec<Range<usize>>,
        fetch: impl FnOnce() -> Result<Vec<u8>, SourceError> + Send + 'a,
    ) -> Self {
        Self::new(name, dtype, shape, ranges, Source::Fetch(Box::new(fetch)))
    }

    fn new(
        name: TensorName,
        dtype: DType,
        shape: &[usize],
        mut ranges: Vec<Range<usize>>,
        source: Source<'a>,
    ) -> Self {
        ranges.retain(|range| range.start != range.end);
        Self {
            name,
            dtype,
            shape: shape.to_vec(),
            ranges,
            source,
        }
    }

    /// Elements that this part holds.
    #[must_use]
    pub fn numel(&self) -> usize {
        self.ranges.iter().map(ExactSizeIterator::len).sum()
    }

    pub(crate) fn is_whole(&self) -> bool {
        numel(&self.shape) == Some(self.numel())
    }

    /// The first elements that are not among the ranges.
    pub(crate) fn first_gap(&self) -> (usize, usize) {
        let mut covered = 0;
        for range in &self.ranges {
            if range.start > covered {
                return (covered, range.start);
            }
            covered = range.end;
        }
        (covered, numel(&self.shape).unwrap_or(usize::MAX))
    }

    /// Checks everything that can be checked without the bytes.
    fn check(&self) -> Result<(), Error> {
        self.name.check()?;
        let numel = checked_numel(&self.name, &self.shape, self.dtype)?;
        let mut from = 0;
        for range in &self.ranges {
            if range.start > range.end || range.end > numel {
                return Err(Error::Range {
                    name: self.name.clone(),
                    start: range.start,
                    end: range.end,
                    numel,
                });
            }
            if range.start < from {
                return Err(Error::Overlap {
                    name: self.name.clone(),
                    start: range.start,
                    end: from.min(range.end),
                });
            }
            from = range.end;
        }
        Ok(())
    }

    /// The bytes, of the length that the ranges ask for.
    pub(crate) fn bytes(self) -> Result<Cow<'a, [u8]>, Error> {
        let expected_bytes = self.numel() * self.dtype.size_bytes();
        let bytes = match self.source {
            Source::Bytes(bytes) => bytes,
            Source::Fetch(fetch) => match fetch() {
                Ok(bytes) => Cow::Owned(bytes),
                Err(source) => {
                    return Err(Error::Source {
                        name: self.name,
                        source,
                    });
                }
            },
        };
        if bytes.len() != expected_bytes {
            return Err(Error::PartLength {
                name: self.name,
                expected_bytes,
                found_bytes: bytes.len(),
            });
        }
        Ok(bytes)
    }
}

/// Checks the parts of one file: each by itself, and that no two have one name.
pub(crate) fn check_all(parts: &[TensorPart<'_>]) -> Result<(), Error> {
    let mut keys = HashSet::new();
    for part in parts {
        part.check()?;
        let key = part.name.key();
        if !keys.insert(key.clone()) {
            return Err(Error::DuplicateTensor { name: key });
        }
    }
    Ok(())
}

impl fmt::Debug for TensorPart<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TensorPart")
            .field("name", &self.name)
            .field("dtype", &self.dtype)
            .field("shape", &self.shape)
            .field("ranges", &self.ranges)
            .finish_non_exhaustive()
    }
}

/// The elements of a tensor of `numel` that `rank` holds, if it is cut evenly: as many as fit on
/// each rank, and fewer, or none, on the last.
///
/// ```
/// use burn_shard_checkpoint::even_range;
///
/// assert_eq!(even_range(10, 0, 4), 0..3);
/// assert_eq!(even_range(10, 3, 4), 9..10);
/// assert_eq!(even_range(2, 3, 4), 2..2);
/// ```
///
/// # Panics
///
/// If `world_size` is 0.
#[must_use]
pub fn even_range(numel: usize, rank: usize, world_size: usize) -> Range<usize> {
    let each = numel.div_ceil(world_size);
    let start = each.saturating_mul(rank).min(numel);
    start..start.saturating_add(each).min(numel)
}

pub(crate) fn numel(shape: &[usize]) -> Option<usize> {
    shape
        .iter()
        .try_fold(1_usize, |product, &extent| product.checked_mul(extent))
}

/// Elements of a tensor whose bytes, too, are a number that the machine can count.
pub(crate) fn checked_numel(
    name: &TensorName,
    shape: &[usize],
    dtype: DType,
) -> Result<usize, Error> {
    numel(shape)
        .filter(|&numel| numel <= isize::MAX.unsigned_abs() / dtype.size_bytes())
        .ok_or_else(|| Error::ShapeOverflow {
            name: name.clone(),
            shape: shape.to_vec(),
        })
}
