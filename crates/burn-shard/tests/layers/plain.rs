//! Layers without parameters, behind a linear layer.

use burn::nn::activation::{
    CeluConfig, EluConfig, GLU, Gelu, HardShrinkConfig, HardSigmoidConfig, HardSwish,
    HardtanhConfig, LeakyReluConfig, LogSigmoid, Mish, RReluConfig, Relu, Relu6, Selu,
    ShrinkConfig, SiLU, Sigmoid, SoftShrinkConfig, SoftplusConfig, Softsign, Tanh, Tanhshrink,
    ThresholdConfig, ThresholdedReluConfig,
};
use burn::nn::interpolate::{Interpolate1dConfig, Interpolate2dConfig, InterpolateMode};
use burn::nn::loss::{BinaryCrossEntropyLossConfig, CrossEntropyLossConfig};
use burn::nn::pool::{
    AdaptiveAvgPool1dConfig, AdaptiveAvgPool2dConfig, AdaptiveAvgPool3dConfig, AvgPool1dConfig,
    AvgPool2dConfig, MaxPool1dConfig, MaxPool2dConfig,
};
use burn::nn::{
    CosineSimilarityConfig, DropoutConfig, Fold4dConfig, GaussianNoiseConfig, Identity,
    LocalResponseNormConfig, PairwiseDistanceConfig, PixelShuffleConfig, PixelUnshuffleConfig,
    PositionalEncodingConfig, RotaryEncodingConfig, Unfold4dConfig,
};
use burn::prelude::*;

use crate::harness::{Row, after, flat};

/// Rows of a layer made of a unit value or a configuration, which takes and gives a tensor of this shape.
macro_rules! after {
    ($shape:expr, $($name:literal: $make:expr,)*) => {
        vec![$(after($name, |_device| $make, $shape, |layer, x| flat(layer.forward(x))),)*]
    };
}

pub(crate) fn without_parameters() -> Vec<Row> {
    let activations = after![[2, 8, 16],
        "Celu": CeluConfig::new().init(),
        "Elu": EluConfig::new().init(),
        "GLU": GLU::new(-1),
        "Gelu": Gelu::new(),
        "HardShrink": HardShrinkConfig::new().init(),
        "HardSigmoid": HardSigmoidConfig::new().init(),
        "HardSwish": HardSwish::new(),
        "Hardtanh": HardtanhConfig::new().init(),
        "LeakyRelu": LeakyReluConfig::new().init(),
        "LogSigmoid": LogSigmoid::new(),
        "Mish": Mish::new(),
        "Relu": Relu::new(),
        "Relu6": Relu6::new(),
        "Selu": Selu::new(),
        "Shrink": ShrinkConfig::new().init(),
        "SiLU": SiLU::new(),
        "Sigmoid": Sigmoid::new(),
        "SoftShrink": SoftShrinkConfig::new().init(),
        "Softplus": SoftplusConfig::new().init(),
        "Softsign": Softsign::new(),
        "Tanh": Tanh::new(),
        "Tanhshrink": Tanhshrink::new(),
        "Threshold": ThresholdConfig::new(0.1, 0.2).init(),
        "ThresholdedRelu": ThresholdedReluConfig::new().init(),
        "Identity": Identity::new(),
        "Dropout of nothing": DropoutConfig::new(0.0).init(),
        "GaussianNoise of nothing": GaussianNoiseConfig::new(0.0).init(),
        "LocalResponseNorm": LocalResponseNormConfig::new(3).init(),
        "Interpolate1d": Interpolate1dConfig::new().with_output_size(Some(5)).init(),
        "Interpolate1d, linear":
            Interpolate1dConfig::new().with_mode(InterpolateMode::Linear).with_scale_factor(Some(2.0)).init(),
        "AdaptiveAvgPool1d": AdaptiveAvgPool1dConfig::new(5).init(),
        "AvgPool1d": AvgPool1dConfig::new(3).init(),
        "MaxPool1d": MaxPool1dConfig::new(3).with_stride(2).init(),
    ];
    let of_images = after![[2, 4, 6, 6],
        "Interpolate2d": Interpolate2dConfig::new().with_output_size(Some([3, 4])).init(),
        "Interpolate2d, cubic":
            Interpolate2dConfig::new().with_mode(InterpolateMode::Cubic).with_output_size(Some([7, 9])).init(),
        "AdaptiveAvgPool2d": AdaptiveAvgPool2dConfig::new([2, 3]).init(),
        "AvgPool2d": AvgPool2dConfig::new([3, 2]).init(),
        "MaxPool2d": MaxPool2dConfig::new([3, 2]).init(),
        "Unfold4d": Unfold4dConfig::new([2, 3]).init(),
        "PixelShuffle": PixelShuffleConfig::new(2).init(),
        "PixelUnshuffle": PixelUnshuffleConfig::new(2).init(),
    ];
    let others = vec![
        after(
            "RRelu of positive numbers, where nothing depends on chance",
            |_device| RReluConfig::new().init(),
            [2, 130],
            |layer, x| flat(layer.forward(x.exp())),
        ),
        after(
            "Fold4d",
            |_device| Fold4dConfig::new([4, 5], [2, 2]).init(),
            [2, 12, 12],
            |layer, x| flat(layer.forward(x)),
        ),
        after(
            "AdaptiveAvgPool3d",
            |_device| AdaptiveAvgPool3dConfig::new([2, 1, 2]).init(),
            [2, 5, 3, 3, 4],
            |layer, x| flat(layer.forward(x)),
        ),
        after(
            "CosineSimilarity",
            |_device| CosineSimilarityConfig::new().init(),
            [2, 130],
            |layer, x| layer.forward(x.clone(), x.tanh()),
        ),
        after(
            "PairwiseDistance",
            |_device| PairwiseDistanceConfig::new().init(),
            [2, 130],
            |layer, x| layer.forward(x.clone(), x.tanh()),
        ),
        after(
            "PositionalEncoding",
            |device| {
                let config = PositionalEncodingConfig::new(16);
                config.with_max_sequence_size(20).init(device)
            },
            [2, 9, 16],
            |layer, x| flat(layer.forward(x)),
        ),
        after(
            "RotaryEncoding",
            |device| RotaryEncodingConfig::new(20, 16).init(device),
            [2, 9, 16],
            |layer, x| flat(layer.forward(x)),
        ),
        after(
            "CrossEntropyLoss with weights",
            |device| {
                let weights = (0..130).map(|i| 1.0 + i as f32 / 65.0).collect();
                let config = CrossEntropyLossConfig::new().with_weights(Some(weights));
                config.with_smoothing(Some(0.1)).init(device)
            },
            [2, 130],
            |layer, x| {
                let targets = Tensor::from_ints([3, 129], &x.device());
                layer.forward(x, targets)
            },
        ),
        after(
            "BinaryCrossEntropyLoss with weights",
            |device| {
                let weights = (0..130).map(|i| 1.0 + i as f32 / 65.0).collect();
                let config = BinaryCrossEntropyLossConfig::new().with_weights(Some(weights));
                config.with_logits(true).init(device)
            },
            [2, 130],
            |layer, x| {
                let targets = x.clone().greater_elem(0.0).int();
                layer.forward(x, targets)
            },
        ),
    ];
    [activations, of_images, others]
        .into_iter()
        .flatten()
        .collect()
}
