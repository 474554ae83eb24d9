//! A transformer of `burn::nn` learns whether a review is a kind one, with its parameters sharded (ZeRO-3).
//!
//! The reviews are made in code. "Not" turns the word after it around, so that counting words is not enough.
//!
//! `cargo run --example text` runs two ranks as threads; under a launcher each process is one rank.
#![allow(clippy::print_stdout, reason = "an example shows what it computes")]
#![allow(
    clippy::cast_possible_truncation,
    reason = "numbers of ranks, words and classes are small"
)]

use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::prelude::*;
use burn_shard::{
    Error, MemoryReport, Oss, ProcessGroup, ReduceOp, ShardConfig, ShardedModule, ShardingStrategy,
};

/// The words, by number; the first stands where a review has ended.
const WORDS: [&str; 16] = [
    "", "not", "good", "great", "lovely", "superb", "bad", "poor", "awful", "dull", "the", "plot",
    "music", "was", "very", "and",
];
const LONGEST: usize = 12;
const WIDTH: usize = 64;
/// Steps from one line of output to the next.
pub(crate) const EVERY: usize = 50;

/// Draws numbers: the linear congruential generator of Numerical Recipes, of which the high bits are the good ones.
struct Draw(u32);

impl Draw {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (self.0 >> 16) as usize % end
    }

    /// A review as numbers of words, filled up to the longest, and whether it is kind.
    fn review(&mut self) -> ([i32; LONGEST], bool) {
        let mut numbers = [0; LONGEST];
        let mut kindness = 0;
        let opinions = 1 + 2 * self.below(2);
        for (opinion, words) in numbers.chunks_mut(4).take(opinions).enumerate() {
            let turned = self.below(2);
            let word = 2 + self.below(8);
            let start = if opinion == 0 { "the" } else { "and" };
            let text = [
                start,
                ["plot", "music"][self.below(2)],
                ["very", "not"][turned],
                WORDS[word],
            ];
            for (number, text) in words.iter_mut().zip(text) {
                *number = token(text);
            }
            kindness += if (word < 6) == (turned == 0) { 1 } else { -1 };
        }
        (numbers, kindness > 0)
    }
}

/// The number of a word.
fn token(word: &str) -> i32 {
    let number = WORDS.iter().position(|known| *known == word);
    number.expect("reviews should be made of the words") as i32
}

struct Batch {
    tokens: Tensor<2, Int>,
    classes: Tensor<1, Int>,
}

impl Batch {
    fn new(draw: &mut Draw, reviews: usize, device: &Device) -> Self {
        let (tokens, classes): (Vec<_>, Vec<_>) = (0..reviews).map(|_| draw.review()).unzip();
        let classes: Vec<i32> = classes.into_iter().map(i32::from).collect();
        Self {
            tokens: Tensor::from_data(TensorData::new(tokens.concat(), [reviews, LONGEST]), device),
            classes: Tensor::from_ints(classes.as_slice(), device),
        }
    }
}

#[derive(Module, Debug)]
struct Classifier {
    words: Embedding,
    places: Embedding,
    encoder: TransformerEncoder,
    output: Linear,
}

impl Classifier {
    fn new(device: &Device) -> Self {
        let encoder = TransformerEncoderConfig::new(WIDTH, 4 * WIDTH, 4, 1)
            // Ranks that are threads share one random generator: with dropout a run would not repeat.
            .with_dropout(0.0)
            .with_norm_first(true);
        Self {
            words: EmbeddingConfig::new(WORDS.len(), WIDTH).init(device),
            places: EmbeddingConfig::new(LONGEST, WIDTH).init(device),
            encoder: encoder.init(device),
            output: LinearConfig::new(WIDTH, 2).init(device),
        }
    }

    /// The scores of both classes.
    fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<2> {
        let [reviews, length] = tokens.dims();
        let device = tokens.device();
        let places = Tensor::arange(0..length as i64, &device).unsqueeze::<2>();
        let padding = tokens.clone().equal_elem(0);
        let x = self.words.forward(tokens) + self.places.forward(places);
        let x = self
            .encoder
            .forward(TransformerEncoderInput::new(x).mask_pad(padding));
        // The first word is always there, and has seen the others.
        self.output
            .forward(x.slice([0..reviews, 0..1]).flatten(1, 2))
    }

    fn loss(&self, batch: Batch) -> Tensor<1> {
        let scores = self.forward(batch.tokens);
        CrossEntropyLossConfig::new()
            .init(&scores.device())
            .forward(scores, batch.classes)
    }
}

/// What a run ends with on one rank.
pub(crate) struct Run {
    /// The mean loss of each [`EVERY`] steps, over all ranks.
    pub(crate) losses: Vec<f64>,
    /// Bytes of all parameters.
    pub(crate) full_bytes: usize,
    pub(crate) memory: MemoryReport,
}

pub(crate) fn train(
    group: &ProcessGroup,
    strategy: ShardingStrategy,
    steps: usize,
) -> Result<Run, Error> {
    let device = Device::flex().autodiff();
    // Groups of 256 KiB: only of large models the default of 25 MiB makes several.
    let config = ShardConfig::new(strategy).with_group_cap_bytes(256 << 10);
    let mut model = ShardedModule::new(Classifier::new(&device), config, group)?;
    let mut optimizer = Oss::new(AdamWConfig::new(), group)?;

    // Each rank draws reviews of its own.
    let mut draw = Draw(1 + group.rank() as u32);
    let mut losses = Vec::new();
    let mut sum = 0.0;
    for step in 1..=steps {
        let loss = model.loss(Batch::new(&mut draw, 32, &device));
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(1e-3, model, gradients);
        sum += loss.into_scalar::<f64>();
        if step % EVERY == 0 {
            let mut mean = [sum / EVERY as f64];
            group.all_reduce(&mut mean, ReduceOp::Mean)?;
            losses.push(mean[0]);
            sum = 0.0;
            if group.rank() == 0 {
                println!("step {step}: loss {:.4}", mean[0]);
            }
        }
    }
    Ok(Run {
        losses,
        full_bytes: 4 * model.num_params(),
        memory: model.memory(),
    })
}

fn main() -> Result<(), Error> {
    ProcessGroup::from_env_or_spawn(2, |group| {
        let run = train(&group, ShardingStrategy::Full, 300)?;
        println!(
            "rank {}: loss from {:.3} to {:.3}; of {} B of parameters it holds\n{}",
            group.rank(),
            run.losses[0],
            run.losses[run.losses.len() - 1],
            run.full_bytes,
            run.memory
        );
        Ok(())
    })?
    .into_iter()
    .collect()
}
