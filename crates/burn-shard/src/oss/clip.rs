//! The global norm of sharded gradients, and what a step makes of it.
//!
//! Each element counts once: of a gradient that all ranks hold whole, each rank adds up the part that
//! it would own as a shard. Sums are made in `f64`, per parameter in plan order, then over the ranks in
//! rank order, by one `all_reduce` of 8 bytes; so all ranks get the same bits.

use burn::config::Config;
use burn_shard_comm::{DType, ReduceOp};
use burn_shard_kernels::{clip_coefficient, max_abs, sum_of_powers, sum_of_squares};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use serde::{Deserialize, Serialize};

use super::step::Job;
use crate::Error;
use crate::runtime::engine::Engine;
use crate::storage::flat::FlatTensor;

/// Which norm of all gradients together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GradientNorm {
    /// The root of the sum of squares.
    #[default]
    L2,
    /// The largest magnitude.
    Max,
    /// The `p`-th root of the sum of `p`-th powers of magnitudes.
    P(f64),
}

/// What a step does if the norm is infinite or not a number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NonFinite {
    /// [`Oss::try_step`](crate::Oss::try_step) returns [`Error::NonFiniteGradients`] on every rank, and
    /// nothing is changed.
    #[default]
    Refuse,
    /// The step is left out on every rank, and counted in
    /// [`Oss::skipped_steps`](crate::Oss::skipped_steps).
    Skip,
}

/// Clipping by the norm of all gradients together, as `clip_grad_norm_` of PyTorch's FSDP.
///
/// Gradients are multiplied by `max_norm / (norm + 1e-6)` where that is below 1.
#[derive(Config, Debug, Copy, PartialEq)]
pub struct GradientNormClipping {
    /// The most that the norm may be.
    pub max_norm: f64,
    /// Which norm.
    #[config(default = "GradientNorm::L2")]
    pub norm: GradientNorm,
    /// What happens if the norm is not finite.
    #[config(default = "NonFinite::Refuse")]
    pub non_finite: NonFinite,
}

/// What is done with gradients before they are used.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Control {
    pub(super) clipping: Option<GradientNormClipping>,
    /// Gradients are this many times too large, and left unused where they are not finite.
    pub(super) loss_scale: Option<f64>,
}

/// What came of it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Verdict {
    /// The norm of the gradients without the loss scale, if it was asked for.
    pub(super) norm: Option<f64>,
    /// What gradients are multiplied by; `None`: the step is left out.
    pub(super) factor: Option<f32>,
}

impl Control {
    /// Decides on a step, the same on all ranks.
    pub(super) fn judge(&self, engine: &Engine, jobs: &[Option<Job>]) -> Result<Verdict, Error> {
        let unscale = self.loss_scale.map_or(1.0, |scale| 1.0 / scale);
        if self.clipping.is_none() && self.loss_scale.is_none() {
            return Ok(Verdict {
                norm: None,
                factor: Some(1.0),
            });
        }
        let kind = self
            .clipping
            .map_or(GradientNorm::L2, |clipping| clipping.norm);
        let norm = kind.over_ranks(engine, jobs)? * unscale;
        let skips = self.loss_scale.is_some()
            || self
                .clipping
                .is_some_and(|clipping| clipping.non_finite == NonFinite::Skip);
        if !norm.is_finite() && !skips {
            let rank = engine.rank();
            return Err(Error::NonFiniteGradients { rank, norm });
        }
        let clip = match self.clipping {
            Some(clipping) if norm.is_finite() => clip_coefficient(norm, clipping.max_norm)?,
            Some(_) | None => 1.0,
        };
        #[allow(clippy::cast_possible_truncation, reason = "steps are made in f32")]
        let loss_scale = self.loss_scale.unwrap_or(1.0) as f32;
        Ok(Verdict {
            norm: Some(norm),
            factor: norm.is_finite().then_some(clip / loss_scale),
        })
    }
}

impl GradientNorm {
    fn over_ranks(self, engine: &Engine, jobs: &[Option<Job>]) -> Result<f64, Error> {
        let mut total = [0.0];
        for (index, job) in jobs.iter().enumerate() {
            let Some(job) = job else { continue };
            let part = self.of_own_part(engine, index, &job.gradient)?;
            total[0] = match self {
                Self::Max => maximum(total[0], part),
                Self::L2 | Self::P(_) => total[0] + part,
            };
        }
        let op = match self {
            Self::Max => ReduceOp::Max,
            Self::L2 | Self::P(_) => ReduceOp::Sum,
        };
        engine.context.mesh.shard.all_reduce(&mut total, op)?;
        Ok(match self {
            Self::L2 => total[0].sqrt(),
            Self::Max => total[0],
            Self::P(p) => total[0].powf(1.0 / p),
        })
    }

    /// Over the elements that this rank owns of a gradient.
    fn of_own_part(
        self,
        engine: &Engine,
        index: usize,
        gradient: &FlatTensor,
    ) -> Result<f64, Error> {
        let plan = engine.plan();
        let spec = plan.group_of(index);
        let owned = engine.owned(index);
        let part = if spec.strategy.shards_gradients() {
            0..owned.len()
        } else {
            owned
        };
        let gradient = gradient.clone().into_host();
        let size = gradient.dtype().size_bytes();
        let bytes = &gradient.as_bytes()[part.start * size..part.end * size];
        #[allow(clippy::wildcard_enum_match_arm, reason = "gradients are floats")]
        match gradient.dtype() {
            DType::F32 => self.of_f32(bytemuck::cast_slice(bytes)),
            DType::F64 => Ok(self.fold(bytemuck::cast_slice::<_, f64>(bytes).iter().copied())),
            DType::BF16 => self.of_f32(&bytemuck::cast_slice::<_, bf16>(bytes).to_f32_vec()),
            DType::F16 => self.of_f32(&bytemuck::cast_slice::<_, f16>(bytes).to_f32_vec()),
            dtype => unreachable!("a gradient is of floats, not of {dtype}"),
        }
    }

    fn of_f32(self, elements: &[f32]) -> Result<f64, Error> {
        Ok(match self {
            Self::L2 => sum_of_squares(elements),
            Self::Max => max_abs(elements).into(),
            Self::P(p) => sum_of_powers(elements, p)?,
        })
    }

    fn fold(self, elements: impl Iterator<Item = f64>) -> f64 {
        match self {
            Self::L2 => elements.map(|x| x * x).sum(),
            Self::Max => elements.map(f64::abs).fold(0.0, maximum),
            Self::P(p) => elements.map(|x| x.abs().powf(p)).sum(),
        }
    }
}

/// The larger one; of a NaN and anything else, the NaN.
fn maximum(a: f64, b: f64) -> f64 {
    if a.is_nan() || a > b { a } else { b }
}
