//! Which value of a module a read, a gradient or a collective belongs to.

use std::sync::{Arc, OnceLock};

use burn::backend::autodiff::NodeId;
use parking_lot::Mutex;

use super::history::History;
use crate::storage::flat::Flat;

/// One value of the module: the tensors between two optimizer steps. A clone shares it, a map (an
/// optimizer step, a load) makes a new one.
#[derive(Debug)]
pub(crate) struct Instance {
    /// Under which node each parameter's gradient is registered; `None` if it requires none. Not known
    /// while an optimizer step still makes this value.
    leaves: OnceLock<Vec<Option<NodeId>>>,
    /// By group: the buffers it is stored in, to gather from ahead of reads. Empty once a step has
    /// begun to write them.
    flats: Mutex<Vec<Flat>>,
    pub(crate) history: History,
}

impl Instance {
    pub(crate) fn new(history: History) -> Arc<Self> {
        Arc::new(Self {
            leaves: OnceLock::new(),
            flats: Mutex::new(Vec::new()),
            history,
        })
    }

    /// Makes the nodes known under which gradients are registered, by parameter.
    pub(crate) fn note_leaves(&self, leaves: Vec<Option<NodeId>>) {
        let first = self.leaves.set(leaves);
        debug_assert!(first.is_ok(), "a value's leaves never change");
    }

    /// Whether any parameter requires a gradient.
    pub(crate) fn is_trainable(&self) -> bool {
        let mut leaves = self.leaves.get().into_iter().flatten();
        leaves.any(Option::is_some)
    }

    /// Under which node a parameter's gradient is registered.
    pub(crate) fn leaf(&self, index: usize) -> Option<NodeId> {
        self.leaves.get().and_then(|leaves| leaves[index])
    }

    /// Whether it is known that a parameter requires no gradient.
    pub(crate) fn is_frozen(&self, index: usize) -> bool {
        let leaves = self.leaves.get();
        leaves.is_some_and(|leaves| leaves[index].is_none())
    }

    /// Makes the buffers known that this value is stored in.
    pub(crate) fn note_flats(&self, flats: &[Flat]) {
        *self.flats.lock() = flats.to_vec();
    }

    /// The buffer of a group.
    pub(crate) fn flat(&self, group: usize) -> Option<Flat> {
        self.flats.lock().get(group).cloned()
    }

    /// Lets go of the buffers, so that they can be written in place.
    pub(crate) fn forget_flats(&self) {
        self.flats.lock().clear();
    }
}
