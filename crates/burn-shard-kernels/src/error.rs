//! Why a step is refused. Every refusal comes before anything is written.

/// Why a step was refused; nothing has been written. The variants from [`WrongDtype`] on are of the
/// kernels for devices only (feature `cubecl`).
///
/// [`WrongDtype`]: Error::WrongDtype
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A slice does not have as many elements as the parameter.
    #[error("{slice} has {numel} elements where the parameter has {param_numel}")]
    NumelMismatch {
        /// The slice that differs.
        slice: &'static str,
        /// Its number of elements.
        numel: usize,
        /// The number of elements of the parameter.
        param_numel: usize,
    },
    /// A hyper-parameter is NaN or infinite, or becomes so when narrowed to `f32`.
    #[error("{name} is {value}, which is not finite in f32")]
    NotFinite {
        /// The hyper-parameter.
        name: &'static str,
        /// Its value.
        value: f64,
    },
    /// The step count is zero or does not fit Burn's `i32`.
    #[error(
        "time is {time}, expected 1..={} (the first step has time 1)",
        i32::MAX
    )]
    TimeOutOfRange {
        /// The step count that was given.
        time: usize,
    },
    /// Adam was given decoupled decay, or AdamW an L2 penalty.
    #[error("{optimizer} has no {decay} weight decay")]
    UnsupportedWeightDecay {
        /// The optimizer that was called.
        optimizer: &'static str,
        /// The kind of decay that was asked for.
        decay: &'static str,
    },
    /// SGD with momentum was given no velocity to update.
    #[error("sgd with momentum needs a velocity")]
    MissingVelocity,
    /// SGD without momentum was given a velocity, which it would leave stale.
    #[error("sgd without momentum was given a velocity of {numel} elements")]
    UnexpectedVelocity {
        /// The number of elements of the velocity.
        numel: usize,
    },
    /// A buffer has a dtype the step does not take there.
    #[error("{buffer} is {found}, expected {expected}")]
    WrongDtype {
        /// The buffer.
        buffer: &'static str,
        /// The dtype, or the first of those, that it may have.
        expected: &'static str,
        /// The dtype it has.
        found: &'static str,
    },
    /// The runtime has no buffers of this dtype.
    #[error("runtime {runtime} has no {dtype} buffers (use f32 there)")]
    UnsupportedDtype {
        /// The dtype that was asked for.
        dtype: &'static str,
        /// The runtime of the client.
        runtime: &'static str,
    },
    /// A view ends beyond its allocation.
    #[error(
        "{numel} elements of {dtype} at element {offset} do not fit into {available_bytes} bytes"
    )]
    OutOfBounds {
        /// First element of the view.
        offset: usize,
        /// Its number of elements.
        numel: usize,
        /// Its dtype.
        dtype: &'static str,
        /// Bytes of the allocation, or of the view it was made from.
        available_bytes: u64,
    },
    /// A view starts where the runtime cannot bind it.
    #[error(
        "a view starts at byte {offset_bytes}, which is not a multiple of {alignment_bytes} \
         (pad tensors to the runtime's memory.alignment)"
    )]
    Misaligned {
        /// Where it starts in its allocation.
        offset_bytes: u64,
        /// What the runtime asks for.
        alignment_bytes: u64,
    },
    /// Two views share elements, and at least one of them would be written.
    #[error("{first} and {second} overlap")]
    Overlap {
        /// The view that would be written.
        first: &'static str,
        /// The other view.
        second: &'static str,
    },
    /// A buffer belongs to another device than the client that was given.
    #[error("a buffer is of another device than the given client of runtime {runtime}")]
    OtherDevice {
        /// The runtime of the client.
        runtime: &'static str,
    },
    /// A buffer that holds one value has more or none.
    #[error("{buffer} has {numel} elements, expected 1")]
    NotScalar {
        /// The buffer.
        buffer: &'static str,
        /// Its number of elements.
        numel: usize,
    },
    /// A range of elements is reversed or ends beyond its buffer.
    #[error("range {start}..{end} does not lie in the {numel} elements of the buffer")]
    RangeOutOfBounds {
        /// First element of the range.
        start: usize,
        /// The element after its last.
        end: usize,
        /// Elements of the buffer.
        numel: usize,
    },
    /// Two ranges share elements, which a step would then change twice, or two slots of a flat buffer.
    #[error("elements {start}.. are given twice: the range before ends at {previous_end}")]
    RangesOverlap {
        /// First element of the later range.
        start: usize,
        /// Where the earlier one ends.
        previous_end: usize,
    },
    /// A tensor has another number of strides than of axes.
    #[error("tensor {index} has {axes} axes but {strides} strides")]
    StridesMismatch {
        /// Position of the tensor in the list.
        index: usize,
        /// Its number of axes.
        axes: usize,
        /// Its number of strides.
        strides: usize,
    },
    /// Some elements of a tensor that is to be written share one place.
    #[error("tensor {index} has elements that overlap: it can be read but not written")]
    SelfOverlap {
        /// Position of the tensor in the list.
        index: usize,
    },
    /// Tensors and slots do not come in pairs.
    #[error("{tensors} tensors for {slots} slots")]
    SlotCount {
        /// Number of tensors.
        tensors: usize,
        /// Number of slots.
        slots: usize,
    },
    /// More tensors are to share a launch than the runtime binds buffers.
    #[error("{tensors} tensors per launch, where runtime {runtime} takes up to {most}")]
    BatchTooLarge {
        /// Tensors per launch that were asked for.
        tensors: usize,
        /// The most that fit beside the flat buffer.
        most: usize,
        /// The runtime of the client.
        runtime: &'static str,
    },
    /// A slot of a flat buffer is shorter than its tensor.
    #[error("slot {index} has room for {padded_numel} elements, its tensor has {numel}")]
    SlotTooSmall {
        /// Position of the tensor in the list.
        index: usize,
        /// Elements of the slot, padding included.
        padded_numel: usize,
        /// Elements of the tensor.
        numel: usize,
    },
}

pub(crate) fn check_numel(
    slice: &'static str,
    numel: usize,
    param_numel: usize,
) -> Result<(), Error> {
    if numel == param_numel {
        Ok(())
    } else {
        Err(Error::NumelMismatch {
            slice,
            numel,
            param_numel,
        })
    }
}

pub(crate) fn check_finite(name: &'static str, value: f64) -> Result<(), Error> {
    if narrow(value).is_finite() {
        Ok(())
    } else {
        Err(Error::NotFinite { name, value })
    }
}

pub(crate) fn check_time(time: usize) -> Result<i32, Error> {
    match i32::try_from(time) {
        Ok(checked) if checked > 0 => Ok(checked),
        Ok(_) | Err(_) => Err(Error::TimeOutOfRange { time }),
    }
}

/// Narrows a scalar as Burn does at each scalar operation: to the nearest `f32`.
#[allow(
    clippy::cast_possible_truncation,
    reason = "the rounding is the point, as in burn-flex"
)]
pub(crate) fn narrow(value: f64) -> f32 {
    value as f32
}
