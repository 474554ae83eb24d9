//! Tells the runtime under which nodes of the graph a module's gradients are to be registered.

use std::sync::Arc;

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::Tensor;

use super::path::Path;
use crate::autodiff::graph::Graph;
use crate::autodiff::ops::node_of;
use crate::runtime::instance::Instance;

/// Tells the current instance under which nodes the module's gradients are registered.
pub(crate) fn note_leaves<M: Module>(graph: &Graph, module: &M) {
    module.visit(&mut NoteLeaves {
        instance: graph.engine.instance(),
        graph,
        path: Path::default(),
    });
}

struct NoteLeaves<'a> {
    graph: &'a Graph,
    instance: Arc<Instance>,
    path: Path,
}

impl ModuleVisitor for NoteLeaves<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.enter(name);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.exit();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let plan = self.graph.engine.plan();
        if let Some(index) = plan.find(&self.path.join()) {
            let base = param.base();
            let leaf = base.is_require_grad().then(|| node_of(base)).flatten();
            self.instance.note_leaf(index, leaf);
        }
    }
}
