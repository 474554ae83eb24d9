//! The communicator: one NCCL rank beside one rank of a control group.

use std::{
    fmt,
    sync::{
        Arc, Weak,
        mpsc::{self, Sender},
    },
    time::Duration,
};

use burn_shard_comm::{
    Call, Caller, Collective, Communicator, DType, Error, ProcessGroup, ReduceOp, Segments,
    SegmentsMut, Traffic, Work, shard_numel,
};
use parking_lot::Mutex;

use crate::{
    api::UniqueId,
    comm::{Comm, Kind, Patience, Span},
    device::{DeviceSegments, on_device},
    error::NcclError,
    in_flight::{BACKEND, InFlight, Kept, Link, Name, watch},
    library::Nccl,
    memory::Memory,
    stage::{Launch, Op, Stage, Width},
    work::Reduction,
};

/// One rank of a group whose data travels through NCCL.
///
/// Reductions are NCCL's: **not** in rank order, and means multiply by a rounded `1 / world_size`
/// before they add. They are the same on all ranks, and from run to run as far as NCCL's algorithm is.
///
/// See the crate's page for what it asks of segments in a device's memory.
pub struct NcclCommunicator {
    control: Arc<dyn Communicator>,
    link: Arc<Link>,
    /// Number of the next collective; held while one is started, so that both groups see one order.
    next: Mutex<u64>,
    traffic: Mutex<Traffic>,
}

impl NcclCommunicator {
    /// Joins the ranks of `control`, all of which have to call this, each with memory of its own.
    ///
    /// `control` decides who is which rank, carries NCCL's id, compares what the ranks call and tells
    /// them of failures. From now on it is the communicator's alone.
    ///
    /// Takes the results of [`Nccl::open`] and of opening the memory, so that a rank which has failed
    /// there tells the others.
    ///
    /// # Errors
    ///
    /// If this rank or another has no library, driver or device: then all fail, and `control` is as it
    /// was. If the ranks' NCCLs do not meet in time: then all fail, and `control` is poisoned.
    pub fn new(
        control: &ProcessGroup,
        nccl: Result<Arc<Nccl>, NcclError>,
        memory: Result<Arc<dyn Memory>, NcclError>,
    ) -> Result<Self, NcclError> {
        let (rank, world_size) = (control.rank(), control.world_size());
        let (sender, receiver) = mpsc::channel();
        let ready = nccl.and_then(|nccl| {
            let memory = memory?;
            memory.enter()?;
            // Without it, nobody would notice that a device hangs.
            watch(rank, receiver).map_err(|error| NcclError::Thread {
                message: error.to_string(),
            })?;
            let id = if rank == 0 {
                Some(nccl.unique_id()?)
            } else {
                None
            };
            Ok((nccl, memory, id))
        });
        let id = match &ready {
            Ok((_, _, Some(id))) => Ok(&id.0[..]),
            Ok((_, _, None)) => Ok(&[][..]),
            Err(error) => Err(error.clone()),
        };
        let ids = agreed(control, id)?;
        let (nccl, memory, _) = ready?;
        let id: [u8; UniqueId::BYTES] =
            ids[0][..].try_into().map_err(|_| NcclError::OtherRanks {
                rank,
                failed: vec![(0, format!("its id of NCCL has {} bytes", ids[0].len()))],
            })?;

        let failure = || control.communicator().failure();
        let patience = Patience {
            deadline: control.deadline(),
            hopeless: &|| failure().is_some(),
        };
        let comm = Comm::init(&nccl, &memory, UniqueId(id), rank, world_size, &patience);
        let comm = comm.map_err(|error| match failure() {
            Some(cause) => NcclError::Group((*cause).clone()),
            None => {
                control.abort(&error.to_string());
                error
            }
        })?;
        control.barrier().inspect_err(|_| comm.abort())?;
        Ok(Self::build(control, comm, memory, sender))
    }

    fn build(
        control: &ProcessGroup,
        comm: Comm,
        memory: Arc<dyn Memory>,
        watch: Sender<InFlight>,
    ) -> Self {
        let control = Arc::clone(control.communicator());
        let weak: Weak<dyn Communicator> = Arc::downgrade(&control) as _;
        let link = Link {
            rank: control.rank(),
            world_size: control.world_size(),
            comm,
            memory,
            control: weak,
            base: control.traffic().total_calls(),
            watch,
        };
        Self {
            control,
            link: Arc::new(link),
            next: Mutex::default(),
            traffic: Mutex::default(),
        }
    }

    /// Waits until every rank has come here and all communication is over, then ends NCCL in order.
    ///
    /// Dropping the last handle does the same in the background, without waiting and without telling
    /// how it went.
    ///
    /// # Errors
    ///
    /// As [`Communicator::barrier`], and if NCCL does not end.
    pub fn close(self) -> Result<(), Error> {
        self.barrier()?;
        let call = Caller::barrier();
        let name = Name::new(&call, *self.next.lock(), self.deadline());
        let closed = self.link.comm.close();
        closed.map_err(|error| name.error(&self.link, &error))
    }

    fn caller(&self) -> Caller {
        Caller::devices(self.link.rank, self.link.world_size)
    }

    /// Tells the others, and gives the collective its number.
    fn begin(&self, next: &mut u64, call: &Call) -> Result<(Name, Box<dyn Work>), Error> {
        let agreement = self.control.announce(call.clone()).map_err(|error| {
            self.link.comm.abort();
            self.link.renumbered(error)
        })?;
        let name = Name::new(call, *next, self.deadline());
        *next += 1;
        self.traffic
            .lock()
            .record(call, self.link.rank, self.link.world_size);
        Ok((name, agreement))
    }

    /// Announces `call` and puts its work on the stream: what `before` does, the calls it returns as one
    /// group, what `after` does.
    fn start(
        &self,
        call: &Call,
        input: Option<Arc<dyn Segments>>,
        output: Option<&DeviceSegments>,
        before: impl FnOnce(&mut Stage) -> Result<Vec<Launch>, NcclError>,
        after: impl FnOnce(&mut Stage, &[Launch]) -> Result<(), NcclError>,
    ) -> Result<(InFlight, Vec<Launch>), Error> {
        let mut next = self.next.lock();
        let (name, mut agreement) = self.begin(&mut next, call)?;
        let link = &self.link;
        let mut kept = Kept::new(&link.memory, input.clone());
        let stream = link.memory.stream();
        let owners: Vec<&DeviceSegments> = input
            .as_ref()
            .and_then(|input| on_device(input.device()))
            .into_iter()
            .chain(output)
            .collect();
        for owner in &owners {
            owner
                .owner()
                .before(stream)
                .map_err(|error| link.fail(error))?;
        }
        let patience = Patience {
            deadline: name.deadline,
            hopeless: &|| self.control.failure().is_some(),
        };
        let launched = link.memory.enter().and_then(|()| {
            let launches = before(&mut kept.stage)?;
            if !launches.is_empty() {
                link.comm.group(&patience, |group| {
                    launches.iter().try_for_each(|launch| {
                        // SAFETY: what is on the host was staged into scratch memory, which is freed on the
                        // stream; what is on the device is what `DeviceSegments::new` was promised, between
                        // its owner's hooks.
                        unsafe { launch.call(group) }
                    })
                })?;
            }
            after(&mut kept.stage, &launches)?;
            kept.record()?;
            Ok(launches)
        });
        let launches = launched.map_err(|error| {
            // If the group has failed, the agreement knows best why, and does not wait.
            let agreed = self.control.failure().map_or(Ok(()), |_| agreement.wait());
            match agreed {
                Ok(()) => name.error(link, &error),
                Err(cause) => {
                    link.comm.abort();
                    link.renumbered(cause)
                }
            }
        })?;
        for owner in &owners {
            owner
                .owner()
                .after(stream)
                .map_err(|error| link.fail(error))?;
        }
        Ok((InFlight::new(link, &name, agreement, kept), launches))
    }

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
            let numels = call
                .numels
                .iter()
                .enumerate()
                .filter(|(_, numel)| **numel > 0);
            numels
                .map(|(segment, &numel)| {
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

    /// The output of an `all_gather` or broadcast is written here, by the host or by the device.
    fn deliver(
        &self,
        in_flight: InFlight,
        launches: &[Launch],
        output: Option<&mut dyn SegmentsMut>,
    ) -> Result<(), Error> {
        let on_device = match &output {
            Some(output) => output.device().is_some(),
            None => in_flight
                .kept
                .input()
                .is_some_and(|input| input.device().is_some()),
        };
        if on_device {
            in_flight.watch();
            return Ok(());
        }
        let mut in_flight = in_flight;
        in_flight.complete()?;
        if let Some(output) = output {
            for (launch, received) in launches.iter().zip(&in_flight.kept.stage.received) {
                Width::Same.narrow(received, output.bytes_mut(launch.segment));
            }
        }
        Ok(())
    }

    fn unsupported(&self, collective: Collective, dtype: DType) -> Error {
        Error::UnsupportedDType {
            rank: self.link.rank,
            collective,
            dtype,
            backend: BACKEND,
        }
    }

    fn checked_input<'a>(
        &self,
        collective: Collective,
        input: &'a dyn Segments,
    ) -> Result<Option<&'a DeviceSegments>, Error> {
        let numels: Vec<usize> = (0..input.count()).map(|i| input.numel(i)).collect();
        let checked = self
            .link
            .checked(collective, input.device(), input.dtype(), &numels)?;
        let moves = matches!(collective, Collective::AllGather | Collective::Broadcast);
        self.link
            .present(collective, checked.filter(|_| moves), &numels)?;
        Ok(checked)
    }
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

/// What each rank has to say, unless one has failed: then all fail.
fn agreed(
    control: &ProcessGroup,
    own: Result<&[u8], NcclError>,
) -> Result<Vec<Vec<u8>>, NcclError> {
    let mut words = Vec::new();
    match &own {
        Ok(bytes) => {
            words.push(1);
            words.extend_from_slice(bytes);
        }
        Err(error) => {
            words.push(0);
            words.extend_from_slice(error.to_string().as_bytes());
        }
    }
    let all = control.all_gather_bytes(&words)?;
    own?;
    let failed: Vec<(usize, String)> = all
        .iter()
        .enumerate()
        .filter(|(_, words)| words.first() != Some(&1))
        .map(|(rank, words)| {
            let text = words.get(1..).unwrap_or_default();
            (rank, String::from_utf8_lossy(text).into_owned())
        })
        .collect();
    if !failed.is_empty() {
        let rank = control.rank();
        return Err(NcclError::OtherRanks { rank, failed });
    }
    Ok(all.into_iter().map(|words| words[1..].to_vec()).collect())
}

impl Communicator for NcclCommunicator {
    fn rank(&self) -> usize {
        self.link.rank
    }

    fn world_size(&self) -> usize {
        self.link.world_size
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
            let numels = call
                .numels
                .iter()
                .enumerate()
                .filter(|(_, numel)| **numel > 0);
            numels
                .map(|(segment, &numel)| {
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
            let numels = call
                .numels
                .iter()
                .enumerate()
                .filter(|(_, numel)| **numel > 0);
            numels
                .map(|(segment, &numel)| {
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

impl fmt::Debug for NcclCommunicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NcclCommunicator")
            .field("control", &self.control)
            .field("comm", &self.link.comm)
            .field("memory", &self.link.memory)
            .finish_non_exhaustive()
    }
}
