//! The command line, and what can be said about it before anything is read.

use std::path::PathBuf;

use burn::prelude::*;
use burn::tensor::{DType, FloatDType};
use burn_shard::ShardingStrategy;
use burn_shard_comm::Placement;
use clap::{Parser, ValueEnum};

use crate::config::BertConfig;
use crate::error::Error;

/// The shortest row: the special tokens, and some text in both segments.
const MIN_SEQ_LEN: usize = 16;
/// Ranks, when nobody says how many.
const DEFAULT_WORLD_SIZE: usize = 2;

/// Pre-trains BERT (masked tokens and next sentence), with model state sharded over ranks: threads
/// of this process, or the processes that a launcher has started (burn-shard launch, torchrun,
/// srun, mpirun).
#[derive(Clone, Debug, Parser)]
#[command(version)]
pub struct Options {
    /// Size of the model
    #[arg(long, value_enum, default_value_t = Size::Tiny)]
    pub model: Size,
    /// What is sharded: ddp (nothing), zero1 (optimizer state), zero2 (and gradients), zero3 (and
    /// parameters)
    #[arg(long, default_value_t = ShardingStrategy::Gradients)]
    pub strategy: ShardingStrategy,
    /// Number of ranks [default: 2 threads, or as many processes as a launcher has started]
    #[arg(long)]
    pub world_size: Option<usize>,
    /// Starts this program once per rank on this machine, as processes
    #[arg(long, value_name = "RANKS", conflicts_with = "world_size")]
    pub launch: Option<usize>,
    /// How ranks that are processes reach each other; mpi: built with `--features mpi` and started
    /// by mpirun; nccl: built with `--features cuda`, a GPU for each process
    #[arg(long, value_enum, default_value_t = Comm::Tcp)]
    pub comm: Comm,
    /// Where tensors are; wgpu and cuda: built with the feature of that name. All threads of a process
    /// share one device, processes have one each
    #[arg(long, value_enum, default_value_t = Backend::Flex)]
    pub backend: Backend,
    /// Text to train on: .txt, .md, .jsonl (field `text`), .parquet (column `text`) files, or
    /// directories of them [default: documentation of the crates in Cargo's registry]
    #[arg(long, num_args = 1.., value_name = "PATH")]
    pub corpus: Vec<PathBuf>,
    /// A Hugging Face tokenizer.json [default: WordPiece trained on the corpus, and kept]
    #[arg(long, value_name = "FILE")]
    pub tokenizer: Option<PathBuf>,
    /// Start from a Hugging Face checkpoint (model.safetensors)
    #[arg(long, value_name = "FILE")]
    pub weights: Option<PathBuf>,
    /// Tokens per row [default: 64 for tiny, 128 otherwise]
    #[arg(long)]
    pub seq_len: Option<usize>,
    /// Rows per rank and step
    #[arg(long, default_value_t = 16)]
    pub micro_batch: usize,
    /// Optimizer steps [default: 300 for tiny, 100 otherwise]
    #[arg(long)]
    pub steps: Option<usize>,
    /// The highest learning rate [default: 1e-3 for tiny, 1e-4 otherwise]
    #[arg(long)]
    pub lr: Option<f64>,
    /// Steps until the highest learning rate; it falls linearly to 0 after [default: a tenth]
    #[arg(long)]
    pub warmup: Option<usize>,
    /// Decides initial weights, pairs and masks
    #[arg(long, default_value_t = 42)]
    pub seed: u64,
    /// Type of parameters and activations
    #[arg(long, value_enum, default_value_t = Precision::F32)]
    pub dtype: Precision,
    /// Dropout of states and attention weights; with 0, runs repeat bit for bit
    #[arg(long, default_value_t = 0.1)]
    pub dropout: f64,
    /// Writes the losses of each step to this file, with all digits
    #[arg(long, value_name = "FILE")]
    pub losses: Option<PathBuf>,
}

/// A way between processes by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Comm {
    /// Sockets
    Tcp,
    /// Messages of an MPI library
    Mpi,
    /// NCCL between GPUs, whose memory it works on
    Nccl,
}

/// A backend of Burn by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Backend {
    /// The CPU, in Rust
    Flex,
    /// GPUs by Vulkan, Metal or DirectX
    Wgpu,
    /// GPUs of NVIDIA
    Cuda,
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

/// A model by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Size {
    /// 4 layers of 128: 1.9 M parameters
    Tiny,
    /// BERT-base: 110 M parameters
    Base,
    /// BERT-large: 336 M parameters
    Large,
}

/// A float type by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Precision {
    /// 32 bits
    F32,
    /// 16 bits, the exponent of f32
    Bf16,
    /// 16 bits, IEEE half: refused, its range is too small
    F16,
    /// 64 bits
    F64,
}

impl std::fmt::Display for Precision {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::F64 => "f64",
        })
    }
}

impl Precision {
    /// Burn's name.
    pub fn dtype(self) -> FloatDType {
        match self {
            Self::F32 => FloatDType::F32,
            Self::Bf16 => FloatDType::BF16,
            Self::F16 => FloatDType::F16,
            Self::F64 => FloatDType::F64,
        }
    }

    /// Size of an element.
    pub fn bytes(self) -> usize {
        DType::from(self.dtype()).size()
    }
}

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
    /// Optimizer steps.
    pub steps: usize,
    /// The highest learning rate.
    pub lr: f64,
    /// Steps until it.
    pub warmup: usize,
    /// Decides initial weights, pairs and masks.
    pub seed: u64,
    /// Type of parameters and activations.
    pub dtype: Precision,
    /// Checkpoint to start from.
    pub weights: Option<PathBuf>,
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
        config.dropout = self.dropout;
        let steps = self.steps.unwrap_or(if is_tiny { 300 } else { 100 });
        let run = Run {
            backend: self.backend,
            strategy: self.strategy,
            world_size: self
                .world_size
                .or(self.launch)
                .unwrap_or(DEFAULT_WORLD_SIZE),
            seq_len: self.seq_len.unwrap_or(if is_tiny { 64 } else { 128 }),
            micro_batch: self.micro_batch,
            steps,
            lr: self.lr.unwrap_or(if is_tiny { 1e-3 } else { 1e-4 }),
            warmup: self.warmup.unwrap_or(steps / 10),
            seed: self.seed,
            dtype: self.dtype,
            weights: self.weights.clone(),
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
        let is_rate = run.lr.is_finite() && run.lr > 0.0;
        check(
            "lr",
            run.lr.to_string(),
            "a positive number".into(),
            is_rate,
        )?;
        let is_share = (0.0..1.0).contains(&self.dropout);
        check(
            "dropout",
            self.dropout.to_string(),
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
        let is_within = run.warmup <= run.steps;
        let allowed = format!("at most the {} steps", run.steps);
        check("warmup", run.warmup.to_string(), allowed, is_within)?;
        Ok(run)
    }
}

impl Run {
    /// The learning rate of a step, counted from 0: up linearly to the highest, then down to 0.
    pub fn lr_at(&self, step: usize) -> f64 {
        let up = (step + 1) as f64 / self.warmup.max(1) as f64;
        let down = (self.steps - step) as f64 / (self.steps - self.warmup + 1) as f64;
        self.lr * up.min(down).min(1.0)
    }

    /// Sets the device's float type and makes it differentiate.
    ///
    /// # Errors
    /// The type has too little range, the backend does not have it, or tensors exist already.
    pub fn device(&self) -> Result<Device, Error> {
        if self.dtype == Precision::F16 {
            // Tried: the squares of most gradients are 0 in f16, and the loss is NaN at step 4.
            let reason = "Adam's moments need more range than f16 has, and nothing here scales \
                          the loss (use bf16)";
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

#[cfg(test)]
mod tests {
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
    fn values_out_of_range_are_named() {
        let error = parse(&["--seq-len", "512"]).unwrap_err().to_string();
        assert_eq!(
            error,
            "--seq-len is 512 (allowed: 16 to 128 for this model)"
        );
        for bad in [
            "--lr=nan",
            "--dropout=1",
            "--steps=0",
            "--world-size=0",
            "--launch=0",
            "--warmup=301",
        ] {
            assert!(matches!(parse(&[bad]), Err(Error::Option { .. })), "{bad}");
        }
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
        assert_eq!(
            parse(&["--model", "large", "--seq-len", "512"])
                .unwrap()
                .seq_len,
            512
        );
    }
}
