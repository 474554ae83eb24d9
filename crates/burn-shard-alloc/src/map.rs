//! The system calls: blocks of memory from Linux, aligned to huge pages and marked for them.

use std::ptr::NonNull;

/// The huge page of `x86_64`, and of `aarch64` with 4 KiB pages. Where the kernel has another, blocks
/// are still valid, only slower.
pub(crate) const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Maps a zeroed block aligned to the huge page, or `None` if the kernel refuses.
///
/// `block_bytes` is a multiple of the huge page, and at least `request_bytes`. Only huge pages that the
/// request fills are asked for (one, if it fills none): a request that ends a little into the next
/// would else make all of that resident.
pub(crate) fn map(block_bytes: usize, request_bytes: usize) -> Option<NonNull<u8>> {
    // Most often the gap next to the last block is taken, and that is aligned.
    let block = map_anywhere(block_bytes)?;
    let block = if block.as_ptr().addr().is_multiple_of(HUGE_PAGE_BYTES) {
        block
    } else {
        // SAFETY: the mapping was just made, nobody else knows it, and it is not used below.
        unsafe { unmap(block, block_bytes) };
        map_and_trim(block_bytes)?
    };
    let filled_bytes = request_bytes - request_bytes % HUGE_PAGE_BYTES;
    let huge_bytes = filled_bytes.clamp(HUGE_PAGE_BYTES, block_bytes);
    // SAFETY: the range lies in a mapping of our own. Failure is ignored: a kernel without huge
    // pages gives small ones.
    unsafe { libc::madvise(block.as_ptr().cast(), huge_bytes, libc::MADV_HUGEPAGE) };
    Some(block)
}

/// Returns a mapping, or part of one, to the kernel.
///
/// # Safety
///
/// The range was mapped by this module and nothing uses it any more.
pub(crate) unsafe fn unmap(block: NonNull<u8>, block_bytes: usize) {
    // SAFETY: the caller's promise. Failure (too many mappings in the process) is ignored: the
    // range then stays mapped and unused.
    unsafe { libc::munmap(block.as_ptr().cast(), block_bytes) };
}

fn map_anywhere(block_bytes: usize) -> Option<NonNull<u8>> {
    // SAFETY: a new anonymous mapping, placed by the kernel, touches no memory that exists.
    let address = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            block_bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    if address == libc::MAP_FAILED {
        None
    } else {
        NonNull::new(address.cast())
    }
}

/// Maps one huge page too much and gives back what sticks out on either side.
fn map_and_trim(block_bytes: usize) -> Option<NonNull<u8>> {
    let start = map_anywhere(block_bytes.checked_add(HUGE_PAGE_BYTES)?)?;
    let address = start.as_ptr().addr();
    let head_bytes = address.next_multiple_of(HUGE_PAGE_BYTES) - address;
    let tail_bytes = HUGE_PAGE_BYTES - head_bytes;
    // SAFETY: head_bytes is less than a huge page, which the mapping has beyond block_bytes.
    let block = unsafe { start.add(head_bytes) };
    if head_bytes > 0 {
        // SAFETY: the range before the block was just mapped and nobody uses it.
        unsafe { unmap(start, head_bytes) };
    }
    // SAFETY: the block ends tail_bytes before the end of the mapping; tail_bytes is not 0.
    let tail = unsafe { block.add(block_bytes) };
    // SAFETY: the range behind the block was just mapped and nobody uses it.
    unsafe { unmap(tail, tail_bytes) };
    Some(block)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Both ways of mapping, whatever the kernel's own alignment: the second is forced.
    #[test]
    fn blocks_are_aligned_zeroed_and_writable_to_the_end() {
        for pages in 1..6 {
            let block_bytes = pages * HUGE_PAGE_BYTES;
            for block in [map(block_bytes, block_bytes - 1), map_and_trim(block_bytes)] {
                let block = block.unwrap();
                assert!(block.as_ptr().addr().is_multiple_of(HUGE_PAGE_BYTES));
                // SAFETY: the block is mapped for block_bytes, zeroed, and ours alone.
                let bytes = unsafe { std::slice::from_raw_parts_mut(block.as_ptr(), block_bytes) };
                assert!(bytes.iter().all(|&byte| byte == 0));
                bytes.fill(1);
                // SAFETY: mapped above, and `bytes` is not used after this.
                unsafe { unmap(block, block_bytes) };
            }
        }
    }

    #[test]
    fn more_than_the_address_space_is_refused() {
        assert_eq!(map(1 << 62, 1 << 62), None);
        assert_eq!(map_and_trim(1 << 62), None);
        assert_eq!(map_and_trim(usize::MAX - HUGE_PAGE_BYTES + 1), None);
    }
}
