//! A module's buffers as tensors of a checkpoint.

use burn::tensor::{Bytes, DType as BurnDType, TensorData};
use burn_shard_checkpoint::{Checkpoint, DType, TensorName, TensorPart, Wanted};

use crate::Error;
use crate::module::buffers::Buffer;

/// The role of a tensor that is no parameter.
const ROLE: &str = "buffer";

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

    /// This buffer with the elements that `source` has in the checkpoint.
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

/// The checkpoint's name of an element type of Burn.
pub(super) fn stored_type(dtype: BurnDType) -> DType {
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
