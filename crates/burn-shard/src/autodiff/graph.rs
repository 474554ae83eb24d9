//! The tokens of a pass on the autodiff graph: where a backward ends, and how deep its reads are; see
//! [Note: depth and anchors] in `ops.rs`.
//!
//! An anchor is to be at least as deep as the activations around it, whose depth nobody can ask for.
//! It grows by so many *levels* from one group's first read to the next. These have to be the same
//! on all ranks: under [`Full`](crate::ShardingStrategy::Full) the depth of a read decides whether a
//! reduction comes before or after a gather. So in the first pass they are a constant, and from the
//! first backward on those that rank 0 counted in it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Weak};

use burn::backend::Dispatch;
use burn::backend::autodiff::NodeId;
use burn::tensor::{Device, Tensor};
use burn_shard_recompute::scope::BlockId;
use parking_lot::Mutex;

use super::ops::{BeginState, ShardOps};
use crate::runtime::engine::Engine;
use crate::runtime::instance::Instance;
use crate::runtime::pass::PassId;

/// More levels than any group of parameters plausibly adds; bounds the cost of a bad estimate.
const MAX_LEVELS: u64 = 4096;

/// Added to a count: ranks that make anchors meanwhile take a node before they have said so, and what
/// one of them had taken when this rank began to count is missing from the difference.
const SLACK: u64 = 16;

/// Nodes that anchors took, on all ranks of this process.
static ANCHOR_NODES: AtomicU64 = AtomicU64::new(0);

/// Nodes made so far on all ranks of this process, without those of anchors.
fn nodes_so_far() -> u64 {
    let anchors = ANCHOR_NODES.fetch_add(1, Relaxed);
    NodeId::new().value.saturating_sub(anchors)
}

/// A wrapped module as the autodiff graph sees it: its engine, and the forward that is open.
#[derive(Debug)]
pub(crate) struct Graph {
    pub(crate) engine: Arc<Engine>,
    open: Mutex<Option<OpenPass>>,
    /// The passes of checkpointed blocks that have yet to run again; see `recompute.rs`.
    pub(super) blocks: Mutex<HashMap<BlockId, PassId>>,
}

/// The tokens of one read.
#[derive(Debug)]
pub(crate) struct Tokens {
    pub(crate) pass: PassId,
    pub(crate) anchor: Tensor<1>,
    pub(crate) begin: Tensor<1>,
}

/// The tokens of a forward and its backward.
#[derive(Debug)]
struct OpenPass {
    id: PassId,
    begin: Tensor<1>,
    /// The deepest anchor so far, and the newest node when it was made.
    deepest: Tensor<1>,
    newest_node: u64,
    /// One anchor per group, made at the group's first read, and again at the first read after it was
    /// resharded: the gradients of these reads then become ready together.
    anchors: Vec<Option<(u64, Tensor<1>)>>,
}

/// A parameter of a wrapped module, for whoever reads it.
#[derive(Clone, Debug)]
pub(crate) struct ParamHandle {
    pub(crate) graph: Arc<Graph>,
    pub(crate) instance: Arc<Instance>,
    /// Index into the plan's parameters.
    pub(crate) index: usize,
}

/// A [`ParamHandle`] that does not keep the module alive. For the tape: a forward whose backward never
/// runs stays on it until a later backward.
#[derive(Clone, Debug)]
pub(crate) struct WeakParamHandle {
    graph: Weak<Graph>,
    instance: Arc<Instance>,
    pub(crate) index: usize,
}

impl ParamHandle {
    pub(crate) fn engine(&self) -> &Engine {
        &self.graph.engine
    }

    pub(crate) fn downgrade(&self) -> WeakParamHandle {
        WeakParamHandle {
            graph: Arc::downgrade(&self.graph),
            instance: Arc::clone(&self.instance),
            index: self.index,
        }
    }

    /// The tokens of a read on an autodiff device.
    pub(crate) fn tokens(&self, device: &Device) -> Tokens {
        let engine = self.engine();
        let group = engine.plan().place[self.index].group;
        self.in_open_pass(device, |pass| Tokens {
            pass: pass.id,
            anchor: pass.anchor(group, engine),
            begin: pass.begin.clone(),
        })
    }

    /// The pass that reads belong to now, and its begin token.
    pub(super) fn open_pass(&self, device: &Device) -> (PassId, Tensor<1>) {
        self.in_open_pass(device, |pass| (pass.id, pass.begin.clone()))
    }

    fn in_open_pass<T>(&self, device: &Device, with: impl FnOnce(&mut OpenPass) -> T) -> T {
        let mut open = self.graph.open.lock();
        let pass = match open.take() {
            Some(pass) if self.engine().is_open(pass.id) => pass,
            _ => OpenPass::new(self, device),
        };
        with(open.insert(pass))
    }
}

impl WeakParamHandle {
    pub(crate) fn upgrade(&self) -> ParamHandle {
        let param = self.try_upgrade();
        param.expect("the sharded module should live until its backward has run")
    }

    /// `None` if the module is gone.
    pub(crate) fn try_upgrade(&self) -> Option<ParamHandle> {
        Some(ParamHandle {
            graph: self.graph.upgrade()?,
            instance: Arc::clone(&self.instance),
            index: self.index,
        })
    }
}

impl Graph {
    pub(crate) fn new(engine: Arc<Engine>) -> Arc<Self> {
        Arc::new(Self {
            engine,
            open: Mutex::new(None),
            blocks: Mutex::new(HashMap::new()),
        })
    }

    /// The next read begins a pass of its own, with a backward of its own.
    pub(crate) fn close_pass(&self) {
        drop(self.open.lock().take());
    }
}

impl OpenPass {
    fn new(handle: &ParamHandle, device: &Device) -> Self {
        let engine = handle.engine();
        let (id, token) = engine.begin_pass();
        let pass = BeginState {
            param: handle.downgrade(),
            pass: id,
            _token: token,
        };
        // Where nothing is trained no gradient is waited for, and backward ends without us.
        let trains = handle.instance.is_trainable();
        let leaf = Tensor::<1>::zeros([1], device).set_require_grad(trains);
        let begin = Dispatch::begin_pass(leaf.into_dispatch(), pass);
        Self {
            id,
            begin: Tensor::from_dispatch(begin),
            deepest: Tensor::zeros([1], device),
            newest_node: nodes_so_far(),
            anchors: vec![None; engine.plan().groups.len()],
        }
    }

    /// The anchor of a group.
    fn anchor(&mut self, group: usize, engine: &Engine) -> Tensor<1> {
        let reshards = engine.reshards(group);
        if let Some((made, anchor)) = &self.anchors[group]
            && *made == reshards
        {
            return anchor.clone();
        }
        let newest_node = &mut self.newest_node;
        let levels = engine.anchor_levels(group, || {
            // Node ids count the nodes of all ranks in this process: an upper bound of the depth
            // gained since the last anchor. A bad count costs time and memory, not correctness.
            let newest = nodes_so_far();
            let gained = newest.saturating_sub(*newest_node);
            *newest_node = newest;
            (gained + SLACK).min(MAX_LEVELS)
        });
        for _ in 0..levels {
            let deeper = Dispatch::deepen(self.deepest.clone().into_dispatch());
            self.deepest = Tensor::from_dispatch(deeper);
            ANCHOR_NODES.fetch_add(1, Relaxed);
        }
        self.anchors[group] = Some((reshards, self.deepest.clone()));
        self.deepest.clone()
    }
}
