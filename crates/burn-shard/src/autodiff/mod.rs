//! The seam to Burn's autodiff: every read of a parameter becomes an operation whose backward hands
//! the gradient to the runtime. Knows a parameter by a handle.

pub(crate) mod graph;
pub(crate) mod ops;
pub(crate) mod reparam;
