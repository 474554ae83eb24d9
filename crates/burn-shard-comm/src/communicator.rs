//! The seam between sharding and transport: what a backend has to provide.
//!
//! Nothing here moves a byte. The reference implementation is `local.rs`; the suite that every
//! implementation has to pass is `conformance`.

use std::{fmt, sync::Arc, time::Duration};

use crate::{
    call::Call,
    error::Error,
    segments::{SegmentLayout, Segments, SegmentsMut},
    split::Members,
    traffic::Traffic,
};

/// How the elements of all ranks become one.
///
/// Elements are combined in rank order, `((r0 + r1) + r2) + ...`, whatever the world size, the
/// length of the buffer or the number of threads, so that a result depends on nothing but the inputs.
/// `f16` and `bf16` are accumulated in `f32` and rounded once at the end. An absent contribution
/// ([`Segments::bytes`] is `None`) counts as literal `+0.0`: `-0.0` plus absent is `+0.0`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    /// The sum; integers wrap around (`wrapping_add`).
    Sum,
    /// The sum divided by the world size, rounded as that division; refused on integers.
    Mean,
    /// The largest; a NaN on any rank gives NaN, of equal values (`-0.0` and `+0.0`) the one of the
    /// lowest rank is kept.
    Max,
    /// The smallest; NaN and equal values as for [`ReduceOp::Max`].
    Min,
}

impl ReduceOp {
    /// The name used in messages.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sum => "sum",
            Self::Mean => "mean",
            Self::Max => "max",
            Self::Min => "min",
        }
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The kinds of collective, as named in errors and counted in [`Traffic`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Collective {
    /// See [`Communicator::all_gather`].
    AllGather,
    /// See [`Communicator::reduce_scatter`].
    ReduceScatter,
    /// See [`Communicator::all_reduce`].
    AllReduce,
    /// See [`Communicator::broadcast`].
    Broadcast,
    /// See [`Communicator::barrier`].
    Barrier,
}

impl Collective {
    /// Every collective, in declaration order.
    pub const ALL: [Self; 5] = [
        Self::AllGather,
        Self::ReduceScatter,
        Self::AllReduce,
        Self::Broadcast,
        Self::Barrier,
    ];

    /// The name used in messages.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::AllGather => "all_gather",
            Self::ReduceScatter => "reduce_scatter",
            Self::AllReduce => "all_reduce",
            Self::Broadcast => "broadcast",
            Self::Barrier => "barrier",
        }
    }
}

impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Elements of one rank's shard of a buffer of `numel` elements: `numel / world_size`, rounded up.
///
/// Rank `r` owns `[r * s, min((r + 1) * s, numel))`; what is missing up to `s` elements is padding.
///
/// # Panics
///
/// When `world_size` is zero.
#[must_use]
pub const fn shard_numel(numel: usize, world_size: usize) -> usize {
    numel.div_ceil(world_size)
}

/// One rank's end of a process group.
///
/// # Ordering
///
/// All ranks have to start the same collectives in the same order, with the same element type,
/// operation, root and lengths. Calls are numbered per rank; what carries the same number is one
/// collective. A `Communicator` may be called from several threads of its rank, but then the order
/// of their calls is the caller's business. Unfinished [`Work`] may be waited for in any order, on
/// each rank in another one, or not at all.
///
/// # Errors
///
/// A *refusal* ([`Error::is_refusal`]) happens before anything was sent and leaves the group usable.
/// Refusals that follow from arguments alike on all ranks (the mean of integers, a root out of range)
/// happen on all of them. Those that follow from one rank's own buffers (an output of the wrong
/// length, an absent input of `all_gather`) happen there alone: the others have started the
/// collective and meet their deadline if the refused rank does not repeat the call corrected, or
/// calls [`Communicator::abort`].
///
/// A *failure* happens after that and poisons the group: the calls that cannot complete return an
/// error that names the collective, its number and the missing ranks, and later calls return
/// [`Error::Poisoned`].
pub trait Communicator: Send + Sync + fmt::Debug {
    /// Number of this rank, below [`Communicator::world_size`].
    fn rank(&self) -> usize;

    /// Number of ranks.
    fn world_size(&self) -> usize;

    /// Who is in this group. A communicator that has sub-groups, and one that wraps another, says so itself.
    fn members(&self) -> Members {
        Members::root(self.rank(), self.world_size())
    }

    /// Number of the device in whose memory segments may be ([`Segments::device`]), as the machine
    /// counts its devices of that kind. `None`: segments have to be in host memory.
    fn memory_device(&self) -> Option<usize> {
        None
    }

    /// How long a call of this rank waits for the others.
    fn deadline(&self) -> Duration;

    /// Sets how long later calls of this rank wait for the others.
    fn set_deadline(&self, deadline: Duration);

    /// Starts a collective of which every rank ends with the concatenation of all ranks' inputs.
    ///
    /// `numels[i]` is `n_i`, the number of elements of the unsharded segment `i`. After
    /// [`Work::finish`], `output[i]` is `input[i]` of rank 0, then of rank 1, ..., cut after `n_i`
    /// elements.
    ///
    /// # Shapes
    ///
    /// | buffer | elements | dtype |
    /// |---|---|---|
    /// | `input[i]` | `shard_numel(n_i, world_size)`, none absent | any |
    /// | `output[i]` of `finish` | `n_i` | that of `input` |
    ///
    /// # Memory
    ///
    /// The input is held until the slowest rank has finished or dropped its [`Work`]. A backend may hold
    /// the result until then as well; one that is finished before it has begun to exchange anything is
    /// received straight into the output.
    ///
    /// # Errors
    ///
    /// Refuses an absent segment and an input whose lengths do not fit `numels`. Returns
    /// [`Error::Poisoned`] in a poisoned group. Everything else is reported by the [`Work`].
    fn all_gather(
        &self,
        input: Arc<dyn Segments>,
        numels: &[usize],
    ) -> Result<Box<dyn Work>, Error>;

    /// Starts a reduction of which every rank ends with its own shard.
    ///
    /// After [`Work::finish`], `output[i]` on rank `r` is the reduced elements
    /// `[r * s, min((r + 1) * s, n_i))` with `s = shard_numel(n_i, world_size)`, then zeros up to `s`.
    ///
    /// # Shapes
    ///
    /// | buffer | elements | dtype |
    /// |---|---|---|
    /// | `input[i]` | `n_i`, may be absent | any, floats for [`ReduceOp::Mean`] |
    /// | `output[i]` of `finish` | `shard_numel(n_i, world_size)` | that of `input` |
    ///
    /// # Memory
    ///
    /// Nothing beyond the buffers. The input is held until the slowest rank has finished or dropped
    /// its [`Work`].
    ///
    /// # Errors
    ///
    /// Refuses the mean of integers and an input that is not aligned. Returns [`Error::Poisoned`] in
    /// a poisoned group. Everything else is reported by the [`Work`].
    fn reduce_scatter(
        &self,
        input: Arc<dyn Segments>,
        op: ReduceOp,
    ) -> Result<Box<dyn Work>, Error>;

    /// Starts a reduction of which every rank ends with the whole result.
    ///
    /// # Shapes
    ///
    /// | buffer | elements | dtype |
    /// |---|---|---|
    /// | `input[i]` | `n_i`, may be absent | any, floats for [`ReduceOp::Mean`] |
    /// | `output[i]` of `finish` | `n_i` | that of `input` |
    ///
    /// # Memory
    ///
    /// One scratch copy of the result for the whole group, until the slowest rank has finished or
    /// dropped its [`Work`]; a backend may keep some of it for the next (ranks as threads: up to
    /// 64 MiB per group). Inputs are released by the time [`Work::wait`] returns.
    ///
    /// # Errors
    ///
    /// The errors of [`Communicator::reduce_scatter`].
    fn all_reduce(&self, input: Arc<dyn Segments>, op: ReduceOp) -> Result<Box<dyn Work>, Error>;

    /// Starts a collective of which every rank ends with the input of rank `root`.
    ///
    /// The root passes `Some(input)`, all others `None`. All pass the `layout` of that input, which is
    /// that of the output of [`Work::finish`]. The root may finish too, or drop its [`Work`].
    ///
    /// # Memory
    ///
    /// Buffers are held as by [`Communicator::all_gather`].
    ///
    /// # Errors
    ///
    /// Refuses a root out of range, an input that is missing on the root or present elsewhere, an
    /// absent segment, and on the root a `layout` that is not that of the input. Returns
    /// [`Error::Poisoned`] in a poisoned group. Everything else is reported by the [`Work`].
    fn broadcast(
        &self,
        input: Option<Arc<dyn Segments>>,
        layout: SegmentLayout,
        root: usize,
    ) -> Result<Box<dyn Work>, Error>;

    /// Returns once every rank has called it.
    ///
    /// # Errors
    ///
    /// Fails as described at [`Communicator`].
    fn barrier(&self) -> Result<(), Error>;

    /// Makes sub-groups: one of the ranks of each color, which are numbered by `key`, and by their number here
    /// where keys are equal. A rank without a color is in none. (`MPI_Comm_split`, `ncclCommSplit`.)
    ///
    /// A collective of this group that waits for all ranks, and counts as one `all_gather`. Sub-groups may be
    /// split again, and a rank may be in sub-groups of several splits.
    ///
    /// # Ordering
    ///
    /// Collectives of a sub-group are combined in the order of its own ranks, and numbered on their own. Where
    /// groups share ranks, these have to start the collectives of all of them in one order, as if they were of
    /// one group.
    ///
    /// # Errors
    ///
    /// Refuses if the communicator has no sub-groups. Fails as described at [`Communicator`]. Errors of a
    /// sub-group are [`Error::SubGroup`]; its failure poisons the group that was split, and the other way round.
    /// A sub-group begins with this group's deadline; its traffic counts here as well.
    fn split(
        &self,
        color: Option<usize>,
        key: usize,
    ) -> Result<Option<Arc<dyn Communicator>>, Error> {
        let _ = (color, key);
        Err(Error::CannotSplit { rank: self.rank() })
    }

    /// Starts a collective that moves nothing: it is over once every rank has announced the same call.
    ///
    /// For communicators that move data by other means and let this one compare calls, notice ranks
    /// that are gone, and tell all ranks of failures. Announcements and other collectives are numbered
    /// together, but announcements do not count as [`Traffic`]. [`Work::finish`] writes nothing.
    ///
    /// # Errors
    ///
    /// Returns [`Error::Poisoned`] in a poisoned group. Everything else is reported by the [`Work`], as
    /// described at [`Communicator`].
    fn announce(&self, call: Call) -> Result<Box<dyn Work>, Error>;

    /// What poisoned the group, if this rank has heard of it; never waits.
    fn failure(&self) -> Option<Arc<Error>>;

    /// Poisons the group on all ranks: calls that wait and later calls return errors.
    ///
    /// Does nothing if the group is poisoned already: the first cause stays.
    fn abort(&self, reason: &str);

    /// Calls this rank has made and bytes it received from other ranks, since the start.
    fn traffic(&self) -> Traffic;
}

/// A collective that was started and is not finished.
///
/// Starting never waits. Dropping it is allowed and gives up this rank's result only: the other ranks
/// still get theirs.
pub trait Work: Send {
    /// Whether [`Work::wait`] would return without waiting for a rank that has not arrived, be it
    /// with an error.
    fn is_ready(&self) -> bool;

    /// Waits until the collective can be finished without waiting.
    ///
    /// For `all_reduce`: after `Ok`, no other rank holds this rank's input any more, nor does the
    /// group.
    ///
    /// # Errors
    ///
    /// Fails as described at [`Communicator`].
    fn wait(&mut self) -> Result<(), Error>;

    /// Waits if needed, then writes this rank's result.
    ///
    /// # Errors
    ///
    /// Fails as [`Work::wait`]. Then refuses an output that does not fit; the group stays usable.
    fn finish(self: Box<Self>, output: &mut dyn SegmentsMut) -> Result<(), Error>;
}
