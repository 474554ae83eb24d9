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
//! | `stage`, `staging` | segments as NCCL takes them; page-locked memory for those on the host |
//! | `in_flight`, `work`, `numbers` | what was started: waiting, failing, results |
//! | `libdevice`, [`doctor`] | what else a machine lacks for training |
//! | `communicator`, `collectives`, `split` | how ranks begin and end, the collectives, sub-groups |
//!
//! # Who may touch a buffer when
//!
//! Segments may be on the host; then they are copied to the device and back, through page-locked memory,
//! which suits control values and little else. Or they are in the device's memory: then
//! [`Segments::device`] returns a [`DeviceSegments`], NCCL reads the very memory, and nobody waits on the
//! host in between.
//!
//! Order between the owner's streams and ours comes from two hooks of the memory's [`Owner`]:
//!
//! 1. When a collective is started, [`Owner::before`] of its input: what is put on our stream afterwards sees
//!    all that the owner has launched, on whichever of its streams ([`Memory::wait_for`] each of them).
//! 2. Until our stream has passed the collective, we hold the input's [`Segments`]; whoever made them sees
//!    to it that nobody writes to the memory or reuses it while they live. The owner's streams do not wait:
//!    what they do meanwhile overlaps. The result is in memory of ours.
//! 3. [`Work::finish`] puts a copy to the output on our stream, between [`Owner::before`] and
//!    [`Owner::after`] of the output, and returns: what the owner launches afterwards, and any reuse of
//!    that memory, waits for the result ([`Memory::hold_up`] its streams).
//!
//! # Nothing hangs
//!
//! A thread looks after each collective from its start: a GPU that hangs, a rank that calls something else
//! or dies becomes an abort within the deadline, and the next call of each rank says why. No call waits in
//! the driver behind a collective: host memory that is copied is page-locked, and it, like the streams and
//! the pool of device memory, is allocated before the first collective.
//!
//! NCCL reads inputs without a copy where lengths allow it: any `all_gather` and broadcast, and a
//! `reduce_scatter` whose input is `world_size` times its output. Others go through padded scratch memory.
//!
//! # Sub-groups
//!
//! [`ProcessGroup::split`] gives each sub-group an NCCL communicator of its own, beside a sub-group of the control
//! group. All of a rank's groups share its stream and its page-locked memory: collectives run in the order in which
//! the rank has started them in any group, which has to be the same on all ranks that groups share. A failure in one
//! poisons all.
//!
//! # Errors
//!
//! Errors are those of every communicator. What fails in NCCL or the driver is [`Error::Backend`] on the
//! rank where it fails, with the code and the text; the others hear of it through the control group. The
//! collective of an integer type that NCCL lacks (16 bits) works from the host, and is refused on the
//! device.
//!
//! [`ProcessGroup::split`]: burn_shard_comm::ProcessGroup::split
//! [`Segments`]: burn_shard_comm::Segments
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
pub mod doctor;
mod error;
mod group;
mod in_flight;
mod libdevice;
mod library;
mod memory;
mod numbers;
mod split;
mod stage;
mod staging;
mod work;

pub use communicator::NcclCommunicator;
#[cfg(feature = "cuda")]
pub use communicator::process_group;
#[cfg(feature = "cuda")]
pub use cuda::Cuda;
pub use device::{DeviceSegments, Owner};
pub use error::{CudaVersion, NcclError};
pub use libdevice::find_libdevice;
pub use library::{Nccl, Version};
pub use memory::{Event, Memory};
