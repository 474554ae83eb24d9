//! A checkpointed stack keeps the inputs of its blocks, not their activations.

use std::sync::{Mutex, PoisonError};

use burn::nn::{Linear, LinearConfig};
use burn::tensor::activation::gelu;
use burn::tensor::{Device, Tensor};
use burn_shard_alloc::HugePageAllocator;
use burn_shard_recompute::{Random, checkpoint_with};

#[global_allocator]
static ALLOCATOR: HugePageAllocator = HugePageAllocator::new();

/// Held by each test: the allocator counts for all of them.
static ALONE: Mutex<()> = Mutex::new(());

/// Burn takes abandoned nodes off its tape while it runs other backwards.
fn sweep(device: &Device) {
    for _ in 0..8 {
        Tensor::<1>::ones([1], device)
            .require_grad()
            .exp()
            .backward();
    }
}

const WIDTH: usize = 64;
const ROWS: usize = 1024;
const ACTIVATION_BYTES: usize = ROWS * WIDTH * 4;

type Block = (Linear, Linear);

fn forward(block: &Block, x: Tensor<2>) -> Tensor<2> {
    gelu(block.1.forward(gelu(block.0.forward(x))))
}

/// Bytes above the parameters: kept after the forward, and at most until the end of backward.
fn bytes(blocks: &[Block], device: &Device, checkpointed: bool) -> (usize, usize) {
    let before = ALLOCATOR.live_bytes();
    ALLOCATOR.reset_peak();
    let mut h = Tensor::<2>::ones([ROWS, WIDTH], device);
    for block in blocks {
        h = match checkpointed {
            true => checkpoint_with(Random::Ignore, block, h, forward),
            false => forward(block, h),
        };
    }
    let loss = h.mean();
    let kept = ALLOCATOR.live_bytes() - before;
    drop(loss.backward());
    let peak = ALLOCATOR.peak_bytes() - before;
    sweep(device);
    (kept, peak)
}

#[test]
fn blocks_keep_their_inputs_only_and_nothing_stays() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let device = Device::flex().autodiff();
    let linear = || LinearConfig::new(WIDTH, WIDTH).init(&device);
    let blocks: Vec<Block> = (0..8).map(|_| (linear(), linear())).collect();
    // Initializes parameters, threads and tables.
    let first = bytes(&blocks, &device, true);
    let before = ALLOCATOR.live_bytes();
    let plain = bytes(&blocks, &device, false);
    let checkpointed = bytes(&blocks, &device, true);
    println!(
        "first {first:?}, plain {plain:?}, checkpointed {checkpointed:?} of {ACTIVATION_BYTES}"
    );
    // Eight inputs and the last output, and small change.
    assert!(checkpointed.0 < 10 * ACTIVATION_BYTES);
    assert!(plain.0 > 2 * checkpointed.0);
    assert!(plain.1 > checkpointed.1 + 8 * ACTIVATION_BYTES);
    let after = ALLOCATOR.live_bytes();
    assert!(
        after < before + ACTIVATION_BYTES,
        "{before} bytes before, {after} after"
    );
}

#[test]
fn a_forward_without_backward_is_freed() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let device = Device::flex().autodiff();
    let linear = || LinearConfig::new(WIDTH, WIDTH).init(&device);
    let block = (linear(), linear());
    let run = || {
        let x = Tensor::<2>::ones([ROWS, WIDTH], &device);
        drop(checkpoint_with(Random::Ignore, &block, x, forward));
        sweep(&device);
    };
    run();
    let before = ALLOCATOR.live_bytes();
    (0..8).for_each(|_| run());
    let after = ALLOCATOR.live_bytes();
    assert!(
        after < before + ACTIVATION_BYTES,
        "{before} bytes before, {after} after"
    );
}
