//! Norms, and activations with parameters.

use burn::nn::activation::{Activation, ActivationConfig, PReluConfig, SwiGluConfig};
use burn::nn::norm::NormalizationConfig;
use burn::nn::{
    BatchNormConfig, GroupNormConfig, InstanceNormConfig, LayerNormConfig, LinearConfig,
    LinearLayout, RmsNormConfig,
};

use super::{D_MODEL, WIDE};
use crate::harness::{Row, flat, row};

pub(crate) fn norms() -> Vec<Row> {
    let normalization = |name, config: NormalizationConfig| {
        let config = config.with_num_features(WIDE - 1);
        row(
            name,
            move |device| config.init(device),
            |layer, draw| flat(layer.forward(draw.x([2, WIDE - 1]).unsqueeze_dim::<3>(2))),
        )
    };
    vec![
        row(
            "LayerNorm",
            |device| LayerNormConfig::new(WIDE).init(device),
            |layer, draw| flat(layer.forward(draw.x([2, WIDE]))),
        ),
        row(
            "LayerNorm without bias",
            |device| LayerNormConfig::new(WIDE).with_bias(false).init(device),
            |layer, draw| flat(layer.forward(draw.x([2, WIDE]))),
        ),
        row(
            "RmsNorm",
            |device| RmsNormConfig::new(WIDE).init(device),
            |layer, draw| flat(layer.forward(draw.x([2, WIDE]))),
        ),
        row(
            "GroupNorm",
            |device| GroupNormConfig::new(3, WIDE).init(device),
            |layer, draw| flat(layer.forward(draw.x([2, WIDE, 2]))),
        ),
        row(
            "InstanceNorm",
            |device| InstanceNormConfig::new(WIDE).init(device),
            |layer, draw| flat(layer.forward(draw.x([1, WIDE, 3]))),
        ),
        row(
            "BatchNorm",
            |device| BatchNormConfig::new(WIDE).init(device),
            |layer, draw| flat(layer.forward(draw.x([3, WIDE]))),
        ),
        row(
            "BatchNorm between linear layers",
            |device| {
                let linear = || LinearConfig::new(D_MODEL, D_MODEL).init(device);
                (
                    linear(),
                    BatchNormConfig::new(D_MODEL).init(device),
                    linear(),
                )
            },
            |(first, norm, last), draw| {
                flat(last.forward(norm.forward(first.forward(draw.x([4, D_MODEL])))))
            },
        ),
        row(
            "norms without parameters between linear layers",
            |device| {
                let linear = || LinearConfig::new(D_MODEL, D_MODEL).init(device);
                let group = GroupNormConfig::new(2, D_MODEL).with_affine(false);
                let instance = InstanceNormConfig::new(D_MODEL).with_affine(false);
                (linear(), group.init(device), instance.init(device))
            },
            |(linear, group, instance), draw| {
                let x = linear
                    .forward(draw.x([6, D_MODEL]))
                    .reshape([2, 3, D_MODEL]);
                let x = x.swap_dims(1, 2);
                flat(instance.forward(group.forward(x)))
            },
        ),
        normalization(
            "Normalization::Group",
            NormalizationConfig::Group(GroupNormConfig::new(5, 5)),
        ),
        normalization(
            "Normalization::Batch",
            NormalizationConfig::Batch(BatchNormConfig::new(1)),
        ),
        row(
            "Normalization::Layer",
            |device| NormalizationConfig::Layer(LayerNormConfig::new(WIDE)).init(device),
            |layer, draw| flat(layer.forward(draw.x([2, WIDE]))),
        ),
        row(
            "Normalization::Rms",
            |device| NormalizationConfig::Rms(RmsNormConfig::new(WIDE)).init(device),
            |layer, draw| flat(layer.forward(draw.x([2, WIDE]))),
        ),
    ]
}

pub(crate) fn activations() -> Vec<Row> {
    vec![
        row(
            "PRelu",
            |device| PReluConfig::new().with_num_parameters(WIDE).init(device),
            |layer, draw| flat(layer.forward(draw.x([2, WIDE]))),
        ),
        row(
            "PRelu of one parameter",
            |device| {
                let linear = LinearConfig::new(D_MODEL, D_MODEL).init(device);
                (linear, PReluConfig::new().init(device))
            },
            |(linear, layer), draw| flat(layer.forward(linear.forward(draw.x([2, D_MODEL])))),
        ),
        row(
            "Activation::PRelu",
            |device| {
                let config = PReluConfig::new().with_num_parameters(WIDE);
                ActivationConfig::PRelu(config).init(device)
            },
            |layer: &Activation, draw| flat(layer.forward(draw.x([2, WIDE]))),
        ),
        row(
            "SwiGlu",
            |device| SwiGluConfig::new(110, 171).init(device),
            |layer, draw| flat(layer.forward(draw.x([2, 3, 110]))),
        ),
        row(
            "SwiGlu with bias, Col",
            |device| {
                let config = SwiGluConfig::new(110, 171).with_layout(LinearLayout::Col);
                config.with_bias(true).init(device)
            },
            |layer, draw| flat(layer.forward(draw.x([2, 3, 110]))),
        ),
        row(
            "Activation::SwiGlu",
            |device| ActivationConfig::SwiGlu(SwiGluConfig::new(110, 171)).init(device),
            |layer: &Activation, draw| flat(layer.forward(draw.x([2, 3, 110]))),
        ),
    ]
}
