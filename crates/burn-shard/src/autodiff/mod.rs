//! The seam to Burn's autodiff: every read of a parameter becomes an operation whose backward hands
//! the gradient to the runtime. Knows a parameter by a handle.

pub(crate) mod graph;
pub(crate) mod ops;
mod recompute;
pub(crate) mod reparam;
