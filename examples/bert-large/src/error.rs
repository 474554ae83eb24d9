//! What can go wrong before and during a run. Every message is one line.

use std::path::PathBuf;

use crate::cli::{Backend, Precision};
use crate::data::corpus::LeftOut;

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

    /// Something that is read like a file is none.
    #[error("{}: {what}, not a file", path.display())]
    NotAFile {
        /// What was named.
        path: PathBuf,
        /// What it is.
        what: &'static str,
    },
    /// An output would destroy an input.
    #[error("--{option} {} is also read, as part of --{input} (name another file)", path.display())]
    Overwrites {
        /// The option that names the output.
        option: &'static str,
        /// The file.
        path: PathBuf,
        /// The option that names the input.
        input: &'static str,
    },

    /// A corpus file of a kind that is not read.
    #[error("{}: not a corpus file (use .txt, .md, .jsonl or .parquet)", path.display())]
    UnknownFormat {
        /// The file.
        path: PathBuf,
    },
    /// A corpus file that the user named is no text.
    #[error("{}: no text, but {what}", path.display())]
    NoTextFile {
        /// The file.
        path: PathBuf,
        /// What it is.
        what: &'static str,
    },
    /// A line of a `.jsonl` file is not JSON.
    #[error("{}:{line}:{column}: {message}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// Counted from 1.
        line: usize,
        /// Counted from 1.
        column: usize,
        /// What the parser said.
        message: String,
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
    /// The text of a `.parquet` file is something else.
    #[error("{}: column `text` holds {found}, not strings", path.display())]
    TextColumnType {
        /// The file.
        path: PathBuf,
        /// What it holds.
        found: String,
    },
    /// A row of a `.parquet` file has bytes that are no text.
    #[error("{}: row {row}: no UTF-8 text", path.display())]
    ParquetRow {
        /// The file.
        path: PathBuf,
        /// Counted from 1.
        row: usize,
    },
    /// A `.parquet` file is compressed by a library that is not built in.
    #[error(
        "{}: compressed with {codec}, which needs C code and is not built in (write it with Snappy, \
         gzip, Brotli or LZ4)",
        path.display()
    )]
    ParquetCodec {
        /// The file.
        path: PathBuf,
        /// Its compression.
        codec: &'static str,
    },
    /// Built without the reader for `.parquet`.
    #[error("{}: built without the cargo feature `parquet`", path.display())]
    NoParquet {
        /// The file.
        path: PathBuf,
    },
    /// No text where the user said.
    #[error(
        "no text in {} (looked for .txt, .md, .jsonl and .parquet{})",
        list(paths),
        and_left_out(left_out)
    )]
    EmptyCorpus {
        /// Where it was looked for.
        paths: Vec<PathBuf>,
        /// What was there instead.
        left_out: LeftOut,
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
    #[error(
        "{found} of {all} documents {} the {least} tokens of an example, pairs need at least 2 of them",
        if *found == 1 { "has" } else { "have" }
    )]
    TooFewDocuments {
        /// How many are long enough.
        found: usize,
        /// How many there are.
        all: usize,
        /// Tokens that a document needs.
        least: usize,
    },
    /// A step would read some text twice.
    #[error(
        "the corpus gives {found} examples, one step of {world_size} ranks with {micro_batch} rows \
         each needs {needed} (use more text, or a smaller --world-size or --micro-batch)"
    )]
    TooFewExamples {
        /// How many.
        found: usize,
        /// Ranks.
        world_size: usize,
        /// Rows per rank.
        micro_batch: usize,
        /// Rows of all ranks.
        needed: usize,
    },

    /// A `tokenizer.json` cannot be used.
    #[error("{}: {fault}", path.display())]
    Tokenizer {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        fault: TokenizerFault,
    },
    /// The vocabulary trained here cannot be used.
    #[error("the vocabulary trained on the corpus cannot be used: {0}")]
    Trained(TokenizerFault),
    /// No vocabulary could be trained.
    #[error("cannot train a vocabulary: {0}")]
    Train(tokenizers::Error),
    /// A vocabulary could not be written down.
    #[error("cannot write the tokenizer: {0}")]
    Describe(tokenizers::Error),
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
    /// The parameters of an export cannot be written.
    #[error("cannot write {}: {source}", path.display())]
    Export {
        /// The file.
        path: PathBuf,
        /// What the writer said.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A checkpoint is another file.
    #[error(
        "{}: {what}, not a safetensors checkpoint (give model.safetensors or \
         model.safetensors.index.json; save_pretrained of transformers writes them)",
        path.display()
    )]
    NotSafetensors {
        /// The file.
        path: PathBuf,
        /// What it is.
        what: &'static str,
    },
    /// A checkpoint is one of another model.
    #[error("{}: not a checkpoint of BERT (it has a tensor {example:?})", path.display())]
    NotBert {
        /// The file.
        path: PathBuf,
        /// The first of its tensors.
        example: String,
    },
    /// The output weights are no copy of the word embeddings.
    #[error(
        "{}: tensor {copy} differs from {original} (this model reads both from one parameter; train \
         such a checkpoint with its decoder tied)",
        path.display()
    )]
    NotTied {
        /// The file.
        path: PathBuf,
        /// The output weights, or their bias.
        copy: &'static str,
        /// What they should equal.
        original: &'static str,
    },
    /// A tensor of a checkpoint is of a type that is no parameter's.
    #[error("{}: tensor {tensor} is {found}, not a float (is the checkpoint quantized?)", path.display())]
    TensorType {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its type.
        found: String,
    },
    /// A checkpoint's tensors cannot be read, or not be used.
    #[error("cannot load weights from {}: {reason}", path.display())]
    Weights {
        /// The file.
        path: PathBuf,
        /// What went wrong.
        reason: String,
    },
    /// Weights without their vocabulary.
    #[error(
        "--weights needs --tokenizer (the tokenizer.json of the same checkpoint: rows of the word \
         embeddings are tokens of its vocabulary)"
    )]
    WeightsAlone,
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

/// What is wrong with a tokenizer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizerFault {
    /// It is none of Hugging Face's.
    #[error("no tokenizer: {0}")]
    Unreadable(tokenizers::Error),
    /// It is another file.
    #[error("{0}, not a tokenizer.json")]
    Other(&'static str),
    /// A token has an id that the model has no row for.
    #[error(
        "token {token:?} has id {id}, the model has rows for ids below {rows} (use a larger --model)"
    )]
    BeyondRows {
        /// The token.
        token: String,
        /// Its id.
        id: u32,
        /// Rows of the model's word embeddings.
        rows: usize,
    },
    /// It is none of BERT's.
    #[error("no token {token} (is it a BERT tokenizer?)")]
    NoSpecialToken {
        /// What it lacks.
        token: &'static str,
    },
    /// Two special tokens are one.
    #[error("{} and {} have the same id {id}", tokens[0], tokens[1])]
    SameId {
        /// Both.
        tokens: [&'static str; 2],
        /// Their id.
        id: u32,
    },
    /// Padding has another id than the model takes for granted.
    #[error("[PAD] has id {found}, the model needs 0")]
    PadNotFirst {
        /// The id there.
        found: u32,
    },
    /// Nothing stands for text.
    #[error("no tokens but special ones")]
    NoWords,
}

fn and_left_out(left_out: &LeftOut) -> String {
    match left_out.is_empty() {
        true => String::new(),
        false => format!("; found {left_out}"),
    }
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
