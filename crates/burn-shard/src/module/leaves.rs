//! Tells the runtime under which nodes of the graph a module's gradients are to be registered.

use burn::backend::autodiff::NodeId;
use burn::module::{Module, Param};
use burn::tensor::Tensor;

use super::walk::{VisitParam, visit_params};
use crate::autodiff::graph::Graph;
use crate::autodiff::ops::node_of;

/// Tells the current instance under which nodes the module's gradients are registered.
pub(crate) fn note_leaves<M: Module>(graph: &Graph, module: &M) {
    let engine = &graph.engine;
    let mut leaves = Leaves(vec![None; engine.plan().params.len()]);
    visit_params(engine.plan(), module, &mut leaves);
    engine.instance().note_leaves(leaves.0);
}

struct Leaves(Vec<Option<NodeId>>);

impl VisitParam for Leaves {
    fn visit_param<const D: usize>(&mut self, index: usize, param: &Param<Tensor<D>>) {
        let base = param.base();
        self.0[index] = base.is_require_grad().then(|| node_of(base)).flatten();
    }
}
