//! Splitting large buffers over the threads of the current rank.

use rayon::prelude::*;

/// Bytes below which a buffer is left to one thread.
const WORTH_SPLITTING_BYTES: usize = 512 << 10;
/// Bytes of one task; a multiple of every element size.
const TASK_BYTES: usize = 128 << 10;

/// Runs `work(offset_bytes, part)` over all of `out`, on several threads if that is worth it.
pub(crate) fn for_parts(out: &mut [u8], work: impl Fn(usize, &mut [u8]) + Sync) {
    if out.len() < WORTH_SPLITTING_BYTES || rayon::current_num_threads() == 1 {
        work(0, out);
    } else {
        out.par_chunks_mut(TASK_BYTES)
            .enumerate()
            .for_each(|(index, part)| work(index * TASK_BYTES, part));
    }
}

/// Copies `source` to `out`, of the same length.
pub(crate) fn copy(source: &[u8], out: &mut [u8]) {
    for_parts(out, |offset, part| {
        part.copy_from_slice(&source[offset..offset + part.len()]);
    });
}
