//! What happens on one rank between two reads of a parameter: parameters are unsharded, gradients are
//! collected and reduced. Knows tensors as flat memory, and nothing of Burn's modules or graphs.
//!
//! | file | what |
//! |---|---|
//! | `engine.rs` | the entrance: one per wrapped module and rank |
//! | `group.rs` | one group of parameters and the states it can be in |
//! | `unshard.rs` | which groups are gathered when, and ahead of time |
//! | `reduce.rs` | which gradients are reduced when |
//! | `mesh.rs` | which ranks share one copy |
//! | `pass.rs` | the reads of one forward whose gradients are still to come |
//! | `schedule.rs` | the orders that ranks learned in the passes before |
//! | `history.rs` | what this rank has done, compared between ranks |
//! | `collective_io.rs` | what collectives read and write |

pub(crate) mod collective_io;
pub(crate) mod context;
pub(crate) mod engine;
pub(crate) mod group;
pub(crate) mod history;
pub(crate) mod instance;
pub(crate) mod mesh;
pub(crate) mod pass;
mod reduce;
mod schedule;
mod unshard;
