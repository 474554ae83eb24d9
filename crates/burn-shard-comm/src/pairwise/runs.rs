//! Which bytes travel: lists of segments seen as one run of bytes, cut into chunks.
//!
//! Pure arithmetic. Both ends of an exchange compute the same cuts from the same [`Call`], so lengths
//! never travel.

use std::ops::Range;

use crate::{
    call::{Call, shard_range},
    communicator::shard_numel,
    dtype::DType,
    segments::{Segments, SegmentsMut},
};

/// Most bytes of one exchange: many times what a round trip costs, and a chunk of a few ranks still fits
/// the second-level cache when it is summed.
pub(super) const CHUNK_BYTES: usize = 1 << 20;

/// Parts of segments from here on travel by themselves, without a copy; smaller ones are packed.
const ALONE_BYTES: usize = 64 << 10;

/// A part of a segment, in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Span {
    pub(super) segment: usize,
    pub(super) bytes: Range<usize>,
}

/// Parts of segments, one after the other, as they travel between two ranks.
#[derive(Debug)]
pub(super) struct Run {
    spans: Vec<Span>,
    /// Where each span begins in the run; one more entry for the end.
    starts: Vec<usize>,
}

impl Run {
    /// The elements `from(segment, numel)` of each segment.
    fn new(call: &Call, from: impl Fn(usize, usize) -> Range<usize>) -> Self {
        let size_bytes = size_bytes(call);
        let mut run = Self {
            spans: Vec::new(),
            starts: vec![0],
        };
        let mut end = 0;
        for (segment, &numel) in call.numels.iter().enumerate() {
            let elements = from(segment, numel);
            if elements.is_empty() {
                continue;
            }
            let bytes = elements.start * size_bytes..elements.end * size_bytes;
            end += bytes.len();
            run.spans.push(Span { segment, bytes });
            run.starts.push(end);
        }
        run
    }

    /// All elements of all segments.
    pub(super) fn whole(call: &Call) -> Self {
        Self::new(call, |_, numel| 0..numel)
    }

    /// What `rank` owns of each segment.
    pub(super) fn shards(call: &Call, rank: usize, world_size: usize) -> Self {
        Self::new(call, |_, numel| shard_range(numel, rank, world_size))
    }

    /// What `rank` owns of each segment, as it lies in a list of shards: from their beginning, without
    /// the padding.
    pub(super) fn of_shards(call: &Call, rank: usize, world_size: usize) -> Self {
        Self::new(call, |_, numel| {
            0..shard_range(numel, rank, world_size).len()
        })
    }

    /// The share of `rank` in all segments as one run of elements, wherever segments begin.
    pub(super) fn share(call: &Call, rank: usize, world_size: usize) -> Self {
        let total: usize = call.numels.iter().sum();
        let share = shard_range(total, rank, world_size);
        let starts: Vec<usize> = call
            .numels
            .iter()
            .scan(0, |end, &numel| {
                let start = *end;
                *end += numel;
                Some(start)
            })
            .collect();
        Self::new(call, |segment, numel| {
            let start = starts[segment];
            let clip = |at: usize| at.clamp(start, start + numel) - start;
            clip(share.start)..clip(share.end)
        })
    }

    pub(super) fn bytes(&self) -> usize {
        self.starts.last().copied().unwrap_or(0)
    }

    /// The run in chunks of at most [`CHUNK_BYTES`]; each is a part of one span, or whole small spans.
    pub(super) fn cuts(&self) -> Vec<Range<usize>> {
        let mut cuts = Vec::new();
        let mut start = 0; // Of the small spans not cut yet.
        for ends in self.starts.windows(2) {
            let (from, to) = (ends[0], ends[1]);
            let alone = to - from >= ALONE_BYTES;
            if start < from && (alone || to - start > CHUNK_BYTES) {
                cuts.push(start..from);
                start = from;
            }
            if alone {
                while start < to {
                    let end = (start + CHUNK_BYTES).min(to);
                    cuts.push(start..end);
                    start = end;
                }
            }
        }
        if start < self.bytes() {
            cuts.push(start..self.bytes());
        }
        cuts
    }

    /// The parts of segments that `range` of the run covers.
    pub(super) fn spans(&self, range: Range<usize>) -> impl Iterator<Item = Span> + '_ {
        let first = self
            .starts
            .partition_point(|&start| start <= range.start)
            .saturating_sub(1);
        self.spans[first.min(self.spans.len())..]
            .iter()
            .zip(&self.starts[first..])
            .take_while(move |&(_, &start)| start < range.end)
            .map(move |(span, &start)| {
                let from = range.start.max(start) - start;
                let to = range.end.min(start + span.bytes.len()) - start;
                Span {
                    segment: span.segment,
                    bytes: span.bytes.start + from..span.bytes.start + to,
                }
            })
    }

    /// The span of `range` if it is one, so that its bytes need not be packed.
    pub(super) fn single(&self, range: Range<usize>) -> Option<Span> {
        let mut spans = self.spans(range);
        spans.next().filter(|_| spans.next().is_none())
    }

    /// The bytes of `range`: where they are if they lie together, else packed into `scratch`.
    ///
    /// Absent segments are zeros.
    pub(super) fn read<'a>(
        &self,
        range: Range<usize>,
        input: &'a dyn Segments,
        scratch: &'a mut [u8],
    ) -> &'a [u8] {
        if let Some(span) = self.single(range.clone())
            && let Some(bytes) = input.bytes(span.segment)
        {
            return &bytes[span.bytes];
        }
        let scratch = &mut scratch[..range.len()];
        let mut rest = &mut *scratch;
        for span in self.spans(range) {
            let (part, later) = rest.split_at_mut(span.bytes.len());
            match input.bytes(span.segment) {
                Some(bytes) => part.copy_from_slice(&bytes[span.bytes]),
                None => part.fill(0),
            }
            rest = later;
        }
        scratch
    }

    /// All bytes of the run, packed.
    pub(super) fn packed(&self, input: &dyn Segments) -> Vec<u8> {
        let mut packed = vec![0; self.bytes()];
        let mut rest = packed.as_mut_slice();
        for span in &self.spans {
            let (part, later) = rest.split_at_mut(span.bytes.len());
            if let Some(bytes) = input.bytes(span.segment) {
                part.copy_from_slice(&bytes[span.bytes.clone()]);
            }
            rest = later;
        }
        packed
    }

    /// Copies `packed`, which is `range` of the run, to where it belongs.
    pub(super) fn write(&self, range: Range<usize>, packed: &[u8], output: &mut dyn SegmentsMut) {
        let mut rest = packed;
        for span in self.spans(range) {
            let (part, later) = rest.split_at(span.bytes.len());
            output.bytes_mut(span.segment)[span.bytes].copy_from_slice(part);
            rest = later;
        }
    }

    /// The parts of segments, in order.
    pub(super) fn all(&self) -> &[Span] {
        &self.spans
    }
}

/// Bytes of one element; 1 for a barrier, which has none.
pub(super) fn size_bytes(call: &Call) -> usize {
    call.dtype.map_or(1, DType::size_bytes)
}

/// Bytes of all segments.
pub(super) fn total_bytes(call: &Call) -> usize {
    call.numels.iter().sum::<usize>() * size_bytes(call)
}

/// Bytes of one rank's shard of `numel` elements, with padding.
pub(super) fn padded_bytes(call: &Call, numel: usize, world_size: usize) -> usize {
    shard_numel(numel, world_size) * size_bytes(call)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{communicator::Collective, segments::SparseSegments};

    fn call(numels: &[usize]) -> Call {
        Call {
            collective: Collective::AllReduce,
            dtype: Some(DType::F32),
            op: None,
            root: None,
            numels: numels.to_vec(),
            label: 0,
            description: String::new(),
        }
    }

    const LISTS: [&[usize]; 7] = [
        &[],
        &[0],
        &[5],
        &[0, 3, 0, 1, 0],
        &[1; 300],
        &[300_000, 7, 16_384, 16_383, 9],
        &[16_000; 40],
    ];

    #[test]
    fn the_runs_of_all_ranks_cover_every_byte_once() {
        for numels in LISTS {
            let call = call(numels);
            for world_size in 1..=5 {
                for of in [Run::shards, Run::share] {
                    let mut seen: Vec<Vec<u8>> = numels.iter().map(|&n| vec![0; 4 * n]).collect();
                    for rank in 0..world_size {
                        let run = of(&call, rank, world_size);
                        for span in run.all() {
                            for byte in &mut seen[span.segment][span.bytes.clone()] {
                                *byte += 1;
                            }
                        }
                    }
                    assert!(seen.iter().flatten().all(|&count| count == 1), "{numels:?}");
                }
            }
        }
    }

    #[test]
    fn cuts_are_in_order_complete_and_bounded() {
        for numels in LISTS {
            let call = call(numels);
            for world_size in 1..=4 {
                for rank in 0..world_size {
                    let run = Run::shards(&call, rank, world_size);
                    let mut end = 0;
                    for cut in run.cuts() {
                        assert_eq!(cut.start, end);
                        assert!(!cut.is_empty() && cut.len() <= CHUNK_BYTES);
                        let covered: usize = run.spans(cut.clone()).map(|s| s.bytes.len()).sum();
                        assert_eq!(covered, cut.len());
                        end = cut.end;
                    }
                    assert_eq!(end, run.bytes());
                }
            }
        }
        // 300 tiny segments are one exchange.
        assert_eq!(Run::whole(&call(&[1; 300])).cuts().len(), 1);
    }

    #[test]
    fn absent_segments_are_zeros_in_dirty_scratch() {
        use crate::segments::MaybeSegment::{Absent, Present};
        let input = SparseSegments(vec![Present(vec![1u8]), Absent { numel: 2 }]);
        let mut call = call(&[1, 2]);
        call.dtype = Some(DType::U8);
        let run = Run::whole(&call);
        assert_eq!(run.read(0..3, &input, &mut [9; 4]), [1, 0, 0]);
        assert_eq!(run.read(1..3, &input, &mut [9; 4]), [0, 0]);
        assert_eq!(run.packed(&input), [1, 0, 0]);
    }
}
