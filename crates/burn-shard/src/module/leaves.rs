//! Tells the runtime under which nodes of the graph a module's gradients are to be registered.

use std::sync::Arc;

use burn::module::{Module, Param};
use burn::tensor::Tensor;

use super::walk::{VisitParam, visit_params};
use crate::autodiff::graph::Graph;
use crate::autodiff::ops::node_of;
use crate::runtime::instance::Instance;

/// Tells the current instance under which nodes the module's gradients are registered.
pub(crate) fn note_leaves<M: Module>(graph: &Graph, module: &M) {
    let engine = &graph.engine;
    let mut note = NoteLeaves(engine.instance());
    visit_params(engine.plan(), module, &mut note);
}

struct NoteLeaves(Arc<Instance>);

impl VisitParam for NoteLeaves {
    fn visit_param<const D: usize>(&mut self, index: usize, param: &Param<Tensor<D>>) {
        let base = param.base();
        let leaf = base.is_require_grad().then(|| node_of(base)).flatten();
        self.0.note_leaf(index, leaf);
    }
}
