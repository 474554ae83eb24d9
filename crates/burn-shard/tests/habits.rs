//! What one does to a module between steps, under every strategy: it has the result of plain data
//! parallel, bit for bit, or it is refused on all ranks with the parameter and the way out named.

#![allow(clippy::unwrap_used, reason = "a test ends at the first error")]

mod common;
#[path = "common/fill.rs"]
mod fill;
#[path = "habits/freezing.rs"]
mod freezing;
#[path = "habits/graphs.rs"]
mod graphs;
#[path = "habits/maps.rs"]
mod maps;
#[path = "common/pair.rs"]
mod pair;
#[path = "habits/ranks.rs"]
mod ranks;
#[path = "habits/records.rs"]
mod records;
