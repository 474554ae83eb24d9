//! The collectives, as calls of NCCL.

use std::{sync::Arc, time::Duration};

use burn_shard_comm::{
    Call, Caller, Collective, Communicator, DType, Error, Members, ReduceOp, SegmentLayout,
    Segments, Traffic, Work, shard_numel,
};

use crate::{
    communicator::NcclCommunicator,
    group::Kind,
    stage::{Launch, Op, Stage, Width},
};

impl Communicator for NcclCommunicator {
    fn rank(&self) -> usize {
        self.link.members.rank()
    }

    fn world_size(&self) -> usize {
        self.link.members.world_size()
    }

    fn members(&self) -> Members {
        self.link.members.clone()
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
        numels: &[usize],
    ) -> Result<Box<dyn Work>, Error> {
        let call = self.checked(|caller| caller.all_gather(&*input, numels))?;
        let world_size = self.world_size();
        let from = self.checked_input(call.collective, &*input)?;
        let size_bytes = input.dtype().size_bytes();
        let launches = |call: &Call, stage: &mut Stage<'_>| {
            let each = filled(call).map(|(segment, numel)| {
                let shard_bytes = shard_numel(numel, world_size) * size_bytes;
                Ok(Launch {
                    segment,
                    op: Op::AllGather,
                    send: stage.input(&*input, from, segment, shard_bytes, Width::Same)?,
                    receive: stage.space(shard_bytes * world_size)?,
                    output_bytes: numel * size_bytes,
                })
            });
            each.collect()
        };
        self.start(call, Some(Arc::clone(&input)), Width::Same, launches)
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
        layout: SegmentLayout,
        root: usize,
    ) -> Result<Box<dyn Work>, Error> {
        let call = self.checked(|caller| caller.broadcast(input.as_deref(), layout, root))?;
        let size_bytes = call.dtype.map_or(1, DType::size_bytes);
        let from = match &input {
            Some(input) => self.checked_input(call.collective, &**input)?,
            None => None,
        };
        let launches = |call: &Call, stage: &mut Stage<'_>| {
            let each = filled(call).map(|(segment, numel)| {
                let bytes = numel * size_bytes;
                // On the root in place: nothing is written.
                let span = match &input {
                    Some(input) => stage.input(&**input, from, segment, bytes, Width::Same)?,
                    None => stage.space(bytes)?,
                };
                Ok(Launch {
                    segment,
                    op: Op::Broadcast { root },
                    send: span,
                    receive: span,
                    output_bytes: bytes,
                })
            });
            each.collect()
        };
        self.start(call, input.clone(), Width::Same, launches)
    }

    fn barrier(&self) -> Result<(), Error> {
        let (_, mut agreement) = self.begin(&mut self.next.lock(), &Caller::barrier(), None)?;
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

    fn split(
        &self,
        color: Option<usize>,
        key: usize,
    ) -> Result<Option<Arc<dyn Communicator>>, Error> {
        let sub_group = self.sub_group(color, key)?;
        Ok(sub_group.map(|sub_group| Arc::new(sub_group) as _))
    }

    fn traffic(&self) -> Traffic {
        self.traffic.traffic()
    }
}

impl NcclCommunicator {
    fn reduction(
        &self,
        collective: Collective,
        input: Arc<dyn Segments>,
        op: ReduceOp,
    ) -> Result<Box<dyn Work>, Error> {
        let call = self.checked(|caller| caller.reduction(collective, &*input, op))?;
        let world_size = self.world_size();
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
        let launches = |call: &Call, stage: &mut Stage<'_>| {
            let each = filled(call).map(|(segment, numel)| {
                let bytes = width.bytes(numel * dtype.size_bytes());
                let shard = width.bytes(shard_numel(numel, world_size) * dtype.size_bytes());
                let send_bytes = if scattered { shard * world_size } else { bytes };
                let send = stage.input(&*input, device, segment, send_bytes, width)?;
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
                    output_bytes: receive.bytes,
                })
            });
            each.collect()
        };
        self.start(call, Some(Arc::clone(&input)), width, launches)
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
