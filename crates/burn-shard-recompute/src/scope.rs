//! What this thread is doing for a checkpointed block, for code that reads parameters in its own way.
//!
//! Code that replaces parameters when they are read (sharding, say) has to know whether a read belongs to
//! a forward whose activations are dropped, or to the recomputation of that forward. Blocks nest, so this
//! is a stack.

use std::cell::RefCell;
use std::fmt;

/// Why a checkpointed block is running.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// The forward: nothing is tracked, and the block's parameters will be read again in backward.
    Forward,
    /// The recomputation in backward, and the backward of the recomputed block.
    Recompute,
}

type Callback = Box<dyn FnOnce() + Send>;

#[derive(Debug)]
struct Frame {
    phase: Phase,
    callbacks: Callbacks,
}

thread_local! {
    static FRAMES: RefCell<Vec<Frame>> = const { RefCell::new(Vec::new()) };
}

/// The phase of the innermost checkpointed block that this thread is running; `None` outside of any.
///
/// # Examples
///
/// ```
/// use burn_shard_recompute::{checkpoint, scope};
/// use burn::nn::LinearConfig;
/// use burn::tensor::{Device, Tensor};
///
/// let device = Device::flex().autodiff();
/// let block = LinearConfig::new(2, 2).init(&device);
/// let y = checkpoint(&block, Tensor::<2>::ones([1, 2], &device), |block, x| {
///     assert!(scope::phase().is_some());
///     block.forward(x)
/// });
/// assert_eq!(scope::phase(), None);
/// y.sum().backward();
/// ```
pub fn phase() -> Option<Phase> {
    FRAMES.with_borrow(|frames| frames.last().map(|frame| frame.phase))
}

/// Has `callback` run once: when the block that is in its [`Phase::Forward`] has been recomputed and the
/// backward of that is over, or when Burn drops the block from its tape because no backward will come.
///
/// In the latter case Burn may hold its locks: the callback must not run tensor operations. If the
/// forward panics, the callback runs then.
///
/// # Panics
///
/// If this thread is not in [`Phase::Forward`].
pub fn on_recomputed(callback: Box<dyn FnOnce() + Send>) {
    FRAMES.with_borrow_mut(|frames| match frames.last_mut() {
        Some(Frame {
            phase: Phase::Forward,
            callbacks,
        }) => callbacks.0.push(callback),
        Some(_) | None => panic!(
            "on_recomputed was called outside the forward of a checkpointed block (ask scope::phase first)"
        ),
    });
}

/// Callbacks that run when this is dropped, in the order in which they came.
#[derive(Default)]
pub(crate) struct Callbacks(Vec<Callback>);

impl Drop for Callbacks {
    fn drop(&mut self) {
        for callback in self.0.drain(..) {
            callback();
        }
    }
}

impl fmt::Debug for Callbacks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Callbacks({})", self.0.len())
    }
}

/// Keeps this thread in a phase until it is dropped.
#[derive(Debug)]
pub(crate) struct Scope {
    /// Frames below this one.
    depth: usize,
}

impl Scope {
    pub(crate) fn enter(phase: Phase) -> Self {
        FRAMES.with_borrow_mut(|frames| {
            frames.push(Frame {
                phase,
                callbacks: Callbacks::default(),
            });
            Self {
                depth: frames.len() - 1,
            }
        })
    }

    /// Leaves the phase and keeps what was to be called.
    pub(crate) fn leave(self) -> Callbacks {
        let frame = FRAMES.with_borrow_mut(Vec::pop);
        frame.map(|frame| frame.callbacks).unwrap_or_default()
    }
}

impl Drop for Scope {
    fn drop(&mut self) {
        // Callbacks may ask for the phase, so they are dropped outside the borrow.
        let left = FRAMES.with_borrow_mut(|frames| {
            let keep = self.depth.min(frames.len());
            frames.split_off(keep)
        });
        drop(left);
    }
}
