//! The collectives, as calls of NCCL.

use std::{sync::Arc, time::Duration};

use burn_shard_comm::{
    Call, Caller, Collective, Communicator, DType, Error, ReduceOp, Segments, SegmentsMut, Traffic,
    Work, shard_numel,
};

use crate::{
    communicator::NcclCommunicator,
    device::on_device,
    group::{Kind, Span},
    stage::{Launch, Op, Stage, Width},
    work::Reduction,
};

impl Communicator for NcclCommunicator {
    fn rank(&self) -> usize {
        self.link.rank
    }

    fn world_size(&self) -> usize {
        self.link.world_size
    }

    fn memory_device(&self) -> Option<usize> {
        Some(self.link.memory.device())
    }

    fn deadline(&self) -> Duration {
        self.control.deadline()
    }

    fn set_deadline(&self, deadline: Duration) {
        self.control.set_deadline(deadline);
    }

    fn all_gather(
        &self,
        input: Arc<dyn Segments>,
        output: &mut dyn SegmentsMut,
    ) -> Result<(), Error> {
        let call = self.caller().all_gather(&*input, output)?;
        let world_size = self.link.world_size;
        let from = self.checked_input(call.collective, &*input)?;
        let to = self.link.checked_output(&call, output)?;
        let shared = Arc::clone(&input);
        let from = from.and(on_device(shared.device()));
        let size_bytes = input.dtype().size_bytes();
        let before = |stage: &mut Stage| {
            filled(&call)
                .map(|(segment, numel)| {
                    let shard_bytes = shard_numel(numel, world_size) * size_bytes;
                    let send = stage.input(&*shared, from, segment, shard_bytes, Width::Same)?;
                    let address = to.and_then(|to| to.addresses()[segment]);
                    let bytes = shard_bytes * world_size;
                    let receive = match address {
                        Some(address) if numel * size_bytes == bytes => Span { address, bytes },
                        // Cut afterwards.
                        _ => stage.space(bytes)?,
                    };
                    let op = Op::AllGather;
                    Ok(Launch {
                        segment,
                        op,
                        send,
                        receive,
                    })
                })
                .collect()
        };
        let after = |stage: &mut Stage, launches: &[Launch]| {
            launches.iter().try_for_each(|launch| {
                let bytes = call.numels[launch.segment] * size_bytes;
                match to.and_then(|to| to.addresses()[launch.segment]) {
                    Some(address) => stage.copy_out(launch.receive, address, bytes),
                    None => stage.receive(launch.receive, bytes),
                }
            })
        };
        let (in_flight, launches) = self.start(&call, Some(input), to, before, after)?;
        self.deliver(in_flight, &launches, Some(output))
    }

    fn reduce_scatter(
        &self,
        input: Arc<dyn Segments>,
        op: ReduceOp,
    ) -> Result<Box<dyn Work>, Error> {
        self.reduction(Collective::ReduceScatter, input, op)
    }

    fn all_reduce(&self, input: Arc<dyn Segments>, op: ReduceOp) -> Result<Box<dyn Work>, Error> {
        self.reduction(Collective::AllReduce, input, op)
    }

    fn broadcast(
        &self,
        input: Option<Arc<dyn Segments>>,
        output: Option<&mut dyn SegmentsMut>,
        root: usize,
    ) -> Result<(), Error> {
        let mut output = output;
        let call = self
            .caller()
            .broadcast(input.as_deref(), output.as_deref_mut(), root)?;
        let size_bytes = call.dtype.map_or(1, DType::size_bytes);
        if let Some(input) = &input {
            self.checked_input(call.collective, &**input)?;
        }
        let to = match output.as_deref() {
            Some(output) => self.link.checked_output(&call, output)?,
            None => None,
        };
        let wanted = output.is_some();
        let shared = input.clone();
        let from = shared.as_ref().and_then(|input| on_device(input.device()));
        let before = |stage: &mut Stage| {
            filled(&call)
                .map(|(segment, numel)| {
                    let bytes = numel * size_bytes;
                    let address = to.and_then(|to| to.addresses()[segment]);
                    let own = match &shared {
                        Some(input) => {
                            Some(stage.input(&**input, from, segment, bytes, Width::Same)?)
                        }
                        None => None,
                    };
                    // On the root, without an output of its own, in place: nothing is written.
                    let receive = match (address, own) {
                        (Some(address), _) => Span { address, bytes },
                        (None, Some(own)) => own,
                        (None, None) => stage.space(bytes)?,
                    };
                    Ok(Launch {
                        segment,
                        op: Op::Broadcast { root },
                        send: own.unwrap_or(receive),
                        receive,
                    })
                })
                .collect()
        };
        let after = |stage: &mut Stage, launches: &[Launch]| {
            let to_host = wanted && to.is_none();
            let mut each = launches.iter().filter(|_| to_host);
            each.try_for_each(|launch| stage.receive(launch.receive, launch.receive.bytes))
        };
        let (in_flight, launches) = self.start(&call, input.clone(), to, before, after)?;
        self.deliver(in_flight, &launches, output)
    }

    fn barrier(&self) -> Result<(), Error> {
        let (_, mut agreement) = self.begin(&mut self.next.lock(), &Caller::barrier())?;
        agreement.wait().map_err(|error| {
            self.link.comm.abort();
            self.link.renumbered(error)
        })
    }

    fn announce(&self, call: Call) -> Result<Box<dyn Work>, Error> {
        let mut next = self.next.lock();
        *next += 1;
        self.control.announce(call)
    }

    fn failure(&self) -> Option<Arc<Error>> {
        self.link.failure()
    }

    fn abort(&self, reason: &str) {
        self.control.abort(reason);
        self.link.comm.abort();
    }

    fn traffic(&self) -> Traffic {
        *self.traffic.lock()
    }
}

impl NcclCommunicator {
    fn reduction(
        &self,
        collective: Collective,
        input: Arc<dyn Segments>,
        op: ReduceOp,
    ) -> Result<Box<dyn Work>, Error> {
        let caller = self.caller();
        let call = caller.reduction(collective, &*input, op)?;
        let world_size = self.link.world_size;
        let dtype = input.dtype();
        let device = self.checked_input(collective, &*input)?;
        let (kind, width) = match (Kind::new(dtype, op), device) {
            (Some(kind), _) => (kind, Width::Same),
            (None, None) => (doubled(dtype, op), Width::Doubled),
            (None, Some(_)) => return Err(self.unsupported(collective, dtype)),
        };
        let scattered = collective == Collective::ReduceScatter;
        let op = if scattered {
            Op::ReduceScatter(kind)
        } else {
            Op::AllReduce(kind)
        };
        let shared = Arc::clone(&input);
        let device = on_device(shared.device());
        let before = |stage: &mut Stage| {
            filled(&call)
                .map(|(segment, numel)| {
                    let bytes = width.bytes(numel * dtype.size_bytes());
                    let shard = width.bytes(shard_numel(numel, world_size) * dtype.size_bytes());
                    let send_bytes = if scattered { shard * world_size } else { bytes };
                    let send = stage.input(&*shared, device, segment, send_bytes, width)?;
                    let receive = match (scattered, device) {
                        (true, _) => stage.space(shard)?,
                        (false, Some(_)) => stage.space(bytes)?,
                        (false, None) => send,
                    };
                    Ok(Launch {
                        segment,
                        op,
                        send,
                        receive,
                    })
                })
                .collect()
        };
        // Results of what came from the host go back at once: later they would queue behind other
        // collectives.
        let after = |stage: &mut Stage, launches: &[Launch]| {
            let to_host = device.is_none();
            let mut each = launches.iter().filter(|_| to_host);
            each.try_for_each(|launch| stage.receive(launch.receive, launch.receive.bytes))
        };
        let (in_flight, launches) = self.start(&call, Some(input), None, before, after)?;
        Ok(Box::new(Reduction::new(
            caller, call, width, in_flight, launches,
        )))
    }
}

/// Number and elements of the segments that have any: there is nothing to launch for others.
fn filled(call: &Call) -> impl Iterator<Item = (usize, usize)> + '_ {
    let numels = call.numels.iter().copied().enumerate();
    numels.filter(|&(_, numel)| numel > 0)
}

/// The 32-bit integers that stand for 16-bit ones.
fn doubled(dtype: DType, op: ReduceOp) -> Kind {
    let wide = if dtype == DType::I16 {
        DType::I32
    } else {
        DType::U32
    };
    Kind::new(wide, op).expect("NCCL should have 32-bit integers")
}
