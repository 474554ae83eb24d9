//! What a module holds beside its parameters: running statistics, integers, booleans.

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{Bool, Bytes, Device, Int, Tensor, TensorData};
use burn_shard_comm::{Error as CommError, ProcessGroup};

use super::bind::AutodiffState;
use super::path::Path;
use crate::plan::Plan;

/// A tensor that is no parameter.
#[derive(Debug)]
pub(crate) struct Buffer {
    pub(crate) path: String,
    pub(crate) data: TensorData,
}

/// The buffers of a plain module.
pub(crate) fn collect<M: Module>(plan: &Plan, module: &M) -> Vec<Buffer> {
    struct Collect<'a> {
        plan: &'a Plan,
        path: Path,
        buffers: Vec<Buffer>,
    }
    impl Collect<'_> {
        fn push(&mut self, data: TensorData) {
            let path = self.path.join();
            self.buffers.push(Buffer { path, data });
        }
    }
    impl ModuleVisitor for Collect<'_> {
        fn enter_module(&mut self, name: &str, _container_type: &str) {
            self.path.enter(name);
        }
        fn exit_module(&mut self, _name: &str, _container_type: &str) {
            self.path.exit();
        }
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if self.plan.find(&self.path.join()).is_none() {
                self.push(param.val().into_data());
            }
        }
        fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
            self.push(param.val().into_data());
        }
        fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
            self.push(param.val().into_data());
        }
    }
    let mut collect = Collect {
        plan,
        path: Path::default(),
        buffers: Vec::new(),
    };
    // Running statistics keep their latest update aside; `valid` is what makes them take it.
    module.valid().visit(&mut collect);
    collect.buffers
}

/// Rank 0's buffers, on every rank. One collective.
pub(crate) fn broadcast(
    group: &ProcessGroup,
    buffers: Vec<Buffer>,
) -> Result<Vec<Buffer>, CommError> {
    let bytes = buffers.iter().map(|buffer| buffer.data.as_bytes());
    let mut bytes = bytes.collect::<Vec<_>>().concat();
    group.broadcast(&mut bytes, 0)?;
    let mut rest = bytes.as_slice();
    let received = buffers.into_iter().map(|buffer| {
        let (own, shape, dtype) = buffer.data.into_parts();
        let (first, others) = rest.split_at(own.len());
        rest = others;
        Buffer {
            path: buffer.path,
            data: TensorData::from_bytes(Bytes::from_bytes_vec(first.to_vec()), shape, dtype),
        }
    });
    Ok(received.collect())
}

/// Puts buffers into a module.
pub(crate) fn put<M: Module>(module: M, buffers: Vec<Buffer>) -> M {
    struct Put {
        path: Path,
        buffers: Vec<Buffer>,
    }
    impl Put {
        fn take(&mut self) -> Option<TensorData> {
            let path = self.path.join();
            let at = self.buffers.iter().position(|buffer| buffer.path == path)?;
            Some(self.buffers.swap_remove(at).data)
        }
    }
    impl ModuleMapper for Put {
        fn enter_module(&mut self, name: &str, _container_type: &str) {
            self.path.enter(name);
        }
        fn exit_module(&mut self, _name: &str, _container_type: &str) {
            self.path.exit();
        }
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            match self.take() {
                None => param,
                Some(data) => param.map(|tensor| {
                    let state = AutodiffState::of(&tensor);
                    let device: Device = tensor.without_autodiff().device();
                    let dtype = data.dtype();
                    state.lift(Tensor::from_data(data, (&device, dtype)))
                }),
            }
        }
        fn map_int<const D: usize>(
            &mut self,
            param: Param<Tensor<D, Int>>,
        ) -> Param<Tensor<D, Int>> {
            match self.take() {
                None => param,
                Some(data) => param.map(|tensor| {
                    let dtype = data.dtype();
                    Tensor::from_data(data, (&tensor.device(), dtype))
                }),
            }
        }
        fn map_bool<const D: usize>(
            &mut self,
            param: Param<Tensor<D, Bool>>,
        ) -> Param<Tensor<D, Bool>> {
            match self.take() {
                None => param,
                Some(data) => param.map(|tensor| {
                    let dtype = data.dtype();
                    Tensor::from_data(data, (&tensor.device(), dtype))
                }),
            }
        }
    }
    // As above, so that no update from before the load replaces what is loaded.
    drop(module.valid());
    module.map(&mut Put {
        path: Path::default(),
        buffers,
    })
}
