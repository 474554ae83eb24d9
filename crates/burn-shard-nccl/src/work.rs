//! Collectives that were started, and the checks of segments in a device's memory.

use std::{any::Any, sync::Arc};

use burn_shard_comm::{Call, Caller, Collective, DType, Error, SegmentsMut, Work};

use crate::{
    device::{DeviceSegments, on_device},
    in_flight::{BACKEND, InFlight, Link, Name},
    stage::{Launch, Width},
};

/// An unfinished collective.
pub(crate) struct Started {
    caller: Caller,
    call: Call,
    width: Width,
    launches: Vec<Launch>,
    /// Taken when finished or dropped.
    in_flight: Option<InFlight>,
}

impl Started {
    pub(crate) fn new(
        caller: Caller,
        call: Call,
        width: Width,
        in_flight: InFlight,
        launches: Vec<Launch>,
    ) -> Self {
        Self {
            caller,
            call,
            width,
            launches,
            in_flight: Some(in_flight),
        }
    }

    /// Copies results to the device once they are there; nobody waits.
    fn copy_out(&mut self, output: &DeviceSegments) -> Result<(), Error> {
        let Some(mut in_flight) = self.in_flight.take() else {
            return Ok(());
        };
        let link = Arc::clone(&in_flight.link);
        let name = Name::new(&self.call, in_flight.sequence, in_flight.deadline);
        if let Err(error) = in_flight.failed() {
            in_flight.watch();
            return Err(error);
        }
        let before = output.owner().before(&*link.memory);
        before.map_err(|error| name.error(&link, &error))?;
        let stage = &in_flight.kept.stage;
        let mut each = self
            .launches
            .iter()
            .zip(self.launches.iter().map(|l| output.addresses()[l.segment]));
        let copied = each.try_for_each(|(launch, address)| match address {
            Some(address) => stage.copy_out(launch.receive, address, launch.result_bytes),
            None => Ok(()),
        });
        copied
            .and_then(|()| in_flight.kept.record())
            .map_err(|error| name.error(&link, &error))?;
        let after = output.owner().after(&*link.memory);
        after.map_err(|error| name.error(&link, &error))?;
        in_flight.watch();
        Ok(())
    }
}

impl Work for Started {
    fn is_ready(&self) -> bool {
        self.in_flight.as_ref().is_none_or(InFlight::is_ready)
    }

    fn wait(&mut self) -> Result<(), Error> {
        self.in_flight.as_mut().map_or(Ok(()), InFlight::complete)
    }

    fn finish(mut self: Box<Self>, output: &mut dyn SegmentsMut) -> Result<(), Error> {
        let Some(link) = self
            .in_flight
            .as_ref()
            .map(|in_flight| Arc::clone(&in_flight.link))
        else {
            return Ok(());
        };
        let collective = self.call.collective;
        if on_device(output.device()).is_some() {
            self.caller.output(&self.call, output)?;
            if let Some(device) = link.checked_output(&self.call, output)? {
                if self.width != Width::Same {
                    let (rank, dtype) = (link.rank, output.dtype());
                    return Err(Error::UnsupportedDType {
                        rank,
                        collective,
                        dtype,
                        backend: BACKEND,
                    });
                }
                return self.copy_out(device);
            }
        }
        self.wait()?;
        self.caller.output(&self.call, output)?;
        link.checked_output(&self.call, output)?;
        let Some(in_flight) = &mut self.in_flight else {
            return Ok(());
        };
        if in_flight.kept.stage.received.len() < self.launches.len() {
            in_flight.fetch(&self.launches)?;
        }
        for (launch, received) in self.launches.iter().zip(&in_flight.kept.stage.received) {
            self.width
                .narrow(received, output.bytes_mut(launch.segment));
        }
        Ok(())
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        if let Some(in_flight) = self.in_flight.take() {
            in_flight.watch();
        }
    }
}

impl Link {
    /// The segments on the device, if they are on one, and it is ours.
    pub(crate) fn checked<'a>(
        &self,
        collective: Collective,
        device: Option<&'a dyn Any>,
        dtype: DType,
        numels: &[usize],
    ) -> Result<Option<&'a DeviceSegments>, Error> {
        let Some(any) = device else { return Ok(None) };
        let (rank, expected) = (self.rank, self.memory.device());
        let segments = on_device(device);
        let Some(segments) = segments.filter(|segments| segments.device() == expected) else {
            let found = any
                .downcast_ref::<DeviceSegments>()
                .map(DeviceSegments::device);
            return Err(Error::OtherDevice {
                rank,
                collective,
                expected,
                found,
            });
        };
        let addresses = segments.addresses();
        if addresses.len() != numels.len() {
            let (input, output) = (numels.len(), addresses.len());
            return Err(Error::SegmentCountDiffers {
                rank,
                collective,
                input,
                output,
            });
        }
        let crooked = addresses.iter().position(|address| {
            address.is_some_and(|address| !address.is_multiple_of(dtype.size_bytes() as u64))
        });
        if let Some(segment) = crooked {
            let numel = numels[segment];
            let bytes = numel * dtype.size_bytes();
            return Err(Error::BadSegment {
                rank,
                collective,
                segment,
                dtype,
                numel,
                expected_bytes: bytes,
                found_bytes: bytes,
                aligned: false,
            });
        }
        Ok(Some(segments))
    }

    /// Refuses absent segments of `segments`.
    pub(crate) fn present(
        &self,
        collective: Collective,
        segments: Option<&DeviceSegments>,
        numels: &[usize],
    ) -> Result<(), Error> {
        let Some(segments) = segments else {
            return Ok(());
        };
        let mut each = segments.addresses().iter().zip(numels);
        match each.position(|(address, &numel)| address.is_none() && numel > 0) {
            None => Ok(()),
            Some(segment) => Err(Error::AbsentSegment {
                rank: self.rank,
                collective,
                segment,
            }),
        }
    }

    /// As [`Link::checked`], of an output of `call`.
    pub(crate) fn checked_output<'a>(
        &self,
        call: &Call,
        output: &'a dyn SegmentsMut,
    ) -> Result<Option<&'a DeviceSegments>, Error> {
        let numels: Vec<usize> = (0..output.count()).map(|i| output.numel(i)).collect();
        let checked = self.checked(call.collective, output.device(), output.dtype(), &numels)?;
        self.present(call.collective, checked, &numels)?;
        Ok(checked)
    }
}
