//! A convolutional network with batch normalization learns to tell stripes apart.
//!
//! The images are made in code and come through `burn::data`: a dataset, a batcher, a data loader, of which each
//! rank takes a slice. Loss and accuracy are those of all ranks together.
//!
//! `cargo run --example conv` runs two ranks as threads; under a launcher each process is one rank.
#![allow(clippy::print_stdout, reason = "an example shows what it computes")]
#![allow(
    clippy::cast_possible_truncation,
    reason = "numbers of ranks, words and classes are small"
)]

use std::sync::Arc;

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::data::dataset::InMemDataset;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::pool::{MaxPool2d, MaxPool2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{GradientsParams, SgdConfig};
use burn::prelude::*;
use burn::tensor::activation::relu;
use burn_shard::{Error, MemoryReport, Oss, ProcessGroup, ShardedModule, ShardingStrategy};

const SIDE: usize = 16;
const CLASSES: usize = 3;

/// A grey image of stripes: horizontal, vertical or diagonal.
#[derive(Clone, Debug)]
struct Image {
    pixels: Vec<f32>,
    class: i32,
}

/// `count` images, the same ones for the same `seed`.
fn images(count: usize, seed: u32) -> InMemDataset<Image> {
    let mut state = seed;
    let mut random = |below: u32| {
        // The linear congruential generator of Numerical Recipes; its high bits are the good ones.
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 16) % below
    };
    let image = |index: usize| {
        let class = index % CLASSES;
        let shift = random(4) as usize;
        let pixel = |at: usize| {
            let (row, column) = (at / SIDE, at % SIDE);
            let across = [row, column, row + column][class];
            let stripe = if (across + shift) % 4 < 2 { 0.4 } else { 0.0 };
            stripe + random(1000) as f32 / 1000.0
        };
        Image {
            pixels: (0..SIDE * SIDE).map(pixel).collect(),
            class: class as i32,
        }
    };
    InMemDataset::new((0..count).map(image).collect())
}

#[derive(Clone, Debug)]
struct Batch {
    images: Tensor<4>,
    classes: Tensor<1, Int>,
}

struct ToBatch;

impl Batcher<Image, Batch> for ToBatch {
    fn batch(&self, items: Vec<Image>, device: &Device) -> Batch {
        let shape = [items.len(), 1, SIDE, SIDE];
        let classes: Vec<i32> = items.iter().map(|item| item.class).collect();
        let pixels: Vec<f32> = items.into_iter().flat_map(|item| item.pixels).collect();
        Batch {
            images: Tensor::from_data(TensorData::new(pixels, shape), device),
            classes: Tensor::from_ints(classes.as_slice(), device),
        }
    }
}

/// This rank's part of the data: of equal length on all ranks, so that they take as many steps.
fn load(
    data: InMemDataset<Image>,
    device: &Device,
    group: &ProcessGroup,
) -> Arc<dyn DataLoader<Batch>> {
    let loader = DataLoaderBuilder::new(ToBatch)
        .batch_size(32)
        .shuffle(7)
        .set_device(device.clone())
        .build(data);
    let items = loader.num_items() / group.world_size();
    loader.slice(group.rank() * items, (group.rank() + 1) * items)
}

#[derive(Module, Debug)]
struct Network {
    first: Conv2d,
    first_norm: BatchNorm,
    second: Conv2d,
    second_norm: BatchNorm,
    pool: MaxPool2d,
    output: Linear,
}

impl Network {
    fn new(device: &Device) -> Self {
        Self {
            first: Conv2dConfig::new([1, 16], [3, 3]).init(device),
            first_norm: BatchNormConfig::new(16).init(device),
            second: Conv2dConfig::new([16, 32], [3, 3]).init(device),
            second_norm: BatchNormConfig::new(32).init(device),
            pool: MaxPool2dConfig::new([2, 2]).init(),
            output: LinearConfig::new(32 * 36, CLASSES).init(device),
        }
    }

    /// The scores of the classes.
    fn forward(&self, images: Tensor<4>) -> Tensor<2> {
        let x = relu(self.first_norm.forward(self.first.forward(images)));
        let x = relu(self.second_norm.forward(self.second.forward(x)));
        self.output.forward(self.pool.forward(x).flatten(1, 3))
    }
}

/// What a run ends with on one rank.
pub(crate) struct Run {
    /// The mean loss of each epoch, over all ranks.
    pub(crate) losses: Vec<f64>,
    /// The part of the unseen images that is told right, over all ranks.
    pub(crate) accuracy: f64,
    /// The first of the running means, which every rank keeps for itself.
    pub(crate) running_mean: f32,
    pub(crate) memory: MemoryReport,
}

pub(crate) fn train(group: &ProcessGroup, epochs: usize) -> Result<Run, Error> {
    let device = Device::flex().autodiff();
    let training = load(images(960, 1), &device, group);
    let unseen = load(images(480, 2), &Device::flex(), group);

    // Every rank goes on with rank 0's parameters and running statistics.
    let model = Network::new(&device);
    let mut model = ShardedModule::new(model, ShardingStrategy::Gradients, group)?;
    let momentum = MomentumConfig::new().with_momentum(0.9);
    let mut optimizer = Oss::new(SgdConfig::new().with_momentum(Some(momentum)), group)?;

    let mut losses = Vec::new();
    for _ in 0..epochs {
        let (mut sum, mut batches) = (0.0, 0_u32);
        for batch in training.iter() {
            let batch = batch.expect("a dataset in memory should give all its items");
            let scores = model.forward(batch.images);
            let loss = CrossEntropyLossConfig::new()
                .init(&device)
                .forward(scores, batch.classes);
            let gradients = GradientsParams::from_grads(loss.backward(), &model);
            model = optimizer.step(0.002, model, gradients);
            sum += loss.into_scalar::<f64>();
            batches += 1;
        }
        losses.push(group.mean(sum / f64::from(batches), batches.into())?);
    }

    // Parameters are the same on all ranks; running statistics are not, as each rank has seen other images. So
    // each evaluates with its own here. `broadcast_buffers` would make them rank 0's; a checkpoint keeps those.
    let evaluated = model.valid();
    let (mut right, mut seen) = (0.0, 0.0);
    for batch in unseen.iter() {
        let batch = batch.expect("a dataset in memory should give all its items");
        seen += batch.classes.dims()[0] as f64;
        let told = evaluated.forward(batch.images).argmax(1).flatten::<1>(0, 1);
        right += told.equal(batch.classes).int().sum().into_scalar::<f64>();
    }
    Ok(Run {
        losses,
        accuracy: group.mean(right / seen, seen)?,
        running_mean: model
            .first_norm
            .running_mean
            .value_sync()
            .into_data()
            .iter()
            .next()
            .expect("there are 16"),
        memory: model.memory(),
    })
}

fn main() -> Result<(), Error> {
    ProcessGroup::from_env_or_spawn(2, |group| {
        let run = train(&group, 5)?;
        println!(
            "rank {}: loss by epoch {:.3?}, accuracy {:.3}, first running mean {:.4}; it holds\n{}",
            group.rank(),
            run.losses,
            run.accuracy,
            run.running_mean,
            run.memory
        );
        Ok(())
    })?
    .into_iter()
    .collect()
}
