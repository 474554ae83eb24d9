//! What users put around their module, and how its tensors are taken out of it and put back.

pub(crate) mod bind;
mod inspect;
mod leaves;
pub(crate) mod path;
pub(crate) mod sharded_module;
mod wrap;
