//! Splitting large buffers over the threads of the current rank.

use std::{error::Error as _, sync::OnceLock};

use rayon::prelude::*;

/// Bytes below which a buffer is left to one thread.
const WORTH_SPLITTING_BYTES: usize = 512 << 10;
/// Bytes of one task; a multiple of every element size.
const TASK_BYTES: usize = 128 << 10;

/// Runs `work(offset_bytes, part)` over all of `out`, on several threads if that is worth it.
pub(crate) fn for_parts(out: &mut [u8], work: impl Fn(usize, &mut [u8]) + Sync) {
    if out.len() < WORTH_SPLITTING_BYTES || !has_threads() {
        work(0, out);
    } else {
        out.par_chunks_mut(TASK_BYTES)
            .enumerate()
            .for_each(|(index, part)| work(index * TASK_BYTES, part));
    }
}

/// Whether there is more than one thread to split work over.
///
/// Outside of any pool, the global one is started, which panics if the system has no thread left. Then this rank
/// works on the thread it has: a rank that panics here would end the job for the sake of speed.
fn has_threads() -> bool {
    static GLOBAL: OnceLock<bool> = OnceLock::new();
    let has_global = || {
        let built = rayon::ThreadPoolBuilder::new().build_global();
        // Other errors say that there is a pool already.
        let failed = built.err().filter(|error| error.source().is_some());
        if let Some(error) = &failed {
            log::warn!("cannot start threads, large collectives run on one: {error}");
        }
        failed.is_none()
    };
    let has_pool = rayon::current_thread_index().is_some() || *GLOBAL.get_or_init(has_global);
    has_pool && rayon::current_num_threads() > 1
}

/// Copies `source` to `out`, of the same length.
pub(crate) fn copy(source: &[u8], out: &mut [u8]) {
    for_parts(out, |offset, part| {
        part.copy_from_slice(&source[offset..offset + part.len()]);
    });
}
