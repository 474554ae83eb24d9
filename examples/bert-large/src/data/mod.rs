//! From text to batches: [`corpus`] finds documents, [`tokenizer`] turns them into token ids,
//! [`dataset`] cuts those into sentence pairs, [`masking`] hides some tokens, [`batches`] deals the
//! examples out to ranks.
//!
//! Nothing here knows about tensors except [`batches::Batch::to_device`], or about ranks except
//! [`batches::Shard`], which says whose example is whose.

pub mod batches;
mod cache;
pub mod corpus;
pub mod dataset;
mod files;
mod formats;
pub mod masking;
mod parquet;
mod prose;
mod registry;
mod text;
pub mod tokenizer;
mod training;
