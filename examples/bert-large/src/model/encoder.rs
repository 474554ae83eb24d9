//! The stack of transformer layers.

use burn::nn::Linear;
use burn::prelude::*;
use burn::tensor::activation::gelu;
use burn_shard_recompute::{Random, checkpoint_with};

use super::attention::{Attention, Projection, padding_bias};
use super::{Input, dense};
use crate::config::BertConfig;

/// The wide middle of a layer's second half.
#[derive(Module, Debug)]
pub struct Intermediate {
    /// To the feed-forward width.
    pub dense: Linear,
}

/// One post-norm transformer layer.
#[derive(Module, Debug)]
pub struct Layer {
    /// Positions exchange.
    pub attention: Attention,
    /// Each position by itself, wide.
    pub intermediate: Intermediate,
    /// Back to the hidden width.
    pub output: Projection,
}

impl Layer {
    fn new(config: &BertConfig, device: &Device) -> Self {
        Self {
            attention: Attention::new(config, device),
            intermediate: Intermediate {
                dense: dense(config.hidden, config.intermediate, config, device),
            },
            output: Projection::new(config.intermediate, config, device),
        }
    }

    fn forward(&self, hidden: Tensor<3>, bias: Tensor<4>) -> Tensor<3> {
        let hidden = self.attention.forward(hidden, bias);
        let wide = gelu(self.intermediate.dense.forward(hidden.clone()));
        self.output.forward(wide, hidden)
    }
}

/// All layers, in order.
#[derive(Module, Debug)]
pub struct Encoder {
    /// From input to output.
    pub layer: Vec<Layer>,
    activation_checkpointing: bool,
    dropout: f64,
}

impl Encoder {
    pub(super) fn new(config: &BertConfig, device: &Device) -> Self {
        Self {
            layer: (0..config.layers)
                .map(|_| Layer::new(config, device))
                .collect(),
            activation_checkpointing: config.activation_checkpointing,
            dropout: config.dropout,
        }
    }

    pub(super) fn forward(&self, hidden: Tensor<3>, input: &Input) -> Tensor<3> {
        let bias = padding_bias(input.padding.clone(), &hidden);
        self.layer.iter().fold(hidden, |hidden, layer| {
            self.run(layer, hidden, bias.clone())
        })
    }

    fn run(&self, layer: &Layer, hidden: Tensor<3>, bias: Tensor<4>) -> Tensor<3> {
        if !self.activation_checkpointing {
            return layer.forward(hidden, bias);
        }
        // Without dropout a layer draws nothing that would have to be drawn again.
        let random = match self.dropout > 0.0 {
            true => Random::Replay,
            false => Random::Ignore,
        };
        checkpoint_with(random, layer, (hidden, bias), |layer, (hidden, bias)| {
            layer.forward(hidden, bias)
        })
    }

    /// The input and every layer's output.
    pub(super) fn hidden_states(&self, hidden: Tensor<3>, input: &Input) -> Vec<Tensor<3>> {
        let bias = padding_bias(input.padding.clone(), &hidden);
        let mut states = vec![hidden.clone()];
        self.layer.iter().fold(hidden, |hidden, layer| {
            let hidden = layer.forward(hidden, bias.clone());
            states.push(hidden.clone());
            hidden
        });
        states
    }
}
