//! What lives on a rank, by the library's own ledger and by the process's allocator, against formulas.
//!
//! Ranks are threads of one process, so what the allocator counts is divided by their number.

#![allow(clippy::unwrap_used, reason = "a test ends at the first error")]

#[path = "common/mlp.rs"]
mod mlp;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use burn::module::Module;
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::optim::{AdamConfig, GradientsParams};
use burn::prelude::*;
use burn::tensor::activation::gelu;
use burn_shard::{
    MemoryKind, Oss, ProcessGroup, ShardConfig, ShardedModule, ShardingStrategy, model_state_bytes,
};
use mlp::{Blocks, Mlp, input};

/// Bytes that live in this process.
static LIVE: AtomicUsize = AtomicUsize::new(0);

/// Tests measure the whole process, so they run one at a time.
static ALONE: Mutex<()> = Mutex::new(());

struct Counting;

// SAFETY: everything is passed on to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE.fetch_add(layout.size(), Relaxed);
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        LIVE.fetch_add(layout.size(), Relaxed);
        // SAFETY: the caller keeps the contract of `alloc_zeroed`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Live bytes of the process at a moment when every rank stands still.
fn live_bytes(group: &ProcessGroup) -> usize {
    group.barrier().unwrap();
    let live = LIVE.load(Relaxed);
    group.barrier().unwrap();
    live
}

fn alone() -> std::sync::MutexGuard<'static, ()> {
    ALONE
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Waits until the threads of earlier ranks have given back what they held: they end by themselves,
/// after the group that they belonged to.
fn settle() {
    let mut quiet = 0;
    let mut live = LIVE.load(Relaxed);
    for _ in 0..1000 {
        std::thread::sleep(std::time::Duration::from_millis(10));
        let now = LIVE.load(Relaxed);
        quiet = if now == live { quiet + 1 } else { 0 };
        live = now;
        if quiet == 5 {
            return;
        }
    }
    panic!("the process should stand still between groups");
}

fn device() -> Device {
    Device::flex().autodiff()
}

const DEPTH: usize = 8;

/// Trains two steps, then a third up to its gradients; calls `check` while these are alive.
fn with_live_gradients(
    group: &ProcessGroup,
    strategy: ShardingStrategy,
    width: usize,
    check: impl FnOnce(&ShardedModule<Mlp>),
) {
    let device = device();
    let config = ShardConfig::new(strategy).with_group_cap_bytes((width * width + width) * 4);
    let mut model = ShardedModule::new(Mlp::new(DEPTH, width, &device), config, group).unwrap();
    let mut oss = Oss::new(AdamConfig::new(), group).unwrap();
    let loss = |net: &Mlp| net.forward(input(2, width, group.rank(), &device)).mean();
    for _ in 0..2 {
        model = mlp::step(model, &mut oss, loss);
    }
    let grads = GradientsParams::from_grads(loss(&model).backward(), &model);
    check(&model);
    drop(oss.step(1e-3, model, grads));
}

/// What alignment and padding may add to `tensors` tensors of one kind: each begins at a multiple of
/// 64 bytes, and is padded to a multiple of `world_size` elements.
fn slack(tensors: usize, world_size: usize) -> usize {
    tensors * (64 + 4 * world_size)
}

#[test]
fn by_the_ledger_a_rank_holds_what_the_formula_says_and_not_less() {
    let _alone = alone();
    for width in [64, 61] {
        for world_size in [1, 2, 4] {
            for strategy in ShardingStrategy::ALL {
                ProcessGroup::spawn(world_size, |group| {
                    with_live_gradients(&group, strategy, width, |model| {
                        let report = model.memory();
                        let live = |kind| report.of(kind).live_bytes;
                        // Vectors are whole under `Full`, and their gradients Burn's own.
                        let whole = match strategy {
                            ShardingStrategy::Full => DEPTH * width,
                            ShardingStrategy::Replicated
                            | ShardingStrategy::OptimizerState
                            | ShardingStrategy::Gradients => 0,
                        };
                        let (kinds, mut expected) = (
                            live(MemoryKind::Parameters)
                                + live(MemoryKind::Gradients)
                                + live(MemoryKind::OptimizerState),
                            model_state_bytes(strategy, model.num_params() - whole, world_size, 4)
                                + whole * 3 * 4,
                        );
                        if matches!(
                            strategy,
                            ShardingStrategy::Replicated | ShardingStrategy::OptimizerState
                        ) {
                            // Gradients are Burn's own tensors: not in the ledger any more.
                            assert_eq!(live(MemoryKind::Gradients), 0);
                            expected -= model.num_params() * 4;
                        }
                        let slack = if width == 64 {
                            0
                        } else {
                            // A matrix keeps its first axis: up to one element per row.
                            4 * (slack(2 * DEPTH, world_size) + 4 * DEPTH * width)
                        };
                        assert!(
                            (expected..=expected + slack).contains(&kinds),
                            "{strategy} {world_size}: {kinds}, expected {expected} + {slack}\n{report}"
                        );
                        assert_eq!(live(MemoryKind::Unsharded), 0, "{report}");
                    });
                })
                .unwrap();
            }
        }
    }
}

#[test]
fn by_the_allocator_a_rank_holds_what_the_formula_says_and_not_less() {
    let _alone = alone();
    let width = 256;
    for world_size in [1, 2, 4] {
        for strategy in ShardingStrategy::ALL {
            settle();
            ProcessGroup::spawn(world_size, |group| {
                // Matrix products keep a workspace of a MiB per thread from the first call on.
                let plain = Mlp::new(1, width, &device());
                let x = || input(2, width, 0, &device());
                drop(plain.forward(x()).mean().backward());
                let before = live_bytes(&group);
                with_live_gradients(&group, strategy, width, |model| {
                    let measured = (live_bytes(&group) - before) / world_size;
                    let state = model_state_bytes(strategy, model.num_params(), world_size, 4);
                    let staging = model.memory().of(MemoryKind::Staging).live_bytes;
                    let largest = (width * width + width) * 4;
                    // What an all_reduce keeps for the next, and everything that is not a tensor:
                    // paths, nodes, maps.
                    let most = state + staging + largest + (64 << 10);
                    assert!(
                        (state + staging..=most).contains(&measured),
                        "{strategy} {world_size}: {measured}, expected {state} + {staging}..{most}"
                    );
                    // What may lie idle for the next step.
                    let shards = model.num_params() * 4 / world_size;
                    assert!(staging <= shards + largest, "{staging}");
                });
            })
            .unwrap();
        }
    }
}

/// Peaks and live bytes of one forward and backward.
#[derive(Debug)]
struct Pass {
    forward_peak: usize,
    after_forward: usize,
    backward_peak: usize,
    after_backward: usize,
}

fn pass<M: Module>(
    model: &ShardedModule<M>,
    kind: MemoryKind,
    loss: impl Fn(&M) -> Tensor<1>,
) -> Pass {
    // The order of reductions is agreed on by the first backward.
    drop(loss(model).backward());
    model.reset_memory_peak();
    let loss = loss(model);
    let forward = model.memory().of(kind);
    model.reset_memory_peak();
    // Measured while these are alive.
    let _grads = GradientsParams::from_grads(loss.backward(), &**model);
    let backward = model.memory().of(kind);
    Pass {
        forward_peak: forward.peak_bytes,
        after_forward: forward.live_bytes,
        backward_peak: backward.peak_bytes,
        after_backward: backward.live_bytes,
    }
}

const WIDTH: usize = 64;
const BLOCK_BYTES: usize = (WIDTH * WIDTH + 3 * WIDTH) * 4;
const WEIGHT_BYTES: usize = WIDTH * WIDTH * 4;

/// One while forward runs, for the next replaces the one before; two in backward, where a group's
/// reduction ends its use.
#[test]
fn under_zero3_about_two_groups_are_unsharded_at_a_time() {
    let _alone = alone();
    for checkpointing in [false, true] {
        for world_size in [2, 4] {
            ProcessGroup::spawn(world_size, |group| {
                let device = if checkpointing {
                    device().gradient_checkpointing()
                } else {
                    device()
                };
                let config = ShardConfig::new(ShardingStrategy::Full);
                let config = config.with_group_cap_bytes(BLOCK_BYTES);
                let blocks = Blocks::new(DEPTH, WIDTH, &device);
                let model = ShardedModule::new(blocks, config, &group).unwrap();
                // Bias, gamma and beta stay whole, in one group of all blocks.
                assert_eq!(model.groups().len(), DEPTH + 1);
                let pass = pass(&model, MemoryKind::Unsharded, |net: &Blocks| {
                    net.forward(input(2, WIDTH, group.rank(), &device)).mean()
                });
                assert_eq!(pass.forward_peak, WEIGHT_BYTES, "{pass:?}");
                assert_eq!(pass.after_forward, WEIGHT_BYTES, "{pass:?}");
                assert!(pass.backward_peak <= 2 * WEIGHT_BYTES, "{pass:?}");
                assert!(pass.backward_peak >= WEIGHT_BYTES, "{pass:?}");
                assert_eq!(pass.after_backward, 0, "{pass:?}");
            })
            .unwrap();
        }
    }
}

/// If reductions waited for the end of backward, all full gradients would be alive at once.
#[test]
fn gradients_are_reduced_while_backward_runs() {
    let _alone = alone();
    for strategy in [ShardingStrategy::Gradients, ShardingStrategy::Full] {
        for world_size in [1, 2, 4] {
            ProcessGroup::spawn(world_size, |group| {
                let device = device();
                let config = ShardConfig::new(strategy).with_group_cap_bytes(BLOCK_BYTES);
                let blocks = Blocks::new(DEPTH, WIDTH, &device);
                let model = ShardedModule::new(blocks, config, &group).unwrap();
                let pass = pass(&model, MemoryKind::Gradients, |net: &Blocks| {
                    net.forward(input(2, WIDTH, group.rank(), &device)).mean()
                });
                // The vectors of `Full` are averaged in Burn's own tensors, not in the ledger then.
                let block = if strategy == ShardingStrategy::Full {
                    WEIGHT_BYTES
                } else {
                    BLOCK_BYTES
                };
                let shards = DEPTH * block / world_size;
                assert_eq!(pass.after_backward, shards, "{pass:?}");
                // One group that is being collected, one that is being reduced.
                let most = shards + 3 * BLOCK_BYTES;
                assert!(pass.backward_peak <= most, "{strategy} {pass:?}");
                assert!(pass.backward_peak >= shards + block, "{pass:?}");
                if world_size == 4 {
                    let full = DEPTH * BLOCK_BYTES;
                    assert!(pass.backward_peak < full, "{strategy} {pass:?}");
                }
            })
            .unwrap();
        }
    }
}

const VOCAB: usize = 512;

/// An embedding whose weight is also the output layer's.
#[derive(Module, Debug)]
struct Tied {
    embedding: Embedding,
    first: Linear,
    second: Linear,
}

impl Tied {
    fn new(device: &Device) -> Self {
        let linear = || LinearConfig::new(WIDTH, WIDTH).init(device);
        Self {
            embedding: EmbeddingConfig::new(VOCAB, WIDTH).init(device),
            first: linear(),
            second: linear(),
        }
    }

    fn loss(&self, tied: bool, device: &Device) -> Tensor<1> {
        let tokens = Tensor::<2, Int>::from_ints([[1, 5, 7, 500]], device);
        let x = self.embedding.forward(tokens).reshape([4, WIDTH]);
        let x = self.second.forward(gelu(self.first.forward(x)));
        if tied {
            x.matmul(self.embedding.weight.val().swap_dims(0, 1)).mean()
        } else {
            x.mean()
        }
    }
}

/// Burn's embedding holds its weight as the state of its backward step, whatever the checkpointing.
/// A tied output layer gathers it a second time, so that two copies are alive at the end of forward.
#[test]
fn an_embedding_keeps_its_full_weight_until_backward_and_a_tied_one_twice() {
    let _alone = alone();
    let embedding = VOCAB * WIDTH * 4;
    let linear = WEIGHT_BYTES;
    for checkpointing in [false, true] {
        for tied in [false, true] {
            ProcessGroup::spawn(2, |group| {
                let device = if checkpointing {
                    device().gradient_checkpointing()
                } else {
                    device()
                };
                let config = ShardConfig::new(ShardingStrategy::Full).with_group_cap_bytes(linear);
                let model = ShardedModule::new(Tied::new(&device), config, &group).unwrap();
                assert_eq!(model.groups().len(), 4);
                let pass = pass(&model, MemoryKind::Unsharded, |net: &Tied| {
                    net.loss(tied, &device)
                });
                // Kept by the embedding, and the group that was read last.
                let last = if tied { embedding } else { linear };
                assert_eq!(pass.after_forward, embedding + last, "{pass:?}");
                assert_eq!(pass.forward_peak, embedding + last, "{pass:?}");
                assert!(pass.backward_peak <= embedding + last + linear, "{pass:?}");
                assert_eq!(pass.after_backward, 0, "{pass:?}");
            })
            .unwrap();
        }
    }
}
