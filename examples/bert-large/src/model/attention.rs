//! Multi-head self-attention and the residual projection that closes each half of a layer.

use burn::nn::{Dropout, DropoutConfig, LayerNorm, Linear};
use burn::prelude::*;
use burn::tensor::activation::softmax;

use super::{dense, layer_norm};
use crate::config::BertConfig;

/// What is added to the score of a padding key. `exp` of it is zero in every float type, and it
/// is finite in each, half precision included.
const MASKED_SCORE: f32 = -1e4;

/// Turns `[rows, length]` padding into a bias on scores, `[rows, 1, 1, length]`.
pub(super) fn padding_bias(padding: Tensor<2, Bool>, like: &Tensor<3>) -> Tensor<4> {
    let [rows, length] = padding.dims();
    let zeros = Tensor::<2>::zeros([rows, length], (&like.device(), like.dtype()));
    zeros
        .mask_fill(padding, MASKED_SCORE)
        .reshape([rows, 1, 1, length])
}

/// Scaled dot-product attention over several heads.
#[derive(Module, Debug)]
pub struct SelfAttention {
    /// What each position looks for.
    pub query: Linear,
    /// What each position offers to be found by.
    pub key: Linear,
    /// What each position passes on.
    pub value: Linear,
    dropout: Dropout,
    heads: usize,
}

impl SelfAttention {
    fn new(config: &BertConfig, device: &Device) -> Self {
        Self {
            query: dense(config.hidden, config.hidden, config, device),
            key: dense(config.hidden, config.hidden, config, device),
            value: dense(config.hidden, config.hidden, config, device),
            dropout: DropoutConfig::new(config.dropout).init(),
            heads: config.heads,
        }
    }

    fn forward(&self, hidden: Tensor<3>, bias: Tensor<4>) -> Tensor<3> {
        let [rows, length, width] = hidden.dims();
        let head = width / self.heads;
        let split = |tensor: Tensor<3>| {
            tensor
                .reshape([rows, length, self.heads, head])
                .swap_dims(1, 2)
        };
        let query = split(self.query.forward(hidden.clone()));
        let key = split(self.key.forward(hidden.clone()));
        let value = split(self.value.forward(hidden));

        let scores = query.matmul(key.transpose()) / (head as f64).sqrt() + bias;
        let weights = self.dropout.forward(softmax(scores, 3));
        weights
            .matmul(value)
            .swap_dims(1, 2)
            .reshape([rows, length, width])
    }
}

/// `layer_norm(residual + dropout(dense(x)))`, the end of both halves of a layer.
#[derive(Module, Debug)]
pub struct Projection {
    /// Back to the hidden width.
    pub dense: Linear,
    /// After the residual is added.
    pub layer_norm: LayerNorm,
    dropout: Dropout,
}

impl Projection {
    pub(super) fn new(width: usize, config: &BertConfig, device: &Device) -> Self {
        Self {
            dense: dense(width, config.hidden, config, device),
            layer_norm: layer_norm(config, device),
            dropout: DropoutConfig::new(config.dropout).init(),
        }
    }

    pub(super) fn forward(&self, x: Tensor<3>, residual: Tensor<3>) -> Tensor<3> {
        let x = self.dropout.forward(self.dense.forward(x));
        self.layer_norm.forward(x + residual)
    }
}

/// The first half of a layer.
#[derive(Module, Debug)]
pub struct Attention {
    /// The attention itself; `self` in Hugging Face's names.
    pub self_attention: SelfAttention,
    /// Mixes the heads and closes the residual.
    pub output: Projection,
}

impl Attention {
    pub(super) fn new(config: &BertConfig, device: &Device) -> Self {
        Self {
            self_attention: SelfAttention::new(config, device),
            output: Projection::new(config.hidden, config, device),
        }
    }

    pub(super) fn forward(&self, hidden: Tensor<3>, bias: Tensor<4>) -> Tensor<3> {
        let attended = self.self_attention.forward(hidden.clone(), bias);
        self.output.forward(attended, hidden)
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Distribution;

    use super::*;

    #[test]
    fn a_padding_key_changes_no_other_position() {
        let device = Device::flex();
        let attention = Attention::new(&BertConfig::fixture(), &device);
        let hidden = Tensor::<3>::random([1, 4, 64], Distribution::Default, &device);
        let padding = Tensor::<2, Bool>::from_data([[false, false, false, true]], &device);
        let noise = Tensor::<3>::random([1, 1, 64], Distribution::Default, &device);
        let other = hidden.clone().slice_assign([0..1, 3..4, 0..64], noise);

        let outputs = [hidden, other].map(|hidden| {
            let bias = padding_bias(padding.clone(), &hidden);
            attention
                .forward(hidden, bias)
                .slice([0..1, 0..3, 0..64])
                .into_data()
        });
        outputs[0].assert_eq(&outputs[1], true);
    }
}
