//! What one rank called, in a form that ranks can compare; and everything it can refuse by itself.

use std::{any::Any, fmt};

use crate::{
    communicator::{Collective, ReduceOp, shard_numel},
    dtype::DType,
    error::Error,
    segments::{Segments, SegmentsMut},
};

/// The header of a collective: has to be equal on all ranks.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
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
}

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
            if self.label != 0 {
                write!(f, " label {}", self.label)?;
            }
        }
        Ok(())
    }
}

impl Call {
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
            reach: Reach::Host,
        }
    }

    /// A rank of a communicator that looks at segments in a device's memory itself.
    #[must_use]
    pub const fn devices(rank: usize, world_size: usize) -> Self {
        Self {
            rank,
            world_size,
            reach: Reach::Devices,
        }
    }

    /// The header of an `all_gather`.
    ///
    /// # Errors
    ///
    /// Refuses as [`Communicator::all_gather`](crate::Communicator::all_gather).
    pub fn all_gather(
        self,
        input: &dyn Segments,
        output: &mut dyn SegmentsMut,
    ) -> Result<Call, Error> {
        let collective = Collective::AllGather;
        self.present(collective, input)?;
        self.input_bytes(collective, input, false)?;
        self.same_list(collective, input.dtype(), input.count(), output)?;
        for segment in 0..input.count() {
            let (input_numel, output_numel) = (input.numel(segment), output.numel(segment));
            if shard_numel(output_numel, self.world_size) != input_numel {
                return Err(self.numel_differs(collective, segment, input_numel, output_numel));
            }
        }
        self.output_bytes(collective, output, false)?;
        Ok(Call {
            collective,
            dtype: Some(input.dtype()),
            op: None,
            root: None,
            numels: (0..output.count()).map(|i| output.numel(i)).collect(),
            label: input.label(),
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
        let dtype = input.dtype();
        if op == ReduceOp::Mean && !dtype.is_float() {
            return Err(Error::MeanOfIntegers {
                rank: self.rank,
                collective,
                dtype,
            });
        }
        self.input_bytes(collective, input, true)?;
        Ok(Call {
            collective,
            dtype: Some(dtype),
            op: Some(op),
            root: None,
            numels: (0..input.count()).map(|i| input.numel(i)).collect(),
            label: input.label(),
        })
    }

    /// Refuses an output that does not fit a reduction that was started as `call`.
    ///
    /// # Errors
    ///
    /// Refuses as [`Work::finish`](crate::Work::finish).
    pub fn reduction_output(self, call: &Call, output: &mut dyn SegmentsMut) -> Result<(), Error> {
        let collective = call.collective;
        let dtype = call.dtype.unwrap_or(output.dtype());
        self.same_list(collective, dtype, call.numels.len(), output)?;
        for (segment, &numel) in call.numels.iter().enumerate() {
            let expected = if collective == Collective::ReduceScatter {
                shard_numel(numel, self.world_size)
            } else {
                numel
            };
            if output.numel(segment) != expected {
                let found = output.numel(segment);
                return Err(self.numel_differs(collective, segment, numel, found));
            }
        }
        self.output_bytes(collective, output, true)
    }

    /// The header of a broadcast.
    ///
    /// # Errors
    ///
    /// Refuses as [`Communicator::broadcast`](crate::Communicator::broadcast).
    pub fn broadcast(
        self,
        input: Option<&dyn Segments>,
        output: Option<&mut (dyn SegmentsMut + '_)>,
        root: usize,
    ) -> Result<Call, Error> {
        let collective = Collective::Broadcast;
        let Self {
            rank, world_size, ..
        } = self;
        if root >= world_size {
            return Err(Error::RootOutOfRange {
                rank,
                root,
                world_size,
            });
        }
        let (dtype, numels) = match (input, output) {
            (Some(_), _) if rank != root => return Err(Error::InputOutsideRoot { rank, root }),
            (None, _) if rank == root => return Err(Error::RootWithoutInput { rank }),
            (None, None) => return Err(Error::ReceiverWithoutOutput { rank, root }),
            (None, Some(output)) => {
                self.output_bytes(collective, output, false)?;
                (
                    output.dtype(),
                    (0..output.count()).map(|i| output.numel(i)).collect(),
                )
            }
            (Some(input), output) => {
                self.present(collective, input)?;
                self.input_bytes(collective, input, false)?;
                let numels: Vec<usize> = (0..input.count()).map(|i| input.numel(i)).collect();
                if let Some(output) = output {
                    self.same_list(collective, input.dtype(), input.count(), output)?;
                    for (segment, &numel) in numels.iter().enumerate() {
                        if output.numel(segment) != numel {
                            let found = output.numel(segment);
                            return Err(self.numel_differs(collective, segment, numel, found));
                        }
                    }
                    self.output_bytes(collective, output, false)?;
                }
                (input.dtype(), numels)
            }
        };
        Ok(Call {
            collective,
            dtype: Some(dtype),
            op: None,
            root: Some(root),
            numels,
            label: 0,
        })
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
        }
    }

    fn present(self, collective: Collective, input: &dyn Segments) -> Result<(), Error> {
        if self.on_device(collective, input.device())? {
            return Ok(());
        }
        let absent = (0..input.count()).find(|&segment| input.bytes(segment).is_none());
        absent.map_or(Ok(()), |segment| {
            Err(Error::AbsentSegment {
                rank: self.rank,
                collective,
                segment,
            })
        })
    }

    fn same_list(
        self,
        collective: Collective,
        dtype: DType,
        count: usize,
        output: &dyn SegmentsMut,
    ) -> Result<(), Error> {
        let rank = self.rank;
        if output.dtype() != dtype {
            let output = output.dtype();
            return Err(Error::DTypeDiffers {
                rank,
                collective,
                input: dtype,
                output,
            });
        }
        if output.count() != count {
            let output = output.count();
            return Err(Error::SegmentCountDiffers {
                rank,
                collective,
                input: count,
                output,
            });
        }
        Ok(())
    }

    const fn numel_differs(
        self,
        collective: Collective,
        segment: usize,
        input_numel: usize,
        output_numel: usize,
    ) -> Error {
        let Self {
            rank, world_size, ..
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
            let rank = self.rank;
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
            rank: self.rank,
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
