//! Process groups and collectives for sharded training, without Burn.
//!
//! A *group* is a fixed number of *ranks* (`world_size`) that run the same program on different data.
//! What they exchange goes through *collectives*: calls that all ranks make, in the same order, with
//! buffers of the same lengths.
//!
//! | collective | before, on rank `r` | after, on rank `r` |
//! |---|---|---|
//! | `all_gather` | shard `r` | all shards |
//! | `reduce_scatter` | a full buffer | shard `r` of the sum |
//! | `all_reduce` | a full buffer | the sum |
//! | `broadcast` | a full buffer on the root | the root's buffer |
//! | `barrier` | | every rank has arrived |
//!
//! A *shard* of `n` elements is [`shard_numel`]`(n, world_size)` of them, the last ones padded.
//!
//! ```
//! # use burn_shard_comm::{Error, ProcessGroup, ReduceOp};
//! # fn main() -> Result<(), Error> {
//! let shards = ProcessGroup::spawn(2, |group| -> Result<[f32; 2], Error> {
//!     let gradient = if group.rank() == 0 { [1.0, 2.0, 3.0] } else { [3.0, 4.0, 5.0] };
//!     let mut shard = [0.0f32; 2];
//!     group.reduce_scatter(&gradient, &mut shard, ReduceOp::Mean)?;
//!     let mut full = [0.0f32; 3];
//!     group.all_gather(&shard, &mut full)?;
//!     assert_eq!(full, [2.0, 3.0, 4.0]);
//!     Ok(shard)
//! })?;
//! let shards: Result<Vec<_>, Error> = shards.into_iter().collect();
//! assert_eq!(shards?, [[2.0, 3.0], [4.0, 0.0]]);
//! # Ok(())
//! # }
//! ```
//!
//! # What is where
//!
//! [`Communicator`] is what a backend provides: lists of buffers ([`Segments`]), unfinished
//! collectives ([`Work`]). [`ProcessGroup`] wraps one and adds collectives on plain slices. [`Local`]
//! starts ranks as threads, the reference backend. [`Pairwise`] makes a communicator of anything that
//! moves bytes between processes ([`Transport`]). [`Recording`] wraps a communicator to count, delay or
//! fail its calls, or to keep the last ones for the [`flight`] recorder. The suite that every backend has to pass is the
//! module `conformance`, behind the feature of that name.
//!
//! Ranks that are processes: [`ProcessGroup::from_env`] joins the group that a launcher started. Its parts
//! are [`Placement`], where a process stands, [`Rendezvous`], how processes find each other, and
//! [`TcpTransport`].
//!
//! # The key decision: inputs are owned
//!
//! The input of a collective is an `Arc<dyn Segments>`, not a borrowed slice. Ranks that are threads
//! can then read each other's buffers without a copy, and no rank ever has to wait for a slower one
//! to have read its input: it starts a reduction, goes on, and may even leave. With borrowed inputs
//! every collective would need a second barrier, or a copy. Outputs are borrowed, since only their
//! own rank writes them.
//!
//! # Order and determinism
//!
//! Elements are combined in rank order, whoever does the work and in however many threads: a
//! result is a function of the inputs, bit by bit ([`ReduceOp`]). Calls carry a number per rank; ranks
//! that call different things under one number are told what each of them called
//! ([`Error::Mismatch`]).
//!
//! # Starting and finishing, sub-groups
//!
//! Each collective that moves something starts without waiting and returns a [`Work`]; `wait` waits, `finish` writes
//! the result. So a gather can be under way while the rank computes. [`ProcessGroup::split`] makes sub-groups, such
//! as the rows and columns of a mesh.
//!
//! # Errors and poisoning
//!
//! A *refusal* comes before communication and changes nothing. Everything else is a *failure*: no
//! rank can know how far the others came, so the group is poisoned and each later call returns
//! [`Error::Poisoned`] with the cause. No wait is without a deadline, and a rank that panics, returns or
//! drops its last handle is noticed at once by the ranks that need it. [`Communicator`] tells more.
#![forbid(unsafe_code)]

mod agreement;
mod call;
mod communicator;
#[cfg(feature = "conformance")]
pub mod conformance;
mod deadline;
mod dtype;
mod ending;
mod error;
pub mod flight;
mod from_env;
mod group;
mod hub;
mod local;
mod pairwise;
mod parallel;
mod pieces;
mod placement;
mod recording;
mod reduce;
mod rendezvous;
mod replace;
mod segments;
mod sockets;
mod spawn;
mod split;
mod tcp;
mod time;
mod traffic;
mod transport;

#[cfg(fuzzing)]
#[doc(hidden)]
pub use rendezvous::wire_checks;

pub use call::{Call, Caller};
pub use communicator::{Collective, Communicator, ReduceOp, Work, shard_numel};
pub use dtype::{DType, Element};
pub use error::Error;
pub use group::ProcessGroup;
pub use pairwise::Pairwise;
pub use placement::{Launcher, Placement, PlacementError, Token};
pub use recording::Recording;
pub use rendezvous::{JobFault, Rendezvous, RendezvousError, Store};
pub use segments::{
    MaybeSegment, OwnedSegments, SegmentLayout, Segments, SegmentsMut, SlicesMut, SparseSegments,
};
pub use spawn::Local;
pub use split::{Members, TrafficCounter};
pub use tcp::TcpTransport;
pub use traffic::{Count, Traffic};
pub use transport::{Fault, LIMIT_GRANULARITY, Limit, Transport};
