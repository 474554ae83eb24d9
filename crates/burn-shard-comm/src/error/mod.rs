//! Everything that can go wrong, with the numbers needed to find out where.

mod nature;

use std::{sync::Arc, time::Duration};

use crate::{
    call::Call, communicator::Collective, dtype::DType, placement::PlacementError,
    rendezvous::RendezvousError,
};

/// What a collective refuses or how it fails.
///
/// *Refusals* happen before anything was sent and leave the group usable; *failures* poison it.
/// [`Error::is_refusal`] tells which is which. `rank` is the rank that returns the error.
#[non_exhaustive]
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// Refusal: a group without ranks.
    #[error("a group needs at least one rank (world_size is 0)")]
    NoRanks,

    /// Refusal: nothing says which rank this process is.
    #[error(
        "no launcher has told this process its rank (start it with burn-shard launch, torchrun, srun or mpirun; for ranks that are threads, use ProcessGroup::spawn)"
    )]
    NoLauncher,

    /// Refusal: the launcher's variables do not say where this process stands.
    #[error(transparent)]
    Placement(Box<PlacementError>),

    /// Failure: the ranks, which are processes, did not find each other.
    #[error(transparent)]
    Rendezvous(Box<RendezvousError>),

    /// Refusal: the mean of integers has no exact result.
    #[error(
        "rank {rank}: {collective} cannot take the mean of {dtype} (use sum and divide, or a float dtype)"
    )]
    MeanOfIntegers {
        /// The rank that was refused.
        rank: usize,
        /// What it called.
        collective: Collective,
        /// Its element type.
        dtype: DType,
    },

    /// Refusal: no such root.
    #[error("rank {rank}: broadcast from root {root}, but ranks are 0..{world_size}")]
    RootOutOfRange {
        /// The rank that was refused.
        rank: usize,
        /// The root it named.
        root: usize,
        /// Ranks in the group.
        world_size: usize,
    },

    /// Refusal: the root has nothing to send.
    #[error("rank {rank}: broadcast on the root without an input (the root passes Some(input))")]
    RootWithoutInput {
        /// The rank that was refused.
        rank: usize,
    },

    /// Refusal: a rank other than the root wants to send.
    #[error("rank {rank}: broadcast with an input, but root is {root} (only the root passes one)")]
    InputOutsideRoot {
        /// The rank that was refused.
        rank: usize,
        /// The root it named.
        root: usize,
    },

    /// Refusal: a segment is absent where zeros cannot stand for it.
    #[error(
        "rank {rank}: {collective} input segment {segment} is absent (only reductions take absent segments)"
    )]
    AbsentSegment {
        /// The rank that was refused.
        rank: usize,
        /// What it called.
        collective: Collective,
        /// The absent segment.
        segment: usize,
    },

    /// Refusal: input and output hold different elements.
    #[error("rank {rank}: {collective} input is {input}, output is {output}")]
    DTypeDiffers {
        /// The rank that was refused.
        rank: usize,
        /// What it called.
        collective: Collective,
        /// Elements of the input.
        input: DType,
        /// Elements of the output.
        output: DType,
    },

    /// Refusal: input and output have different numbers of segments.
    #[error("rank {rank}: {collective} input has {input} segments, output has {output}")]
    SegmentCountDiffers {
        /// The rank that was refused.
        rank: usize,
        /// What it called.
        collective: Collective,
        /// Segments of the input.
        input: usize,
        /// Segments of the output.
        output: usize,
    },

    /// Refusal: the lengths of an input and an output segment do not fit each other.
    #[error(
        "rank {rank}: {collective} segment {segment} of world size {world_size}: input has {input_numel} elements, output has {output_numel} (one is to be shard_numel of the other for all_gather and reduce_scatter, the same otherwise)"
    )]
    NumelDiffers {
        /// The rank that was refused.
        rank: usize,
        /// What it called.
        collective: Collective,
        /// The segment.
        segment: usize,
        /// Ranks in the group.
        world_size: usize,
        /// Elements of the input segment.
        input_numel: usize,
        /// Elements of the output segment.
        output_numel: usize,
    },

    /// Refusal: a segment hands out other bytes than its length says, or badly aligned ones.
    #[error(
        "rank {rank}: {collective} segment {segment} should be {numel} {dtype} ({expected_bytes} bytes, aligned), but is {found_bytes} bytes (aligned: {aligned})"
    )]
    BadSegment {
        /// The rank that was refused.
        rank: usize,
        /// What it called.
        collective: Collective,
        /// The segment.
        segment: usize,
        /// Its element type.
        dtype: DType,
        /// Elements it claims.
        numel: usize,
        /// Bytes that many elements have.
        expected_bytes: usize,
        /// Bytes it handed out.
        found_bytes: usize,
        /// Whether these are aligned to the element.
        aligned: bool,
    },

    /// Refusal: the segments are in the memory of a device.
    #[error(
        "rank {rank}: {collective} of segments in a device's memory, which this communicator cannot reach (copy them to the host, or use a communicator for that device)"
    )]
    DeviceSegments {
        /// The rank that was refused.
        rank: usize,
        /// What it called.
        collective: Collective,
    },

    /// Refusal: the segments are in the memory of another device than the communicator's, or of
    /// another kind of device.
    #[error(
        "rank {rank}: {collective} on device {expected} of segments on {} (one communicator serves one device)",
        found.map_or_else(|| "a device of another kind".to_owned(), |found| format!("device {found}"))
    )]
    OtherDevice {
        /// The rank that was refused.
        rank: usize,
        /// What it called.
        collective: Collective,
        /// The device of the communicator.
        expected: usize,
        /// The device of the segments.
        found: Option<usize>,
    },

    /// Refusal: the communicator cannot reduce this element type where the segments are.
    #[error(
        "rank {rank}: {backend} cannot {collective} {dtype} in a device's memory (use another dtype, or segments on the host)"
    )]
    UnsupportedDType {
        /// The rank that was refused.
        rank: usize,
        /// What it called.
        collective: Collective,
        /// Its element type.
        dtype: DType,
        /// What the communicator is made of.
        backend: &'static str,
    },

    /// Failure: the library below the communicator failed on this rank.
    #[error("rank {rank}: {collective} #{sequence} failed in {backend}: {message}")]
    Backend {
        /// The rank that returns the error.
        rank: usize,
        /// What it called.
        collective: Collective,
        /// Number of the collective.
        sequence: u64,
        /// What the communicator is made of.
        backend: &'static str,
        /// What the library said.
        message: String,
    },

    /// Failure: the ranks did not call the same collective; every rank gets this.
    #[error("rank {rank}: ranks disagree on collective #{sequence}: {}", describe(.calls.iter().enumerate()))]
    Mismatch {
        /// The rank that returns the error.
        rank: usize,
        /// Number of the collective.
        sequence: u64,
        /// What each rank called, in rank order.
        calls: Arc<[Call]>,
    },

    /// Failure: some ranks did not arrive in time.
    #[error("rank {rank}: {collective} #{sequence} waited {waited:?} for ranks {missing:?}")]
    Deadline {
        /// The rank that returns the error.
        rank: usize,
        /// What it called.
        collective: Collective,
        /// Number of the collective.
        sequence: u64,
        /// How long it waited.
        waited: Duration,
        /// Ranks that had not arrived.
        missing: Vec<usize>,
    },

    /// Failure: some ranks have left the group and will never arrive.
    #[error(
        "rank {rank}: {collective} #{sequence} cannot complete, ranks {missing:?} have left the group (returned, or dropped their handles)"
    )]
    RankLeft {
        /// The rank that returns the error.
        rank: usize,
        /// What it called.
        collective: Collective,
        /// Number of the collective.
        sequence: u64,
        /// Ranks that left without taking part.
        missing: Vec<usize>,
    },

    /// Failure: the group was poisoned while this rank waited.
    #[error(
        "rank {rank}: {collective} #{sequence} was interrupted while waiting for ranks {missing:?}: {cause}"
    )]
    Interrupted {
        /// The rank that returns the error.
        rank: usize,
        /// What it called.
        collective: Collective,
        /// Number of the collective.
        sequence: u64,
        /// Ranks that had not arrived.
        missing: Vec<usize>,
        /// What poisoned the group.
        #[source]
        cause: Arc<Error>,
    },

    /// Failure: a rank called [`abort`](crate::Communicator::abort).
    #[error("rank {rank} aborted: {reason}")]
    Aborted {
        /// The rank that aborted.
        rank: usize,
        /// Why.
        reason: String,
    },

    /// Failure: a rank panicked.
    #[error("rank {rank} panicked: {message}")]
    RankPanicked {
        /// The rank that panicked.
        rank: usize,
        /// What it said.
        message: String,
    },

    /// Failure: the process of a rank ended without a word, or the connection to it broke.
    #[error("rank {rank}: rank {peer} is gone without a word: {message}")]
    RankDied {
        /// The rank that noticed.
        rank: usize,
        /// The rank that is gone.
        peer: usize,
        /// What the system said.
        message: String,
    },

    /// Failure: a rank sent what no rank of this version sends at this point.
    #[error("rank {rank}: rank {peer} is out of step: it {message}")]
    OutOfStep {
        /// The rank that noticed.
        rank: usize,
        /// The rank that sent it.
        peer: usize,
        /// What it sent, and what was expected.
        message: String,
    },

    /// Failure: [`Recording`](crate::Recording) was told to fail this call.
    #[error("rank {rank}: call {call} ({collective}) fails as it was told to")]
    Injected {
        /// The rank that fails.
        rank: usize,
        /// Number of the call on that rank, from 0.
        call: u64,
        /// What it called.
        collective: Collective,
    },

    /// Failure: the threads of a rank could not be started.
    #[error("rank {rank}: cannot start {threads} threads: {message}")]
    Threads {
        /// The rank without threads.
        rank: usize,
        /// How many it was to have.
        threads: usize,
        /// What the thread pool said.
        message: String,
    },

    /// Refusal or failure of a sub-group, as [`Communicator::split`](crate::Communicator::split) makes them.
    #[error("{} (in the sub-group of color {color}, ranks {ranks:?})", with_ranks(.error, .ranks))]
    SubGroup {
        /// The color that its ranks have split with.
        color: usize,
        /// Its ranks in order, as the group numbers them that all sub-groups come from. So do ranks in `error`.
        ranks: Arc<[usize]>,
        /// What went wrong.
        #[source]
        error: Arc<Error>,
    },

    /// Refusal: the communicator has no sub-groups.
    #[error("rank {rank}: this communicator cannot be split into sub-groups")]
    CannotSplit {
        /// The rank that was refused.
        rank: usize,
    },

    /// Failure: the group was poisoned before this call.
    #[error("rank {rank}: {collective} in a poisoned group: {cause}")]
    Poisoned {
        /// The rank that returns the error.
        rank: usize,
        /// What it called.
        collective: Collective,
        /// What poisoned the group.
        #[source]
        cause: Arc<Error>,
    },
}

impl From<PlacementError> for Error {
    fn from(error: PlacementError) -> Self {
        Self::Placement(Box::new(error))
    }
}

impl From<RendezvousError> for Error {
    fn from(error: RendezvousError) -> Self {
        Self::Rendezvous(Box::new(error))
    }
}

/// The text of `error`, where what a sub-group's ranks called has the numbers of `ranks`.
pub(crate) fn with_ranks(error: &Error, ranks: &[usize]) -> String {
    if let Error::Mismatch {
        rank,
        sequence,
        calls,
    } = error
    {
        let calls = describe(ranks.iter().copied().zip(&**calls));
        return format!("rank {rank}: ranks disagree on collective #{sequence}: {calls}");
    }
    error.to_string()
}

fn describe<'a>(calls: impl Iterator<Item = (usize, &'a Call)> + Clone) -> String {
    let parts: Vec<String> = calls
        .clone()
        .map(|(rank, call)| format!("rank {rank}: {call}"))
        .collect();
    let mut text = parts.join("; ");
    if calls.clone().any(|(_, call)| !call.description.is_empty()) {
        text.push_str(
            " (usual cause: a forward, backward, step or read that only some of the ranks ran, or a branch that depends on a rank's data)",
        );
    }
    text
}
