//! The reference communicator: ranks are threads of one process.
//!
//! Collectives read the peers' buffers directly, so the only copies are the results. How ranks meet
//! is told in `hub.rs`, how threads are started in `spawn.rs`.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;

use crate::{
    call::{Call, Caller, shard_range},
    communicator::{Collective, Communicator, ReduceOp, Work, shard_numel},
    error::Error,
    hub::{Hub, Input, Outcome, Slot, Waiter},
    parallel,
    reduce::reduce,
    segments::{SegmentLayout, Segments, SegmentsMut},
    split::{Members, TrafficCounter},
    traffic::Traffic,
};

/// How long ranks wait for each other unless told otherwise.
pub(crate) const DEFAULT_DEADLINE: Duration = Duration::from_secs(5 * 60);

/// One rank of a group of threads.
#[derive(Debug)]
pub(crate) struct LocalCommunicator {
    place: Arc<Place>,
    deadline: Mutex<Duration>,
    counter: Arc<TrafficCounter>,
    /// Number of the next split.
    splits: AtomicU64,
}

/// A rank's place in a hub, which it leaves when the last communicator there, or in a sub-group, is dropped.
#[derive(Debug)]
struct Place {
    hub: Arc<Hub>,
    members: Members,
    _split_from: Option<Arc<Self>>,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.hub.leave(self.members.rank);
    }
}

impl LocalCommunicator {
    pub(crate) fn new(hub: Arc<Hub>, rank: usize, deadline: Duration) -> Self {
        let members = Members::root(rank, hub.world_size());
        let place = Place {
            hub,
            members,
            _split_from: None,
        };
        Self::at(place, deadline, Arc::default())
    }

    fn at(place: Place, deadline: Duration, counter: Arc<TrafficCounter>) -> Self {
        Self {
            place: Arc::new(place),
            deadline: Mutex::new(deadline),
            counter,
            splits: AtomicU64::new(0),
        }
    }

    fn hub(&self) -> &Arc<Hub> {
        &self.place.hub
    }

    /// Checks arguments, and names the group if they are refused.
    fn checked(&self, check: impl FnOnce(Caller) -> Result<Call, Error>) -> Result<Call, Error> {
        let members = &self.place.members;
        check(Caller::member(members)).map_err(|error| members.named(error))
    }

    fn start(&self, call: Call, input: Input) -> Result<Box<dyn Work>, Error> {
        let posted = self.post(call, input)?;
        Ok(Box::new(Started { posted }))
    }

    fn post(&self, call: Call, input: Input) -> Result<Posted, Error> {
        let posted = self.announced(call, input)?;
        self.counter.record(&posted.call, &self.place.members);
        Ok(posted)
    }

    fn announced(&self, call: Call, input: Input) -> Result<Posted, Error> {
        let members = self.place.members.clone();
        let posted = self.hub().post(&members, call.clone(), input);
        let slot = posted.map_err(|error| members.named(error))?;
        let deadline = self.deadline();
        Ok(Posted {
            hub: Arc::clone(self.hub()),
            members,
            call,
            slot,
            deadline,
        })
    }
}

impl Communicator for LocalCommunicator {
    fn rank(&self) -> usize {
        self.place.members.rank
    }

    fn world_size(&self) -> usize {
        self.place.members.world_size()
    }

    fn members(&self) -> Members {
        self.place.members.clone()
    }

    fn deadline(&self) -> Duration {
        *self.deadline.lock()
    }

    fn set_deadline(&self, deadline: Duration) {
        *self.deadline.lock() = deadline;
    }

    fn all_gather(
        &self,
        input: Arc<dyn Segments>,
        numels: &[usize],
    ) -> Result<Box<dyn Work>, Error> {
        let call = self.checked(|caller| caller.all_gather(&*input, numels))?;
        self.start(call, Some(input))
    }

    fn reduce_scatter(
        &self,
        input: Arc<dyn Segments>,
        op: ReduceOp,
    ) -> Result<Box<dyn Work>, Error> {
        let collective = Collective::ReduceScatter;
        let call = self.checked(|caller| caller.reduction(collective, &*input, op))?;
        self.start(call, Some(input))
    }

    fn all_reduce(&self, input: Arc<dyn Segments>, op: ReduceOp) -> Result<Box<dyn Work>, Error> {
        let collective = Collective::AllReduce;
        let call = self.checked(|caller| caller.reduction(collective, &*input, op))?;
        self.start(call, Some(input))
    }

    fn broadcast(
        &self,
        input: Option<Arc<dyn Segments>>,
        layout: SegmentLayout,
        root: usize,
    ) -> Result<Box<dyn Work>, Error> {
        let call = self.checked(|caller| caller.broadcast(input.as_deref(), layout, root))?;
        self.start(call, input)
    }

    fn barrier(&self) -> Result<(), Error> {
        self.post(Caller::barrier(), None)?.outcome().map(drop)
    }

    fn announce(&self, call: Call) -> Result<Box<dyn Work>, Error> {
        let posted = self.announced(call, None)?;
        Ok(Box::new(Announcement { posted }))
    }

    fn split(
        &self,
        color: Option<usize>,
        key: usize,
    ) -> Result<Option<Arc<dyn Communicator>>, Error> {
        let number = self.splits.fetch_add(1, Ordering::Relaxed);
        let members = self.place.members.split(self, color, key)?;
        Ok(color.zip(members).map(|(color, members)| {
            let ranks = Arc::clone(&members.ranks);
            let place = Place {
                hub: self.hub().enter(number, color, ranks),
                members,
                _split_from: Some(Arc::clone(&self.place)),
            };
            let counter = TrafficCounter::split_from(&self.counter);
            Arc::new(Self::at(place, self.deadline(), counter)) as _
        }))
    }

    fn failure(&self) -> Option<Arc<Error>> {
        self.hub().failure()
    }

    fn abort(&self, reason: &str) {
        let members = &self.place.members;
        self.hub().fail(members.named(Error::Aborted {
            rank: members.root_rank(),
            reason: reason.to_owned(),
        }));
    }

    fn traffic(&self) -> Traffic {
        self.counter.traffic()
    }
}

fn bytes_of(input: &Input, segment: usize) -> Option<&[u8]> {
    input.as_ref().and_then(|input| input.bytes(segment))
}

/// A collective this rank has posted.
struct Posted {
    hub: Arc<Hub>,
    members: Members,
    call: Call,
    slot: Arc<Slot>,
    deadline: Duration,
}

impl Posted {
    fn waiter(&self) -> Waiter<'_> {
        Waiter {
            members: &self.members,
            collective: self.call.collective,
            deadline: self.deadline,
        }
    }

    fn outcome(&self) -> Result<&Outcome, Error> {
        self.hub.wait(&self.slot, self.waiter())
    }
}

struct Announcement {
    posted: Posted,
}

impl Work for Announcement {
    fn is_ready(&self) -> bool {
        self.posted.hub.is_ready(&self.posted.slot)
    }

    fn wait(&mut self) -> Result<(), Error> {
        self.posted.outcome().map(drop)
    }

    fn finish(mut self: Box<Self>, _: &mut dyn SegmentsMut) -> Result<(), Error> {
        self.wait()
    }
}

/// A collective that moves something.
struct Started {
    posted: Posted,
}

impl Work for Started {
    fn is_ready(&self) -> bool {
        self.posted.hub.is_ready(&self.posted.slot)
    }

    fn wait(&mut self) -> Result<(), Error> {
        let posted = &self.posted;
        if let Outcome::Pieces(pieces) = posted.outcome()? {
            if pieces.released() {
                return Ok(());
            }
            if pieces.work(posted.members.rank) {
                posted.hub.wake();
            } else {
                posted
                    .hub
                    .wait_for_pieces(&posted.slot, pieces, posted.waiter())?;
            }
        }
        Ok(())
    }

    fn finish(mut self: Box<Self>, output: &mut dyn SegmentsMut) -> Result<(), Error> {
        self.wait()?;
        let Posted { members, call, .. } = &self.posted;
        let fits = Caller::member(members).output(call, output);
        fits.map_err(|error| members.named(error))?;
        let inputs = match self.posted.outcome()? {
            Outcome::Pieces(pieces) => {
                pieces.copy_out(output);
                return Ok(());
            }
            Outcome::Exchanged(inputs) => inputs.as_slice(),
            Outcome::Mismatch(_) => &[],
        };
        match (call.collective, call.root) {
            (Collective::AllGather, _) => gather(inputs, output),
            (Collective::ReduceScatter, _) => reduce_scatter(members, call, inputs, output),
            (Collective::Broadcast, Some(root)) => {
                for segment in 0..output.count() {
                    let source = bytes_of(&inputs[root], segment);
                    let source = source.expect("a root's input should be present");
                    parallel::copy(source, output.bytes_mut(segment));
                }
            }
            (Collective::Broadcast | Collective::AllReduce | Collective::Barrier, _) => {}
        }
        Ok(())
    }
}

fn gather(inputs: &[Input], output: &mut dyn SegmentsMut) {
    for segment in 0..output.count() {
        let mut rest = output.bytes_mut(segment);
        for input in inputs {
            let source = bytes_of(input, segment).expect("all_gather inputs should be present");
            let (part, later) = rest.split_at_mut(source.len().min(rest.len()));
            parallel::copy(&source[..part.len()], part);
            rest = later;
        }
    }
}

fn reduce_scatter(members: &Members, call: &Call, inputs: &[Input], output: &mut dyn SegmentsMut) {
    let (rank, world_size) = (members.rank, members.world_size());
    let (dtype, op) = (output.dtype(), call.op.unwrap_or(ReduceOp::Sum));
    let size_bytes = dtype.size_bytes();
    for (segment, &numel) in call.numels.iter().enumerate() {
        let own = shard_range(numel, rank, world_size);
        debug_assert!(own.len() <= shard_numel(numel, world_size));
        let sources: Vec<Option<&[u8]>> = inputs
            .iter()
            .map(|input| {
                bytes_of(input, segment)
                    .map(|bytes| &bytes[own.start * size_bytes..own.end * size_bytes])
            })
            .collect();
        let (result, padding) = output
            .bytes_mut(segment)
            .split_at_mut(own.len() * size_bytes);
        parallel::for_parts(result, |offset, part| {
            let sources: Vec<Option<&[u8]>> = sources
                .iter()
                .map(|source| source.map(|bytes| &bytes[offset..offset + part.len()]))
                .collect();
            reduce(dtype, op, &sources, part);
        });
        padding.fill(0);
    }
}
