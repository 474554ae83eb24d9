//! What a run does: the options, filled in and checked by looking at them.

use std::path::{Path, PathBuf};

use burn::prelude::*;
use burn_shard::checkpoint::{Checkpoint, CheckpointError};
use burn_shard::{MixedPrecision, ShardingStrategy};
use burn_shard_comm::Placement;

use crate::cli::{Backend, Comm, Options, Precision, Size};
use crate::config::BertConfig;
use crate::data::batches::Batch;
use crate::data::dataset::Dataset;
use crate::error::Error;

/// The shortest row: the special tokens, and some text in both segments.
const MIN_SEQ_LEN: usize = 16;
/// Ranks, when nobody says how many.
const DEFAULT_WORLD_SIZE: usize = 2;

/// A checked run.
#[derive(Clone, Debug)]
pub struct Run {
    /// The model's sizes.
    pub config: BertConfig,
    /// Where tensors are.
    pub backend: Backend,
    /// What is sharded.
    pub strategy: ShardingStrategy,
    /// Number of ranks; where a launcher has started them, it knows better.
    pub world_size: usize,
    /// Tokens per row.
    pub seq_len: usize,
    /// Rows per rank and step.
    pub micro_batch: usize,
    /// Micro-batches per rank and step.
    pub accumulate: usize,
    /// The most that the norm of all gradients may be.
    pub clip_norm: Option<f64>,
    /// Groups that are gathered ahead.
    pub prefetch: usize,
    /// Ranks that share one copy.
    pub shard_ranks: Option<usize>,
    /// Where checkpoints are kept, and how often they are made.
    pub checkpoints: Option<CheckpointPlan>,
    /// Optimizer steps.
    pub steps: usize,
    /// The highest learning rate.
    pub lr: f64,
    /// Steps until it.
    pub warmup: usize,
    /// Decides initial weights, pairs and masks.
    pub seed: u64,
    /// Type of stored parameters.
    pub dtype: Precision,
    /// Type of computation.
    pub precision: Precision,
    /// Types of computation and reduction, where they are others.
    pub mixed_precision: Option<MixedPrecision>,
    /// Checkpoint to start from.
    pub weights: Option<PathBuf>,
    /// Where the model is written as Hugging Face has it.
    pub export: Option<PathBuf>,
}

/// Where and when a run is saved.
#[derive(Clone, Debug)]
pub struct CheckpointPlan {
    /// The directory.
    pub dir: PathBuf,
    /// Steps between checkpoints; `None`: at the end only.
    pub every: Option<usize>,
    /// Whether the run goes on from the newest of them.
    pub start: Start,
}

/// Where a run begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// At step 0.
    New,
    /// At the newest checkpoint: the user says so, or the launcher has started the ranks again.
    Resumed,
}

/// Whether a launcher has started the ranks again, and there is a checkpoint. A damaged one counts: that is
/// said when it is loaded, and not passed over by beginning anew.
fn goes_on(dir: &Path) -> bool {
    let count = std::env::var("BURN_SHARD_RESTART_COUNT");
    let is_again = count.is_ok_and(|count| count.parse::<usize>().is_ok_and(|count| count > 0));
    is_again
        && dir.is_dir()
        && !matches!(
            Checkpoint::open(dir),
            Err(CheckpointError::NoCheckpoint { .. })
        )
}

impl Options {
    /// Fills in what depends on the model, and checks what can be checked by looking.
    ///
    /// # Errors
    /// A value is out of range, for the model or at all.
    pub fn run(&self) -> Result<Run, Error> {
        let is_tiny = self.model == Size::Tiny;
        let mut config = match self.model {
            Size::Tiny => BertConfig::tiny(),
            Size::Base => BertConfig::base(),
            Size::Large => BertConfig::large(),
        };
        config.dropout = self.dropout.unwrap_or(if is_tiny { 0.0 } else { 0.1 });
        config.activation_checkpointing = self.activation_checkpointing;
        let steps = self.steps.unwrap_or(if is_tiny { 1000 } else { 100 });
        let run = Run {
            backend: self.backend,
            strategy: self.strategy,
            world_size: self
                .world_size
                .or(self.launch)
                .unwrap_or(DEFAULT_WORLD_SIZE),
            seq_len: self.seq_len.unwrap_or(if is_tiny { 32 } else { 128 }),
            micro_batch: self.micro_batch,
            accumulate: self.accumulate,
            clip_norm: self.clip_norm,
            prefetch: self.prefetch,
            shard_ranks: self.shard_ranks,
            checkpoints: self.checkpoint_dir.as_ref().map(|dir| CheckpointPlan {
                dir: dir.clone(),
                every: self.checkpoint_every,
                start: if self.resume || goes_on(dir) {
                    Start::Resumed
                } else {
                    Start::New
                },
            }),
            steps,
            lr: self.lr.unwrap_or(if is_tiny { 2e-3 } else { 1e-4 }),
            warmup: self.warmup.unwrap_or(steps / 10),
            seed: self.seed,
            dtype: self.dtype,
            precision: self.precision(),
            mixed_precision: self.mixed_precision()?,
            weights: self.weights.clone(),
            export: self.export.clone(),
            config,
        };

        let at_least_one = |option, value| match value {
            0 => Err(Error::Option {
                option,
                value: "0".into(),
                allowed: "1 or more".into(),
            }),
            _ => Ok(()),
        };
        let ranks = match self.launch {
            Some(_) => "launch",
            None => "world-size",
        };
        at_least_one(ranks, run.world_size)?;
        at_least_one("micro-batch", run.micro_batch)?;
        at_least_one("steps", run.steps)?;
        at_least_one("accumulate", run.accumulate)?;
        at_least_one("checkpoint-every", self.checkpoint_every.unwrap_or(1))?;
        at_least_one("shard-ranks", run.shard_ranks.unwrap_or(1))?;
        let check = |option, value: String, allowed: String, good: bool| match good {
            true => Ok(()),
            false => Err(Error::Option {
                option,
                value,
                allowed,
            }),
        };
        let most = run.config.max_positions;
        let lengths = MIN_SEQ_LEN..=most;
        check(
            "seq-len",
            run.seq_len.to_string(),
            format!("{MIN_SEQ_LEN} to {most} for this model"),
            lengths.contains(&run.seq_len),
        )?;
        // Steps are taken in f32, where 1e-50 is 0 and 1e50 infinite.
        let rates = f64::from(f32::MIN_POSITIVE)..f64::from(f32::MAX);
        check(
            "lr",
            run.lr.to_string(),
            "a positive number".into(),
            rates.contains(&run.lr),
        )?;
        if let Some(norm) = run.clip_norm {
            check(
                "clip-norm",
                norm.to_string(),
                "a positive number".into(),
                rates.contains(&norm),
            )?;
        }
        let is_share = (0.0..1.0).contains(&run.config.dropout);
        check(
            "dropout",
            run.config.dropout.to_string(),
            "from 0 to below 1".into(),
            is_share,
        )?;
        check(
            "comm",
            "mpi".into(),
            "tcp with --launch; MPI's ranks are started by mpirun".into(),
            self.launch.is_none() || self.comm != Comm::Mpi,
        )?;
        check(
            "comm",
            "nccl".into(),
            "tcp or mpi, or nccl with --backend cuda".into(),
            self.comm != Comm::Nccl || self.backend == Backend::Cuda,
        )?;
        if self.weights.is_some() && self.tokenizer.is_none() {
            return Err(Error::WeightsAlone);
        }
        let is_within = run.warmup <= run.steps;
        let allowed = format!("at most the {} steps", run.steps);
        check("warmup", run.warmup.to_string(), allowed, is_within)?;
        Ok(run)
    }

    /// The type of computation: on GPUs of NVIDIA the one that their matrix units are made for.
    fn precision(&self) -> Precision {
        self.precision.unwrap_or(match (self.backend, self.dtype) {
            (Backend::Cuda, Precision::F32) => Precision::Bf16,
            _ => self.dtype,
        })
    }

    /// What `--precision` and `--reduce-dtype` say beside `--dtype`.
    fn mixed_precision(&self) -> Result<Option<MixedPrecision>, Error> {
        let precision = self.precision();
        let reduce = self.reduce_dtype.unwrap_or(self.dtype);
        if (precision, reduce) == (self.dtype, self.dtype) {
            return Ok(None);
        }
        let is_f32 = self.dtype == Precision::F32;
        let mixed = |option, value: Precision| {
            let mixed = value.mixed().filter(|_| is_f32 || value == self.dtype);
            mixed.ok_or_else(|| Error::Option {
                option,
                value: value.to_string(),
                allowed: match is_f32 {
                    true => "f32, bf16 or f16".into(),
                    false => format!("{0} with --dtype {0}: master weights are f32", self.dtype),
                },
            })
        };
        let param = mixed("precision", precision)?;
        Ok(Some(MixedPrecision::new(
            param,
            mixed("reduce-dtype", reduce)?,
        )))
    }
}

impl Run {
    /// The learning rate of a step, counted from 0: up linearly to the highest, then down to 0.
    pub fn lr_at(&self, step: usize) -> f64 {
        let up = (step + 1) as f64 / self.warmup.max(1) as f64;
        let down = (self.steps - step) as f64 / (self.steps - self.warmup + 1) as f64;
        self.lr * up.min(down).min(1.0)
    }

    /// The rows that the model is tried on at the end: a micro-batch, which memory has room for.
    pub fn held_out(&self, dataset: &Dataset) -> Option<Batch> {
        Batch::held_out(dataset, self.micro_batch, self.seed)
    }

    /// Sets the device's float type and makes it differentiate.
    ///
    /// # Errors
    /// The type has too little range, the backend does not have it, or tensors exist already.
    pub fn device(&self) -> Result<Device, Error> {
        if self.dtype == Precision::F16 {
            // Tried: the squares of most gradients are 0 in f16, and the loss is NaN at step 4.
            let reason = "Adam's moments need more range than f16 has (use --precision f16, which keeps \
                          them in f32)";
            return Err(Error::DType {
                dtype: self.dtype,
                reason: reason.into(),
            });
        }
        let placement = Placement::from_env().map_err(burn_shard::CommError::from)?;
        let index = placement.map_or(0, |placement| placement.local_rank);
        let mut device = self.backend.device(index)?;
        device.configure(self.dtype.dtype()).map_err(|source| {
            let reason = source
                .to_string()
                .lines()
                .next()
                .unwrap_or_default()
                .to_owned();
            Error::DType {
                dtype: self.dtype,
                reason,
            }
        })?;
        let device = device.autodiff();
        Ok(match self.strategy {
            // Otherwise the tape keeps views of gathered parameters, and with them all of those:
            // 1,401 MiB instead of 245 for BERT-large on two ranks.
            ShardingStrategy::Full => device.gradient_checkpointing(),
            ShardingStrategy::Replicated
            | ShardingStrategy::OptimizerState
            | ShardingStrategy::Gradients => device,
        })
    }
}

impl Backend {
    /// Device `index` of this backend.
    ///
    /// # Errors
    /// The program was built without the backend, or the device cannot be opened.
    fn device(self, index: usize) -> Result<Device, Error> {
        let refused = |reason: String| Error::Backend {
            backend: self,
            index,
            reason,
        };
        #[cfg(not(all(feature = "wgpu", feature = "cuda")))]
        let missing = |feature: &str| {
            refused(format!(
                "this program was built without it (add --features {feature})"
            ))
        };
        match self {
            Self::Flex => Ok(Device::flex()),
            #[cfg(feature = "wgpu")]
            Self::Wgpu => match cubecl::Device::wgpu(cubecl::device::WgpuDeviceKind::default()) {
                // A software driver has one adapter for all.
                Ok(_) => Ok(Device::wgpu(burn::tensor::DeviceKind::DefaultDevice)),
                Err(error) => Err(refused(format!("{error:?}"))),
            },
            #[cfg(not(feature = "wgpu"))]
            Self::Wgpu => Err(missing("wgpu")),
            #[cfg(feature = "cuda")]
            Self::Cuda => match cubecl::Device::cuda(index) {
                Ok(_) => Ok(Device::cuda(index)),
                Err(error) => Err(refused(format!("{error:?}"))),
            },
            #[cfg(not(feature = "cuda"))]
            Self::Cuda => Err(missing("cuda")),
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    fn parse(arguments: &[&str]) -> Result<Run, Error> {
        let arguments = ["bert-large"].iter().chain(arguments);
        Options::try_parse_from(arguments).unwrap().run()
    }

    #[test]
    fn the_learning_rate_rises_then_falls() {
        let run = parse(&["--steps", "10", "--warmup", "4", "--lr", "1"]).unwrap();
        let rates: Vec<f64> = (0..10).map(|step| run.lr_at(step)).collect();
        assert_eq!(rates[..4], [0.25, 0.5, 0.75, 1.0]);
        assert!(rates[3..].is_sorted_by(|a, b| a > b), "{rates:?}");
        assert!(rates[9] > 0.0);
        let run = parse(&["--steps", "2", "--warmup", "0", "--lr", "1"]).unwrap();
        assert!(run.lr_at(0) > 0.0 && run.lr_at(1) > 0.0);
    }

    #[test]
    fn a_precision_that_is_that_of_the_parameters_mixes_nothing() {
        let mixed = |arguments: &[&str]| parse(arguments).unwrap().mixed_precision;
        assert_eq!(mixed(&[]), None);
        assert_eq!(mixed(&["--precision", "f32"]), None);
        assert_eq!(mixed(&["--dtype", "bf16", "--precision", "bf16"]), None);
        for bf16 in [["--precision", "bf16"], ["--backend", "cuda"]] {
            assert_eq!(mixed(&bf16), Some(MixedPrecision::bf16()));
        }
        assert_eq!(mixed(&["--backend", "cuda", "--precision", "f32"]), None);
        let both = mixed(&["--precision", "bf16", "--reduce-dtype", "bf16"]).unwrap();
        assert_eq!(both.reduce, burn_shard::Precision::BF16);
    }

    #[test]
    fn values_out_of_range_are_named() {
        let error = parse(&["--seq-len", "512"]).unwrap_err().to_string();
        assert_eq!(
            error,
            "--seq-len is 512 (allowed: 16 to 128 for this model)"
        );
        for bad in [
            "--lr=nan",
            "--lr=-1",
            "--lr=inf",
            "--lr=0",
            "--lr=1e-50",
            "--lr=1e50",
            "--dropout=-0.1",
            "--dropout=1",
            "--steps=0",
            "--world-size=0",
            "--launch=0",
            "--warmup=1001",
        ] {
            assert!(matches!(parse(&[bad]), Err(Error::Option { .. })), "{bad}");
        }
        let error = parse(&["--lr", "-1"]).unwrap_err().to_string();
        assert_eq!(error, "--lr is -1 (allowed: a positive number)");
        let error = parse(&["--weights", "model.safetensors"]).unwrap_err();
        assert!(matches!(error, Error::WeightsAlone), "{error}");
        let error = parse(&["--launch", "2", "--comm", "mpi"]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "--comm is mpi (allowed: tcp with --launch; MPI's ranks are started by mpirun)"
        );
        let error = parse(&["--launch", "2", "--comm", "nccl"]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "--comm is nccl (allowed: tcp or mpi, or nccl with --backend cuda)"
        );
        let error = parse(&["--precision", "f64"]).unwrap_err().to_string();
        assert_eq!(error, "--precision is f64 (allowed: f32, bf16 or f16)");
        let error = parse(&["--dtype", "bf16", "--precision", "f16"]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "--precision is f16 (allowed: bf16 with --dtype bf16: master weights are f32)"
        );
        assert_eq!(
            parse(&["--model", "large", "--seq-len", "512"])
                .unwrap()
                .seq_len,
            512
        );
    }
}
