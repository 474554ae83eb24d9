//! From text to batches: [`corpus`] finds documents, [`tokenizer`] turns them into token ids,
//! [`batches`] cuts those into sentence pairs, [`masking`] hides some tokens.
//!
//! Nothing here knows about tensors except [`batches::Batch::to_device`], or about ranks except
//! [`batches::Shard`], which says whose example is whose.

pub mod batches;
pub mod corpus;
pub mod masking;
mod prose;
mod registry;
pub mod tokenizer;
