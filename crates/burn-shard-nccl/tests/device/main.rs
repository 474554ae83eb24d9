//! Segments in the device's memory: the protocol of their owners, no copies, nobody waits.

#![allow(clippy::unwrap_used, reason = "a test ends at the first error")]

mod buffers;
#[path = "../common/mod.rs"]
mod common;
mod refusals;
mod results;
mod streams;
mod sub_groups;
