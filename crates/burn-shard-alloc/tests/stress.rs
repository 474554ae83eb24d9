//! The allocator as the global one of this binary, under threads.
//!
//! Exact counts are checked on instances of their own: of the global one, the harness has a share.

#![allow(clippy::unwrap_used, reason = "helpers of tests, which may panic")]

use std::alloc::{GlobalAlloc, Layout};
use std::sync::mpsc;

use burn_shard_alloc::{HugePageAllocator, THRESHOLD_BYTES};

const CACHED_BYTES: usize = 64 << 20;
const THREADS: u64 = 8;
const ROUNDS: usize = 500;

#[global_allocator]
static ALLOCATOR: HugePageAllocator = HugePageAllocator::new().with_cached_bytes(CACHED_BYTES);

/// A raw allocation, filled with a pattern of its own that is checked before it is freed.
struct Filled {
    allocator: &'static HugePageAllocator,
    ptr: *mut u8,
    layout: Layout,
    seed: u8,
}

// SAFETY: it owns its memory, which is bound to no thread.
unsafe impl Send for Filled {}

impl Filled {
    fn new(allocator: &'static HugePageAllocator, layout: Layout, zeroed: bool, seed: u8) -> Self {
        let ptr = if zeroed {
            // SAFETY: no layout of this test is empty.
            unsafe { allocator.alloc_zeroed(layout) }
        } else {
            // SAFETY: no layout of this test is empty.
            unsafe { allocator.alloc(layout) }
        };
        assert!(!ptr.is_null());
        assert!(
            ptr.addr().is_multiple_of(layout.align()),
            "{layout:?} at {ptr:p}"
        );
        let mut filled = Self {
            allocator,
            ptr,
            layout,
            seed,
        };
        if zeroed {
            assert!(
                filled.bytes().iter().all(|&byte| byte == 0),
                "{layout:?} is not zeroed"
            );
        }
        filled.fill();
        filled
    }

    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the allocation is ours alone and that long; its bytes were read only if zeroed
        // or filled.
        unsafe { std::slice::from_raw_parts_mut(self.ptr, self.layout.size()) }
    }

    fn fill(&mut self) {
        let seed = self.seed;
        for (byte, i) in self.bytes().iter_mut().zip(0usize..) {
            *byte = pattern(seed, i);
        }
    }

    fn check(&mut self, numel: usize) {
        let seed = self.seed;
        let wrong = self.bytes()[..numel]
            .iter()
            .zip(0..)
            .position(|(&b, i)| b != pattern(seed, i));
        assert_eq!(wrong, None, "somebody wrote into {:?}", self.layout);
    }

    fn resize(&mut self, size: usize) {
        let kept = self.layout.size().min(size);
        // SAFETY: pointer and layout belong together; the size is neither 0 nor near the limit.
        let ptr = unsafe { self.allocator.realloc(self.ptr, self.layout, size) };
        assert!(!ptr.is_null());
        assert!(ptr.addr().is_multiple_of(self.layout.align()));
        self.ptr = ptr;
        self.layout = Layout::from_size_align(size, self.layout.align()).unwrap();
        self.check(kept);
        self.fill();
    }
}

impl Drop for Filled {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.check(self.layout.size());
        }
        // SAFETY: pointer and layout belong together, and this is the last use.
        unsafe { self.allocator.dealloc(self.ptr, self.layout) };
    }
}

fn pattern(seed: u8, i: usize) -> u8 {
    // Differs between neighbouring pages too.
    seed ^ (i ^ (i >> 12)).to_le_bytes()[0]
}

struct Rng(u64);

impl Rng {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ (z >> 31)) % bound
    }

    /// Small, around the threshold, or some MiB.
    fn size(&mut self) -> usize {
        let size = match self.below(4) {
            0 => 1 + self.below(5000),
            1 => (1 << 20) - 2 + self.below(5),
            2 => (2 << 20) - 2 + self.below(5),
            _ => (1 << 20) + self.below(6 << 20),
        };
        usize::try_from(size).unwrap()
    }

    /// Mostly small; at times more than a page, and more than the huge page.
    fn align(&mut self) -> usize {
        match self.below(12) {
            0 => 1 << 16,
            1 => 1 << 21,
            2 => 1 << 22,
            _ => 1 << self.below(13),
        }
    }
}

/// Allocates, resizes, frees, and hands blocks to the next thread, which frees them.
fn churn(seed: u64, from: &mpsc::Receiver<Filled>, to: &mpsc::Sender<Filled>) {
    let mut rng = Rng(seed);
    let mut held: Vec<Filled> = Vec::new();
    for round in 0..ROUNDS {
        match rng.below(8) {
            0..=2 if held.len() < 8 => {
                let layout = Layout::from_size_align(rng.size(), rng.align()).unwrap();
                held.push(Filled::new(
                    &ALLOCATOR,
                    layout,
                    rng.below(2) == 0,
                    round.to_le_bytes()[0],
                ));
            }
            3 if !held.is_empty() => {
                let size = rng.size();
                held[0].resize(size);
            }
            4 if !held.is_empty() => to.send(held.swap_remove(0)).unwrap(),
            5 => drop(from.try_recv()),
            _ => drop(held.pop()),
        }
        assert!(ALLOCATOR.cached_bytes() <= CACHED_BYTES);
    }
}

#[test]
fn blocks_are_exclusive_aligned_zeroed_and_counted_under_threads() {
    let before_bytes = ALLOCATOR.live_bytes();
    ALLOCATOR.reset_peak();
    let (mut senders, receivers): (Vec<_>, Vec<_>) = (0..THREADS).map(|_| mpsc::channel()).unzip();
    senders.rotate_left(1);
    std::thread::scope(|scope| {
        for (seed, (from, to)) in (1..).zip(receivers.into_iter().zip(senders)) {
            scope.spawn(move || {
                churn(seed, &from, &to);
                // What comes in later is freed until the sender is done.
                drop(to);
                from.iter().for_each(drop);
            });
        }
    });
    assert!(ALLOCATOR.peak_bytes() >= before_bytes + (8 << 20));
    // Threads leave a little behind in the standard library; a lost tensor would be a MiB.
    let left_bytes = ALLOCATOR.live_bytes().abs_diff(before_bytes);
    assert!(left_bytes < 64 << 10, "{left_bytes} bytes left");
    ALLOCATOR.release_cached();
    assert_eq!(ALLOCATOR.cached_bytes(), 0);
}

fn layout(size: usize) -> Layout {
    Layout::from_size_align(size, 64).unwrap()
}

#[test]
fn counters_follow_the_layouts() {
    static EXACT: HugePageAllocator = HugePageAllocator::new();
    let mut filled = Filled::new(&EXACT, layout(3 << 20), false, 1);
    assert_eq!(EXACT.live_bytes(), 3 << 20);
    for size in [
        4 << 20,
        (2 << 20) + 1,
        THRESHOLD_BYTES - 1,
        THRESHOLD_BYTES,
        100,
        5000,
    ] {
        filled.resize(size);
        assert_eq!(EXACT.live_bytes(), size);
    }
    drop(filled);
    assert_eq!(EXACT.live_bytes(), 0);
    assert!(EXACT.peak_bytes() >= 4 << 20);
    EXACT.reset_peak();
    assert_eq!(EXACT.peak_bytes(), 0);
}

#[cfg(target_os = "linux")]
#[test]
fn a_block_stays_in_its_class() {
    static EXACT: HugePageAllocator = HugePageAllocator::new();
    let mut filled = Filled::new(&EXACT, layout(3 << 20), false, 1);
    let in_place = filled.ptr;
    filled.resize(4 << 20);
    assert_eq!(filled.ptr, in_place);
    filled.resize((2 << 20) + 1);
    assert_eq!(filled.ptr, in_place);
    // To stay would be to be freed as a smaller block, and to lose the rest.
    filled.resize(2 << 20);
    assert_eq!(EXACT.cached_bytes(), 4 << 20);
    // The move held both blocks.
    assert_eq!(EXACT.peak_bytes(), (4 << 20) + 1);
    drop(filled);
    assert_eq!(EXACT.cached_bytes(), (4 << 20) + (2 << 20));
}

#[test]
fn what_cannot_be_had_is_null() {
    static EXACT: HugePageAllocator = HugePageAllocator::new();
    let layout = Layout::from_size_align(isize::MAX.unsigned_abs() - 4095, 4096).unwrap();
    // SAFETY: the layout is not empty.
    assert!(unsafe { EXACT.alloc(layout) }.is_null());
    // SAFETY: the layout is not empty.
    assert!(unsafe { EXACT.alloc_zeroed(layout) }.is_null());
    let mut filled = Filled::new(
        &EXACT,
        Layout::from_size_align(2 << 20, 4096).unwrap(),
        false,
        9,
    );
    // SAFETY: pointer and layout belong together; the size rounds up to no more than the limit.
    let moved = unsafe { EXACT.realloc(filled.ptr, filled.layout, layout.size()) };
    assert!(moved.is_null());
    filled.check(2 << 20);
    drop(filled);
    assert_eq!(EXACT.live_bytes(), 0);
}
