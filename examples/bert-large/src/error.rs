//! What can go wrong before and during a run. Every message is one line.

use std::path::PathBuf;

use crate::cli::{Backend, Precision};

/// Why a run did not start, or stopped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An option is out of range.
    #[error("--{option} is {value} (allowed: {allowed})")]
    Option {
        /// Its name.
        option: &'static str,
        /// What was given.
        value: String,
        /// What would do.
        allowed: String,
    },
    /// The backend does not compute in this type.
    #[error("--dtype {dtype}: {reason}")]
    DType {
        /// The type.
        dtype: Precision,
        /// What the backend said; Burn does not export its type.
        reason: String,
    },

    /// The backend is not there.
    #[error("--backend {backend:?}, device {index}: {reason}")]
    Backend {
        /// The backend.
        backend: Backend,
        /// Which of its devices.
        index: usize,
        /// What is missing.
        reason: String,
    },

    /// A launcher has started another number of ranks than the user says.
    #[error(
        "--world-size is {given}, but this process is one of {found} ranks (leave --world-size out)"
    )]
    WorldSize {
        /// What was given.
        given: usize,
        /// What the launcher, or MPI, says.
        found: usize,
    },
    /// What started the ranks and MPI do not know of each other.
    #[error(
        "MPI says that {mpi} ranks were started, but the environment says {launched} (with --comm mpi \
         start ranks by mpirun, or by srun if it knows this MPI)"
    )]
    OtherJob {
        /// Ranks of MPI's job.
        mpi: usize,
        /// Ranks of the launcher's job.
        launched: usize,
    },
    /// Built without MPI.
    #[error("--comm mpi: built without the cargo feature `mpi`")]
    NoMpi,
    /// MPI did not let this process join.
    #[cfg(feature = "mpi")]
    #[error(transparent)]
    Mpi(#[from] burn_shard_mpi::MpiError),
    /// Ranks that are threads share a GPU, and NCCL wants one for each.
    #[error(
        "--comm nccl: ranks have to be processes (add --launch N, or start with torchrun or srun)"
    )]
    NcclThreads,
    /// Built without NCCL.
    #[error("--comm nccl: built without the cargo feature `cuda`")]
    NoNccl,
    /// NCCL did not let this process join.
    #[cfg(feature = "cuda")]
    #[error("--comm nccl: {0}")]
    Nccl(#[from] burn_shard_nccl::NcclError),
    /// Ranks could not be started.
    #[error("--launch: {0}")]
    Launch(#[from] burn_shard_launch::LaunchError),
    /// Where this program is cannot be found out.
    #[error("--launch: cannot find this program: {0}")]
    NoProgram(std::io::Error),
    /// What ranks send each other about a run cannot be written or read.
    #[error("rank {rank}: a message about the run: {source} (do all ranks run the same build?)")]
    Message {
        /// This rank.
        rank: usize,
        /// What was wrong with it.
        source: postcard::Error,
    },

    /// A file or directory could not be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// Which one.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file or directory could not be written.
    #[error("cannot write {}: {source}", path.display())]
    Write {
        /// Which one.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },

    /// A corpus file of a kind that is not read.
    #[error("{}: not a corpus file (use .txt, .md, .jsonl or .parquet)", path.display())]
    UnknownFormat {
        /// The file.
        path: PathBuf,
    },
    /// A line of a `.jsonl` file is not JSON.
    #[error("{}:{line}: {source}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// Counted from 1.
        line: usize,
        /// What the parser said.
        source: serde_json::Error,
    },
    /// A line of a `.jsonl` file has no text.
    #[error("{}:{line}: no string field `text`", path.display())]
    NoText {
        /// The file.
        path: PathBuf,
        /// Counted from 1.
        line: usize,
    },
    /// A `.parquet` file cannot be read.
    #[cfg(feature = "parquet")]
    #[error("cannot read {}: {source}", path.display())]
    Parquet {
        /// The file.
        path: PathBuf,
        /// What the reader said.
        source: Box<parquet::errors::ParquetError>,
    },
    /// A `.parquet` file has no text.
    #[error("{}: no column `text` (there are {columns:?})", path.display())]
    NoTextColumn {
        /// The file.
        path: PathBuf,
        /// Its columns.
        columns: Vec<String>,
    },
    /// Built without the reader for `.parquet`.
    #[error("{}: built without the cargo feature `parquet`", path.display())]
    NoParquet {
        /// The file.
        path: PathBuf,
    },
    /// No text where the user said.
    #[error(
        "no text in {} (looked for .txt, .md, .jsonl and .parquet)",
        list(paths)
    )]
    EmptyCorpus {
        /// Where it was looked for.
        paths: Vec<PathBuf>,
    },
    /// No text where Cargo keeps sources.
    #[error("no text in Cargo's registry {} (name some with --corpus PATH)", path.display())]
    EmptyRegistry {
        /// Where it was looked for.
        path: PathBuf,
    },
    /// The registry cannot be found.
    #[error("neither CARGO_HOME nor a home directory is set (name a corpus with --corpus PATH)")]
    NoHome,
    /// Next-sentence pairs need two documents.
    #[error("the corpus has {found} documents of some length, pairs need at least 2")]
    TooFewDocuments {
        /// How many.
        found: usize,
    },
    /// A step would read some text twice.
    #[error(
        "the corpus gives {found} examples, one step of {world_size} ranks with {micro_batch} rows \
         each needs {} (use more text, or a smaller --world-size or --micro-batch)",
        world_size * micro_batch
    )]
    TooFewExamples {
        /// How many.
        found: usize,
        /// Ranks.
        world_size: usize,
        /// Rows per rank.
        micro_batch: usize,
    },

    /// A `tokenizer.json` is none.
    #[error("cannot read a tokenizer from {}: {source}", path.display())]
    Tokenizer {
        /// The file.
        path: PathBuf,
        /// What the reader said.
        source: tokenizers::Error,
    },
    /// A tokenizer has more tokens than the model has rows for.
    #[error(
        "{}: {found} tokens, the model has room for {most} (use a larger --model)",
        path.display()
    )]
    VocabularyTooLarge {
        /// The file.
        path: PathBuf,
        /// Its tokens.
        found: usize,
        /// The model's.
        most: usize,
    },
    /// A tokenizer is none of BERT's.
    #[error("{}: no token {token} (is it a BERT tokenizer?)", path.display())]
    NoSpecialToken {
        /// The file.
        path: PathBuf,
        /// What it lacks.
        token: &'static str,
    },
    /// Padding has another id than the model takes for granted.
    #[error("{}: [PAD] has id {found}, the model needs 0", path.display())]
    PadNotFirst {
        /// The file.
        path: PathBuf,
        /// The id there.
        found: u32,
    },
    /// A tokenizer has no token beyond the special ones.
    #[error("{}: no tokens above the special ones", path.display())]
    NoWords {
        /// The file.
        path: PathBuf,
    },
    /// No vocabulary could be trained.
    #[error("cannot train a vocabulary: {0}")]
    Train(tokenizers::Error),
    /// Text could not be tokenized.
    #[error("cannot tokenize the corpus: {0}")]
    Encode(tokenizers::Error),

    /// A checkpoint is no safetensors file.
    #[error("cannot read weights from {}: {source}", path.display())]
    Safetensors {
        /// The file.
        path: PathBuf,
        /// What the reader said.
        source: Box<burn_store::SafetensorsStoreError>,
    },
    /// A checkpoint lacks a parameter.
    #[error("{}: tensor {tensor} {expected:?} is missing{}", path.display(), and_more(*others))]
    TensorMissing {
        /// The file.
        path: PathBuf,
        /// The tensor, by its Hugging Face name.
        tensor: String,
        /// The shape it should have.
        expected: Vec<usize>,
        /// How many more are missing.
        others: usize,
    },
    /// A checkpoint has a tensor the model does not.
    #[error("{}: the model has no tensor {tensor} {found:?}{}", path.display(), and_more(*others))]
    TensorUnknown {
        /// The file.
        path: PathBuf,
        /// The tensor, by its Hugging Face name.
        tensor: String,
        /// Its shape in the file.
        found: Vec<usize>,
        /// How many more are unknown.
        others: usize,
    },
    /// A tensor of a checkpoint has another shape than the model's.
    #[error("{}: tensor {tensor} has shape {found:?}, the model needs {expected:?}", path.display())]
    TensorShape {
        /// The file.
        path: PathBuf,
        /// The tensor, by its Hugging Face name.
        tensor: String,
        /// Its shape in the file.
        found: Vec<usize>,
        /// The shape it should have, written as in the file.
        expected: Vec<usize>,
    },

    /// Sharding refused the model, or a collective failed.
    #[error(transparent)]
    Shard(#[from] burn_shard::Error),
    /// A collective failed.
    #[error(transparent)]
    Comm(#[from] burn_shard::CommError),
    /// The loss is no number any more.
    #[error("step {step}: the loss is {loss} (try a lower --lr, or another --dtype)")]
    Diverged {
        /// Counted from 1.
        step: usize,
        /// Infinite or not a number.
        loss: f64,
    },
}

fn and_more(others: usize) -> String {
    match others {
        0 => String::new(),
        n => format!(" (and {n} more)"),
    }
}

fn list(paths: &[PathBuf]) -> String {
    let paths: Vec<_> = paths
        .iter()
        .map(|path| path.display().to_string())
        .collect();
    paths.join(", ")
}
