//! How deep the anchors of a pass are, see [Note: depth and anchors] in `ops`.
//!
//! An anchor is to be at least as deep as the activations around it, whose depth nobody can ask for.
//! It grows by so many *levels* from one group's first read to the next. These have to be the same
//! on all ranks: under [`Full`](crate::ShardingStrategy::Full) the depth of a read decides whether a
//! reduction comes before or after a gather. So in the first pass they are a constant, and from the
//! first backward on those that rank 0 counted in it.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use burn::backend::Dispatch;
use burn::backend::autodiff::NodeId;
use burn::tensor::{Device, Tensor};

use crate::ops::{Hook, ShardOps};

/// Levels between groups before they are agreed on: more than most layers have nodes.
const FIRST_LEVELS: u64 = 256;

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

/// Levels by which the anchor grows when a group is first read in a pass.
#[derive(Debug)]
pub(crate) struct Levels {
    used: Vec<u64>,
    /// What was counted on this rank, until ranks have agreed.
    counted: Option<Vec<u64>>,
}

impl Levels {
    pub(crate) fn new(groups: usize) -> Self {
        Self {
            used: vec![FIRST_LEVELS; groups],
            counted: Some(vec![FIRST_LEVELS; groups]),
        }
    }

    /// What this rank counted; of a group that was never read, the constant.
    pub(crate) fn take_counted(&mut self) -> Option<Vec<u64>> {
        self.counted.take()
    }

    pub(crate) fn agree(&mut self, levels: &[u64]) {
        self.used.copy_from_slice(levels);
    }
}

/// The tokens of a forward pass and its backward.
#[derive(Debug)]
pub(crate) struct Pass {
    begin: Tensor<1>,
    /// The deepest anchor so far, and the newest node when it was made.
    deepest: Tensor<1>,
    newest_node: u64,
    /// One anchor per group, made at the group's first read: the group's gradients then become
    /// ready together, which is when they are reduced.
    anchors: Vec<Option<Tensor<1>>>,
}

impl Pass {
    pub(crate) fn new(hook: &Hook, device: &Device) -> Self {
        let token = Tensor::<1>::zeros([1], device).require_grad();
        let begin = Dispatch::begin_pass(token.into_dispatch(), hook.clone());
        Self {
            begin: Tensor::from_dispatch(begin),
            deepest: Tensor::zeros([1], device),
            newest_node: nodes_so_far(),
            anchors: vec![None; hook.engine.plan.groups.len()],
        }
    }

    pub(crate) fn begin(&self) -> Tensor<1> {
        self.begin.clone()
    }

    /// The anchor for one more read of a parameter, of a tied one or of a layer called again: its own
    /// gradient need not wait for that of the first.
    pub(crate) fn latest(&self) -> Tensor<1> {
        self.deepest.clone()
    }

    /// The anchor of a group.
    pub(crate) fn anchor(&mut self, group: usize, levels: &mut Levels) -> Tensor<1> {
        if let Some(anchor) = &self.anchors[group] {
            return anchor.clone();
        }
        if let Some(counted) = &mut levels.counted {
            // Node ids count the nodes of all ranks in this process: an upper bound of the depth
            // gained since the last anchor. A bad count costs time and memory, not correctness.
            let newest = nodes_so_far();
            let gained = newest.saturating_sub(self.newest_node);
            counted[group] = (gained + SLACK).min(MAX_LEVELS);
            self.newest_node = newest;
        }
        for _ in 0..levels.used[group] {
            let deeper = Dispatch::deepen(self.deepest.clone().into_dispatch());
            self.deepest = Tensor::from_dispatch(deeper);
            ANCHOR_NODES.fetch_add(1, Relaxed);
        }
        self.anchors[group] = Some(self.deepest.clone());
        self.deepest.clone()
    }
}
