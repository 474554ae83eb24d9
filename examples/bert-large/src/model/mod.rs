//! BERT as Hugging Face's `BertForPreTraining` computes it, written with `burn::nn`.
//!
//! Field names follow Hugging Face's, so that a parameter's module path is its name in a
//! checkpoint, up to the few spellings [`crate::weights`] lists. Nothing here knows that the
//! parameters may be sharded: each is read through the layer that owns it.

mod attention;
mod embeddings;
mod encoder;
mod heads;

pub use attention::{Attention, Projection, SelfAttention};
pub use embeddings::Embeddings;
pub use encoder::{Encoder, Intermediate, Layer};
pub use heads::{Heads, MaskedLmHead, Pooler, Transform};

use burn::module::Initializer;
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::prelude::*;

use crate::config::BertConfig;

/// A batch of token rows, all of one length.
#[derive(Clone, Debug)]
pub struct Input {
    /// Token ids, `[rows, length]`.
    pub ids: Tensor<2, Int>,
    /// 0 for the first segment, 1 for the second, `[rows, length]`.
    pub token_types: Tensor<2, Int>,
    /// True where a position is padding, `[rows, length]`.
    pub padding: Tensor<2, Bool>,
}

/// What the model should have said about an [`Input`].
#[derive(Clone, Debug)]
pub struct Targets {
    /// Masked positions in the flattened `[rows * length]` batch; never empty, see `masked`.
    pub positions: Tensor<1, Int>,
    /// The original token at each of `positions`.
    pub labels: Tensor<1, Int>,
    /// How many of `positions` count: all of them, or 0 when nothing was masked and `positions`
    /// holds one stand-in.
    pub masked: usize,
    /// Per row 0 if the second segment continues the first, 1 if it is from elsewhere, `[rows]`.
    pub next_sentence: Tensor<1, Int>,
}

/// The losses of one batch, each a scalar `[1]`.
#[derive(Clone, Debug)]
pub struct Losses {
    /// Mean cross-entropy over the masked positions.
    pub masked_lm: Tensor<1>,
    /// Mean cross-entropy of the next-sentence head, when the model has one.
    pub next_sentence: Option<Tensor<1>>,
}

impl Losses {
    /// The sum, which training minimizes.
    pub fn total(&self) -> Tensor<1> {
        match &self.next_sentence {
            Some(next_sentence) => self.masked_lm.clone() + next_sentence.clone(),
            None => self.masked_lm.clone(),
        }
    }
}

/// Embeddings, encoder, and the pooler that feeds the next-sentence head.
#[derive(Module, Debug)]
pub struct Bert {
    /// Words, positions and token types.
    pub embeddings: Embeddings,
    /// The stack of layers.
    pub encoder: Encoder,
    /// The first position's state through a dense layer and tanh.
    pub pooler: Option<Pooler>,
}

/// BERT with its two pre-training heads.
#[derive(Module, Debug)]
pub struct BertForPreTraining {
    /// The model proper.
    pub bert: Bert,
    /// The heads that pre-training puts on it.
    pub cls: Heads,
}

impl BertForPreTraining {
    /// Describes a model; parameters are drawn when first read.
    pub fn new(config: &BertConfig, device: &Device) -> Self {
        Self {
            bert: Bert {
                embeddings: Embeddings::new(config, device),
                encoder: Encoder::new(config, device),
                pooler: config.next_sentence.then(|| Pooler::new(config, device)),
            },
            cls: Heads::new(config, device),
        }
    }

    /// Computes both losses of a batch.
    pub fn forward(&self, input: &Input, targets: &Targets) -> Losses {
        let embedded = self.bert.embeddings.forward(input);
        let hidden = self.bert.encoder.forward(embedded, input);
        let words = &self.bert.embeddings.word_embeddings;
        let masked_lm = self.cls.masked_lm_loss(hidden.clone(), targets, words);
        let next_sentence = self.bert.pooler.as_ref().and_then(|pooler| {
            let pooled = pooler.forward(hidden);
            self.cls.next_sentence_loss(pooled, targets)
        });
        Losses {
            masked_lm,
            next_sentence,
        }
    }

    /// The most likely token at each of `positions` of the flattened batch, `[n]`.
    pub fn guesses(&self, input: &Input, positions: Tensor<1, Int>) -> Tensor<1, Int> {
        let embedded = self.bert.embeddings.forward(input);
        let hidden = self.bert.encoder.forward(embedded, input);
        let words = &self.bert.embeddings.word_embeddings;
        self.cls.guesses(hidden, positions, words)
    }

    /// The state after the embeddings and after each layer, `[rows, length, hidden]` each.
    pub fn hidden_states(&self, input: &Input) -> Vec<Tensor<3>> {
        let embedded = self.bert.embeddings.forward(input);
        self.bert.encoder.hidden_states(embedded, input)
    }
}

/// A dense layer with BERT's initial values.
pub(crate) fn dense(
    d_input: usize,
    d_output: usize,
    config: &BertConfig,
    device: &Device,
) -> Linear {
    let mut linear = LinearConfig::new(d_input, d_output)
        .with_initializer(Initializer::Normal {
            mean: 0.0,
            std: config.init_std,
        })
        .init(device);
    linear.bias = Some(Initializer::Zeros.init([d_output], device));
    linear
}

/// A layer norm with BERT's epsilon.
pub(crate) fn layer_norm(config: &BertConfig, device: &Device) -> LayerNorm {
    LayerNormConfig::new(config.hidden)
        .with_epsilon(config.layer_norm_eps)
        .init(device)
}

#[cfg(test)]
mod tests {
    use burn::module::{ModuleVisitor, Param};

    use super::*;

    #[derive(Default)]
    struct Count {
        tensors: usize,
        initialized: usize,
    }

    impl ModuleVisitor for Count {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.tensors += 1;
            self.initialized += usize::from(param.is_initialized());
        }
    }

    #[test]
    fn bert_large_has_336_million_parameters_in_398_tensors() {
        let model = BertForPreTraining::new(&BertConfig::large(), &Device::flex());
        let mut count = Count::default();
        model.visit(&mut count);
        assert_eq!(model.num_params(), 336_226_108);
        assert_eq!(count.tensors, 398);
        assert_eq!(count.initialized, 0, "counting should not allocate");
    }
}
