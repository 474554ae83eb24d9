//! NCCL as a communicator.
//!
//! [`NcclCommunicator`] is one rank: it puts collectives on a stream of its own, next to which a
//! *control group* (ranks as threads, or processes connected by TCP) decides who is which rank, carries
//! NCCL's id, compares what the ranks call, and tells all of them when one fails. NCCL itself can do none
//! of these: ranks that call different things hang, or get garbage.
//!
//! | module | what |
//! |---|---|
//! | `library`, `api` | finding `libnccl.so.2` at run time; its functions |
//! | `group`, `comm` | checked calls: lengths, codes, groups, waits that end |
//! | `memory`, `cuda` | the memory NCCL works on; a GPU's, with the feature `cuda` |
//! | `device` | segments in that memory, and their owner's part |
//! | `stage` | segments on the host: to the device and back |
//! | `in_flight`, `work` | what was started: waiting, failing, results |
//! | `communicator`, `collectives` | how ranks begin and end, and the collectives |
//!
//! # Who may touch a buffer when
//!
//! Segments may be on the host; then they are copied to the device and back, which suits control values
//! and little else. Or they are in the device's memory: then [`Segments::device`] returns a
//! [`DeviceSegments`], NCCL works on the very memory, and nobody waits on the host in between.
//!
//! Order between the owner's streams and ours comes from two hooks of the memory's [`Owner`]:
//!
//! 1. [`Owner::before`], when a collective is started: what is put on our stream afterwards sees all that
//!    the owner has launched, on whichever of its streams ([`Memory::wait_for`] each of them).
//! 2. Our stream now owns the memory. Inputs are only read, and so may the owner; outputs are ours alone.
//! 3. [`Owner::after`], once everything is on our stream: what the owner launches afterwards waits for
//!    it, and so does every reuse of the memory ([`Memory::hold_up`] its streams).
//!
//! Both return at once. An `all_gather` or broadcast into device memory returns as soon as it is on the
//! stream. A reduction keeps its result in memory of its own until [`Work::finish`], which puts a copy to
//! the output on the stream, between the output's own hooks, and returns. A thread watches what nobody waits
//! for: a GPU that hangs, a rank that calls something else or dies becomes an abort within the deadline,
//! and the next call of each rank says why.
//!
//! NCCL works without a copy where lengths allow it: an `all_gather` whose output is `world_size` times its
//! input, a `reduce_scatter` whose input is `world_size` times its output. Others go through padded
//! scratch memory. The shard of an `all_gather` may be a view of its output.
//!
//! # Errors
//!
//! As for every communicator. What fails in NCCL or the driver is [`Error::Backend`] on the rank where
//! it fails, with the code and the text; the others hear of it through the control group. The
//! collective of an integer type that NCCL lacks (16 bits) works from the host, and is refused on the
//! device.
//!
//! [`Segments::device`]: burn_shard_comm::Segments::device
//! [`Work::finish`]: burn_shard_comm::Work::finish
//! [`Error::Backend`]: burn_shard_comm::Error::Backend

mod api;
mod collectives;
mod comm;
mod communicator;
#[cfg(feature = "cuda")]
mod cuda;
mod device;
mod error;
mod group;
mod in_flight;
mod library;
mod memory;
mod stage;
mod work;

pub use communicator::NcclCommunicator;
#[cfg(feature = "cuda")]
pub use communicator::process_group;
#[cfg(feature = "cuda")]
pub use cuda::Cuda;
pub use device::{DeviceSegments, Owner};
pub use error::NcclError;
pub use library::{Nccl, Version};
pub use memory::{Event, Memory};
