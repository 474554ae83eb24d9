//! The parts that the ranks have of one collective, and their chunks.

use std::ops::Range;

use super::{
    desk::Slots,
    header::INLINE_BYTES,
    line::{Failure, Line},
    runs::Run,
};
use crate::{call::Call, segments::SegmentsMut};

pub(super) struct Parts {
    pub(super) runs: Vec<Run>,
    cuts: Vec<Vec<Range<usize>>>,
}

impl Parts {
    /// The runs `of(call, rank, world_size)` of all ranks.
    pub(super) fn new(
        call: &Call,
        world_size: usize,
        of: impl Fn(&Call, usize, usize) -> Run,
    ) -> Self {
        let runs: Vec<Run> = (0..world_size)
            .map(|rank| of(call, rank, world_size))
            .collect();
        Self {
            cuts: runs.iter().map(Run::cuts).collect(),
            runs,
        }
    }

    /// Chunks of the rank that has most.
    pub(super) fn chunks(&self) -> usize {
        self.cuts.iter().map(Vec::len).max().unwrap_or(0)
    }

    /// Chunk `index` of the part of `rank`; empty if it has fewer.
    pub(super) fn cut(&self, rank: usize, index: usize) -> Range<usize> {
        self.cuts[rank].get(index).cloned().unwrap_or(0..0)
    }

    /// Bytes of the largest chunk, or of what may follow a header.
    pub(super) fn scratch_bytes(&self) -> usize {
        let cuts = self.cuts.iter().flatten().map(Range::len);
        cuts.max().unwrap_or(0).max(INLINE_BYTES)
    }

    /// Sends `send` while chunk `index` of the part of `owner` comes from `from` into `output`.
    pub(super) fn exchange(
        &self,
        line: &mut Line<'_>,
        (to, send): (usize, &[u8]),
        (from, owner, index): (usize, usize, usize),
        output: &mut dyn SegmentsMut,
        slots: &mut Slots<'_>,
    ) -> Result<(), Failure> {
        let (run, cut) = (&self.runs[owner], self.cut(owner, index));
        if let Some(span) = run.single(cut.clone()) {
            let receive = &mut output.bytes_mut(span.segment)[span.bytes];
            return line.exchange(to, send, from, receive);
        }
        let receive = slots.slot(from, cut.len());
        line.exchange(to, send, from, receive)?;
        run.write(cut, receive, output);
        Ok(())
    }

    /// Packs chunk `index` of the part of `rank` from an output into `scratch`.
    pub(super) fn read_back<'a>(
        &self,
        (rank, index): (usize, usize),
        output: &mut dyn SegmentsMut,
        scratch: &'a mut [u8],
    ) -> &'a [u8] {
        let cut = self.cut(rank, index);
        let scratch = &mut scratch[..cut.len()];
        let mut rest = &mut *scratch;
        for span in self.runs[rank].spans(cut) {
            let (part, later) = rest.split_at_mut(span.bytes.len());
            part.copy_from_slice(&output.bytes_mut(span.segment)[span.bytes]);
            rest = later;
        }
        scratch
    }
}
