//! Attention and transformers, with caches and without.

use burn::nn::attention::{
    CrossAttentionCache, CrossAttentionConfig, MhaCache, MhaInput, MultiHeadAttentionConfig,
    generate_autoregressive_mask,
};
use burn::nn::transformer::{
    PositionWiseFeedForwardConfig, TransformerDecoderConfig, TransformerDecoderInput,
    TransformerEncoderConfig, TransformerEncoderInput, TransformerEncoderLayer,
    TransformerEncoderLayerAutoregressiveCache,
};
use burn::prelude::*;

use super::D_MODEL;
use crate::harness::{Draw, Row, flat, row};

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
