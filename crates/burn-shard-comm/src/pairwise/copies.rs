//! How collectives travel that copy: straight from the input of one rank into the output of another,
//! unless small segments are packed.

use std::ops::Range;

use super::{
    desk::Desk,
    header::{INLINE_BYTES, Numbered, agree},
    line::{Failure, Line},
    parts::Parts,
    runs::{Run, total_bytes},
};
use crate::{
    parallel,
    segments::{Segments, SegmentsMut},
};

/// Ends once all ranks have called it.
pub(super) fn barrier(
    line: &mut Line<'_>,
    desk: &mut Desk,
    numbered: Numbered<'_>,
) -> Result<(), Failure> {
    let (_, mut slots) = desk.lay_out(INLINE_BYTES, line.world_size());
    agree(line, numbered, |_| Vec::new(), &mut slots)
}

/// `output` ends as the shards of all ranks.
pub(super) fn all_gather(
    line: &mut Line<'_>,
    desk: &mut Desk,
    numbered: Numbered<'_>,
    input: &dyn Segments,
    output: &mut dyn SegmentsMut,
) -> Result<(), Failure> {
    let call = numbered.call;
    let (rank, world_size) = (line.rank(), line.world_size());
    let mine = Run::of_shards(call, rank, world_size);
    let parts = Parts::new(call, world_size, Run::shards);
    let (own, mut slots) = desk.lay_out(parts.scratch_bytes(), world_size);
    if total_bytes(call) <= INLINE_BYTES {
        agree(line, numbered, |_| mine.packed(input), &mut slots)?;
        for (_, from) in line.rounds() {
            let run = &parts.runs[from];
            run.write(0..run.bytes(), slots.get(from, run.bytes()), output);
        }
    } else {
        agree(line, numbered, |_| Vec::new(), &mut slots)?;
        for index in 0..parts.chunks() {
            // The same chunk, seen from the shard.
            let send = mine.read(parts.cut(rank, index), input, own);
            for (to, from) in line.rounds() {
                parts.exchange(line, (to, send), (from, from, index), output, &mut slots)?;
            }
        }
    }
    for (from, to) in mine.all().iter().zip(parts.runs[rank].all()) {
        copy(
            input,
            (from.segment, from.bytes.clone()),
            output,
            to.bytes.clone(),
        );
    }
    Ok(())
}

/// `output` ends as the input of the root; on the root nothing is written.
///
/// The root sends every rank a share, and the ranks send each other theirs: nobody sends more than twice
/// the bytes, however many ranks there are.
pub(super) fn broadcast(
    line: &mut Line<'_>,
    desk: &mut Desk,
    numbered: Numbered<'_>,
    output: &mut dyn SegmentsMut,
) -> Result<(), Failure> {
    let Numbered { call, input, .. } = numbered;
    let (rank, world_size) = (line.rank(), line.world_size());
    let root = call.root.unwrap_or(0);
    let whole = Run::whole(call);
    let parts = Parts::new(call, world_size, Run::share);
    let (own, mut slots) = desk.lay_out(parts.scratch_bytes(), world_size);
    let small = total_bytes(call) <= INLINE_BYTES;
    let inline = |_| match input {
        Some(input) if small => whole.packed(input),
        _ => Vec::new(),
    };
    agree(line, numbered, inline, &mut slots)?;
    match input {
        Some(_) if small => {}
        None if small => {
            whole.write(0..whole.bytes(), slots.get(root, whole.bytes()), output);
        }
        Some(input) => {
            for index in 0..parts.chunks() {
                for (to, _) in line.rounds() {
                    let send = parts.runs[to].read(parts.cut(to, index), input, own);
                    line.exchange(to, send, to, &mut [])?;
                }
            }
            for index in 0..parts.chunks() {
                let send = parts.runs[root].read(parts.cut(root, index), input, own);
                for (to, _) in line.rounds() {
                    line.exchange(to, send, to, &mut [])?;
                }
            }
        }
        None => {
            for index in 0..parts.chunks() {
                parts.exchange(line, (root, &[]), (root, rank, index), output, &mut slots)?;
            }
            for index in 0..parts.chunks() {
                let send = parts.read_back((rank, index), output, own);
                for (to, from) in line.rounds() {
                    let send = if to == root { &[][..] } else { send };
                    parts.exchange(line, (to, send), (from, from, index), output, &mut slots)?;
                }
            }
        }
    }
    Ok(())
}

/// Copies a part of a segment to the same segment of the output.
fn copy(
    input: &dyn Segments,
    (segment, from): (usize, Range<usize>),
    output: &mut dyn SegmentsMut,
    to: Range<usize>,
) {
    let input = input.bytes(segment);
    let input = input.expect("inputs of collectives that copy should be present");
    parallel::copy(&input[from], &mut output.bytes_mut(segment)[to]);
}
