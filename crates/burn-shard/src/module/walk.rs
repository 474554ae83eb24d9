//! Traversals of a module's parameters, by their index in the plan. What the plan does not know, such as
//! running statistics, is passed over.

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::Tensor;

use super::path::Path;
use crate::plan::Plan;

/// What becomes of each parameter.
pub(super) trait MapParam {
    fn map_param<const D: usize>(
        &mut self,
        index: usize,
        param: Param<Tensor<D>>,
    ) -> Param<Tensor<D>>;
}

/// What is done with each parameter.
pub(super) trait VisitParam {
    fn visit_param<const D: usize>(&mut self, index: usize, param: &Param<Tensor<D>>);
}

pub(super) fn map_params<M: Module>(plan: &Plan, module: M, with: &mut impl MapParam) -> M {
    let path = Path::default();
    module.map(&mut Walk { plan, path, with })
}

pub(super) fn visit_params<M: Module>(plan: &Plan, module: &M, with: &mut impl VisitParam) {
    let path = Path::default();
    module.visit(&mut Walk { plan, path, with });
}

struct Walk<'a, W> {
    plan: &'a Plan,
    path: Path,
    with: &'a mut W,
}

impl<W> Walk<'_, W> {
    fn index(&self) -> Option<usize> {
        self.plan.find(&self.path.join())
    }
}

impl<W: MapParam> ModuleMapper for Walk<'_, W> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.enter(name);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.exit();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match self.index() {
            None => param,
            Some(index) => self.with.map_param(index, param),
        }
    }
}

impl<W: VisitParam> ModuleVisitor for Walk<'_, W> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.enter(name);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.exit();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(index) = self.index() {
            self.with.visit_param(index, param);
        }
    }
}
