//! Random numbers: the recomputation of a block has to draw what its forward drew.
//!
//! A backend has one generator per process, whose state cannot be read. So a block that runs is given a
//! seed of its own, taken from the generator, and after it the generator goes on from another such seed.
//! Whether anybody drew meanwhile is seen from the numbers that come next: after a seed they are known.

use std::cell::Cell;

use burn::tensor::{Device, Distribution, Int, Tensor};
use parking_lot::Mutex;

/// What is done about random numbers that a block draws.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Random {
    /// The recomputation draws the same numbers as the forward.
    ///
    /// The device's generator is seeded before and after the block, in forward and in backward, with seeds
    /// drawn from it. So a run that starts with [`Device::seed`] still repeats, but what it draws, in the block
    /// and after it, is not what it would draw without the checkpoint. A block that draws nothing changes the
    /// generator all the same. On a GPU the host waits for the device each time.
    ///
    /// A backend has one generator for all threads of the process. A block that draws while another thread
    /// draws, or runs such a block, cannot be repeated; backward then panics, and no gradient is
    /// wrong silently. So with dropout in checkpointed blocks, ranks have to be processes. Blocks that draw nothing
    /// run in any number of threads. The only thing not noticed is a block that draws only under a condition
    /// that does not hold in its recomputation.
    #[default]
    Replay,
    /// The generator is left alone: for blocks that draw nothing. If one does, its gradients are wrong.
    Ignore,
}

/// The next numbers of a generator, as far as they are compared.
type Print = [u32; 4];

/// What is known about the generator, over all threads.
struct Generator {
    /// What it gives next if nobody draws.
    expected: Option<Print>,
    /// How often it was found to have been drawn from.
    draws: u64,
    /// How often it was seeded here.
    seedings: u64,
}

static GENERATOR: Mutex<Generator> = Mutex::new(Generator {
    expected: None,
    draws: 0,
    seedings: 0,
});

thread_local! {
    /// How many of the seedings were this thread's.
    static OWN_SEEDINGS: Cell<u64> = const { Cell::new(0) };
}

/// Draws from the generator, then seeds it with what `next` makes of the numbers drawn.
fn seed(device: &Device, next: impl FnOnce(Print) -> u64) -> Seeding {
    let mut generator = GENERATOR.lock();
    let print = draw(device);
    if generator.expected != Some(print) {
        generator.draws += 1;
    }
    let seed = next(print);
    device.seed(seed);
    generator.expected = Some(draw(device));
    device.seed(seed);
    generator.seedings += 1;
    OWN_SEEDINGS.set(OWN_SEEDINGS.get() + 1);
    Seeding {
        print,
        draws: generator.draws,
        others: generator.seedings - OWN_SEEDINGS.get(),
    }
}

/// The state of affairs after [`seed`].
struct Seeding {
    print: Print,
    draws: u64,
    /// Seedings by other threads so far.
    others: u64,
}

fn draw(device: &Device) -> Print {
    let range = Distribution::Uniform(0.0, f64::from(1 << 24));
    let numbers = Tensor::<1, Int>::random([4], range, device).into_data();
    let mut print = Print::default();
    for (place, number) in print.iter_mut().zip(numbers.iter::<u32>()) {
        *place = number;
    }
    print
}

/// A seed from what was drawn; `purpose` tells seeds of one draw apart (the mixing step of `SplitMix64`,
/// Steele, Lea and Flood 2014).
fn derive(print: Print, purpose: u32) -> u64 {
    let mut state = 0u64;
    for word in print.into_iter().chain([purpose]) {
        state = (state ^ u64::from(word)).wrapping_add(0x9e37_79b9_7f4a_7c15);
        state = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        state = (state ^ (state >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        state ^= state >> 31;
    }
    state
}

/// What a recomputation needs to draw the same numbers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Replay {
    seed: u64,
    /// What the generator gave next after the forward; unknown if other threads seeded it meanwhile.
    end: Option<Print>,
}

/// Runs `block`, and says how to have it draw the same numbers again.
pub(crate) fn record<T>(device: &Device, block: impl FnOnce() -> T) -> (T, Replay) {
    let start = seed(device, |print| derive(print, 1));
    let out = block();
    let end = seed(device, |_| derive(start.print, 2));
    let replay = Replay {
        seed: derive(start.print, 1),
        end: (end.others == start.others).then_some(end.print),
    };
    (out, replay)
}

/// Runs `block` on the numbers that [`record`] gave it.
///
/// # Panics
///
/// If numbers were drawn, and they may be others than in the forward.
pub(crate) fn replay<T>(device: &Device, replay: Replay, block: impl FnOnce() -> T) -> T {
    let start = seed(device, |_| replay.seed);
    let out = block();
    let end = seed(device, |_| derive(start.print, 3));
    // A block that draws nothing now drew nothing then: what others drew does not matter.
    assert!(
        end.draws == start.draws || replay.end == Some(end.print),
        "a checkpointed block draws random numbers, and its recomputation did not draw those of its forward: \
         other threads use the same generator, or the block draws other amounts each time (run ranks as \
         processes, set dropout to 0, or pass Random::Ignore if the block draws nothing)"
    );
    out
}

/// Runs `block` on the random numbers it would get in a checkpoint, without checkpointing it.
///
/// So runs with checkpoints and without can be compared, or one be switched to the other, at equal dropout.
///
/// # Examples
///
/// ```
/// use burn::nn::DropoutConfig;
/// use burn::tensor::{Device, Tensor};
/// use burn_shard_recompute::{checkpoint, seeded};
///
/// let device = Device::flex().autodiff();
/// let (dropout, x) = (DropoutConfig::new(0.5).init(), Tensor::<1>::ones([8], &device).require_grad());
/// device.seed(7);
/// let kept = seeded(&device, || dropout.forward(x.clone()));
/// device.seed(7);
/// let checkpointed = checkpoint(&dropout, x, |dropout, x| dropout.forward(x));
/// kept.into_data().assert_eq(&checkpointed.into_data(), true);
/// ```
pub fn seeded<T>(device: &Device, block: impl FnOnce() -> T) -> T {
    record(device, block).0
}
