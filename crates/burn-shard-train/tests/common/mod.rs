//! A small network, its data, and trainings of it through Burn's `Learner`.

#![allow(
    dead_code,
    unreachable_pub,
    unnameable_types,
    missing_debug_implementations,
    clippy::unwrap_used,
    clippy::missing_panics_doc,
    clippy::cast_precision_loss,
    reason = "helpers of tests, each of which uses a part of them"
)]

pub mod oracle;

use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::data::dataset::{Dataset, DatasetError};
use burn::nn::{Linear, LinearConfig};
use burn::optim::ModuleOptimizer;
use burn::prelude::*;
use burn::tensor::TensorReadError;
use burn_shard::{ElementwiseConfig, Local, ProcessGroup, ShardConfig};
use burn_shard_train::ShardedTraining;
use burn_train::logger::InMemoryMetricLogger;
use burn_train::metric::store::{Aggregate, EventStoreClient, Split};
use burn_train::metric::{
    Adaptor, LossMetric, Metric, MetricMetadata, MetricName, SerializedEntry,
};
use burn_train::{
    EarlyStoppingStrategy, InferenceStep, Interrupter, Learner, LearningResult, RegressionOutput,
    SupervisedTraining, TrainOutput, TrainStep, TrainingStrategy,
};

pub const LR: f64 = 0.05;
const WIDTH: usize = 5;

pub fn device() -> Device {
    Device::flex().autodiff()
}

#[derive(Module, Debug)]
pub struct Net {
    hidden: Linear,
    output: Linear,
}

impl Net {
    pub fn new() -> Self {
        let device = device();
        Self {
            hidden: LinearConfig::new(WIDTH, 7).init(&device),
            output: LinearConfig::new(7, 1).init(&device),
        }
    }

    pub fn compare(&self, batch: Batch) -> RegressionOutput {
        let output = self.output.forward(self.hidden.forward(batch.x).tanh());
        let loss = (output.clone() - batch.y.clone()).square().mean();
        RegressionOutput::new(loss, output, batch.y)
    }
}

impl TrainStep for Net {
    type Input = Batch;
    type Output = RegressionOutput;

    fn step(&self, batch: Batch) -> TrainOutput<RegressionOutput> {
        let output = self.compare(batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl InferenceStep for Net {
    type Input = Batch;
    type Output = RegressionOutput;

    fn step(&self, batch: Batch) -> RegressionOutput {
        self.compare(batch)
    }
}

#[derive(Clone, Debug)]
pub struct Batch {
    pub x: Tensor<2>,
    pub y: Tensor<2>,
}

/// What happens when a certain item is read.
#[derive(Clone, Default)]
pub enum Event {
    #[default]
    Nothing,
    Interrupt(usize, Interrupter),
    Unreadable(usize),
    Panic(usize),
}

/// Items whose values follow from their indices.
pub struct Items {
    pub indices: Vec<usize>,
    pub event: Event,
}

impl Dataset<usize> for Items {
    fn get(&self, index: usize) -> Result<usize, DatasetError> {
        let item = self.indices[index];
        match &self.event {
            Event::Interrupt(at, interrupter) if *at == item => {
                interrupter.stop(Some("the test says so"));
            }
            Event::Unreadable(at) if *at == item => {
                let error = std::io::Error::other(format!("item {item} is unreadable"));
                return Err(DatasetError::new(error));
            }
            Event::Panic(at) if *at == item => panic!("item {item} panics"),
            Event::Nothing | Event::Interrupt(..) | Event::Unreadable(_) | Event::Panic(_) => {}
        }
        Ok(item)
    }

    fn len(&self) -> usize {
        self.indices.len()
    }
}

pub struct Rows;

impl Batcher<usize, Batch> for Rows {
    fn batch(&self, items: Vec<usize>, device: &Device) -> Batch {
        let rows = items.len();
        let x = |item: usize, i: usize| ((item * 31 + i * 17) % 23) as f32 / 11.5 - 1.0;
        let row = |item: &usize| (0..WIDTH).map(|i| x(*item, i)).collect::<Vec<_>>();
        let values: Vec<f32> = items.iter().flat_map(row).collect();
        let x = Tensor::from_data(TensorData::new(values, [rows, WIDTH]), device);
        Batch {
            y: x.clone().sum_dim(1),
            x,
        }
    }
}

pub fn loader(indices: Vec<usize>, batch: usize, event: Event) -> Arc<dyn DataLoader<Batch>> {
    DataLoaderBuilder::new(Rows)
        .batch_size(batch)
        .build(Items { indices, event })
}

/// The loss of a batch, for [`Losses`].
pub struct BatchLoss(f32);

impl Adaptor<BatchLoss> for RegressionOutput {
    fn adapt(&self) -> BatchLoss {
        BatchLoss(self.loss.clone().into_scalar())
    }
}

/// A metric that keeps the bits of every loss it is shown.
#[derive(Clone, Default)]
pub struct Losses(pub Arc<Mutex<Vec<u32>>>);

impl Losses {
    pub fn sorted(&self) -> Vec<u32> {
        let mut all = self.0.lock().unwrap().clone();
        all.sort_unstable();
        all
    }
}

impl Metric for Losses {
    type Input = BatchLoss;

    fn name(&self) -> MetricName {
        Arc::new("Losses".to_owned())
    }

    fn update(
        &mut self,
        loss: &BatchLoss,
        _metadata: &MetricMetadata,
    ) -> Result<SerializedEntry, TensorReadError> {
        self.0.lock().unwrap().push(loss.0.to_bits());
        self.compute()
    }

    fn compute(&mut self) -> Result<SerializedEntry, TensorReadError> {
        Ok(SerializedEntry::new(String::new(), String::new()))
    }

    fn clear(&mut self) {}
}

/// Stops after the epoch `last`, and keeps the mean losses of training and of validation by epoch.
#[derive(Clone)]
pub struct Watch {
    pub last: usize,
    pub losses: Arc<Mutex<Vec<(f64, f64)>>>,
}

impl Watch {
    pub fn until(last: usize) -> Self {
        Self {
            last,
            losses: Arc::default(),
        }
    }
}

impl EarlyStoppingStrategy for Watch {
    fn should_stop(&mut self, epoch: usize, store: &EventStoreClient) -> bool {
        let loss = |split| store.find_metric("Loss", epoch, Aggregate::Mean, &split);
        let losses = (loss(Split::Train).unwrap(), loss(Split::Valid).unwrap());
        self.losses.lock().unwrap().push(losses);
        epoch >= self.last
    }
}

/// One training. Batches of 4, unless told otherwise.
#[derive(Clone)]
pub struct Run {
    pub train: Vec<usize>,
    pub valid: Vec<usize>,
    pub batch: usize,
    pub valid_batch: usize,
    pub epochs: usize,
    pub accumulation: Option<usize>,
    pub event: Event,
    pub valid_event: Event,
    pub watch: Watch,
    pub interrupter: Interrupter,
}

impl Run {
    pub fn new(train: usize, valid: usize, epochs: usize) -> Self {
        Self {
            train: (0..train).collect(),
            valid: (100..100 + valid).collect(),
            batch: 4,
            valid_batch: 4,
            epochs,
            accumulation: None,
            event: Event::Nothing,
            valid_event: Event::Nothing,
            watch: Watch::until(usize::MAX),
            interrupter: Interrupter::new(),
        }
    }

    pub fn training(&self) -> SupervisedTraining<Net> {
        let train = loader(self.train.clone(), self.batch, self.event.clone());
        let valid = loader(
            self.valid.clone(),
            self.valid_batch,
            self.valid_event.clone(),
        );
        // Nothing is written: metrics are in memory, and checkpoints off.
        let mut training = SupervisedTraining::new("unused", train, valid)
            .metrics((LossMetric::new(),))
            .with_metric_logger(InMemoryMetricLogger::default())
            .with_application_logger(None)
            .with_interrupter(self.interrupter.clone())
            .early_stopping(self.watch.clone())
            .num_epochs(self.epochs);
        if let Some(accumulation) = self.accumulation {
            training = training.grads_accumulation(accumulation);
        }
        training
    }

    pub fn launch(
        &self,
        model: &Net,
        optimizer: ModuleOptimizer,
        strategy: TrainingStrategy<Net>,
    ) -> LearningResult<Net> {
        self.training()
            .with_training_strategy(strategy)
            .launch(Learner::new(model.clone(), optimizer, LR))
    }

    pub fn in_threads<C: ElementwiseConfig + Clone + Sync>(
        &self,
        model: &Net,
        config: impl Into<ShardConfig>,
        optimizer: (C, ModuleOptimizer),
        ranks: usize,
    ) -> LearningResult<Net> {
        let sharded = ShardedTraining::threads(config, optimizer.0, vec![device(); ranks])
            .with_deadline(Duration::from_secs(60));
        self.launch(model, optimizer.1, sharded.into())
    }
}

/// Runs `f` for each rank of a group as if it were a process of its own.
pub fn as_processes<T: Send>(ranks: usize, f: impl Fn(ProcessGroup) -> T + Sync) -> Vec<T> {
    let groups = Local::new(ranks).deadline(Duration::from_secs(60)).groups();
    thread::scope(|scope| {
        let run = &f;
        let ranks: Vec<_> = groups
            .into_iter()
            .map(|group| scope.spawn(move || run(group)))
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}
