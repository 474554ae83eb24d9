//! Time to allocate, touch and free a tensor's memory, beside the system allocator.
//!
//! `cargo run --release -p burn-shard-alloc --example churn`

#![allow(clippy::print_stdout, reason = "printing is what it is for")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::time::{Duration, Instant};

use burn_shard_alloc::HugePageAllocator;

const ROUNDS: usize = 200;
const PAGE_BYTES: usize = 4096;

static ALLOCATOR: HugePageAllocator = HugePageAllocator::new();

fn main() {
    println!("alloc + write each page + free, {ROUNDS} rounds on each thread");
    for threads in [1, 2] {
        for mib in [1, 4, 16, 64] {
            let layout = Layout::from_size_align(mib << 20, 64).expect("a MiB should fit a layout");
            let system = churn(&System, layout, threads);
            let ours = churn(&ALLOCATOR, layout, threads);
            println!(
                "{mib:3} MiB, threads {threads}: system {system:9.1?}, ours {ours:9.1?}, \
                 ratio {:.1}",
                system.as_secs_f64() / ours.as_secs_f64()
            );
        }
    }
    println!("first touch of fresh memory, 64 MiB, nothing cached");
    let layout = Layout::from_size_align(64 << 20, 64).expect("64 MiB should fit a layout");
    let (mut system, mut ours) = (Duration::MAX, Duration::MAX);
    for _ in 0..20 {
        let start = Instant::now();
        touch(&System, layout);
        system = system.min(start.elapsed());
        ALLOCATOR.release_cached();
        let start = Instant::now();
        touch(&ALLOCATOR, layout);
        ours = ours.min(start.elapsed());
    }
    println!(
        " 64 MiB, threads 1: system {system:9.1?}, ours {ours:9.1?}, ratio {:.1}",
        system.as_secs_f64() / ours.as_secs_f64()
    );
}

/// Mean time of a round, all threads at it at once.
fn churn(allocator: &(impl GlobalAlloc + Sync), layout: Layout, threads: usize) -> Duration {
    let start = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| (0..ROUNDS).for_each(|_| touch(allocator, layout)));
        }
    });
    start.elapsed() / u32::try_from(ROUNDS).expect("rounds should fit u32")
}

fn touch(allocator: &impl GlobalAlloc, layout: Layout) {
    // SAFETY: the layout is not empty.
    let ptr = unsafe { allocator.alloc(layout) };
    assert!(!ptr.is_null(), "memory should be there");
    for offset in (0..layout.size()).step_by(PAGE_BYTES) {
        // SAFETY: the offset is inside of the allocation.
        let byte = unsafe { ptr.add(offset) };
        // SAFETY: the byte is ours to write.
        unsafe { byte.write_volatile(1) };
    }
    // SAFETY: pointer and layout belong together, and this is the last use.
    unsafe { allocator.dealloc(ptr, layout) };
}
