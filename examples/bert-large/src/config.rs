//! Sizes of the model.

/// The id of the padding token, in every vocabulary.
pub const PAD_ID: u32 = 0;

/// Sizes and rates of a BERT model.
#[derive(Clone, Debug, PartialEq)]
pub struct BertConfig {
    /// Rows of the word embedding.
    pub vocab_size: usize,
    /// Width of a position's state.
    pub hidden: usize,
    /// Number of layers.
    pub layers: usize,
    /// Attention heads per layer; divides `hidden`.
    pub heads: usize,
    /// Width of the feed-forward middle.
    pub intermediate: usize,
    /// The longest sequence.
    pub max_positions: usize,
    /// Segments that can be told apart.
    pub token_types: usize,
    /// Added to the variance in every layer norm.
    pub layer_norm_eps: f64,
    /// Dropout of states and attention weights.
    pub dropout: f64,
    /// Whether the model has a pooler and a next-sentence head.
    pub next_sentence: bool,
}

impl BertConfig {
    /// Small enough that the loss falls within two minutes on two cores.
    pub fn tiny() -> Self {
        Self {
            vocab_size: 8192,
            hidden: 128,
            layers: 4,
            heads: 4,
            intermediate: 512,
            max_positions: 128,
            ..Self::large()
        }
    }

    /// BERT-base, uncased.
    pub fn base() -> Self {
        Self {
            hidden: 768,
            layers: 12,
            heads: 12,
            intermediate: 3072,
            ..Self::large()
        }
    }

    /// BERT-large, uncased.
    pub fn large() -> Self {
        Self {
            vocab_size: 30_522,
            hidden: 1024,
            layers: 24,
            heads: 16,
            intermediate: 4096,
            max_positions: 512,
            token_types: 2,
            layer_norm_eps: 1e-12,
            dropout: 0.1,
            next_sentence: true,
        }
    }

    /// The model whose training PyTorch recorded, for the tests.
    pub fn fixture() -> Self {
        Self {
            vocab_size: 1000,
            hidden: 64,
            layers: 2,
            heads: 4,
            intermediate: 256,
            max_positions: 32,
            dropout: 0.0,
            next_sentence: false,
            ..Self::large()
        }
    }
}
