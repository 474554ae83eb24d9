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
    /// Standard deviation of every weight at the start; biases start at zero, norms at one.
    pub init_std: f64,
    /// Dropout of states and attention weights.
    pub dropout: f64,
    /// Whether a layer runs again in backward instead of keeping its activations.
    pub activation_checkpointing: bool,
    /// Whether the model has a pooler and a next-sentence head.
    pub next_sentence: bool,
}

impl BertConfig {
    /// Small enough to learn something within minutes on two cores: few tokens, so that each is
    /// seen often, and weights that are not smaller than such narrow layers need (BERT's 0.02 leaves
    /// their attention at zero for long).
    pub fn tiny() -> Self {
        Self {
            vocab_size: 2048,
            init_std: 0.05,
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
            init_std: 0.02,
            dropout: 0.1,
            activation_checkpointing: false,
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
