//! What users put around their module, and how its tensors are taken out of it and put back.

pub(crate) mod bind;
pub(crate) mod buffers;
mod burn_module;
pub(crate) mod inspect;
mod leaves;
pub(crate) mod path;
pub(crate) mod sharded_module;
mod walk;
mod wrap;
