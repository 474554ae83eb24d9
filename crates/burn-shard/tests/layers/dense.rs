//! Linear layers, embeddings and convolutions.

use burn::nn::conv::{
    Conv1dConfig, Conv2dConfig, Conv3dConfig, ConvTranspose1dConfig, ConvTranspose2dConfig,
    ConvTranspose3dConfig, DeformConv2dConfig,
};
use burn::nn::{
    EmbeddingConfig, Initializer, LinearConfig, LinearLayout, PaddingConfig1d, PaddingConfig2d,
    PaddingConfig3d,
};

use crate::harness::{Row, flat, row};

pub(crate) fn linear() -> Vec<Row> {
    let linear = |name, config: LinearConfig| {
        let d_input = config.d_input;
        row(
            name,
            move |device| config.init(device),
            move |layer, draw| flat(layer.forward(draw.x([2, 3, d_input]))),
        )
    };
    let config = || LinearConfig::new(110, 171);
    vec![
        linear("Linear", config()),
        linear("Linear without bias", config().with_bias(false)),
        linear("Linear, Col", config().with_layout(LinearLayout::Col)),
        linear(
            "Linear without bias, Col",
            config().with_bias(false).with_layout(LinearLayout::Col),
        ),
        linear(
            "Linear, Col, square",
            LinearConfig::new(131, 131).with_layout(LinearLayout::Col),
        ),
        linear(
            "Linear without bias, orthogonal",
            // Burn draws a bias by the same initializer, and this one makes no vectors.
            config()
                .with_bias(false)
                .with_initializer(Initializer::Orthogonal { gain: 1.0 }),
        ),
        linear("Linear with one output", LinearConfig::new(17_001, 1)),
        linear("Linear with one input", LinearConfig::new(1, 17_001)),
        row(
            "Embedding",
            |device| EmbeddingConfig::new(601, 31).init(device),
            |layer, draw| flat(layer.forward(draw.tokens([3, 50], 601))),
        ),
        row(
            "Embedding, tied",
            |device| EmbeddingConfig::new(601, 31).init(device),
            |layer, draw| {
                let x = layer.forward(draw.tokens([3, 5], 601)).reshape([15, 31]);
                flat(x.matmul(layer.weight.val().transpose()))
            },
        ),
    ]
}

pub(crate) fn convolutions() -> Vec<Row> {
    vec![
        row(
            "Conv1d",
            |device| {
                let config = Conv1dConfig::new(40, 61, 7).with_padding(PaddingConfig1d::Same);
                config.init(device)
            },
            |layer, draw| flat(layer.forward(draw.x([2, 40, 9]))),
        ),
        row(
            "Conv1d in two groups without bias",
            |device| {
                let config = Conv1dConfig::new(60, 80, 7).with_groups(2).with_bias(false);
                config.with_stride(2).with_dilation(2).init(device)
            },
            |layer, draw| flat(layer.forward(draw.x([2, 60, 16]))),
        ),
        row(
            "Conv2d",
            |device| {
                let config = Conv2dConfig::new([40, 50], [3, 3]);
                config.with_padding(PaddingConfig2d::Same).init(device)
            },
            |layer, draw| flat(layer.forward(draw.x([2, 40, 4, 5]))),
        ),
        row(
            "Conv2d in two groups without bias",
            |device| {
                let config = Conv2dConfig::new([60, 70], [3, 3]).with_groups(2);
                config.with_bias(false).with_stride([2, 1]).init(device)
            },
            |layer, draw| flat(layer.forward(draw.x([2, 60, 5, 4]))),
        ),
        row(
            "Conv3d",
            |device| {
                let config = Conv3dConfig::new([20, 32], [3, 3, 3]);
                config.with_padding(PaddingConfig3d::Same).init(device)
            },
            |layer, draw| flat(layer.forward(draw.x([2, 20, 3, 2, 3]))),
        ),
        row(
            "Conv3d without bias",
            |device| {
                Conv3dConfig::new([20, 32], [3, 3, 3])
                    .with_bias(false)
                    .init(device)
            },
            |layer, draw| flat(layer.forward(draw.x([1, 20, 3, 4, 3]))),
        ),
        row(
            "ConvTranspose1d",
            |device| {
                let config = ConvTranspose1dConfig::new([40, 61], 7).with_stride(2);
                config.with_padding(1).with_padding_out(1).init(device)
            },
            |layer, draw| flat(layer.forward(draw.x([2, 40, 4]))),
        ),
        row(
            "ConvTranspose2d",
            |device| {
                let config = ConvTranspose2dConfig::new([40, 50], [3, 3]);
                config.with_stride([2, 1]).init(device)
            },
            |layer, draw| flat(layer.forward(draw.x([2, 40, 3, 2]))),
        ),
        row(
            "ConvTranspose2d in two groups without bias",
            |device| {
                let config = ConvTranspose2dConfig::new([60, 70], [3, 3]).with_groups(2);
                config.with_bias(false).init(device)
            },
            |layer, draw| flat(layer.forward(draw.x([2, 60, 3, 2]))),
        ),
        row(
            "ConvTranspose3d",
            |device| ConvTranspose3dConfig::new([20, 32], [3, 3, 3]).init(device),
            |layer, draw| flat(layer.forward(draw.x([1, 20, 2, 3, 2]))),
        ),
        row(
            "DeformConv2d",
            |device| DeformConv2dConfig::new([40, 50], [3, 3]).init(device),
            |layer, draw| {
                let offset = draw.x([1, 18, 3, 3]);
                let mask = draw.x([1, 9, 3, 3]);
                flat(layer.forward(draw.x([1, 40, 5, 5]), offset, Some(mask)))
            },
        ),
        row(
            "DeformConv2d without mask and bias",
            |device| {
                DeformConv2dConfig::new([40, 50], [3, 3])
                    .with_bias(false)
                    .init(device)
            },
            |layer, draw| flat(layer.forward(draw.x([1, 40, 5, 5]), draw.x([1, 18, 3, 3]), None)),
        ),
    ]
}
