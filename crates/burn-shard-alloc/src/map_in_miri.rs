//! Stands in for `map.rs` under Miri, which knows neither huge pages nor mappings that are given back in parts:
//! blocks are from the system's allocator, so that Miri checks what the cache does with them.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    ptr::NonNull,
};

pub(crate) const HUGE_PAGE_BYTES: usize = 2 << 20;

fn layout(block_bytes: usize) -> Option<Layout> {
    Layout::from_size_align(block_bytes, HUGE_PAGE_BYTES).ok()
}

/// A zeroed block aligned to the huge page.
pub(crate) fn map(block_bytes: usize, _request_bytes: usize) -> Option<NonNull<u8>> {
    let layout = layout(block_bytes)?;
    // SAFETY: blocks are multiples of the huge page, and not empty.
    NonNull::new(unsafe { System.alloc_zeroed(layout) })
}

/// Frees a block.
///
/// # Safety
///
/// The block is a whole one, made by [`map`] with the same size, and nothing uses it any more.
pub(crate) unsafe fn unmap(block: NonNull<u8>, block_bytes: usize) {
    let layout = layout(block_bytes).expect("a block should have a layout");
    // SAFETY: the caller's promise.
    unsafe { System.dealloc(block.as_ptr(), layout) };
}
