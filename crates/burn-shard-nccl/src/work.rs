//! Collectives that were started, and the checks of segments in a device's memory.

use std::{any::Any, sync::Arc};

use burn_shard_comm::{Call, Caller, Collective, DType, Error, Segments, SegmentsMut, Work};

use crate::{
    comm::Patience,
    device::{DeviceSegments, on_device},
    error::NcclError,
    in_flight::{BACKEND, Flight, Link},
    memory::Scratch,
    stage::{Launch, Width},
};

/// A collective that was started. Its result is in memory of its own until it is finished.
pub(crate) struct Started {
    pub(crate) call: Call,
    pub(crate) width: Width,
    pub(crate) launches: Vec<Launch>,
    /// Freed on the stream, when dropped.
    pub(crate) _scratch: Vec<Scratch>,
    /// Where the result is, if it is in no memory of its own.
    pub(crate) _input: Option<Arc<dyn Segments>>,
    pub(crate) flight: Arc<Flight>,
}

impl Started {
    /// Copies results to the device once they are there; nobody waits.
    fn copy_out(&self, output: &DeviceSegments) -> Result<(), Error> {
        self.flight.failed()?;
        let link = &self.flight.link;
        let memory = &link.memory;
        let failed = |error: NcclError| self.flight.name.error(link, &error);
        output.owner().before(&**memory).map_err(failed)?;
        let copied = self.launches.iter().try_for_each(|launch| {
            let (from, bytes) = (launch.receive, launch.output_bytes);
            let Some(to) = output.addresses()[launch.segment] else {
                return Ok(());
            };
            assert!(
                bytes <= from.bytes,
                "a result should be as long as its output"
            );
            if from.address == to {
                return Ok(());
            }
            // SAFETY: the output is that long (`DeviceSegments::new`), the result no shorter, and freed on
            // the stream.
            unsafe { memory.copy(from.address, to, bytes) }
        });
        // Even after a failure: some of it may be on the stream.
        let after = output.owner().after(&**memory);
        copied.and(after).map_err(failed)
    }

    /// Copies results to the host; waits until they are there.
    fn fetch(&self, output: &mut dyn SegmentsMut) -> Result<(), Error> {
        let link = &self.flight.link;
        let hopeless = || link.failure().is_some();
        let patience = Patience {
            deadline: self.flight.name.deadline,
            hopeless: &hopeless,
        };
        let mut received = self.flight.take_received();
        received.resize_with(self.launches.len(), || None);
        for (launch, received) in self.launches.iter().zip(received) {
            let mut output = output.bytes_mut(launch.segment);
            if let Some(received) = received {
                self.width.narrow(received.bytes(), output);
                continue;
            }
            let take = |piece: &[u8]| {
                let (now, later) =
                    std::mem::take(&mut output).split_at_mut(self.width.narrowed(piece.len()));
                self.width.narrow(piece, now);
                output = later;
            };
            let (from, bytes) = (launch.receive.address, launch.output_bytes);
            // SAFETY: the result is no shorter, and this value keeps it.
            let fetched = unsafe { link.staging.fetch(from, bytes, &patience, take) };
            fetched.map_err(|error| self.flight.name.error(link, &error))?;
        }
        Ok(())
    }

    /// Refuses outputs that do not fit; those on the device.
    fn checked<'a>(
        &self,
        output: &'a mut dyn SegmentsMut,
    ) -> Result<Option<&'a DeviceSegments>, Error> {
        let link = &self.flight.link;
        let collective = self.call.collective;
        let fits = Caller::device_member(&link.members).output(&self.call, output);
        fits.map_err(|error| link.members.named(error))?;
        let device = link.checked_output(&self.call, output)?;
        if device.is_some() && self.width != Width::Same {
            return Err(link.members.named(Error::UnsupportedDType {
                rank: link.members.root_rank(),
                dtype: SegmentsMut::dtype(output),
                collective,
                backend: BACKEND,
            }));
        }
        Ok(device)
    }
}

impl Work for Started {
    fn is_ready(&self) -> bool {
        self.flight.is_ready()
    }

    fn wait(&mut self) -> Result<(), Error> {
        self.flight.complete()
    }

    fn finish(self: Box<Self>, output: &mut dyn SegmentsMut) -> Result<(), Error> {
        if on_device(output.device()).is_some()
            && let Some(device) = self.checked(output)?
        {
            return self.copy_out(device);
        }
        self.flight.complete()?;
        self.checked(output)?;
        self.fetch(output)
    }
}

impl Link {
    /// The segments on the device, if it is ours.
    pub(crate) fn checked<'a>(
        &self,
        collective: Collective,
        device: &'a dyn Any,
        dtype: DType,
        numels: &[usize],
    ) -> Result<&'a DeviceSegments, Error> {
        let (rank, expected) = (self.members.root_rank(), self.memory.device());
        let segments = on_device(Some(device));
        let Some(segments) = segments.filter(|segments| segments.device() == expected) else {
            let found = device
                .downcast_ref::<DeviceSegments>()
                .map(DeviceSegments::device);
            return Err(self.members.named(Error::OtherDevice {
                rank,
                collective,
                expected,
                found,
            }));
        };
        let addresses = segments.addresses();
        if addresses.len() != numels.len() {
            let (input, output) = (numels.len(), addresses.len());
            return Err(self.members.named(Error::SegmentCountDiffers {
                rank,
                collective,
                input,
                output,
            }));
        }
        let crooked = addresses.iter().position(|address| {
            address.is_some_and(|address| !address.is_multiple_of(dtype.size_bytes() as u64))
        });
        if let Some(segment) = crooked {
            let numel = numels[segment];
            let bytes = numel * dtype.size_bytes();
            return Err(self.members.named(Error::BadSegment {
                rank,
                collective,
                segment,
                dtype,
                numel,
                expected_bytes: bytes,
                found_bytes: bytes,
                aligned: false,
            }));
        }
        Ok(segments)
    }

    /// Refuses absent segments of `segments`.
    pub(crate) fn present(
        &self,
        collective: Collective,
        segments: &DeviceSegments,
        numels: &[usize],
    ) -> Result<(), Error> {
        let mut each = segments.addresses().iter().zip(numels);
        match each.position(|(address, &numel)| address.is_none() && numel > 0) {
            None => Ok(()),
            Some(segment) => Err(self.members.named(Error::AbsentSegment {
                rank: self.members.root_rank(),
                collective,
                segment,
            })),
        }
    }

    /// Checks an output of `call` as [`Link::checked`] does.
    pub(crate) fn checked_output<'a>(
        &self,
        call: &Call,
        output: &'a dyn SegmentsMut,
    ) -> Result<Option<&'a DeviceSegments>, Error> {
        let Some(device) = output.device() else {
            return Ok(None);
        };
        let numels: Vec<usize> = (0..output.count()).map(|i| output.numel(i)).collect();
        let checked = self.checked(call.collective, device, output.dtype(), &numels)?;
        self.present(call.collective, checked, &numels)?;
        Ok(Some(checked))
    }
}
