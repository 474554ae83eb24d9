//! Element types, and the casts that a reader may ask for.

use half::{bf16, f16};
use serde::{Deserialize, Serialize};

/// The type of a tensor's elements, written as safetensors does (`F32`). Elements are little-endian.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
#[allow(missing_docs, reason = "the names say it")]
pub enum DType {
    Bool,
    U8,
    I8,
    U16,
    I16,
    F16,
    BF16,
    U32,
    I32,
    F32,
    U64,
    I64,
    F64,
}

impl DType {
    /// Bytes of one element.
    #[must_use]
    pub const fn size_bytes(self) -> usize {
        match self {
            Self::Bool | Self::U8 | Self::I8 => 1,
            Self::U16 | Self::I16 | Self::F16 | Self::BF16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::U64 | Self::I64 | Self::F64 => 8,
        }
    }

    pub(crate) const fn to_safetensors(self) -> safetensors::Dtype {
        use safetensors::Dtype as Other;
        match self {
            Self::Bool => Other::BOOL,
            Self::U8 => Other::U8,
            Self::I8 => Other::I8,
            Self::U16 => Other::U16,
            Self::I16 => Other::I16,
            Self::F16 => Other::F16,
            Self::BF16 => Other::BF16,
            Self::U32 => Other::U32,
            Self::I32 => Other::I32,
            Self::F32 => Other::F32,
            Self::U64 => Other::U64,
            Self::I64 => Other::I64,
            Self::F64 => Other::F64,
        }
    }

    /// `None` for what no tensor of Burn holds (complex numbers, floats of 8 bits and fewer).
    #[allow(
        clippy::wildcard_enum_match_arm,
        reason = "the enum of safetensors is open, and everything else is refused"
    )]
    pub(crate) const fn from_safetensors(other: safetensors::Dtype) -> Option<Self> {
        use safetensors::Dtype as Other;
        Some(match other {
            Other::BOOL => Self::Bool,
            Other::U8 => Self::U8,
            Other::I8 => Self::I8,
            Other::U16 => Self::U16,
            Other::I16 => Self::I16,
            Other::F16 => Self::F16,
            Other::BF16 => Self::BF16,
            Other::U32 => Self::U32,
            Other::I32 => Self::I32,
            Other::F32 => Self::F32,
            Other::U64 => Self::U64,
            Other::I64 => Self::I64,
            Other::F64 => Self::F64,
            _ => return None,
        })
    }
}

/// Whether a reader may be given another element type than the checkpoint holds.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DTypePolicy {
    /// Element types have to be equal.
    #[default]
    Strict,
    /// `F32`, `BF16` and `F16` are converted into each other. Widening is exact; narrowing rounds
    /// once, to the nearest, ties to even. Other types have to be equal.
    Cast,
}

impl DTypePolicy {
    /// Whether a tensor of `from` may be read as `to`.
    #[must_use]
    pub fn allows(self, from: DType, to: DType) -> bool {
        let castable = |dtype| matches!(dtype, DType::F32 | DType::BF16 | DType::F16);
        from == to || (self == Self::Cast && castable(from) && castable(to))
    }
}

/// Converts `input` of `from` to `output` of `to`, element by element. Both are allowed by
/// [`DTypePolicy::Cast`] and different, and the lengths fit each other.
pub(crate) fn cast(from: DType, input: &[u8], to: DType, output: &mut [u8]) {
    let elements = input.chunks_exact(from.size_bytes());
    for (element, out) in elements.zip(output.chunks_exact_mut(to.size_bytes())) {
        let value = match (from, element) {
            (DType::BF16, &[a, b]) => bf16::from_le_bytes([a, b]).to_f32(),
            (DType::F16, &[a, b]) => f16::from_le_bytes([a, b]).to_f32(),
            (_, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]),
            (_, _) => unreachable!("the policy should have refused {from:?}"),
        };
        if to == DType::BF16 {
            out.copy_from_slice(&bf16::from_f32(value).to_le_bytes());
        } else if to == DType::F16 {
            out.copy_from_slice(&f16::from_f32(value).to_le_bytes());
        } else {
            out.copy_from_slice(&value.to_le_bytes());
        }
    }
}
