//! Token, position and token-type embeddings.

use burn::module::Initializer;
use burn::nn::{Dropout, DropoutConfig, Embedding, EmbeddingConfig, LayerNorm};
use burn::prelude::*;

use super::{Input, layer_norm};
use crate::config::{BertConfig, PAD_ID};

/// The sum of three learned embeddings, normalized.
#[derive(Module, Debug)]
pub struct Embeddings {
    /// One row per token; the masked-LM head reads the same rows as its output weights.
    pub word_embeddings: Embedding,
    /// One row per position.
    pub position_embeddings: Embedding,
    /// One row per segment.
    pub token_type_embeddings: Embedding,
    /// After the sum.
    pub layer_norm: LayerNorm,
    dropout: Dropout,
}

impl Embeddings {
    pub(super) fn new(config: &BertConfig, device: &Device) -> Self {
        let table = |rows| {
            EmbeddingConfig::new(rows, config.hidden)
                .with_initializer(Initializer::Normal {
                    mean: 0.0,
                    std: config.init_std,
                })
                .init(device)
        };
        Self {
            word_embeddings: table(config.vocab_size),
            position_embeddings: table(config.max_positions),
            token_type_embeddings: table(config.token_types),
            layer_norm: layer_norm(config, device),
            dropout: DropoutConfig::new(config.dropout).init(),
        }
    }

    /// Embeds a batch, `[rows, length, hidden]`.
    pub fn forward(&self, input: &Input) -> Tensor<3> {
        let [_, length] = input.ids.dims();
        let positions = Tensor::<1, Int>::arange(0..length as i64, &input.ids.device());

        let words = self.word_embeddings.forward(input.ids.clone());
        // PyTorch's `padding_idx`: looking PAD up teaches its row nothing (the output weights,
        // which are the same rows, still do).
        let is_pad = input.ids.clone().equal_scalar(PAD_ID).unsqueeze_dim::<3>(2);
        let is_pad = is_pad.expand(words.dims());
        let words = words.clone().mask_where(is_pad, words.detach());

        let positions = self.position_embeddings.forward(positions.unsqueeze::<2>());
        let token_types = self
            .token_type_embeddings
            .forward(input.token_types.clone());
        let sum = words + token_types + positions;
        self.dropout.forward(self.layer_norm.forward(sum))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// No replayed loss can show this: attention to padding is masked, so its embedding has a
    /// gradient of zero wherever `padding` says the truth.
    #[test]
    fn looking_padding_up_teaches_its_row_nothing() {
        let device = Device::flex().autodiff();
        let embeddings = Embeddings::new(&BertConfig::fixture(), &device);
        let ids = Tensor::<2, Int>::from_data([[5, 0, 7]], &device);
        let input = Input {
            token_types: ids.zeros_like(),
            padding: ids.zeros_like().bool(),
            ids,
        };
        let weights = embeddings.word_embeddings.weight.val();
        let gradients = embeddings.forward(&input).powi_scalar(3).sum().backward();
        let gradient = weights
            .grad(&gradients)
            .unwrap()
            .abs()
            .sum_dim(1)
            .into_data();
        let rows: Vec<f32> = gradient.iter().collect();
        assert!(rows[5] > 0.0 && rows[7] > 0.0);
        assert_eq!((rows[0], rows[6]), (0.0, 0.0));
    }
}
