//! Which value of a module a gradient belongs to.

use std::sync::Arc;

use burn::backend::autodiff::NodeId;
use parking_lot::Mutex;

/// One value of the module: the tensors between two optimizer steps. A clone shares it, a map (an
/// optimizer step, a load) makes a new one.
#[derive(Debug)]
pub(crate) struct Instance {
    /// Under which node each parameter's gradient is registered; `None` if it requires none.
    leaves: Mutex<Vec<Option<NodeId>>>,
}

impl Instance {
    pub(crate) fn new(params: usize) -> Arc<Self> {
        Arc::new(Self {
            leaves: Mutex::new(vec![None; params]),
        })
    }

    pub(crate) fn note_leaf(&self, index: usize, leaf: Option<NodeId>) {
        self.leaves.lock()[index] = leaf;
    }

    pub(crate) fn leaves(&self) -> Vec<Option<NodeId>> {
        self.leaves.lock().clone()
    }
}
