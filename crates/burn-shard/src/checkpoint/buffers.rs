//! What a module holds beside its parameters: running statistics, integers, booleans.

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{Bool, Bytes, DType as BurnDType, Device, Int, Tensor, TensorData};
use burn_shard_checkpoint::{Checkpoint, DType, TensorName, TensorPart, Wanted};

use crate::Error;
use crate::module::path::Path;
use crate::plan::Plan;

/// The role of a tensor that is no parameter.
const ROLE: &str = "buffer";

/// A tensor that is no parameter.
#[derive(Debug)]
pub(super) struct Buffer {
    path: String,
    data: TensorData,
}

impl Buffer {
    fn dtype(&self) -> DType {
        stored_type(self.data.dtype())
    }

    pub(super) fn part(self) -> TensorPart<'static> {
        let (name, dtype) = (TensorName::state(self.path.clone(), ROLE), self.dtype());
        let shape = self.data.shape().to_vec();
        TensorPart::full(name, dtype, &shape, self.data.bytes().to_vec())
    }

    pub(super) fn wanted(&self) -> Wanted {
        Wanted {
            name: TensorName::state(self.path.clone(), ROLE),
            dtype: self.dtype(),
            shape: self.data.shape().to_vec(),
        }
    }

    /// The same buffer with the elements that `source` has in the checkpoint.
    pub(super) fn loaded(
        self,
        checkpoint: &Checkpoint,
        source: &TensorName,
    ) -> Result<Self, Error> {
        let bytes = Bytes::from_bytes_vec(checkpoint.read(source)?);
        let (shape, dtype) = (self.data.shape().clone(), self.data.dtype());
        Ok(Self {
            path: self.path,
            data: TensorData::from_bytes(bytes, shape, dtype),
        })
    }
}

fn stored_type(dtype: BurnDType) -> DType {
    #[allow(
        clippy::wildcard_enum_match_arm,
        reason = "booleans and quantized tensors are bytes"
    )]
    match dtype {
        BurnDType::F64 => DType::F64,
        BurnDType::F32 | BurnDType::Flex32 => DType::F32,
        BurnDType::F16 => DType::F16,
        BurnDType::BF16 => DType::BF16,
        BurnDType::I64 => DType::I64,
        BurnDType::I32 => DType::I32,
        BurnDType::I16 => DType::I16,
        BurnDType::I8 => DType::I8,
        BurnDType::U64 => DType::U64,
        BurnDType::U32 => DType::U32,
        BurnDType::U16 => DType::U16,
        _ => DType::U8,
    }
}

/// The buffers of a plain module.
pub(super) fn collect<M: Module>(plan: &Plan, module: &M) -> Vec<Buffer> {
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

/// Puts buffers into a module.
pub(super) fn put<M: Module>(module: M, buffers: Vec<Buffer>) -> M {
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
                    let state = crate::module::bind::AutodiffState::of(&tensor);
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
