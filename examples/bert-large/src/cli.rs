//! The command line.

use std::path::PathBuf;

use burn::tensor::{DType, FloatDType};
use burn_shard::ShardingStrategy;
use clap::{Parser, ValueEnum};

/// Pre-trains BERT (masked tokens and next sentence), with model state sharded over ranks: threads
/// of this process, or the processes that a launcher has started (burn-shard launch, torchrun,
/// srun, mpirun).
#[derive(Clone, Debug, Parser)]
#[command(version, allow_negative_numbers = true)]
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
    /// Starts this program once per rank on this machine, as processes (Unix only)
    #[arg(long, value_name = "RANKS", conflicts_with = "world_size")]
    pub launch: Option<usize>,
    /// Starts all processes again after a failure, at most so many times; they go on from the newest
    /// checkpoint, if there is one
    #[arg(long, value_name = "N", requires = "launch")]
    pub max_restarts: Option<usize>,
    /// How ranks that are processes reach each other; mpi: built with `--features mpi` and started
    /// by mpirun; nccl: built with `--features cuda`, a GPU for each process
    #[arg(long, value_enum, default_value_t = Comm::Tcp)]
    pub comm: Comm,
    /// Where tensors are; wgpu and cuda: built with the feature of that name. All threads of a process
    /// share one device, processes have one each
    #[arg(long, value_enum, default_value_t = Backend::Flex)]
    pub backend: Backend,
    /// Text to train on: .txt, .md, .jsonl (field `text`), .parquet (column `text`) files, the first
    /// three also as .gz, or directories of them [default: documentation of the crates in Cargo's registry]
    #[arg(long, num_args = 1.., value_name = "PATH")]
    pub corpus: Vec<PathBuf>,
    /// A Hugging Face tokenizer.json [default: WordPiece trained on the corpus, and kept]
    #[arg(long, value_name = "FILE")]
    pub tokenizer: Option<PathBuf>,
    /// Start from a Hugging Face checkpoint (model.safetensors, or the model.safetensors.index.json of
    /// one in several files); needs --tokenizer
    #[arg(long, value_name = "FILE")]
    pub weights: Option<PathBuf>,
    /// Tokens per row [default: 32 for tiny, 128 otherwise]
    #[arg(long)]
    pub seq_len: Option<usize>,
    /// Rows per rank and step
    #[arg(long, default_value_t = 16)]
    pub micro_batch: usize,
    /// Micro-batches per rank and step, whose gradients are added up before they are averaged
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub accumulate: usize,
    /// Clips the norm of all gradients together to this
    #[arg(long, value_name = "NORM")]
    pub clip_norm: Option<f64>,
    /// Groups of parameters that zero3 gathers ahead of their use
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub prefetch: usize,
    /// Hybrid sharding: so many neighbouring ranks share one copy of what is sharded [default: all]
    #[arg(long, value_name = "N")]
    pub shard_ranks: Option<usize>,
    /// Saves module and optimizer there, after the last step and when the program is told to stop
    #[arg(long, value_name = "DIR")]
    pub checkpoint_dir: Option<PathBuf>,
    /// Saves every so many steps, too, and keeps the last two
    #[arg(long, value_name = "STEPS", requires = "checkpoint_dir")]
    pub checkpoint_every: Option<usize>,
    /// Goes on from the newest checkpoint there, on any number of ranks and with any strategy
    #[arg(long, requires = "checkpoint_dir")]
    pub resume: bool,
    /// Writes the model there as Hugging Face has it: model.safetensors, config.json, tokenizer.json
    #[arg(long, value_name = "DIR")]
    pub export: Option<PathBuf>,
    /// Optimizer steps [default: 1000 for tiny, 100 otherwise]
    #[arg(long)]
    pub steps: Option<usize>,
    /// The highest learning rate [default: 2e-3 for tiny, 1e-4 otherwise]
    #[arg(long)]
    pub lr: Option<f64>,
    /// Steps until the highest learning rate; it falls linearly to 0 after [default: a tenth]
    #[arg(long)]
    pub warmup: Option<usize>,
    /// Decides initial weights, pairs and masks
    #[arg(long, default_value_t = 42)]
    pub seed: u64,
    /// Type in which parameters are stored and stepped
    #[arg(long, value_enum, default_value_t = Precision::F32)]
    pub dtype: Precision,
    /// Type in which the model computes and parameters are gathered; a 16-bit type keeps f32 master
    /// weights (mixed precision), and f16 scales the loss [default: bf16 with --backend cuda, otherwise that
    /// of --dtype]
    #[arg(long, value_enum, value_name = "DTYPE")]
    pub precision: Option<Precision>,
    /// Type in which gradients travel, with a 16-bit --precision [default: f32]
    #[arg(long, value_enum, value_name = "DTYPE", requires = "precision")]
    pub reduce_dtype: Option<Precision>,
    /// Keeps only the inputs of each layer for backward, which computes the layer again
    #[arg(long)]
    pub activation_checkpointing: bool,
    /// Dropout of states and attention weights; with 0, runs repeat bit for bit [default: 0 for tiny,
    /// 0.1 otherwise]
    #[arg(long)]
    pub dropout: Option<f64>,
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

/// A model by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Size {
    /// 4 layers of 128: 1.1 M parameters
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
    /// 16 bits, IEEE half: for --precision only, since its range is small
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

    /// The type as one of mixed precision; none is of 64 bits.
    pub fn mixed(self) -> Option<burn_shard::Precision> {
        match self {
            Self::F32 => Some(burn_shard::Precision::F32),
            Self::Bf16 => Some(burn_shard::Precision::BF16),
            Self::F16 => Some(burn_shard::Precision::F16),
            Self::F64 => None,
        }
    }

    /// Size of an element.
    pub fn bytes(self) -> usize {
        DType::from(self.dtype()).size()
    }
}
