//! A network learns to tell two spirals apart. All of it is plain Burn, but for one line: the training strategy.
//!
//! ```text
//! cargo run --release -p learner                            # two ranks as threads, ZeRO-3
//! cargo run --release -p learner -- --strategy zero1 --ranks 4
//! burn-shard launch -n 2 -- target/release/learner          # two ranks as processes
//! ```
#![allow(clippy::print_stdout, reason = "an example shows what it computes")]

use std::error::Error;
use std::path::PathBuf;
use std::sync::Arc;

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::data::dataset::InMemDataset;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Linear, LinearConfig};
use burn::optim::AdamConfig;
use burn::prelude::*;
use burn_shard::{CommError, ProcessGroup, ShardingStrategy};
use burn_shard_train::ShardedTraining;
use burn_train::metric::store::{Aggregate, Direction, Split};
use burn_train::metric::{AccuracyMetric, LossMetric};
use burn_train::{
    ClassificationOutput, InferenceStep, Learner, MetricEarlyStoppingStrategy, StoppingCondition,
    SupervisedTraining, TrainOutput, TrainStep, TrainingStrategy,
};
use clap::Parser;

/// Wide enough for ZeRO-3 to shard the hidden layer; it leaves small parameters whole.
const WIDTH: usize = 192;

/// Trains a small network, sharded over ranks.
#[derive(Parser)]
struct Arguments {
    /// What is sharded: `ddp`, `zero1`, `zero2` or `zero3`.
    #[arg(long, default_value = "zero3")]
    strategy: ShardingStrategy,
    /// Ranks as threads; a launcher's job has its own number.
    #[arg(long, default_value_t = 2)]
    ranks: usize,
    /// Most times that the data is gone through.
    #[arg(long, default_value_t = 40)]
    epochs: usize,
    /// Where Burn writes metrics.
    #[arg(long, default_value = "learner-metrics")]
    directory: PathBuf,
}

#[derive(Module, Debug)]
struct Net {
    input: Linear,
    hidden: Linear,
    output: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        Self {
            input: LinearConfig::new(2, WIDTH).init(device),
            hidden: LinearConfig::new(WIDTH, WIDTH).init(device),
            output: LinearConfig::new(WIDTH, 2).init(device),
        }
    }

    fn classify(&self, batch: Batch) -> ClassificationOutput {
        let x = self.input.forward(batch.points).tanh();
        let output = self.output.forward(self.hidden.forward(x).tanh());
        let loss = CrossEntropyLossConfig::new()
            .init(&output.device())
            .forward(output.clone(), batch.arms.clone());
        ClassificationOutput::new(loss, output, batch.arms)
    }
}

impl TrainStep for Net {
    type Input = Batch;
    type Output = ClassificationOutput;

    fn step(&self, batch: Batch) -> TrainOutput<ClassificationOutput> {
        let output = self.classify(batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl InferenceStep for Net {
    type Input = Batch;
    type Output = ClassificationOutput;

    fn step(&self, batch: Batch) -> ClassificationOutput {
        self.classify(batch)
    }
}

#[derive(Clone, Debug)]
struct Batch {
    points: Tensor<2>,
    arms: Tensor<1, Int>,
}

/// A point, and which of the two spirals it is on.
#[derive(Clone, Debug)]
struct Point {
    at: [f32; 2],
    arm: i32,
}

struct PointBatcher;

impl Batcher<Point, Batch> for PointBatcher {
    fn batch(&self, points: Vec<Point>, device: &Device) -> Batch {
        let count = points.len();
        let at: Vec<f32> = points.iter().flat_map(|point| point.at).collect();
        let arms: Vec<i32> = points.iter().map(|point| point.arm).collect();
        Batch {
            points: Tensor::from_data(TensorData::new(at, [count, 2]), device),
            arms: Tensor::from_data(TensorData::new(arms, [count]), device),
        }
    }
}

/// `count` points of both spirals in turn, `shift` of the way to the next point.
fn spirals(count: u16, shift: f32) -> InMemDataset<Point> {
    let point = |index: u16| {
        let arm = index % 2;
        let along = 0.1 + 0.9 * (f32::from(index) + shift) / f32::from(count);
        let angle = std::f32::consts::PI * (3.0 * along + f32::from(arm));
        Point {
            at: [along * angle.cos(), along * angle.sin()],
            arm: arm.into(),
        }
    };
    // Neighbours are far from each other in the order of the data, since each rank has one stretch of it.
    let indices = std::iter::successors(Some(0), |index| Some((index + 389) % count));
    let mixed = indices.take(count.into()).map(point);
    InMemDataset::new(mixed.collect())
}

fn loader(points: InMemDataset<Point>) -> Arc<dyn DataLoader<Batch>> {
    DataLoaderBuilder::new(PointBatcher)
        .batch_size(32)
        .shuffle(7)
        .build(points)
}

/// Where the ranks are: processes if a launcher has started this one, or else threads.
fn strategy(
    arguments: &Arguments,
    device: &Device,
) -> Result<TrainingStrategy<Net>, Box<dyn Error>> {
    let optimizer = AdamConfig::new();
    let sharded = match ProcessGroup::from_env() {
        Ok(group) => {
            ShardedTraining::process(arguments.strategy, optimizer, &group, device.clone())
        }
        Err(CommError::NoLauncher) => {
            let devices = vec![device.clone(); arguments.ranks];
            ShardedTraining::threads(arguments.strategy, optimizer, devices)
        }
        Err(error) => return Err(error.into()),
    };
    Ok(sharded.into())
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments = Arguments::parse();
    let device = Device::flex().autodiff();
    device.seed(1);
    let (train, valid) = (loader(spirals(1024, 0.0)), loader(spirals(256, 0.5)));
    let stop = MetricEarlyStoppingStrategy::new(
        &LossMetric::new(),
        Aggregate::Mean,
        Direction::Lowest,
        Split::Valid,
        StoppingCondition::NoImprovementSince { n_epochs: 5 },
    );
    let result = SupervisedTraining::new(&arguments.directory, train, valid.clone())
        .metrics((AccuracyMetric::new(), LossMetric::new()))
        .early_stopping(stop)
        .with_training_strategy(strategy(&arguments, &device)?)
        .with_application_logger(None)
        .num_epochs(arguments.epochs)
        // The configuration of the optimizer is the strategy's, too.
        .launch(Learner::new(
            Net::new(&device),
            AdamConfig::new().init(),
            1e-2,
        ));
    if let Some(error) = result.error {
        return Err(error.to_string().into());
    }

    let mut right = 0;
    for batch in valid.to_device(&Device::flex()).iter() {
        let output = result.model.classify(batch?);
        let arms = output.output.argmax(1).squeeze_dim::<1>(1);
        right += arms.equal(output.targets).int().sum().into_scalar::<i32>();
    }
    println!("{right} of {} points are told right", valid.num_items());
    Ok(())
}
