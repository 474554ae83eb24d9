//! Getting segments to where NCCL can read and write them.

use std::{borrow::Cow, sync::Arc};

use burn_shard_comm::{DType, Segments};

use crate::{
    comm::Patience,
    device::DeviceSegments,
    error::NcclError,
    group::{Group, Kind, Span},
    memory::{Memory, Scratch},
    staging::Staging,
};

/// One call of NCCL.
#[derive(Clone, Copy)]
pub(crate) enum Op {
    AllGather,
    Broadcast { root: usize },
    AllReduce(Kind),
    ReduceScatter(Kind),
}

/// One call of NCCL for one segment.
#[derive(Clone, Copy)]
pub(crate) struct Launch {
    pub(crate) segment: usize,
    pub(crate) op: Op,
    pub(crate) send: Span,
    pub(crate) receive: Span,
    /// How many bytes of what is received are the output: the rest is padding.
    pub(crate) output_bytes: usize,
}

impl Launch {
    /// # Safety
    ///
    /// See [`Group`].
    pub(crate) unsafe fn call(self, group: &Group<'_>) -> Result<(), NcclError> {
        let Self { send, receive, .. } = self;
        match self.op {
            // SAFETY: the caller's.
            Op::AllGather => unsafe { group.all_gather(send, receive) },
            // SAFETY: the caller's.
            Op::Broadcast { root } => unsafe { group.broadcast(send, receive, root) },
            // SAFETY: the caller's.
            Op::AllReduce(kind) => unsafe { group.all_reduce(send, receive, kind) },
            // SAFETY: the caller's.
            Op::ReduceScatter(kind) => unsafe { group.reduce_scatter(send, receive, kind) },
        }
    }
}

/// How elements travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Width {
    /// Elements as they are.
    Same,
    /// 16-bit integers, which NCCL does not have, as 32-bit ones. Sums wrap to the same 16 bits.
    Doubled,
}

impl Width {
    pub(crate) const fn bytes(self, bytes: usize) -> usize {
        match self {
            Self::Same => bytes,
            Self::Doubled => 2 * bytes,
        }
    }

    /// How many bytes of elements travel as `bytes`.
    pub(crate) const fn narrowed(self, bytes: usize) -> usize {
        match self {
            Self::Same => bytes,
            Self::Doubled => bytes / 2,
        }
    }

    fn widen(self, dtype: DType, bytes: &[u8]) -> Cow<'_, [u8]> {
        if self == Self::Same {
            return Cow::Borrowed(bytes);
        }
        let halves = bytes.chunks_exact(2).map(|pair| [pair[0], pair[1]]);
        let wide = |half: [u8; 2]| {
            if dtype == DType::I16 {
                i32::from(i16::from_ne_bytes(half)).to_ne_bytes()
            } else {
                u32::from(u16::from_ne_bytes(half)).to_ne_bytes()
            }
        };
        Cow::Owned(halves.flat_map(wide).collect())
    }

    /// Writes what `received` holds to `output`.
    pub(crate) fn narrow(self, received: &[u8], output: &mut [u8]) {
        if self == Self::Same {
            output.copy_from_slice(&received[..output.len()]);
            return;
        }
        for (half, wide) in output.chunks_exact_mut(2).zip(received.chunks_exact(4)) {
            let wide = u32::from_ne_bytes([wide[0], wide[1], wide[2], wide[3]]);
            #[expect(
                clippy::cast_possible_truncation,
                reason = "that is how 16 bits wrap around"
            )]
            let narrow = wide as u16;
            half.copy_from_slice(&narrow.to_ne_bytes());
        }
    }
}

/// Puts on the stream what a collective needs there.
pub(crate) struct Stage<'a> {
    memory: &'a Arc<dyn Memory>,
    staging: &'a Staging,
    patience: &'a Patience<'a>,
    /// Freed on the stream, when dropped.
    pub(crate) scratch: Vec<Scratch>,
}

impl<'a> Stage<'a> {
    pub(crate) const fn new(
        memory: &'a Arc<dyn Memory>,
        staging: &'a Staging,
        patience: &'a Patience<'a>,
    ) -> Self {
        Self {
            memory,
            staging,
            patience,
            scratch: Vec::new(),
        }
    }

    /// Memory with anything in it.
    pub(crate) fn space(&mut self, bytes: usize) -> Result<Span, NcclError> {
        let scratch = Scratch::new(self.memory, bytes)?;
        let span = Span {
            address: scratch.address(),
            bytes: scratch.bytes(),
        };
        self.scratch.push(scratch);
        Ok(span)
    }

    /// Segment `index`, as long as `bytes`: what it lacks is zeros. The segment itself, if it is on the
    /// device and long enough.
    pub(crate) fn input(
        &mut self,
        input: &dyn Segments,
        device: Option<&DeviceSegments>,
        index: usize,
        bytes: usize,
        width: Width,
    ) -> Result<Span, NcclError> {
        let dtype = input.dtype();
        let own_bytes = width.bytes(input.numel(index) * dtype.size_bytes());
        let address = device.and_then(|device| device.addresses()[index]);
        if let Some(address) = address
            && own_bytes == bytes
        {
            return Ok(Span { address, bytes });
        }
        let scratch = Scratch::new(self.memory, bytes)?;
        let host = if device.is_none() {
            input.bytes(index)
        } else {
            None
        };
        let filled = match (address, host) {
            (Some(address), _) => {
                // SAFETY: the segment is that long (`DeviceSegments::new`), the scratch no shorter.
                unsafe { self.memory.copy(address, scratch.address(), own_bytes) }?;
                own_bytes
            }
            (None, Some(host)) => {
                let bytes = width.widen(dtype, host);
                // SAFETY: the scratch is no shorter, and freed on the stream.
                unsafe {
                    self.staging
                        .upload(&bytes, scratch.address(), self.patience)
                }?;
                bytes.len()
            }
            (None, None) => 0,
        };
        scratch.zero_from(filled)?;
        let span = Span {
            address: scratch.address(),
            bytes,
        };
        self.scratch.push(scratch);
        Ok(span)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doubled_integers_wrap_as_their_own_sums_do() {
        let (a, b) = ([i16::MAX, -1, i16::MIN, 5], [1, -1, -1, -7i16]);
        let wide = |values: &[i16; 4]| {
            let bytes: Vec<u8> = values
                .iter()
                .flat_map(|value| value.to_ne_bytes())
                .collect();
            let wide = Width::Doubled.widen(DType::I16, &bytes).into_owned();
            let quads = wide.chunks_exact(4);
            quads
                .map(|q| i32::from_ne_bytes([q[0], q[1], q[2], q[3]]))
                .collect::<Vec<i32>>()
        };
        let sums = wide(&a).into_iter().zip(wide(&b)).map(|(a, b)| a + b);
        let sums: Vec<u8> = sums.flat_map(i32::to_ne_bytes).collect();
        let mut narrow = [0; 8];
        Width::Doubled.narrow(&sums, &mut narrow);
        let expected: Vec<u8> = a
            .iter()
            .zip(b)
            .flat_map(|(a, b)| a.wrapping_add(b).to_ne_bytes())
            .collect();
        assert_eq!(narrow[..], expected[..]);
    }
}
