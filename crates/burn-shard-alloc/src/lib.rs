//! This crate provides [`HugePageAllocator`], a global allocator for training binaries.
//!
//! Burn's CPU backend allocates and frees tensors of many MiB at every operation. With glibc each
//! is an `mmap`, a page fault per 4 KiB touched, and a `munmap`, all of them under the one lock
//! that the process has for its address space; ranks that are threads of one process queue for it.
//! This allocator serves large requests from blocks of 2 MiB pages that it keeps after they are
//! freed, so a training step in its steady state neither faults nor maps anything.
//!
//! What lives here: routing, counting (this file), size classes (`class.rs`), the cache of freed
//! blocks (`pool.rs`), and the system calls (`map.rs`). What does not: small allocations, which go
//! to [`System`] and are only counted.
//!
//! The key design decision is that a block's size follows from the size of the request alone, so
//! freeing needs no header beside the data (Rust hands the layout back) and the list of freed
//! blocks lives inside the blocks. Nothing in here allocates.
//!
//! # Memory
//!
//! A request of `s` bytes, `s >=` [`THRESHOLD_BYTES`], takes a block of `s` rounded up to 2 MiB
//! and then, above 16 MiB, up to at most 1/8 more. Pages of that rest are not touched, so they
//! stay virtual until a larger request of the same class reuses the block. At most
//! [`HugePageAllocator::with_cached_bytes`] bytes of freed blocks are kept; beyond that the ones
//! freed longest ago return to the operating system.
//!
//! # Platforms
//!
//! On anything but Linux all requests go to [`System`], and counting is what remains.
//!
//! # Examples
//!
//! ```
//! use burn_shard_alloc::HugePageAllocator;
//!
//! #[global_allocator]
//! static ALLOCATOR: HugePageAllocator = HugePageAllocator::new().with_cached_bytes(1 << 30);
//!
//! ALLOCATOR.reset_peak();
//! let before_bytes = ALLOCATOR.live_bytes();
//! drop(vec![1u8; 5 << 20]);
//! assert!(ALLOCATOR.peak_bytes() >= before_bytes + (5 << 20));
//! assert_eq!(ALLOCATOR.live_bytes(), before_bytes);
//! ```

#[cfg(target_os = "linux")]
mod class;
#[cfg(target_os = "linux")]
#[cfg_attr(miri, path = "map_in_miri.rs")]
mod map;
#[cfg(target_os = "linux")]
mod pool;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Requests of at least so many bytes are served from huge pages: 1 MiB.
pub const THRESHOLD_BYTES: usize = 1 << 20;

/// Freed blocks kept unless [`HugePageAllocator::with_cached_bytes`] says otherwise: 512 MiB.
pub const DEFAULT_CACHED_BYTES: usize = 512 << 20;

/// A global allocator that serves large requests from cached blocks of huge pages, and counts.
///
/// Declare exactly one, as `static` and `#[global_allocator]`; see the [crate] for an example.
///
/// # Ordering
///
/// Counters are relaxed atomics: exact once the threads that allocate have been joined, and
/// otherwise a momentary value. The lock around the cache is held for a few loads and stores,
/// never over a system call.
#[derive(Debug)]
pub struct HugePageAllocator {
    live_bytes: OwnLine<AtomicUsize>,
    peak_bytes: OwnLine<AtomicUsize>,
    #[cfg(target_os = "linux")]
    pool: pool::Pool,
}

/// Keeps the counter that every allocation writes off the line of those it only reads.
#[derive(Debug)]
#[repr(align(64))]
struct OwnLine<T>(T);

impl HugePageAllocator {
    /// Creates an allocator that keeps up to [`DEFAULT_CACHED_BYTES`] of freed blocks.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            live_bytes: OwnLine(AtomicUsize::new(0)),
            peak_bytes: OwnLine(AtomicUsize::new(0)),
            #[cfg(target_os = "linux")]
            pool: pool::Pool::new(DEFAULT_CACHED_BYTES),
        }
    }

    /// Sets how many bytes of freed blocks are kept for reuse; with 0, none are.
    #[must_use]
    #[cfg_attr(
        not(target_os = "linux"),
        allow(unused_variables, reason = "nothing is cached off Linux")
    )]
    pub const fn with_cached_bytes(self, limit_bytes: usize) -> Self {
        Self {
            live_bytes: self.live_bytes,
            peak_bytes: self.peak_bytes,
            #[cfg(target_os = "linux")]
            pool: pool::Pool::new(limit_bytes),
        }
    }

    /// Bytes requested and not yet freed, small requests included, rounding and cache excluded.
    #[must_use]
    pub fn live_bytes(&self) -> usize {
        self.live_bytes.0.load(Relaxed)
    }

    /// The most bytes that were live at once since the start or the last [`Self::reset_peak`].
    ///
    /// A reallocation that has to move holds both blocks for a moment, and counts as both.
    #[must_use]
    pub fn peak_bytes(&self) -> usize {
        self.peak_bytes.0.load(Relaxed)
    }

    /// Starts a new peak at what is live now.
    pub fn reset_peak(&self) {
        self.peak_bytes.0.store(self.live_bytes(), Relaxed);
    }

    /// Bytes of freed blocks that are kept for reuse, still held from the operating system.
    #[must_use]
    pub fn cached_bytes(&self) -> usize {
        #[cfg(target_os = "linux")]
        return self.pool.cached_bytes();
        #[cfg(not(target_os = "linux"))]
        0
    }

    /// Returns all freed blocks to the operating system.
    pub fn release_cached(&self) {
        #[cfg(target_os = "linux")]
        self.pool.release_cached();
    }

    #[inline]
    fn count_up(&self, size_bytes: usize) {
        let live_bytes = self.live_bytes.0.fetch_add(size_bytes, Relaxed) + size_bytes;
        // Mostly a load of a line nobody writes; a write only while the peak rises.
        if live_bytes > self.peak_bytes.0.load(Relaxed) {
            self.peak_bytes.0.fetch_max(live_bytes, Relaxed);
        }
    }

    #[inline]
    fn count_down(&self, size_bytes: usize) {
        self.live_bytes.0.fetch_sub(size_bytes, Relaxed);
    }
}

impl Default for HugePageAllocator {
    fn default() -> Self {
        Self::new()
    }
}

// SAFETY: pointers come from the system allocator or from the pool, and which of the two follows
// from the layout alone, so each goes back where it came from; a pool block is aligned to 2 MiB,
// no shorter than requested, and not handed out again before it is freed. Nothing here unwinds.
unsafe impl GlobalAlloc for HugePageAllocator {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let ptr = if is_large(layout) {
            self.alloc_large(layout)
        } else {
            // SAFETY: the caller vouches for the layout.
            unsafe { System.alloc(layout) }
        };
        if !ptr.is_null() {
            self.count_up(layout.size());
        }
        ptr
    }

    #[inline]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        let ptr = if is_large(layout) {
            self.alloc_large_zeroed(layout)
        } else {
            // SAFETY: the caller vouches for the layout.
            unsafe { System.alloc_zeroed(layout) }
        };
        if !ptr.is_null() {
            self.count_up(layout.size());
        }
        ptr
    }

    #[inline]
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        self.count_down(layout.size());
        if is_large(layout) {
            // SAFETY: the caller vouches that this layout gave this pointer, and it was large then.
            unsafe { self.dealloc_large(ptr, layout) };
        } else {
            // SAFETY: as above, and the layout was not large then.
            unsafe { System.dealloc(ptr, layout) };
        }
    }

    #[inline]
    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // SAFETY: the caller vouches that the new size, rounded up to the alignment, fits.
        let new_layout = unsafe { Layout::from_size_align_unchecked(new_size, layout.align()) };
        let kept = match (is_large(layout), is_large(new_layout)) {
            // SAFETY: the caller vouches for pointer, layout and size; both sizes are the system's.
            (false, false) => unsafe { System.realloc(ptr, layout, new_size) },
            (true, true) if same_block(layout, new_layout) => ptr,
            // SAFETY: the caller's promises are passed on.
            _ => return unsafe { self.relocate(ptr, layout, new_layout) },
        };
        if !kept.is_null() {
            if new_size >= layout.size() {
                self.count_up(new_size - layout.size());
            } else {
                self.count_down(layout.size() - new_size);
            }
        }
        kept
    }
}

impl HugePageAllocator {
    /// Moves an allocation to a block that fits `new_layout`.
    ///
    /// # Safety
    ///
    /// The conditions of [`GlobalAlloc::realloc`] hold.
    unsafe fn relocate(&self, ptr: *mut u8, layout: Layout, new_layout: Layout) -> *mut u8 {
        // SAFETY: the caller vouches that the new layout is valid and not empty.
        let new_ptr = unsafe { self.alloc(new_layout) };
        if !new_ptr.is_null() {
            let kept_bytes = layout.size().min(new_layout.size());
            // SAFETY: both blocks are live, distinct, and no shorter than what is copied.
            unsafe { new_ptr.copy_from_nonoverlapping(ptr, kept_bytes) };
            // SAFETY: the caller vouches that this layout gave this pointer.
            unsafe { self.dealloc(ptr, layout) };
        }
        new_ptr
    }
}

/// Whether the pool serves such requests. Blocks are aligned to 2 MiB, so what needs more is left
/// to the system allocator.
#[cfg(target_os = "linux")]
#[inline]
fn is_large(layout: Layout) -> bool {
    layout.size() >= THRESHOLD_BYTES && layout.align() <= map::HUGE_PAGE_BYTES
}

/// Whether two large layouts share a size class. Smaller would fit too, but would later be freed
/// under the wrong class.
#[cfg(target_os = "linux")]
fn same_block(layout: Layout, new_layout: Layout) -> bool {
    class::SizeClass::of(layout.size()) == class::SizeClass::of(new_layout.size())
}

#[cfg(target_os = "linux")]
impl HugePageAllocator {
    fn alloc_large(&self, layout: Layout) -> *mut u8 {
        match self
            .pool
            .take(class::SizeClass::of(layout.size()), layout.size())
        {
            Some((block, _)) => block.as_ptr(),
            None => std::ptr::null_mut(),
        }
    }

    fn alloc_large_zeroed(&self, layout: Layout) -> *mut u8 {
        match self
            .pool
            .take(class::SizeClass::of(layout.size()), layout.size())
        {
            Some((block, pool::Contents::Zero)) => block.as_ptr(),
            Some((block, pool::Contents::Stale)) => {
                // SAFETY: the block is ours alone and no shorter than requested.
                unsafe { block.as_ptr().write_bytes(0, layout.size()) };
                block.as_ptr()
            }
            None => std::ptr::null_mut(),
        }
    }

    /// # Safety
    ///
    /// `ptr` came from this pool for a request of this layout, and is not used any more.
    unsafe fn dealloc_large(&self, ptr: *mut u8, layout: Layout) {
        if let Some(block) = std::ptr::NonNull::new(ptr) {
            // SAFETY: the caller's promise; the size gives the class it was taken with.
            unsafe { self.pool.give(block, class::SizeClass::of(layout.size())) };
        }
    }
}

// Without a pool nothing is large, and what follows is never called.

#[cfg(not(target_os = "linux"))]
#[inline]
fn is_large(_: Layout) -> bool {
    false
}

#[cfg(not(target_os = "linux"))]
fn same_block(_: Layout, _: Layout) -> bool {
    false
}

#[cfg(not(target_os = "linux"))]
impl HugePageAllocator {
    fn alloc_large(&self, _: Layout) -> *mut u8 {
        std::ptr::null_mut()
    }

    fn alloc_large_zeroed(&self, _: Layout) -> *mut u8 {
        std::ptr::null_mut()
    }

    unsafe fn dealloc_large(&self, _: *mut u8, _: Layout) {}
}
