//! The pre-training heads: masked tokens and next sentence.

use burn::module::{Initializer, Param};
use burn::nn::{Embedding, LayerNorm, Linear};
use burn::prelude::*;
use burn::tensor::activation::{gelu, log_softmax};
use burn::tensor::{DType, FloatDType};

use super::{Targets, dense, layer_norm};
use crate::config::BertConfig;

/// The first position's state, through a dense layer and tanh.
#[derive(Module, Debug)]
pub struct Pooler {
    /// Hidden to hidden.
    pub dense: Linear,
}

impl Pooler {
    pub(super) fn new(config: &BertConfig, device: &Device) -> Self {
        Self {
            dense: dense(config.hidden, config.hidden, config, device),
        }
    }

    /// Pools `[rows, length, hidden]` to `[rows, hidden]`.
    pub fn forward(&self, hidden: Tensor<3>) -> Tensor<2> {
        let [rows, _, width] = hidden.dims();
        let first = hidden.slice([0..rows, 0..1]).reshape([rows, width]);
        self.dense.forward(first).tanh()
    }
}

/// What happens to a hidden state before it is compared with the word embeddings.
#[derive(Module, Debug)]
pub struct Transform {
    /// Hidden to hidden.
    pub dense: Linear,
    /// After the activation.
    pub layer_norm: LayerNorm,
}

/// Scores every token of the vocabulary.
#[derive(Module, Debug)]
pub struct MaskedLmHead {
    /// Hidden states to the space of word embeddings.
    pub transform: Transform,
    /// One per token.
    pub bias: Param<Tensor<1>>,
}

impl MaskedLmHead {
    /// Scores hidden states `[n, hidden]` against every token, `[n, vocab]`. The output weights
    /// are `words` itself, read again: there is no second matrix.
    pub fn forward(&self, hidden: Tensor<2>, words: &Embedding) -> Tensor<2> {
        let hidden = self
            .transform
            .layer_norm
            .forward(gelu(self.transform.dense.forward(hidden)));
        hidden.matmul(words.weight.val().transpose()) + self.bias.val().unsqueeze::<2>()
    }
}

/// Both heads.
#[derive(Module, Debug)]
pub struct Heads {
    /// Which token was masked.
    pub predictions: MaskedLmHead,
    /// Whether the second segment follows the first.
    pub seq_relationship: Option<Linear>,
}

impl Heads {
    pub(super) fn new(config: &BertConfig, device: &Device) -> Self {
        Self {
            predictions: MaskedLmHead {
                transform: Transform {
                    dense: dense(config.hidden, config.hidden, config, device),
                    layer_norm: layer_norm(config, device),
                },
                bias: Initializer::Zeros.init([config.vocab_size], device),
            },
            seq_relationship: config
                .next_sentence
                .then(|| dense(config.hidden, 2, config, device)),
        }
    }

    /// Mean cross-entropy over the masked positions, 0 if there are none. Only their states are
    /// scored, about one in seven.
    pub(super) fn masked_lm_loss(
        &self,
        hidden: Tensor<3>,
        targets: &Targets,
        words: &Embedding,
    ) -> Tensor<1> {
        let logits = self.scores(hidden, targets.positions.clone(), words);
        let sum = cross_entropy_sum(logits, targets.labels.clone());
        // The stand-in of an empty batch stays in the graph with weight zero: every parameter
        // takes part in every step, on every rank.
        let weight = if targets.masked == 0 {
            0.0
        } else {
            1.0 / targets.masked as f64
        };
        sum * weight
    }

    /// The most likely token at each of `positions`.
    pub(super) fn guesses(
        &self,
        hidden: Tensor<3>,
        positions: Tensor<1, Int>,
        words: &Embedding,
    ) -> Tensor<1, Int> {
        self.scores(hidden, positions, words)
            .argmax(1)
            .squeeze_dim(1)
    }

    /// Scores of every token at each of `positions` of the flattened batch.
    fn scores(&self, hidden: Tensor<3>, positions: Tensor<1, Int>, words: &Embedding) -> Tensor<2> {
        let [rows, length, width] = hidden.dims();
        let hidden = hidden.reshape([rows * length, width]).select(0, positions);
        self.predictions.forward(hidden, words)
    }

    /// Mean cross-entropy over the rows.
    pub(super) fn next_sentence_loss(
        &self,
        pooled: Tensor<2>,
        targets: &Targets,
    ) -> Option<Tensor<1>> {
        let logits = self.seq_relationship.as_ref()?.forward(pooled);
        let [rows, _] = logits.dims();
        Some(cross_entropy_sum(logits, targets.next_sentence.clone()) / rows as f64)
    }
}

/// Sum over rows of `-log softmax(logits)[label]`, in `f32` where the logits are of a 16-bit type: the loss has too
/// many digits for one.
fn cross_entropy_sum(logits: Tensor<2>, labels: Tensor<1, Int>) -> Tensor<1> {
    let logits = if matches!(logits.dtype(), DType::BF16 | DType::F16) {
        logits.cast(FloatDType::F32)
    } else {
        logits
    };
    log_softmax(logits, 1)
        .gather(1, labels.unsqueeze_dim(1))
        .sum()
        .neg()
}
