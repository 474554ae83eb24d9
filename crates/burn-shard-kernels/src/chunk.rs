//! The split of one step over the threads of the current rayon pool.
//!
//! It cannot change a result: a step looks at one element at a time, so any split gives the same
//! bits. Splits fall on multiples of [`CHUNK_NUMEL`], so chunks keep the alignment of the slice.

/// Elements a thread takes at once: 256 KiB per slice, small enough to spread over threads and
/// large enough to hide the cost of handing it over.
pub(crate) const CHUNK_NUMEL: usize = 64 * 1024;

/// Slices of equal length that a step walks in lockstep.
pub(crate) trait Lockstep: Sized + Send {
    /// Elements in each of the slices.
    fn numel(&self) -> usize;

    /// Splits each of the slices at the same place.
    fn split_at(self, mid: usize) -> (Self, Self);
}

/// Calls `step` on all of `slices`, in chunks if the pool has threads to share them.
pub(crate) fn in_chunks<S: Lockstep>(slices: S, step: &(impl Fn(S) + Sync)) {
    if slices.numel() <= CHUNK_NUMEL || rayon::current_num_threads() == 1 {
        step(slices);
    } else {
        halve(slices, step);
    }
}

fn halve<S: Lockstep>(slices: S, step: &(impl Fn(S) + Sync)) {
    let chunks = slices.numel().div_ceil(CHUNK_NUMEL);
    if chunks <= 1 {
        step(slices);
    } else {
        let (left, right) = slices.split_at(chunks / 2 * CHUNK_NUMEL);
        rayon::join(|| halve(left, step), || halve(right, step));
    }
}
