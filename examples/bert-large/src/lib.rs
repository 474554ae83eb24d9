//! BERT pre-training.
pub mod config;
pub mod error;
pub mod model;
pub mod weights;
