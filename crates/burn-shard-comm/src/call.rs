//! What one rank called, in a form that ranks can compare; and everything it can refuse by itself.

use std::{any::Any, fmt};

use crate::{
    communicator::{Collective, ReduceOp, shard_numel},
    dtype::DType,
    error::Error,
    segments::{SegmentLayout, Segments, SegmentsMut},
    split::Members,
};

/// The header of a collective: has to be equal on all ranks, but for its description.
#[non_exhaustive]
#[derive(Clone, Debug)]
pub struct Call {
    /// Which collective.
    pub collective: Collective,
    /// Element type; none for a barrier.
    pub dtype: Option<DType>,
    /// Operation, for those that reduce.
    pub op: Option<ReduceOp>,
    /// Root, for a broadcast.
    pub root: Option<usize>,
    /// Elements of each segment, unsharded.
    pub numels: Vec<usize>,
    /// What the caller says the elements are, see [`Segments::label`]; 0 for a broadcast.
    pub label: u64,
    /// What the caller says the elements are, for people, see [`Segments::describe`]: empty until an error
    /// needs it, and not compared.
    pub description: String,
}

impl PartialEq for Call {
    fn eq(&self, other: &Self) -> bool {
        let compared = |call: &Self| (call.collective, call.dtype, call.op, call.root, call.label);
        compared(self) == compared(other) && self.numels == other.numels
    }
}

impl Eq for Call {}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 8;
        write!(f, "{}", self.collective)?;
        if let Some(dtype) = self.dtype {
            write!(f, " {dtype}")?;
        }
        if let Some(op) = self.op {
            write!(f, " {op}")?;
        }
        if let Some(root) = self.root {
            write!(f, " from {root}")?;
        }
        if self.dtype.is_some() {
            let shown = &self.numels[..self.numels.len().min(SHOWN)];
            write!(f, " {shown:?}")?;
            if self.numels.len() > SHOWN {
                let total: usize = self.numels.iter().sum();
                write!(f, "... ({} segments, {total} elements)", self.numels.len())?;
            }
            if !self.description.is_empty() {
                write!(f, " of {}", self.description)?;
            } else if self.label != 0 {
                write!(f, " label {}", self.label)?;
            }
        }
        Ok(())
    }
}

impl Call {
    /// With what `input` says its elements are, for an error.
    #[must_use]
    pub fn described(&self, input: Option<&dyn Segments>) -> Self {
        let mut call = self.clone();
        if let Some(input) = input
            && call.description.is_empty()
        {
            call.description = input.describe();
        }
        call
    }

    /// See the table at [`Traffic`](crate::Traffic).
    pub(crate) fn received_bytes(&self, rank: usize, world_size: usize) -> usize {
        let Some(dtype) = self.dtype else { return 0 };
        let elements: usize = self
            .numels
            .iter()
            .map(|&numel| {
                let own = shard_range(numel, rank, world_size).len();
                match self.collective {
                    Collective::AllGather => numel - own,
                    Collective::ReduceScatter => (world_size - 1) * own,
                    Collective::AllReduce => (world_size - 1) * own + (numel - own),
                    Collective::Broadcast if self.root == Some(rank) => 0,
                    Collective::Broadcast => numel,
                    Collective::Barrier => 0,
                }
            })
            .sum();
        elements * dtype.size_bytes()
    }
}

/// The elements of a buffer of `numel` that rank `rank` owns, without padding.
pub(crate) fn shard_range(numel: usize, rank: usize, world_size: usize) -> std::ops::Range<usize> {
    let shard = shard_numel(numel, world_size);
    (rank * shard).min(numel)..((rank + 1) * shard).min(numel)
}

/// Who calls: checks the arguments of a collective and makes its [`Call`], for communicators.
#[derive(Clone, Copy, Debug)]
pub struct Caller {
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
    /// Number of this rank in errors.
    shown: usize,
    reach: Reach,
}

/// Which segments a communicator can read and write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reach {
    Host,
    Devices,
}

impl Caller {
    /// A rank of a communicator that refuses segments in a device's memory.
    #[must_use]
    pub const fn host(rank: usize, world_size: usize) -> Self {
        Self {
            rank,
            world_size,
            shown: rank,
            reach: Reach::Host,
        }
    }

    /// A rank of a communicator that looks at segments in a device's memory itself.
    #[must_use]
    pub const fn devices(rank: usize, world_size: usize) -> Self {
        Self {
            rank,
            world_size,
            shown: rank,
            reach: Reach::Devices,
        }
    }

    /// A rank of a sub-group, or of a group that is none, whose segments are on the host.
    pub(crate) fn member(members: &Members) -> Self {
        Self {
            shown: members.root_rank(),
            ..Self::host(members.rank, members.world_size())
        }
    }

    /// A rank of a group that may be a sub-group, of a communicator that looks at segments in a device's memory
    /// itself.
    #[must_use]
    pub fn device_member(members: &Members) -> Self {
        Self {
            reach: Reach::Devices,
            ..Self::member(members)
        }
    }

    /// The header of the `all_gather` that a [`Communicator::split`](crate::Communicator::split) is: whether a rank
    /// has a color, the color, the key.
    #[must_use]
    pub fn split(self) -> Call {
        Call {
            collective: Collective::AllGather,
            dtype: Some(DType::U64),
            numels: vec![3 * self.world_size],
            ..Self::barrier()
        }
    }

    /// The header of an `all_gather`.
    ///
    /// # Errors
    ///
    /// Refuses as [`Communicator::all_gather`](crate::Communicator::all_gather).
    pub fn all_gather(self, input: &dyn Segments, numels: &[usize]) -> Result<Call, Error> {
        let collective = Collective::AllGather;
        self.present(collective, input)?;
        self.input_bytes(collective, input, false)?;
        self.same_count(collective, input.count(), numels.len())?;
        for (segment, &numel) in numels.iter().enumerate() {
            if shard_numel(numel, self.world_size) != input.numel(segment) {
                return Err(self.numel_differs(collective, segment, input.numel(segment), numel));
            }
        }
        Ok(Call {
            collective,
            dtype: Some(input.dtype()),
            numels: numels.to_vec(),
            label: input.label(),
            ..Self::barrier()
        })
    }

    /// The header of a `reduce_scatter` or an `all_reduce`.
    ///
    /// # Errors
    ///
    /// Refuses as [`Communicator::reduce_scatter`](crate::Communicator::reduce_scatter).
    pub fn reduction(
        self,
        collective: Collective,
        input: &dyn Segments,
        op: ReduceOp,
    ) -> Result<Call, Error> {
        let SegmentLayout { dtype, numels } = SegmentLayout::of(input);
        if op == ReduceOp::Mean && !dtype.is_float() {
            return Err(Error::MeanOfIntegers {
                rank: self.shown,
                collective,
                dtype,
            });
        }
        self.input_bytes(collective, input, true)?;
        Ok(Call {
            collective,
            dtype: Some(dtype),
            op: Some(op),
            numels,
            label: input.label(),
            ..Self::barrier()
        })
    }

    /// The header of a broadcast.
    ///
    /// # Errors
    ///
    /// Refuses as [`Communicator::broadcast`](crate::Communicator::broadcast).
    pub fn broadcast(
        self,
        input: Option<&dyn Segments>,
        layout: SegmentLayout,
        root: usize,
    ) -> Result<Call, Error> {
        let collective = Collective::Broadcast;
        let Self {
            rank: own,
            world_size,
            shown: rank,
            ..
        } = self;
        if root >= world_size {
            return Err(Error::RootOutOfRange {
                rank,
                root,
                world_size,
            });
        }
        let SegmentLayout { dtype, numels } = layout;
        match input {
            Some(_) if own != root => return Err(Error::InputOutsideRoot { rank, root }),
            None if own == root => return Err(Error::RootWithoutInput { rank }),
            None => {}
            Some(input) => {
                self.present(collective, input)?;
                self.input_bytes(collective, input, false)?;
                self.same_dtype(collective, input.dtype(), dtype)?;
                self.same_count(collective, input.count(), numels.len())?;
                for (segment, &numel) in numels.iter().enumerate() {
                    if input.numel(segment) != numel {
                        let own = input.numel(segment);
                        return Err(self.numel_differs(collective, segment, own, numel));
                    }
                }
            }
        }
        Ok(Call {
            collective,
            dtype: Some(dtype),
            root: Some(root),
            numels,
            ..Self::barrier()
        })
    }

    /// Refuses an output that does not fit a collective that was started as `call`.
    ///
    /// # Errors
    ///
    /// Refuses as [`Work::finish`](crate::Work::finish).
    pub fn output(self, call: &Call, output: &mut dyn SegmentsMut) -> Result<(), Error> {
        let collective = call.collective;
        self.same_dtype(
            collective,
            call.dtype.unwrap_or(output.dtype()),
            output.dtype(),
        )?;
        self.same_count(collective, call.numels.len(), output.count())?;
        for (segment, &numel) in call.numels.iter().enumerate() {
            let (own, expected) = match collective {
                Collective::ReduceScatter => (numel, shard_numel(numel, self.world_size)),
                Collective::AllGather => (shard_numel(numel, self.world_size), numel),
                Collective::AllReduce | Collective::Broadcast | Collective::Barrier => {
                    (numel, numel)
                }
            };
            let found = output.numel(segment);
            if found != expected {
                return Err(self.numel_differs(collective, segment, own, found));
            }
        }
        self.output_bytes(collective, output, call.op.is_some())
    }

    /// The header of a barrier.
    #[must_use]
    pub const fn barrier() -> Call {
        Call {
            collective: Collective::Barrier,
            dtype: None,
            op: None,
            root: None,
            numels: Vec::new(),
            label: 0,
            description: String::new(),
        }
    }

    fn present(self, collective: Collective, input: &dyn Segments) -> Result<(), Error> {
        if self.on_device(collective, input.device())? {
            return Ok(());
        }
        let absent = (0..input.count()).find(|&segment| input.bytes(segment).is_none());
        absent.map_or(Ok(()), |segment| {
            Err(Error::AbsentSegment {
                rank: self.shown,
                collective,
                segment,
            })
        })
    }

    fn same_dtype(self, collective: Collective, input: DType, output: DType) -> Result<(), Error> {
        let rank = self.shown;
        if output == input {
            return Ok(());
        }
        Err(Error::DTypeDiffers {
            rank,
            collective,
            input,
            output,
        })
    }

    fn same_count(self, collective: Collective, input: usize, output: usize) -> Result<(), Error> {
        let rank = self.shown;
        if output == input {
            return Ok(());
        }
        Err(Error::SegmentCountDiffers {
            rank,
            collective,
            input,
            output,
        })
    }

    const fn numel_differs(
        self,
        collective: Collective,
        segment: usize,
        input_numel: usize,
        output_numel: usize,
    ) -> Error {
        let Self {
            shown: rank,
            world_size,
            ..
        } = self;
        Error::NumelDiffers {
            rank,
            collective,
            segment,
            world_size,
            input_numel,
            output_numel,
        }
    }

    fn input_bytes(
        self,
        collective: Collective,
        input: &dyn Segments,
        align: bool,
    ) -> Result<(), Error> {
        if self.on_device(collective, input.device())? {
            return Ok(());
        }
        for segment in 0..input.count() {
            if let Some(bytes) = input.bytes(segment) {
                let claim = Claim {
                    segment,
                    dtype: input.dtype(),
                    numel: input.numel(segment),
                };
                self.check_bytes(collective, claim, bytes, align)?;
            }
        }
        Ok(())
    }

    fn output_bytes(
        self,
        collective: Collective,
        output: &mut dyn SegmentsMut,
        align: bool,
    ) -> Result<(), Error> {
        if self.on_device(collective, output.device())? {
            return Ok(());
        }
        for segment in 0..output.count() {
            let claim = Claim {
                segment,
                dtype: output.dtype(),
                numel: output.numel(segment),
            };
            self.check_bytes(collective, claim, output.bytes_mut(segment), align)?;
        }
        Ok(())
    }

    /// Whether segments are in a device's memory, where only the communicator can look at them.
    fn on_device(self, collective: Collective, device: Option<&dyn Any>) -> Result<bool, Error> {
        if device.is_some() && self.reach == Reach::Host {
            let rank = self.shown;
            return Err(Error::DeviceSegments { rank, collective });
        }
        Ok(device.is_some())
    }

    fn check_bytes(
        self,
        collective: Collective,
        Claim {
            segment,
            dtype,
            numel,
        }: Claim,
        bytes: &[u8],
        align: bool,
    ) -> Result<(), Error> {
        let expected_bytes = numel * dtype.size_bytes();
        let aligned = bytes.is_empty() || bytes.as_ptr().addr().is_multiple_of(dtype.size_bytes());
        if bytes.len() == expected_bytes && (aligned || !align) {
            return Ok(());
        }
        Err(Error::BadSegment {
            rank: self.shown,
            collective,
            segment,
            dtype,
            numel,
            expected_bytes,
            found_bytes: bytes.len(),
            aligned,
        })
    }
}

/// What a segment says about itself.
#[derive(Clone, Copy)]
struct Claim {
    segment: usize,
    dtype: DType,
    numel: usize,
}
