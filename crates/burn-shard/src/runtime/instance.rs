//! Which value of a module a read, a gradient or a collective belongs to.

use std::sync::Arc;

use burn::backend::autodiff::NodeId;
use parking_lot::Mutex;

use super::history::History;
use crate::storage::flat::Flat;

/// One value of the module: the tensors between two optimizer steps. A clone shares it, a map (an
/// optimizer step, a load) makes a new one.
#[derive(Debug)]
pub(crate) struct Instance {
    /// Under which node each parameter's gradient is registered; `None` if it requires none.
    leaves: Mutex<Vec<Option<NodeId>>>,
    /// By group: the buffers it is stored in, to gather from ahead of reads. Empty once a step has
    /// begun to write them.
    flats: Mutex<Vec<Flat>>,
    pub(crate) history: History,
}

impl Instance {
    pub(crate) fn new(params: usize, history: History) -> Arc<Self> {
        Arc::new(Self {
            leaves: Mutex::new(vec![None; params]),
            flats: Mutex::new(Vec::new()),
            history,
        })
    }

    pub(crate) fn note_leaf(&self, index: usize, leaf: Option<NodeId>) {
        self.leaves.lock()[index] = leaf;
    }

    /// Whether any parameter requires a gradient.
    pub(crate) fn is_trainable(&self) -> bool {
        self.leaves.lock().iter().any(Option::is_some)
    }

    pub(crate) fn requires_gradient(&self, index: usize) -> bool {
        self.leaves.lock()[index].is_some()
    }

    pub(crate) fn leaves(&self) -> Vec<Option<NodeId>> {
        self.leaves.lock().clone()
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
