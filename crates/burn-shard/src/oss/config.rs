//! Which optimizers may step on shards, and how their configurations become a [`Method`].

use std::fmt;
use std::sync::Arc;

use burn::config::Config;
use burn::grad_clipping::{GradientClipping, GradientClippingConfig};
use burn::module::ParamGroup;
use burn::optim::{
    AdaGrad, AdaGradConfig, Adam, AdamConfig, AdamW, AdamWConfig, Adan, AdanConfig, DynOptimizer,
    Lion, LionConfig, Optimizer, RmsProp, RmsPropConfig, Sgd, SgdConfig,
};
use burn::tensor::Tensor;
use burn_shard_kernels::{AdamHyper, MomentumHyper, SgdHyper, WeightDecay};
use serde_json::Value;

use super::state::ParamState;
use crate::Error;
use crate::storage::flat::{FlatTensor, from_flat, to_flat};

/// Configuration of an optimizer whose step of an element depends on nothing but that element's
/// parameter, gradient and state, so that a step on shards equals a step on the whole.
///
/// Implement it for your own optimizer only if that holds.
///
/// Optimizers that look at whole tensors do not compile:
///
/// ```compile_fail,E0277
/// use burn::optim::LambConfig;
/// use burn_shard::{Oss, ProcessGroup};
///
/// fn sharded(group: &ProcessGroup) -> Result<Oss, burn_shard::Error> {
///     Oss::new(LambConfig::new(), group)
/// }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not an elementwise optimizer, so it cannot step on shards",
    label = "this optimizer looks at whole tensors (norms, factors or line searches)",
    note = "Lamb, Adafactor, Muon and LBFGS are refused because a rank holds only a part of each \
            tensor; use one of Sgd, Adam, AdamW, AdaGrad, RmsProp, Lion, Adan, or strategy ddp with \
            the stock optimizer"
)]
pub trait ElementwiseConfig: Config + 'static {
    /// The optimizer it configures.
    type Optimizer: Optimizer;

    /// Builds the bare optimizer, as the configuration's own `build` does.
    fn build(&self) -> Self::Optimizer;
}

macro_rules! elementwise {
    ($($config:ty => $optimizer:ty),* $(,)?) => {$(
        impl ElementwiseConfig for $config {
            type Optimizer = $optimizer;

            fn build(&self) -> $optimizer {
                // The inherent method, which a method call prefers to this trait's.
                <$config>::build(self)
            }
        }
    )*};
}

elementwise! {
    AdaGradConfig => AdaGrad,
    AdamConfig => Adam,
    AdamWConfig => AdamW,
    AdanConfig => Adan,
    LionConfig => Lion,
    RmsPropConfig => RmsProp,
    SgdConfig => Sgd,
}

/// How one parameter group is stepped.
#[derive(Clone)]
pub(super) struct Method {
    pub(super) group: ParamGroup,
    /// The stock optimizer, on one-dimensional shards.
    pub(super) stock: Arc<dyn DynOptimizer>,
    /// The optimizer's step in one pass over memory, where there is such a kernel; `f32` only.
    pub(super) fused: Option<Fused>,
    pub(super) clip_value: Option<f32>,
}

impl fmt::Debug for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Method")
            .field("group", &self.group)
            .field("fused", &self.fused)
            .field("clip_value", &self.clip_value)
            .finish_non_exhaustive()
    }
}

/// A fused step and its hyper-parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Fused {
    Adam(AdamHyper),
    AdamW(AdamHyper),
    Sgd(SgdHyper),
}

impl Fused {
    /// The names that Burn's record of the same optimizer gives its state of a parameter.
    pub(super) fn moments(&self) -> &'static [&'static str] {
        match self {
            Self::Sgd(hyper) if hyper.momentum.is_none() => &[],
            Self::Sgd(_) => &["velocity"],
            Self::Adam(_) | Self::AdamW(_) => &["moment_1", "moment_2"],
        }
    }
}

impl Method {
    /// Burn's own step of one-dimensional tensors, clipping included.
    pub(super) fn step_stock(
        &self,
        lr: f64,
        param: FlatTensor,
        gradient: FlatTensor,
        state: &mut ParamState,
    ) -> FlatTensor {
        let gradient = from_flat::<1>(gradient);
        let gradient = match self.clip_value {
            Some(threshold) => GradientClipping::Value(threshold).clip_gradient(gradient),
            None => gradient,
        };
        let param = from_flat::<1>(param).into_bridge();
        let stock = state.stock.take().map(|(_, stock)| stock);
        let (param, stock) = self
            .stock
            .step_dyn(1, lr, param, gradient.into_bridge(), stock);
        state.stock = stock.map(|stock| (Arc::clone(&self.stock), stock));
        to_flat(Tensor::<1>::from_bridge(param))
    }

    pub(super) fn new<C: ElementwiseConfig>(group: ParamGroup, config: &C) -> Result<Self, Error> {
        // Burn keeps most fields of its configurations private, but serializes all of them.
        let fields = serde_json::to_value(config)?;
        // The two names Burn uses.
        let clipping = ["grad_clipping", "gradient_clipping"].map(|name| fields[name].clone());
        let mut clip_value = None;
        for clipping in clipping.into_iter().filter(|clipping| !clipping.is_null()) {
            match serde_json::from_value(clipping)? {
                GradientClippingConfig::Value(threshold) => clip_value = Some(threshold),
                GradientClippingConfig::Norm(_) => return Err(Error::NormClipping),
            }
        }
        let fused = fused::<C>(&fields);
        Ok(Self {
            group,
            stock: Arc::new(config.build()),
            fused,
            clip_value,
        })
    }
}

/// A field that may be null.
fn present(value: &Value) -> Option<&Value> {
    (!value.is_null()).then_some(value)
}

/// The fused equivalent of a stock optimizer, if every one of its options is covered.
fn fused<C: 'static>(fields: &Value) -> Option<Fused> {
    use std::any::TypeId;
    let config = TypeId::of::<C>();
    let penalty = |decay: &Value| number(&decay["penalty"]);
    if config == TypeId::of::<SgdConfig>() {
        let momentum = match present(&fields["momentum"]) {
            None => None,
            Some(momentum) => Some(MomentumHyper {
                momentum: momentum["momentum"].as_f64()?,
                dampening: momentum["dampening"].as_f64()?,
                nesterov: momentum["nesterov"].as_bool()?,
            }),
        };
        let weight_decay = match present(&fields["weight_decay"]) {
            None => None,
            Some(decay) => Some(penalty(decay)?),
        };
        return Some(Fused::Sgd(SgdHyper {
            weight_decay,
            momentum,
        }));
    }
    let is_adam = config == TypeId::of::<AdamConfig>();
    let is_adamw = config == TypeId::of::<AdamWConfig>();
    if !(is_adam || is_adamw)
        || fields["amsgrad"].as_bool()?
        || fields["cautious_weight_decay"].as_bool() == Some(true)
    {
        return None;
    }
    let weight_decay = match present(&fields["weight_decay"]) {
        None => WeightDecay::None,
        Some(decay) if is_adam => WeightDecay::L2(penalty(decay)?),
        Some(decay) => WeightDecay::Decoupled(number(decay)?),
    };
    let hyper = AdamHyper {
        beta_1: number(&fields["beta_1"])?,
        beta_2: number(&fields["beta_2"])?,
        epsilon: number(&fields["epsilon"])?,
        weight_decay,
    };
    Some(if is_adam {
        Fused::Adam(hyper)
    } else {
        Fused::AdamW(hyper)
    })
}

/// An `f32` that went through JSON as `f64`, which holds it exactly.
#[allow(
    clippy::cast_possible_truncation,
    reason = "the value came from an f32"
)]
fn number(value: &Value) -> Option<f32> {
    value.as_f64().map(|number| number as f32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::optim::decay::WeightDecayConfig;
    use burn::optim::momentum::MomentumConfig;

    fn method(config: &impl ElementwiseConfig) -> Result<Method, Error> {
        Method::new(ParamGroup::all(), config)
    }

    #[test]
    fn every_option_of_a_fused_optimizer_reaches_its_kernel() {
        let config = AdamConfig::new()
            .with_beta_1(0.8)
            .with_beta_2(0.95)
            .with_epsilon(1e-7)
            .with_weight_decay(Some(WeightDecayConfig { penalty: 0.3 }));
        let Some(Fused::Adam(hyper)) = method(&config).unwrap().fused else {
            panic!("not fused")
        };
        let expected = AdamHyper {
            beta_1: 0.8,
            beta_2: 0.95,
            epsilon: 1e-7,
            weight_decay: WeightDecay::L2(0.3),
        };
        assert_eq!(hyper, expected);

        let Some(Fused::AdamW(hyper)) = method(&AdamWConfig::new()).unwrap().fused else {
            panic!("not fused")
        };
        assert_eq!(hyper.weight_decay, WeightDecay::Decoupled(1e-4));

        let momentum = MomentumConfig::new()
            .with_nesterov(true)
            .with_dampening(0.0);
        let config = SgdConfig::new().with_momentum(Some(momentum));
        let Some(Fused::Sgd(hyper)) = method(&config).unwrap().fused else {
            panic!("not fused")
        };
        let expected = MomentumHyper {
            momentum: 0.9,
            dampening: 0.0,
            nesterov: true,
        };
        assert_eq!(
            hyper,
            SgdHyper {
                weight_decay: None,
                momentum: Some(expected)
            }
        );
    }

    #[test]
    fn options_without_a_kernel_take_the_stock_path() {
        assert!(
            method(&AdamConfig::new().with_amsgrad(true))
                .unwrap()
                .fused
                .is_none()
        );
        let cautious = AdamWConfig::new().with_cautious_weight_decay(true);
        assert!(method(&cautious).unwrap().fused.is_none());
        assert!(method(&LionConfig::new()).unwrap().fused.is_none());
    }

    #[test]
    fn clipping_by_norm_is_refused_and_by_value_is_kept() {
        let norm = Some(GradientClippingConfig::Norm(1.0));
        let value = Some(GradientClippingConfig::Value(0.5));
        for error in [
            method(&AdamConfig::new().with_grad_clipping(norm.clone())).unwrap_err(),
            method(&SgdConfig::new().with_gradient_clipping(norm)).unwrap_err(),
        ] {
            assert!(matches!(error, Error::NormClipping));
        }
        let config = SgdConfig::new().with_gradient_clipping(value);
        assert_eq!(method(&config).unwrap().clip_value, Some(0.5));
    }
}
