//! Tensors in host memory: those of the `flex` backend, and what collectives read and write.

use std::sync::Arc;

use burn::backend::flex::{FlexTensor, Layout};
use burn::tensor::{Bytes, DType as BurnDType, FloatDType, Shape};
use burn_shard_comm::{DType, Segments, SegmentsMut};

use crate::purpose::Purpose;

/// A contiguous tensor in host memory, or a view of a flat buffer. Clones share the memory.
#[derive(Clone, Debug)]
pub(crate) struct HostTensor {
    bytes: Arc<Bytes>,
    /// Where the tensor starts in `bytes`, in bytes.
    offset: usize,
    shape: Shape,
    dtype: DType,
}

impl HostTensor {
    /// A view of `bytes` from element `offset` on.
    ///
    /// # Panics
    ///
    /// If the view reaches past the end of `bytes`.
    pub(crate) fn view(bytes: Arc<Bytes>, offset: usize, shape: &[usize], dtype: DType) -> Self {
        let offset = offset * dtype.size_bytes();
        let shape = Shape::from(shape.to_vec());
        let end = offset + shape.num_elements() * dtype.size_bytes();
        assert!(
            end <= bytes.len(),
            "a view of {end} bytes should fit into {}",
            bytes.len()
        );
        Self {
            bytes,
            offset,
            shape,
            dtype,
        }
    }

    /// A one-dimensional tensor of its own memory.
    pub(crate) fn copied(bytes: &[u8], dtype: DType) -> Self {
        let shape = Shape::from(vec![bytes.len() / dtype.size_bytes()]);
        Self {
            bytes: Arc::new(aligned(bytes)),
            offset: 0,
            shape,
            dtype,
        }
    }

    /// Without a copy where the tensor is contiguous.
    pub(crate) fn from_flex(tensor: FlexTensor) -> Self {
        let tensor = if tensor.is_contiguous() {
            tensor
        } else {
            tensor.to_contiguous()
        };
        let dtype = dtype_of(tensor.dtype()).expect("a float tensor should have a float dtype");
        Self {
            offset: tensor.layout().start_offset() * dtype.size_bytes(),
            shape: tensor.layout().shape().clone(),
            dtype,
            bytes: tensor.data_arc(),
        }
    }

    /// Without a copy.
    pub(crate) fn into_flex(self) -> FlexTensor {
        let Self {
            bytes,
            offset,
            shape,
            dtype,
        } = self;
        let strides = Layout::contiguous(shape.clone()).strides().to_vec();
        let layout = Layout::new(shape, strides, offset / dtype.size_bytes());
        FlexTensor::from_arc(bytes, layout, burn_dtype(dtype))
    }

    pub(crate) fn dtype(&self) -> DType {
        self.dtype
    }

    #[cfg(feature = "cubecl")]
    pub(crate) fn shape(&self) -> &[usize] {
        self.shape.as_slice()
    }

    pub(crate) fn numel(&self) -> usize {
        self.shape.num_elements()
    }

    /// The elements in one axis.
    pub(crate) fn flattened(mut self) -> Self {
        self.shape = Shape::from(vec![self.numel()]);
        self
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        let len = self.numel() * self.dtype.size_bytes();
        &self.bytes[self.offset..self.offset + len]
    }

    /// Mutable access; copies first if another tensor shares the memory.
    pub(crate) fn as_bytes_mut(&mut self) -> &mut [u8] {
        if Arc::get_mut(&mut self.bytes).is_none() {
            self.bytes = Arc::new(aligned(self.as_bytes()));
            self.offset = 0;
        }
        let range = self.offset..self.offset + self.numel() * self.dtype.size_bytes();
        let bytes = Arc::get_mut(&mut self.bytes).expect("the memory should be ours alone now");
        &mut bytes[range]
    }

    /// The flat buffer this tensor is a view of, if it is the view of `shape_numel` elements at
    /// element `offset` of a buffer of `flat_len` elements.
    pub(crate) fn flat(&self, offset: usize, flat_len: usize) -> Option<&Arc<Bytes>> {
        let size = self.dtype.size_bytes();
        (self.offset == offset * size && self.bytes.len() == flat_len * size).then_some(&self.bytes)
    }
}

/// A copy of `bytes` aligned for any element type.
pub(crate) fn aligned(bytes: &[u8]) -> Bytes {
    let mut copy = Bytes::from_elems(vec![0_u64; bytes.len().div_ceil(size_of::<u64>())]);
    copy[..bytes.len()].copy_from_slice(bytes);
    copy
}

/// The communicator's name for a Burn float dtype.
pub(crate) fn dtype_of(dtype: BurnDType) -> Option<DType> {
    #[allow(
        clippy::wildcard_enum_match_arm,
        reason = "everything else is not a plain float"
    )]
    match dtype {
        BurnDType::F32 | BurnDType::Flex32 => Some(DType::F32),
        BurnDType::F64 => Some(DType::F64),
        BurnDType::F16 => Some(DType::F16),
        BurnDType::BF16 => Some(DType::BF16),
        _ => None,
    }
}

pub(crate) fn burn_dtype(dtype: DType) -> BurnDType {
    match dtype {
        DType::F32 => BurnDType::F32,
        DType::F64 => BurnDType::F64,
        DType::F16 => BurnDType::F16,
        DType::BF16 => BurnDType::BF16,
        DType::I8
        | DType::I16
        | DType::I32
        | DType::I64
        | DType::U8
        | DType::U16
        | DType::U32
        | DType::U64 => unreachable!("only float tensors are made from host memory"),
    }
}

/// Burn's name for a float dtype, as casts want it.
pub(crate) fn float_dtype(dtype: DType) -> FloatDType {
    burn_dtype(dtype).into()
}

/// Tensors posted to a collective. `None` contributes zeros to a reduction.
#[derive(Debug)]
pub(crate) struct TensorSegments {
    pub(crate) dtype: DType,
    /// Number of elements and contents of each segment.
    pub(crate) tensors: Vec<(usize, Option<HostTensor>)>,
    /// Tells ranks apart that send other parameters of the same lengths.
    pub(crate) purpose: Purpose,
}

impl Segments for TensorSegments {
    fn dtype(&self) -> DType {
        self.dtype
    }

    fn count(&self) -> usize {
        self.tensors.len()
    }

    fn numel(&self, index: usize) -> usize {
        self.tensors[index].0
    }

    fn bytes(&self, index: usize) -> Option<&[u8]> {
        self.tensors[index].1.as_ref().map(HostTensor::as_bytes)
    }

    fn label(&self) -> u64 {
        self.purpose.label
    }

    fn describe(&self) -> String {
        self.purpose.text.clone()
    }
}

/// Pieces of buffers that a collective writes.
pub(crate) struct PiecesMut<'a> {
    pub(crate) dtype: DType,
    pub(crate) pieces: Vec<&'a mut [u8]>,
}

impl SegmentsMut for PiecesMut<'_> {
    fn dtype(&self) -> DType {
        self.dtype
    }

    fn count(&self) -> usize {
        self.pieces.len()
    }

    fn numel(&self, index: usize) -> usize {
        self.pieces[index].len() / self.dtype.size_bytes()
    }

    fn bytes_mut(&mut self, index: usize) -> &mut [u8] {
        self.pieces[index]
    }
}

/// Cuts `bytes` into one mutable piece per `(offset, numel)`, given in ascending order of offset.
pub(crate) fn pieces_mut(
    mut bytes: &mut [u8],
    dtype: DType,
    ranges: impl Iterator<Item = (usize, usize)>,
) -> PiecesMut<'_> {
    let size = dtype.size_bytes();
    let mut at = 0;
    let mut pieces = Vec::new();
    for (offset, numel) in ranges {
        let (_, rest) = bytes.split_at_mut((offset - at) * size);
        let (piece, rest) = rest.split_at_mut(numel * size);
        pieces.push(piece);
        bytes = rest;
        at = offset + numel;
    }
    PiecesMut { dtype, pieces }
}
