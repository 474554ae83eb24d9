//! What can go wrong before and during a run. Every message is one line.

use std::path::PathBuf;

/// Why a run did not start, or stopped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file or directory could not be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// Which one.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A checkpoint is no safetensors file.
    #[error("cannot read weights from {}: {source}", path.display())]
    Safetensors {
        /// The file.
        path: PathBuf,
        /// What the reader said.
        source: Box<burn_store::SafetensorsStoreError>,
    },
    /// A checkpoint lacks a parameter.
    #[error("{}: tensor {tensor} {expected:?} is missing{}", path.display(), and_others(*others))]
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
    #[error("{}: the model has no tensor {tensor} {found:?}{}", path.display(), and_others(*others))]
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
}

fn and_others(others: usize) -> String {
    match others {
        0 => String::new(),
        n => format!(" (and {n} more)"),
    }
}
