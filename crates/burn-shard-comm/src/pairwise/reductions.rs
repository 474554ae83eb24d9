//! How reductions travel: every rank receives its part of all inputs and combines it in rank order.

use std::ops::Range;

use super::{
    desk::{Desk, Slots},
    header::{INLINE_BYTES, Numbered, agree},
    line::{Failure, Line},
    parts::Parts,
    runs::{Run, total_bytes},
};
use crate::{call::Call, communicator::ReduceOp, dtype::DType, reduce::reduce, segments::Segments};

/// `result` ends as what this rank owns of every segment, one after the other.
pub(super) fn reduce_scatter(
    line: &mut Line<'_>,
    desk: &mut Desk,
    numbered: Numbered<'_>,
    input: &dyn Segments,
    result: &mut [u8],
) -> Result<(), Failure> {
    let call = numbered.call;
    let combine = Combine::new(call, line, Run::shards);
    let parts = &combine.parts;
    let (own, mut slots) = desk.lay_out(parts.scratch_bytes(), line.world_size());
    if total_bytes(call) > INLINE_BYTES {
        agree(line, numbered, |_| Vec::new(), &mut slots)?;
        return combine.chunk_by_chunk(line, (own, &mut slots), input, result);
    }
    let inline = |to: usize| parts.runs[to].packed(input);
    agree(line, numbered, inline, &mut slots)?;
    let part = &parts.runs[line.rank()];
    combine.ranks_in_order(part.read(0..part.bytes(), input, own), &slots, result);
    Ok(())
}

/// `result` ends as all segments, one after the other.
pub(super) fn all_reduce(
    line: &mut Line<'_>,
    desk: &mut Desk,
    numbered: Numbered<'_>,
    input: &dyn Segments,
    result: &mut [u8],
) -> Result<(), Failure> {
    let call = numbered.call;
    let rank = line.rank();
    let combine = Combine::new(call, line, Run::share);
    let parts = &combine.parts;
    let (own, mut slots) = desk.lay_out(parts.scratch_bytes(), line.world_size());
    if total_bytes(call) <= INLINE_BYTES {
        let whole = Run::whole(call);
        agree(line, numbered, |_| whole.packed(input), &mut slots)?;
        combine.ranks_in_order(whole.read(0..whole.bytes(), input, own), &slots, result);
        return Ok(());
    }
    agree(line, numbered, |_| Vec::new(), &mut slots)?;
    let mut end = 0;
    let places: Vec<Range<usize>> = parts
        .runs
        .iter()
        .map(|run| {
            let start = end;
            end += run.bytes();
            start..end
        })
        .collect();
    combine.chunk_by_chunk(
        line,
        (own, &mut slots),
        input,
        &mut result[places[rank].clone()],
    )?;
    for index in 0..parts.chunks() {
        let place = |rank: usize| {
            let cut = parts.cut(rank, index);
            places[rank].start + cut.start..places[rank].start + cut.end
        };
        for (to, from) in line.rounds() {
            let [send, receive] = result
                .get_disjoint_mut([place(rank), place(from)])
                .expect("shares of two ranks should not overlap");
            line.exchange(to, send, from, receive)?;
        }
    }
    Ok(())
}

/// How the parts of all ranks become one.
struct Combine {
    rank: usize,
    dtype: DType,
    op: ReduceOp,
    parts: Parts,
}

impl Combine {
    fn new(call: &Call, line: &Line<'_>, of: impl Fn(&Call, usize, usize) -> Run) -> Self {
        Self {
            rank: line.rank(),
            dtype: call.dtype.unwrap_or(DType::U8),
            op: call.op.unwrap_or(ReduceOp::Sum),
            parts: Parts::new(call, line.world_size(), of),
        }
    }

    /// Exchanges and combines this rank's part, chunk by chunk.
    fn chunk_by_chunk(
        &self,
        line: &mut Line<'_>,
        (own, slots): (&mut [u8], &mut Slots<'_>),
        input: &dyn Segments,
        result: &mut [u8],
    ) -> Result<(), Failure> {
        let parts = &self.parts;
        for index in 0..parts.chunks() {
            let mine = parts.cut(self.rank, index);
            for (to, from) in line.rounds() {
                let send = parts.runs[to].read(parts.cut(to, index), input, own);
                line.exchange(to, send, from, slots.slot(from, mine.len()))?;
            }
            let source = parts.runs[self.rank].read(mine.clone(), input, own);
            self.ranks_in_order(source, slots, &mut result[mine]);
        }
        Ok(())
    }

    /// Combines `own` of this rank and what the others sent, in rank order.
    fn ranks_in_order(&self, own: &[u8], slots: &Slots<'_>, result: &mut [u8]) {
        let sources: Vec<Option<&[u8]>> = (0..self.parts.runs.len())
            .map(|rank| {
                Some(if rank == self.rank {
                    own
                } else {
                    slots.get(rank, own.len())
                })
            })
            .collect();
        reduce(self.dtype, self.op, &sources, result);
    }
}
