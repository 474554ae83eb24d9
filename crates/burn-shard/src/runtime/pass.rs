//! The reads of one forward whose gradients are still to come.

use std::sync::{Arc, Weak};

/// Number of a forward and its backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct PassId(pub(crate) u64);

/// Held by the graph for as long as the backward of a pass may still come.
#[derive(Clone, Debug)]
pub(crate) struct PassToken {
    _alive: Arc<()>,
}

/// One forward, until its backward is over.
#[derive(Debug)]
pub(crate) struct Pass {
    pub(crate) id: PassId,
    token: Weak<()>,
    /// By group: gradients that were announced by a read and have not come.
    pending: Vec<usize>,
    /// By parameter: whether a gradient has come.
    pub(crate) came: Vec<bool>,
    /// Ways of doing backward that were asked for when the pass began.
    pub(crate) sync: GradientSync,
}

/// Whether backward reduces the gradients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum GradientSync {
    /// Backward ends with the average over the ranks.
    #[default]
    Reduce,
    /// Backward adds to what this rank has accumulated, and nothing is sent.
    Accumulate,
}

impl Pass {
    pub(crate) fn new(
        id: PassId,
        groups: usize,
        params: usize,
        sync: GradientSync,
    ) -> (Self, PassToken) {
        let alive = Arc::new(());
        let pass = Self {
            id,
            token: Arc::downgrade(&alive),
            pending: vec![0; groups],
            came: vec![false; params],
            sync,
        };
        (pass, PassToken { _alive: alive })
    }

    /// Whether its backward may still come: the graph has not dropped it.
    pub(crate) fn may_end(&self) -> bool {
        self.token.strong_count() > 0
    }

    pub(crate) fn expect(&mut self, group: usize) {
        self.pending[group] += 1;
    }

    pub(crate) fn arrived(&mut self, group: usize) {
        self.pending[group] = self.pending[group].saturating_sub(1);
    }

    /// Whether all gradients of a group have come that will.
    pub(crate) fn is_complete(&self, group: usize) -> bool {
        self.pending[group] == 0
    }
}
