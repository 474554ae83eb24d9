//! The rows, by kind of layer. Every row has matrices, or vectors, of more than 64 KiB.

mod attention;
mod dense;
mod norms;
mod plain;
mod recurrent;

pub(crate) use attention::{attention, transformers};
pub(crate) use dense::{convolutions, linear};
pub(crate) use norms::{activations, norms};
pub(crate) use plain::without_parameters;
pub(crate) use recurrent::recurrent;

use crate::harness::Row;

/// Features of a norm whose vectors are larger than 64 KiB.
const WIDE: usize = 17_001;

/// A square matrix of this many rows takes more than 64 KiB.
const D_MODEL: usize = 130;

pub(crate) fn all() -> Vec<Row> {
    [
        linear(),
        convolutions(),
        norms(),
        activations(),
        recurrent(),
        attention(),
        transformers(),
        without_parameters(),
    ]
    .into_iter()
    .flatten()
    .collect()
}
