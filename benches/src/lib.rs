//! Measures BERT training steps under every strategy.
//!
//! Each measurement runs in a process of its own ([`child`]), so that its peak memory is its own;
//! the parent ([`table`]) interleaves them in rounds and reports ratios within a round, because
//! machines are shared and drift.

pub mod child;
pub mod table;
