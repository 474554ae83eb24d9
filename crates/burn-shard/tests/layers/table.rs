//! The rows, by kind of layer. Every row has matrices, or vectors, of more than 64 KiB.

use burn::nn::activation::{
    Activation, ActivationConfig, CeluConfig, EluConfig, GLU, Gelu, HardShrinkConfig,
    HardSigmoidConfig, HardSwish, HardtanhConfig, LeakyReluConfig, LogSigmoid, Mish, PReluConfig,
    RReluConfig, Relu, Relu6, Selu, ShrinkConfig, SiLU, Sigmoid, SoftShrinkConfig, SoftplusConfig,
    Softsign, SwiGluConfig, Tanh, Tanhshrink, ThresholdConfig, ThresholdedReluConfig,
};
use burn::nn::attention::{
    CrossAttentionCache, CrossAttentionConfig, MhaCache, MhaInput, MultiHeadAttentionConfig,
    generate_autoregressive_mask,
};
use burn::nn::conv::{
    Conv1dConfig, Conv2dConfig, Conv3dConfig, ConvTranspose1dConfig, ConvTranspose2dConfig,
    ConvTranspose3dConfig, DeformConv2dConfig,
};
use burn::nn::interpolate::{Interpolate1dConfig, Interpolate2dConfig, InterpolateMode};
use burn::nn::loss::{BinaryCrossEntropyLossConfig, CrossEntropyLossConfig};
use burn::nn::norm::NormalizationConfig;
use burn::nn::pool::{
    AdaptiveAvgPool1dConfig, AdaptiveAvgPool2dConfig, AdaptiveAvgPool3dConfig, AvgPool1dConfig,
    AvgPool2dConfig, MaxPool1dConfig, MaxPool2dConfig,
};
use burn::nn::transformer::{
    PositionWiseFeedForwardConfig, TransformerDecoderConfig, TransformerDecoderInput,
    TransformerEncoderConfig, TransformerEncoderInput, TransformerEncoderLayer,
    TransformerEncoderLayerAutoregressiveCache,
};
use burn::nn::{
    BatchNormConfig, BiGruConfig, BiLstmConfig, BiRnnConfig, CosineSimilarityConfig, DropoutConfig,
    EmbeddingConfig, Fold4dConfig, GateController, GaussianNoiseConfig, GroupNormConfig, GruConfig,
    Identity, Initializer, InstanceNormConfig, LayerNormConfig, LinearConfig, LinearLayout,
    LocalResponseNormConfig, LstmConfig, LstmState, PaddingConfig1d, PaddingConfig2d,
    PaddingConfig3d, PairwiseDistanceConfig, PixelShuffleConfig, PixelUnshuffleConfig,
    PositionalEncodingConfig, RmsNormConfig, RnnConfig, RnnState, RotaryEncodingConfig,
    Unfold4dConfig,
};
use burn::prelude::*;

use crate::harness::{Draw, Row, after, flat, row};

/// Features of a norm whose vectors are larger than 64 KiB.
const WIDE: usize = 17_001;

/// A square matrix of this many rows takes more than 64 KiB.
const D_MODEL: usize = 130;

pub(crate) fn all() -> Vec<Row> {
    [
        linear(),
        convolutions(),
        norms(),
        activations(),
        recurrent(),
        attention(),
        transformers(),
        without_parameters(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

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

/// Sizes of the recurrent layers.
const D_INPUT: usize = 128;
const D_HIDDEN: usize = 131;

pub(crate) fn recurrent() -> Vec<Row> {
    let x = |draw: &Draw| draw.x([2, 5, D_INPUT]);
    let both = |a: Tensor<1>, b: Tensor<1>| Tensor::cat(vec![a, b], 0);
    vec![
        row(
            "Rnn",
            |device| RnnConfig::new(D_INPUT, D_HIDDEN, true).init(device),
            move |layer, draw| {
                let (output, state) = layer.forward(x(draw), None);
                both(flat(output), flat(state.hidden))
            },
        ),
        row(
            "Rnn, reverse, without bias, from a state",
            |device| {
                let config = RnnConfig::new(D_INPUT, D_HIDDEN, false);
                config.with_reverse(true).init(device)
            },
            move |layer, draw| {
                let state = RnnState::new(draw.x([2, D_HIDDEN]));
                flat(layer.forward(x(draw), Some(state)).0)
            },
        ),
        row(
            "BiRnn",
            |device| BiRnnConfig::new(D_INPUT, D_HIDDEN, true).init(device),
            move |layer, draw| flat(layer.forward(x(draw), None).0),
        ),
        row(
            "GateController",
            |device| {
                let initializer = Initializer::XavierNormal { gain: 1.0 };
                GateController::new(D_INPUT, D_HIDDEN, true, initializer, device)
            },
            |layer, draw| flat(layer.gate_product(draw.x([3, D_INPUT]), draw.x([3, D_HIDDEN]))),
        ),
        row(
            "Gru",
            |device| GruConfig::new(D_INPUT, D_HIDDEN, true).init(device),
            move |layer, draw| flat(layer.forward(x(draw), None)),
        ),
        row(
            "Gru, reset before, from a state",
            |device| {
                let config = GruConfig::new(D_INPUT, D_HIDDEN, true);
                config.with_reset_after(false).init(device)
            },
            move |layer, draw| flat(layer.forward(x(draw), Some(draw.x([2, D_HIDDEN])))),
        ),
        row(
            "BiGru",
            |device| BiGruConfig::new(D_INPUT, D_HIDDEN, true).init(device),
            move |layer, draw| {
                let (output, state) = layer.forward(x(draw), None);
                both(flat(output), flat(state))
            },
        ),
        row(
            "Lstm",
            |device| LstmConfig::new(D_INPUT, D_HIDDEN, true).init(device),
            move |layer, draw| {
                let (output, state) = layer.forward(x(draw), None);
                both(flat(output), flat(state.cell))
            },
        ),
        row(
            "Lstm, reverse, input and forget gate in one, from a state",
            |device| {
                let config = LstmConfig::new(D_INPUT, D_HIDDEN, false).with_reverse(true);
                config.with_input_forget(true).init(device)
            },
            move |layer, draw| {
                let state = || draw.x([2, D_HIDDEN]);
                flat(
                    layer
                        .forward(x(draw), Some(LstmState::new(state(), state())))
                        .0,
                )
            },
        ),
        row(
            "BiLstm",
            |device| BiLstmConfig::new(D_INPUT, D_HIDDEN, true).init(device),
            move |layer, draw| {
                let (output, state) = layer.forward(x(draw), None);
                both(flat(output), flat(state.hidden))
            },
        ),
    ]
}

pub(crate) fn attention() -> Vec<Row> {
    let cross = |heads_kv, d_head| {
        CrossAttentionConfig::new(D_MODEL, 129, 2, heads_kv, d_head).with_dropout(0.0)
    };
    let mha = || MultiHeadAttentionConfig::new(D_MODEL, 2).with_dropout(0.0);
    vec![
        row(
            "MultiHeadAttention",
            move |device| mha().init(device),
            |layer, draw| {
                let output = layer.forward(MhaInput::self_attn(draw.x([2, 3, D_MODEL])));
                Tensor::cat(vec![flat(output.context), flat(output.weights)], 0)
            },
        ),
        row(
            "MultiHeadAttention without biases, with masks",
            move |device| {
                let config = mha().with_quiet_softmax(true).with_output_bias(false);
                let config = config.with_key_bias(false).with_query_bias(false);
                config.with_value_bias(false).init(device)
            },
            |layer, draw| {
                let input = MhaInput::new(
                    draw.x([2, 3, D_MODEL]),
                    draw.x([2, 4, D_MODEL]),
                    draw.x([2, 4, D_MODEL]),
                );
                let pad = draw.tokens([2, 4], 3).equal_elem(0);
                flat(layer.forward(input.mask_pad(pad)).context)
            },
        ),
        row(
            "MultiHeadAttention with a cache",
            move |device| mha().init(device),
            |layer, draw| {
                let mut cache = MhaCache::autoregressive();
                let x = draw.x([2, 3, D_MODEL]);
                let prefix = |length| MhaInput::self_attn(x.clone().slice([0..2, 0..length]));
                let outputs = (1..=3)
                    .map(|length| flat(layer.forward_cache(prefix(length), &mut cache).context));
                Tensor::cat(outputs.collect(), 0)
            },
        ),
        row(
            "CrossAttention",
            move |device| cross(2, 70).init(device),
            |layer, draw| flat(layer.forward(draw.x([2, 3, D_MODEL]), draw.x([2, 4, 129]), None)),
        ),
        row(
            "CrossAttention of grouped queries, with a mask",
            move |device| cross(1, 128).with_quiet_softmax(true).init(device),
            |layer, draw| {
                let pad = draw.tokens([2, 4], 3).equal_elem(0);
                let context = draw.x([2, 4, 129]);
                flat(layer.forward(draw.x([2, 3, D_MODEL]), context, Some(pad)))
            },
        ),
        row(
            "CrossAttention with a cache",
            move |device| cross(2, 70).init(device),
            |layer, draw| {
                let mut cache = CrossAttentionCache::new();
                let outputs = (0..2).map(|_| {
                    let (query, context) = (draw.x([2, 1, D_MODEL]), draw.x([2, 4, 129]));
                    flat(layer.forward_cache(query, context, None, &mut cache))
                });
                Tensor::cat(outputs.collect(), 0)
            },
        ),
    ]
}

fn encoder() -> TransformerEncoderConfig {
    TransformerEncoderConfig::new(D_MODEL, 140, 2, 2).with_dropout(0.0)
}

fn decoder() -> TransformerDecoderConfig {
    TransformerDecoderConfig::new(D_MODEL, 140, 2, 2).with_dropout(0.0)
}

fn decoder_input(draw: &Draw, length: usize) -> TransformerDecoderInput {
    let target = draw.x([2, 3, D_MODEL]).slice([0..2, 0..length]);
    TransformerDecoderInput::new(target, draw.x([2, 4, D_MODEL]))
}

pub(crate) fn transformers() -> Vec<Row> {
    let feed_forward = || PositionWiseFeedForwardConfig::new(D_MODEL, 140).with_dropout(0.0);
    let x = |draw: &Draw| draw.x([2, 3, D_MODEL]);
    vec![
        row(
            "PositionWiseFeedForward",
            move |device| feed_forward().init(device),
            move |layer, draw| flat(layer.forward(x(draw))),
        ),
        // With an activation that has parameters it is no row: Burn shows them to no visitor.
        row(
            "TransformerEncoder",
            |device| encoder().init(device),
            move |layer, draw| flat(layer.forward(TransformerEncoderInput::new(x(draw)))),
        ),
        row(
            "TransformerEncoder, norm first, with masks",
            |device| {
                encoder()
                    .with_norm_first(true)
                    .with_quiet_softmax(true)
                    .init(device)
            },
            move |layer, draw| {
                let input = TransformerEncoderInput::new(x(draw))
                    .mask_pad(draw.tokens([2, 3], 3).equal_elem(0))
                    .mask_attn(generate_autoregressive_mask(2, 3, &draw.device));
                flat(layer.forward(input))
            },
        ),
        row(
            "TransformerEncoder with a cache",
            |device| encoder().init(device),
            move |layer, draw| {
                let mut cache = layer.new_autoregressive_cache();
                let outputs = (1..=3).map(|length| {
                    let input = TransformerEncoderInput::new(x(draw).slice([0..2, 0..length]));
                    flat(layer.forward_autoregressive_inference(input, &mut cache))
                });
                Tensor::cat(outputs.collect(), 0)
            },
        ),
        row(
            "TransformerEncoderLayer",
            |device| TransformerEncoderLayer::new(&encoder(), device),
            move |layer, draw| flat(layer.forward(x(draw), None, None)),
        ),
        row(
            "TransformerEncoderLayer with a cache",
            |device| TransformerEncoderLayer::new(&encoder().with_norm_first(true), device),
            move |layer, draw| {
                let mut cache = TransformerEncoderLayerAutoregressiveCache::empty();
                let outputs = (1..=2).map(|length| {
                    let x = x(draw).slice([0..2, 0..length]);
                    flat(layer.forward_autoregressive_inference(x, None, None, &mut cache))
                });
                Tensor::cat(outputs.collect(), 0)
            },
        ),
        row(
            "TransformerDecoder",
            |device| decoder().init(device),
            |layer, draw| flat(layer.forward(decoder_input(draw, 3))),
        ),
        row(
            "TransformerDecoder, norm first, with masks",
            |device| decoder().with_norm_first(true).init(device),
            |layer, draw| {
                let input = decoder_input(draw, 3)
                    .target_mask_attn(generate_autoregressive_mask(2, 3, &draw.device))
                    .memory_mask_pad(draw.tokens([2, 4], 3).equal_elem(0));
                flat(layer.forward(input))
            },
        ),
        row(
            "TransformerDecoder with a cache",
            |device| decoder().init(device),
            |layer, draw| {
                let mut cache = layer.new_autoregressive_cache();
                let outputs = (1..=3).map(|length| {
                    let input = decoder_input(draw, length);
                    flat(layer.forward_autoregressive_inference(input, &mut cache))
                });
                Tensor::cat(outputs.collect(), 0)
            },
        ),
        row(
            "TransformerDecoder, norm first, with a cache",
            |device| decoder().with_norm_first(true).init(device),
            |layer, draw| {
                let mut cache = layer.new_autoregressive_cache();
                let outputs = (1..=2).map(|length| {
                    let input = decoder_input(draw, length);
                    flat(layer.forward_autoregressive_inference(input, &mut cache))
                });
                Tensor::cat(outputs.collect(), 0)
            },
        ),
    ]
}

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
