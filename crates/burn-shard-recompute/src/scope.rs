//! What this thread is doing for a checkpointed block, for code that reads parameters in its own way.
//!
//! Code that replaces parameters when they are read (sharding, say) has to know whether a read belongs to
//! a forward whose activations are dropped, or to the recomputation of that forward. Blocks nest, so this
//! is a stack.

use std::cell::RefCell;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use burn::tensor::Tensor;

/// Why a checkpointed block is running.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// The forward: nothing is tracked, and the block's parameters will be read again in backward.
    Forward,
    /// The recomputation in backward, and the backward of the recomputed block.
    Recompute,
}

/// One run of a block in forward, and its recomputation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(u64);

impl BlockId {
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

type Callback = Box<dyn FnOnce() + Send>;

#[derive(Debug)]
struct Frame {
    phase: Phase,
    block: BlockId,
    requests: Requests,
}

/// What was asked for in a forward.
#[derive(Debug, Default)]
pub(crate) struct Requests {
    pub(crate) callbacks: Callbacks,
    pub(crate) ancestors: Vec<Tensor<1>>,
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

/// The innermost checkpointed block that this thread is running, the same in forward and recomputation.
pub fn block() -> Option<BlockId> {
    FRAMES.with_borrow(|frames| frames.last().map(|frame| frame.block))
}

/// The innermost block that this thread is recomputing. In the forward of a nested block this is the block
/// around it.
pub fn recomputed_block() -> Option<BlockId> {
    FRAMES.with_borrow(|frames| {
        let mut frames = frames.iter().rev();
        let frame = frames.find(|frame| frame.phase == Phase::Recompute);
        frame.map(|frame| frame.block)
    })
}

/// Has `callback` run once: when the block that is in its [`Phase::Forward`] has run again and its backward is
/// about to begin, or when Burn drops the block from its tape because no backward will come.
///
/// In the latter case Burn may hold its locks: the callback must not run tensor operations. If the
/// forward panics, the callback runs then.
///
/// # Panics
///
/// If this thread is not in [`Phase::Forward`].
pub fn on_recomputed(callback: Box<dyn FnOnce() + Send>) {
    request("on_recomputed", |requests| {
        requests.callbacks.0.push(callback)
    });
}

/// Makes `tensor` an ancestor of the block that is in its [`Phase::Forward`]: the backward step of `tensor`
/// will run, and after the block's.
///
/// # Panics
///
/// If this thread is not in [`Phase::Forward`].
pub fn add_ancestor(tensor: Tensor<1>) {
    request("add_ancestor", |requests| requests.ancestors.push(tensor));
}

fn request(what: &str, add: impl FnOnce(&mut Requests)) {
    FRAMES.with_borrow_mut(|frames| match frames.last_mut() {
        Some(Frame {
            phase: Phase::Forward,
            requests,
            ..
        }) => add(requests),
        Some(_) | None => panic!(
            "{what} was called outside the forward of a checkpointed block (ask scope::phase first)"
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
    pub(crate) fn enter(phase: Phase, block: BlockId) -> Self {
        FRAMES.with_borrow_mut(|frames| {
            frames.push(Frame {
                phase,
                block,
                requests: Requests::default(),
            });
            Self {
                depth: frames.len() - 1,
            }
        })
    }

    /// Leaves the phase and keeps what was asked for.
    pub(crate) fn leave(self) -> Requests {
        let frame = FRAMES.with_borrow_mut(Vec::pop);
        frame.map(|frame| frame.requests).unwrap_or_default()
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
