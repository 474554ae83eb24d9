//! One NCCL rank beside one rank of a control group: how they begin, start collectives, and end.

use std::{
    fmt,
    sync::{
        Arc, Weak,
        mpsc::{self, Sender},
    },
};

use burn_shard_comm::{
    Call, Caller, Collective, Communicator, DType, Error, ProcessGroup, SegmentLayout, Segments,
    TrafficCounter, Work,
};
use parking_lot::Mutex;

use crate::{
    api::UniqueId,
    comm::{Comm, Patience},
    device::{DeviceSegments, on_device},
    error::NcclError,
    group::Span,
    in_flight::{BACKEND, Flight, Kept, Link, Name, watch},
    library::Nccl,
    memory::Memory,
    numbers::Numbers,
    stage::{Launch, Stage, Width},
    staging::Staging,
    work::Started,
};

/// One rank of a group whose data travels through NCCL.
///
/// Reductions are NCCL's: **not** in rank order, and means multiply by a rounded `1 / world_size`
/// before they add. They are the same on all ranks, and from run to run as far as NCCL's algorithm is.
///
/// See the crate's page for what it asks of segments in a device's memory.
pub struct NcclCommunicator {
    pub(crate) control: Arc<dyn Communicator>,
    pub(crate) link: Arc<Link>,
    /// Number of the next collective; held while one is started, so that both groups see one order.
    pub(crate) next: Mutex<u64>,
    pub(crate) traffic: Arc<TrafficCounter>,
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
        let rank = control.rank();
        let (sender, receiver) = mpsc::channel();
        let ready = nccl.and_then(|nccl| {
            let memory = memory?;
            memory.enter()?;
            let staging = Staging::new(&memory)?;
            // Without it, nobody would notice that a device hangs.
            watch(rank, receiver).map_err(|error| NcclError::Thread {
                message: error.to_string(),
            })?;
            let id = if rank == 0 {
                Some(nccl.unique_id()?)
            } else {
                None
            };
            Ok((nccl, memory, staging, id))
        });
        let id = match &ready {
            Ok((_, _, _, Some(id))) => Ok(&id.0[..]),
            Ok((_, _, _, None)) => Ok(&[][..]),
            Err(error) => Err(error.clone()),
        };
        let ids = agreed(control, id)?;
        let (nccl, memory, staging, _) = ready?;
        let id: [u8; UniqueId::BYTES] =
            ids[0][..].try_into().map_err(|_| NcclError::OtherRanks {
                rank,
                failed: vec![(0, format!("its id of NCCL has {} bytes", ids[0].len()))],
            })?;

        let failure = || control.communicator().failure();
        let comm = joined(control, &nccl, &memory, UniqueId(id));
        let comm = comm.map_err(|error| match failure() {
            Some(cause) => NcclError::Group((*cause).clone()),
            None => {
                control.abort(&error.to_string());
                error
            }
        })?;
        control.barrier().inspect_err(|_| comm.abort())?;
        let members = control.communicator().members();
        let numbers = Numbers::new(members, control.traffic().total_calls());
        let device = (memory, staging);
        Ok(Self::build(
            control.communicator(),
            comm,
            device,
            numbers,
            sender,
        ))
    }

    pub(crate) fn build(
        control: &Arc<dyn Communicator>,
        comm: Comm,
        (memory, staging): (Arc<dyn Memory>, Arc<Staging>),
        numbers: Numbers,
        watch: Sender<Arc<Flight>>,
    ) -> Self {
        let weak: Weak<dyn Communicator> = Arc::downgrade(control) as _;
        let link = Link {
            members: control.members(),
            comm,
            memory,
            staging,
            control: weak,
            numbers,
            watch,
            sub_groups: Mutex::default(),
        };
        Self {
            control: Arc::clone(control),
            link: Arc::new(link),
            next: Mutex::default(),
            traffic: Arc::default(),
        }
    }

    /// Waits until every rank has come here and all communication is over, then ends NCCL in order: in sub-groups of
    /// which this rank still has a handle first. Collectives of these fail from then on.
    ///
    /// Dropping the last handle does the same in the background, without waiting and without telling
    /// how it went.
    ///
    /// # Errors
    ///
    /// The errors of [`Communicator::barrier`], and one if NCCL does not end.
    pub fn close(self) -> Result<(), Error> {
        self.barrier()?;
        let call = Caller::barrier();
        let name = Name::new(&call, *self.next.lock(), self.deadline());
        let closed = self.link.close();
        closed.map_err(|error| name.error(&self.link, &error))
    }

    /// Checks arguments, and names the group if they are refused.
    pub(crate) fn checked(
        &self,
        check: impl FnOnce(Caller) -> Result<Call, Error>,
    ) -> Result<Call, Error> {
        let members = &self.link.members;
        check(Caller::device_member(members)).map_err(|error| members.named(error))
    }

    /// Tells the others, and gives the collective its number. The control group has no elements that it could ask what
    /// they are: `input` says so.
    pub(crate) fn begin(
        &self,
        next: &mut u64,
        call: &Call,
        input: Option<&dyn Segments>,
    ) -> Result<(Name, Box<dyn Work>), Error> {
        let agreement = self.control.announce(call.described(input));
        let agreement = agreement.map_err(|error| {
            self.link.comm.abort();
            self.link.renumbered(error)
        })?;
        let name = Name::new(call, *next, self.deadline());
        *next += 1;
        self.traffic.record(call, &self.link.members);
        Ok((name, agreement))
    }

    /// Announces `call` and puts it on the stream: the calls of NCCL that `launches` returns, as one group.
    pub(crate) fn start(
        &self,
        call: Call,
        input: Option<Arc<dyn Segments>>,
        width: Width,
        launches: impl FnOnce(&Call, &mut Stage<'_>) -> Result<Vec<Launch>, NcclError>,
    ) -> Result<Box<dyn Work>, Error> {
        let mut next = self.next.lock();
        let (name, mut agreement) = self.begin(&mut next, &call, input.as_deref())?;
        let link = &self.link;
        let device = input.as_ref().and_then(|input| on_device(input.device()));
        if let Some(device) = device {
            let before = device.owner().before(&*link.memory);
            before.map_err(|error| name.error(link, &error))?;
        }
        let patience = Patience {
            deadline: name.deadline,
            hopeless: &|| self.control.failure().is_some(),
        };
        // What is on the host was copied by the time its collective is on the stream.
        let mut kept = Kept::new(&link.memory, input.clone().filter(|_| device.is_some()));
        let mut stage = Stage::new(&link.memory, &link.staging, &patience);
        let launched = link.memory.enter().and_then(|()| {
            let launches = launches(&call, &mut stage)?;
            if !launches.is_empty() {
                link.comm.group(&patience, |group| {
                    launches.iter().try_for_each(|launch| {
                        // SAFETY: what is on the host was staged into scratch memory, which is freed on the
                        // stream; what is on the device is what `DeviceSegments::new` was promised, and `kept`
                        // keeps.
                        unsafe { launch.call(group) }
                    })
                })?;
            }
            if device.is_none() {
                // Small results come at once: later they would queue behind other collectives.
                for launch in &launches {
                    let Span { address, bytes } = launch.receive;
                    // SAFETY: the scratch of `stage`, which is freed on the stream, is that long.
                    let received = unsafe { link.staging.receive(address, bytes) }?;
                    kept.received.push(received);
                }
            }
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
        let scratch = stage.scratch;
        // Of a broadcast, the root's input is the result.
        let input = input.filter(|_| call.collective == Collective::Broadcast);
        Ok(Box::new(Started {
            call,
            width,
            launches,
            _scratch: scratch,
            _input: input,
            flight: Flight::start(link, name, agreement, kept),
        }))
    }

    pub(crate) fn unsupported(&self, collective: Collective, dtype: DType) -> Error {
        let members = &self.link.members;
        members.named(Error::UnsupportedDType {
            rank: members.root_rank(),
            collective,
            dtype,
            backend: BACKEND,
        })
    }

    pub(crate) fn checked_input<'a>(
        &self,
        collective: Collective,
        input: &'a dyn Segments,
    ) -> Result<Option<&'a DeviceSegments>, Error> {
        let Some(device) = input.device() else {
            return Ok(None);
        };
        let SegmentLayout { dtype, numels } = SegmentLayout::of(input);
        let checked = self.link.checked(collective, device, dtype, &numels)?;
        if matches!(collective, Collective::AllGather | Collective::Broadcast) {
            self.link.present(collective, checked, &numels)?;
        }
        Ok(Some(checked))
    }
}

/// The ranks of `control`, with NCCL between their GPUs: this rank's is number `device`.
///
/// # Errors
///
/// The errors of [`NcclCommunicator::new`].
#[cfg(feature = "cuda")]
pub fn process_group(control: &ProcessGroup, device: usize) -> Result<ProcessGroup, NcclError> {
    let memory = crate::cuda::Cuda::new(device).map(|cuda| Arc::new(cuda) as _);
    let communicator = NcclCommunicator::new(control, Nccl::open(), memory)?;
    Ok(ProcessGroup::new(Arc::new(communicator)))
}

/// This rank of the NCCL communicator that the ranks of `control` make of `id`.
pub(crate) fn joined(
    control: &ProcessGroup,
    nccl: &Arc<Nccl>,
    memory: &Arc<dyn Memory>,
    id: UniqueId,
) -> Result<Comm, NcclError> {
    let patience = Patience {
        deadline: control.deadline(),
        hopeless: &|| control.communicator().failure().is_some(),
    };
    let (rank, world_size) = (control.rank(), control.world_size());
    Comm::init(nccl, memory, id, rank, world_size, &patience)
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

impl fmt::Debug for NcclCommunicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NcclCommunicator")
            .field("control", &self.control)
            .field("comm", &self.link.comm)
            .field("memory", &self.link.memory)
            .finish_non_exhaustive()
    }
}
