//! In which element types parameters are used and gradients travel.

use burn::config::Config;
use burn_shard_comm::DType;
use serde::{Deserialize, Serialize};

/// An element type of floats that a [`MixedPrecision`] may name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Precision {
    /// IEEE single precision.
    F32,
    /// bfloat16: the range of `f32` with 8 bits of precision.
    BF16,
    /// IEEE half precision: 11 bits, up to 65,504. Gradients need loss scaling.
    F16,
}

impl Precision {
    pub(crate) fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::BF16 => DType::BF16,
            Self::F16 => DType::F16,
        }
    }
}

impl std::fmt::Display for Precision {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.dtype().name())
    }
}

/// Mixed precision with `f32` master weights, as `MixedPrecisionPolicy` of PyTorch's FSDP2.
///
/// Stored parameters stay in `f32` (the *master weights*), and so do the gradients that backward
/// leaves and the optimizer's state. Reading a parameter returns it in `param`. The gradient that
/// comes back in `param` travels in `reduce`, is summed in `f32` over the ranks and ends in `f32`.
///
/// It applies to `f32` parameters; parameters of other types stay as they are.
///
/// # References
///
/// Micikevicius et al., "Mixed Precision Training", <https://arxiv.org/abs/1710.03740>.
///
/// # Examples
///
/// ```
/// use burn_shard::{MixedPrecision, Precision};
///
/// assert_eq!(MixedPrecision::bf16(), MixedPrecision::new(Precision::BF16, Precision::F32));
/// ```
#[doc(alias = "MixedPrecisionPolicy")]
#[derive(Config, Debug, Copy, PartialEq, Eq)]
pub struct MixedPrecision {
    /// The type in which reads return parameters, and in which they are gathered.
    pub param: Precision,
    /// The type in which gradients travel. `f32` loses nothing; a 16-bit type halves the bytes, and
    /// the mean is rounded to it once.
    pub reduce: Precision,
}

impl MixedPrecision {
    /// `bf16` parameters, gradients reduced in `f32`: the usual choice.
    #[must_use]
    pub fn bf16() -> Self {
        Self::new(Precision::BF16, Precision::F32)
    }
}
