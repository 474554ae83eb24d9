//! What the tests share: gradients as bits, by parameter.
#![allow(dead_code, reason = "no test binary uses all of it")]

use std::sync::{Mutex, MutexGuard, PoisonError};

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{DType, Device, Gradients, Tensor};

/// Holds the process's one generator of random numbers: other tests draw from it too.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    static GENERATOR: Mutex<()> = Mutex::new(());
    GENERATOR.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Without and with Burn's own checkpointing of cheap operations.
pub(crate) fn devices() -> [Device; 2] {
    [
        Device::flex().autodiff(),
        Device::flex().autodiff().gradient_checkpointing(),
    ]
}

/// Shape and bits of a tensor.
pub(crate) type Bits = (Vec<usize>, Vec<u8>);

pub(crate) fn bits<const D: usize>(tensor: Tensor<D>) -> Bits {
    let data = tensor.into_data();
    (data.shape().to_vec(), data.as_bytes().to_vec())
}

/// Gradients of all parameters in the order of the module; those of `inputs` after them.
pub(crate) fn grads_of<const D: usize>(
    loss: Tensor<1>,
    module: &impl Module,
    inputs: &[&Tensor<D>],
) -> Vec<Option<Bits>> {
    let grads = loss.backward();
    let mut all = gradients(&grads, module);
    all.extend(inputs.iter().map(|input| input.grad(&grads).map(bits)));
    all
}

/// Gradients of all parameters in the order of the module.
pub(crate) fn gradients(grads: &Gradients, module: &impl Module) -> Vec<Option<Bits>> {
    struct Collect<'a>(&'a Gradients, Vec<Option<Bits>>);
    impl ModuleVisitor for Collect<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.1.push(param.base().grad(self.0).map(bits));
        }
    }
    let mut collect = Collect(grads, Vec::new());
    module.visit(&mut collect);
    collect.1
}

/// The module with parameters of type `dtype`.
pub(crate) fn cast<M: Module>(module: M, dtype: DType) -> M {
    struct Cast(DType);
    impl ModuleMapper for Cast {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            param.map(|tensor| {
                let grad = tensor.is_require_grad();
                let tensor = tensor.set_require_grad(false).cast(self.0);
                tensor.set_require_grad(grad)
            })
        }
    }
    module.map(&mut Cast(dtype))
}
