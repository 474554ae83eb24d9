//! Process groups and collectives for sharded training.
//!
//! Work in progress; the essay follows.
#![forbid(unsafe_code)]

mod call;
mod communicator;
mod dtype;
mod error;
mod group;
mod hub;
mod local;
mod parallel;
mod pieces;
mod recording;
mod reduce;
mod segments;
mod spawn;
mod traffic;

pub use call::Call;
pub use communicator::{Collective, Communicator, ReduceOp, Work, shard_numel};
pub use dtype::{DType, Element};
pub use error::Error;
pub use group::ProcessGroup;
pub use recording::Recording;
pub use segments::{MaybeSegment, OwnedSegments, Segments, SegmentsMut, SlicesMut, SparseSegments};
pub use spawn::Local;
pub use traffic::{Count, Traffic};
