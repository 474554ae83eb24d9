//! An `all_reduce` cut into pieces that any rank can reduce for all.
//!
//! The segments, seen as one run of elements, are cut into pieces of equal length. A rank that waits
//! claims pieces until none is left, so the ranks that arrive share the work, and one that is busy
//! elsewhere (or has left) holds nobody up. Which rank reduced a piece does not show in the result:
//! it combines the elements of all ranks in rank order.
//!
//! When the last piece is done, the inputs are let go; results stay until the last rank has copied
//! them out.

use std::{
    ops::Range,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use parking_lot::Mutex;

use crate::{
    call::Call, communicator::ReduceOp, dtype::DType, hub::Input, parallel, reduce::reduce,
    segments::SegmentsMut,
};

/// Bytes of one piece: enough to hide the claim, few enough to share the work evenly.
const PIECE_BYTES: usize = 256 << 10;

/// Bytes a group keeps for later pieces.
pub(crate) const KEPT_BYTES: usize = 64 << 20;

pub(crate) struct Pieces {
    dtype: DType,
    op: ReduceOp,
    /// Where each segment begins in the run of all elements; one more entry for the end.
    starts: Vec<usize>,
    /// Elements per piece.
    piece_numel: usize,
    next: AtomicUsize,
    results: Vec<OnceLock<Scratch>>,
    shelf: Arc<Shelf>,
    desk: Mutex<Desk>,
    released: AtomicBool,
}

/// The memory of one piece, in `u64`s to be aligned for every element.
type Scratch = Vec<u64>;

/// Memory of pieces that were copied out, kept for the next: fresh pages cost more than the sums.
#[derive(Default)]
pub(crate) struct Shelf {
    kept: Mutex<Vec<Scratch>>,
}

impl Shelf {
    /// At least `bytes` of memory, with anything in it.
    fn take(&self, bytes: usize) -> Scratch {
        if bytes < PIECE_BYTES {
            return vec![0; bytes.div_ceil(8)];
        }
        self.kept
            .lock()
            .pop()
            .unwrap_or_else(|| vec![0; PIECE_BYTES / 8])
    }

    fn give_back(&self, scratch: impl Iterator<Item = Scratch>) {
        let mut kept = self.kept.lock();
        let room = (KEPT_BYTES / PIECE_BYTES).saturating_sub(kept.len());
        kept.extend(
            scratch
                .filter(|scratch| scratch.len() * 8 == PIECE_BYTES)
                .take(room),
        );
    }
}

struct Desk {
    /// Ranks that claim or reduce pieces at the moment.
    workers: Vec<usize>,
    inputs: Option<Arc<Vec<Input>>>,
}

/// A part of a segment within a piece.
struct Span {
    segment: usize,
    /// Elements of the segment.
    range: Range<usize>,
    /// Where they begin in the piece, in elements.
    start: usize,
}

impl Pieces {
    pub(crate) fn new(call: &Call, op: ReduceOp, inputs: Vec<Input>, shelf: &Arc<Shelf>) -> Self {
        let dtype = call.dtype.unwrap_or(DType::U8);
        let mut starts = vec![0];
        let mut total = 0;
        for &numel in &call.numels {
            total += numel;
            starts.push(total);
        }
        let piece_numel = PIECE_BYTES / dtype.size_bytes();
        let results = (0..total.div_ceil(piece_numel))
            .map(|_| OnceLock::new())
            .collect();
        Self {
            dtype,
            op,
            starts,
            piece_numel,
            next: AtomicUsize::new(0),
            results,
            shelf: Arc::clone(shelf),
            desk: Mutex::new(Desk {
                workers: Vec::new(),
                inputs: Some(Arc::new(inputs)),
            }),
            released: AtomicBool::new(false),
        }
    }

    /// Whether all pieces are done and the inputs let go.
    pub(crate) fn released(&self) -> bool {
        self.released.load(Ordering::Acquire)
    }

    /// Ranks that are reducing.
    pub(crate) fn workers(&self) -> Vec<usize> {
        self.desk.lock().workers.clone()
    }

    /// Reduces pieces for all ranks until none is left to claim; true if this let go of the inputs.
    pub(crate) fn work(&self, rank: usize) -> bool {
        let inputs = {
            let mut desk = self.desk.lock();
            let Some(inputs) = desk.inputs.clone() else {
                return false;
            };
            desk.workers.push(rank);
            inputs
        };
        let threads = if self.results.len() > 1 {
            rayon::current_num_threads()
        } else {
            1
        };
        if threads == 1 {
            self.claim_all(&inputs);
        } else {
            rayon::scope(|scope| {
                for _ in 1..threads.min(self.results.len()) {
                    scope.spawn(|_| self.claim_all(&inputs));
                }
                self.claim_all(&inputs);
            });
        }
        drop(inputs);
        let mut desk = self.desk.lock();
        if let Some(index) = desk.workers.iter().position(|&worker| worker == rank) {
            desk.workers.swap_remove(index);
        }
        if !desk.workers.is_empty() {
            return false;
        }
        // Every piece is claimed by now; as nobody is at work, every claimed one is done as well.
        let inputs = desk.inputs.take();
        drop(desk);
        let last = inputs.is_some();
        drop(inputs);
        if last {
            self.released.store(true, Ordering::Release);
        }
        last
    }

    fn claim_all(&self, inputs: &[Input]) {
        loop {
            let index = self.next.fetch_add(1, Ordering::Relaxed);
            let Some(result) = self.results.get(index) else {
                return;
            };
            let first = result.set(self.reduce_piece(index, inputs)).is_ok();
            debug_assert!(first, "a piece should be claimed once");
        }
    }

    fn reduce_piece(&self, index: usize, inputs: &[Input]) -> Scratch {
        let size_bytes = self.dtype.size_bytes();
        let piece = self.piece_range(index);
        let mut result = self.shelf.take(piece.len() * size_bytes);
        let out: &mut [u8] = bytemuck::cast_slice_mut(&mut result);
        let mut sources: Vec<Option<&[u8]>> = Vec::with_capacity(inputs.len());
        for span in self.spans(piece) {
            let bytes = span.range.start * size_bytes..span.range.end * size_bytes;
            sources.clear();
            sources.extend(inputs.iter().map(|input| {
                let input = input
                    .as_ref()
                    .expect("every rank of an all_reduce should have an input");
                input
                    .bytes(span.segment)
                    .map(|segment| &segment[bytes.clone()])
            }));
            let start = span.start * size_bytes;
            reduce(
                self.dtype,
                self.op,
                &sources,
                &mut out[start..start + bytes.len()],
            );
        }
        result
    }

    /// Copies the result of all pieces out; they have to be done.
    pub(crate) fn copy_out(&self, output: &mut dyn SegmentsMut) {
        let size_bytes = self.dtype.size_bytes();
        for segment in 0..self.starts.len() - 1 {
            let start = self.starts[segment];
            parallel::for_parts(output.bytes_mut(segment), |offset, part| {
                let mut part = part;
                let mut position = start + offset / size_bytes;
                while !part.is_empty() {
                    assert!(
                        position < self.total(),
                        "an output should be as long as it says"
                    );
                    let index = position / self.piece_numel;
                    let piece = self.piece_range(index);
                    let result = self.results[index]
                        .get()
                        .expect("all pieces should be done");
                    let from = &bytemuck::cast_slice::<u64, u8>(result)
                        [(position - piece.start) * size_bytes..piece.len() * size_bytes];
                    let (now, later) = part.split_at_mut(part.len().min(from.len()));
                    now.copy_from_slice(&from[..now.len()]);
                    position = piece.end;
                    part = later;
                }
            });
        }
    }

    fn total(&self) -> usize {
        self.starts.last().copied().unwrap_or(0)
    }

    fn piece_range(&self, index: usize) -> Range<usize> {
        index * self.piece_numel..((index + 1) * self.piece_numel).min(self.total())
    }

    /// The parts of segments that `piece` covers.
    fn spans(&self, piece: Range<usize>) -> impl Iterator<Item = Span> + '_ {
        // The last segment that begins at or before the piece: it holds the piece's first element.
        let first = self.starts.partition_point(|&start| start <= piece.start) - 1;
        (first..self.starts.len() - 1)
            .map(move |segment| {
                let (start, end) = (self.starts[segment], self.starts[segment + 1]);
                let (from, to) = (start.max(piece.start), end.min(piece.end));
                (segment, start, from, to)
            })
            .take_while(move |&(_, start, _, _)| start < piece.end)
            .filter(|&(_, _, from, to)| from < to)
            .map(move |(segment, start, from, to)| Span {
                segment,
                range: from - start..to - start,
                start: from - piece.start,
            })
    }
}

impl Drop for Pieces {
    fn drop(&mut self) {
        self.shelf
            .give_back(self.results.iter_mut().filter_map(OnceLock::take));
    }
}
