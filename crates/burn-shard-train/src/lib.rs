//! Sharded data-parallel training as a training strategy of Burn's [`Learner`](burn_train::Learner).
//!
//! [`ShardedTraining`] goes into [`SupervisedTraining`](burn_train::SupervisedTraining) where Burn's own
//! strategies go. The model stays a plain Burn module with `TrainStep` and `InferenceStep`, the loaders stay
//! Burn's, and metrics, renderer, summary, learning rate schedulers and early stopping are Burn's too.
//!
//! # Example
//!
//! ```
//! # use std::sync::Arc;
//! # use burn::data::dataloader::{DataLoader, DataLoaderBuilder, batcher::Batcher};
//! # use burn::data::dataset::InMemDataset;
//! # use burn::nn::{Linear, LinearConfig};
//! use burn::optim::AdamConfig;
//! # use burn::prelude::*;
//! use burn_shard::ShardingStrategy;
//! use burn_shard_train::ShardedTraining;
//! use burn_train::metric::LossMetric;
//! use burn_train::{Learner, SupervisedTraining};
//! # use burn_train::{InferenceStep, RegressionOutput, TrainOutput, TrainStep};
//! # #[derive(Module, Debug)]
//! # struct Net { layer: Linear }
//! # impl Net {
//! #     fn compare(&self, x: Tensor<2>) -> RegressionOutput {
//! #         let (y, sum) = (self.layer.forward(x.clone()), x.sum_dim(1));
//! #         RegressionOutput::new((y.clone() - sum.clone()).square().mean(), y, sum)
//! #     }
//! # }
//! # impl TrainStep for Net {
//! #     type Input = Tensor<2>;
//! #     type Output = RegressionOutput;
//! #     fn step(&self, x: Tensor<2>) -> TrainOutput<RegressionOutput> {
//! #         let output = self.compare(x);
//! #         TrainOutput::new(self, output.loss.backward(), output)
//! #     }
//! # }
//! # impl InferenceStep for Net {
//! #     type Input = Tensor<2>;
//! #     type Output = RegressionOutput;
//! #     fn step(&self, x: Tensor<2>) -> RegressionOutput { self.compare(x) }
//! # }
//! # struct Rows;
//! # impl Batcher<[f32; 4], Tensor<2>> for Rows {
//! #     fn batch(&self, items: Vec<[f32; 4]>, device: &Device) -> Tensor<2> {
//! #         let rows = items.len();
//! #         Tensor::from_data(TensorData::new(items.into_flattened(), [rows, 4]), device)
//! #     }
//! # }
//! # fn loader(items: u8) -> Arc<dyn DataLoader<Tensor<2>>> {
//! #     let items = (0..items).map(|i| [f32::from(i % 7), 1.0, 0.5, f32::from(i % 3)]).collect();
//! #     DataLoaderBuilder::new(Rows).batch_size(4).build(InMemDataset::new(items))
//! # }
//! # let directory = tempfile::tempdir().unwrap();
//! # let (train, valid) = (loader(32), loader(16));
//! # let device = Device::flex().autodiff();
//! # let model = Net { layer: LinearConfig::new(4, 1).init(&device) };
//! // Two ranks as threads, on one device each.
//! let devices = vec![device.clone(), device];
//! let sharded = ShardedTraining::threads(ShardingStrategy::Full, AdamConfig::new(), devices);
//! let result = SupervisedTraining::new(directory.path(), train, valid)
//!     .metrics((LossMetric::new(),))
//!     .with_training_strategy(sharded.into())
//! #   .with_application_logger(None)
//!     .num_epochs(2)
//!     .launch(Learner::new(model, AdamConfig::new().init(), 1e-2));
//! assert!(result.error.is_none());
//! ```
//!
//! # What it does with
//!
//! | | |
//! |---|---|
//! | the optimizer | [`ShardedTraining`] takes its configuration and steps shards. A `Learner` hides its optimizer, so the one it was made with is **not used and cannot be compared**: give the same configuration to both. Nor is a model's own `TrainStep::optimize` called |
//! | learning rates | of the `Learner`'s scheduler, one step of it for each step of the optimizer |
//! | training data | rank `r` of `N` has items `r * n .. (r + 1) * n`, `n = items / N`; the last `items % N` are left out, as by `drop_last` of PyTorch's `DistributedSampler`. A loader that shuffles does it within each part |
//! | the last batch | as large on every rank as on any other, so that the mean over ranks is the mean over items, for loaders with at most one worker; with more workers, ranks may meet their small batches at different steps |
//! | validation data | all of it, over the ranks without overlap; a rank with fewer batches runs one more item with the others, whose output is not looked at |
//! | metrics | of the items of all ranks if ranks are threads, in rank order; of the items of **rank 0 alone** if they are processes |
//! | early stopping | decided by rank 0 after each epoch, for all |
//! | an interruption, a failing data set | on any rank, it ends all of them before their next step |
//! | gradient accumulation | sums, as Burn does; [`no_sync`](burn_shard::ShardedModule::no_sync) until the last of them, which costs full gradients |
//! | other ranks' processes | show nothing and log nothing, but Burn's renderer still says that training starts and ends: give them a quiet one |
//! | a failing rank | [`LearningResult::error`](burn_train::LearningResult) names it, and the model that comes back is the one that was given. In a process, a panic inside of a step stays a panic |
//! | memory | a `Learner` cannot give its model away: each process keeps one full copy, in host memory |
//! | autodiff checkpointing | `SupervisedTraining::gradient_checkpointing` does not reach strategies of users: call `gradient_checkpointing()` on the devices |
//! | Burn's dashboard | feature `tui` of `burn-train` |
//!
//! # What it refuses
//!
//! Checkpointers of `SupervisedTraining`, and `checkpoint(epoch)`: they would save and load the state of the
//! optimizer that is not used. [`Error::Checkpointers`] says so before training begins. Train with a loop of
//! your own and [`Checkpoints`](burn_shard::checkpoint::Checkpoints) where a job has to be resumed.

mod board;
mod error;
mod rank;
mod shares;
mod strategy;

pub use error::Error;
pub use strategy::ShardedTraining;
