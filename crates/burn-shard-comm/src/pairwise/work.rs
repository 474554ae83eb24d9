//! Collectives on their way: the job that runs, the promise of its result, the handle that takes it.

use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};

use super::{
    copies::{all_gather, barrier, broadcast},
    desk::{Desk, Scratch},
    group::Group,
    header::Numbered,
    line::{Failure, Line},
    reductions::{all_reduce, reduce_scatter},
    runs::{Run, padded_bytes, size_bytes, total_bytes},
    turns::Turns,
};
use crate::{
    call::{Call, Caller, shard_range},
    communicator::{Collective, Work},
    dtype::DType,
    error::Error,
    parallel,
    segments::{Segments, SegmentsMut},
};

/// A collective or announcement that waits for its turn.
pub(super) struct Job {
    pub(super) ticket: u64,
    sequence: u64,
    group: Arc<Group>,
    call: Arc<Call>,
    kind: Kind,
    deadline: Duration,
    input: Option<Arc<dyn Segments>>,
    promise: Arc<Promise>,
}

/// What ranks exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Headers, and the elements of a collective.
    Exchange,
    /// Headers only.
    Announcement,
}

/// The result of a job, once it is there.
type Promise = OnceLock<Result<Scratch, Error>>;

impl Job {
    /// Runs the collective, lets go of the input, and keeps the promise.
    pub(super) fn run(self, turns: &Turns) {
        let (call, numbered) = (&*self.call, self.numbered());
        let bytes = self.result_bytes();
        let mut scratch = turns.shelf.take(bytes);
        let result = &mut bytemuck::cast_slice_mut(&mut scratch)[..bytes];
        let done = turns.run(numbered, self.deadline, |line, desk| {
            match (call.collective, numbered.input) {
                (Collective::ReduceScatter, Some(input)) => {
                    reduce_scatter(line, desk, numbered, input, result)
                }
                (Collective::AllReduce, Some(input)) => {
                    all_reduce(line, desk, numbered, input, result)
                }
                _ => self.copy(line, desk, &mut Landing::new(call, result)),
            }
        });
        self.keep(done.map(|()| scratch), turns);
    }

    /// Runs a collective that copies, straight into the output.
    fn run_into(self, turns: &Turns, output: &mut dyn SegmentsMut) -> Result<(), Error> {
        turns.run(self.numbered(), self.deadline, |line, desk| {
            self.copy(line, desk, output)
        })
    }

    /// All that is neither announced nor a reduction.
    fn copy(
        &self,
        line: &mut Line<'_>,
        desk: &mut Desk,
        output: &mut dyn SegmentsMut,
    ) -> Result<(), Failure> {
        let numbered = self.numbered();
        match (self.call.collective, numbered.input) {
            (Collective::AllGather, Some(input)) => all_gather(line, desk, numbered, input, output),
            (Collective::Broadcast, _) if self.kind == Kind::Exchange => {
                broadcast(line, desk, numbered, output)
            }
            _ => barrier(line, desk, numbered),
        }
    }

    pub(super) fn fail(self, error: Error, turns: &Turns) {
        self.keep(Err(error), turns);
    }

    pub(super) fn numbered(&self) -> Numbered<'_> {
        Numbered {
            ticket: self.ticket,
            sequence: self.sequence,
            group: &self.group,
            call: &self.call,
            input: self.input.as_deref(),
        }
    }

    /// Bytes of the result on this rank, without padding.
    fn result_bytes(&self) -> usize {
        let (call, members) = (&*self.call, &self.group.members);
        match call.collective {
            _ if self.kind == Kind::Announcement => 0,
            Collective::ReduceScatter => {
                Run::shards(call, members.rank, members.world_size()).bytes()
            }
            Collective::Broadcast if self.input.is_some() => 0,
            Collective::AllGather
            | Collective::AllReduce
            | Collective::Broadcast
            | Collective::Barrier => total_bytes(call),
        }
    }

    fn keep(self, result: Result<Scratch, Error>, turns: &Turns) {
        let Self { input, promise, .. } = self;
        // Before those that wait are told: they may count on it.
        drop(input);
        let first = promise.set(result).is_ok();
        debug_assert!(first, "a promise should be kept once");
        drop(promise);
        turns.wake();
    }
}

/// A result that nobody has an output for yet: its segments, one after the other.
struct Landing<'a> {
    call: &'a Call,
    starts: Vec<usize>,
    bytes: &'a mut [u8],
}

impl<'a> Landing<'a> {
    fn new(call: &'a Call, bytes: &'a mut [u8]) -> Self {
        let mut starts = vec![0];
        for &numel in &call.numels {
            starts.push(starts[starts.len() - 1] + numel * size_bytes(call));
        }
        Self {
            call,
            starts,
            bytes,
        }
    }
}

impl SegmentsMut for Landing<'_> {
    fn dtype(&self) -> DType {
        self.call.dtype.unwrap_or(DType::U8)
    }
    fn count(&self) -> usize {
        self.call.numels.len()
    }
    fn numel(&self, index: usize) -> usize {
        self.call.numels[index]
    }
    fn bytes_mut(&mut self, index: usize) -> &mut [u8] {
        &mut self.bytes[self.starts[index]..self.starts[index + 1]]
    }
}

/// The handle of a collective or announcement.
pub(super) struct Started {
    turns: Arc<Turns>,
    ticket: u64,
    sequence: u64,
    group: Arc<Group>,
    call: Arc<Call>,
    kind: Kind,
    deadline: Duration,
    /// On the root of a broadcast: its result.
    own: Option<Arc<dyn Segments>>,
    promise: Arc<Promise>,
}

impl Started {
    /// Queues a collective of `input`, or the announcement of one.
    pub(super) fn new(
        turns: &Arc<Turns>,
        group: &Arc<Group>,
        call: Call,
        kind: Kind,
        deadline: Duration,
        input: Option<Arc<dyn Segments>>,
    ) -> Result<Self, Error> {
        let own = input
            .clone()
            .filter(|_| call.collective == Collective::Broadcast);
        let (call, promise) = (Arc::new(call), Arc::<Promise>::default());
        let (ticket, sequence) = turns.queue(group, &call, |ticket, sequence| Job {
            ticket,
            sequence,
            group: Arc::clone(group),
            call: Arc::clone(&call),
            kind,
            deadline,
            input,
            promise: Arc::clone(&promise),
        })?;
        if kind == Kind::Exchange {
            group.counter.record(&call, &group.members);
        }
        Ok(Self {
            turns: Arc::clone(turns),
            ticket,
            sequence,
            group: Arc::clone(group),
            call,
            kind,
            deadline,
            own,
            promise,
        })
    }

    fn numbered(&self) -> Numbered<'_> {
        Numbered {
            ticket: self.ticket,
            sequence: self.sequence,
            group: &self.group,
            call: &self.call,
            input: None,
        }
    }

    /// Refuses an output that does not fit.
    fn check(&self, output: &mut dyn SegmentsMut) -> Result<(), Error> {
        let members = &self.group.members;
        let fits = Caller::member(members).output(&self.call, output);
        fits.map_err(|error| members.named(error))
    }

    /// Copies a result that nobody had an output for.
    fn copy_out(&self, scratch: &Scratch, output: &mut dyn SegmentsMut) {
        let (rank, world_size) = (self.group.members.rank, self.group.members.world_size());
        let mut rest: &[u8] = bytemuck::cast_slice(scratch);
        let size_bytes = size_bytes(&self.call);
        for (segment, &numel) in self.call.numels.iter().enumerate() {
            let output = output.bytes_mut(segment);
            let (own, padded) = if self.call.collective == Collective::ReduceScatter {
                let own = shard_range(numel, rank, world_size).len();
                (own, padded_bytes(&self.call, numel, world_size))
            } else {
                (numel, output.len())
            };
            let (part, later) = rest.split_at(own * size_bytes);
            let (result, padding) = output[..padded].split_at_mut(part.len());
            parallel::copy(part, result);
            padding.fill(0);
            rest = later;
        }
    }
}

impl Work for Started {
    fn is_ready(&self) -> bool {
        self.promise.get().is_some() || self.turns.has_failed()
    }

    fn wait(&mut self) -> Result<(), Error> {
        if let Some(job) = self.turns.claim(self.ticket) {
            job.run(&self.turns);
        }
        self.turns.wait(self.numbered(), self.deadline, |_| {
            self.promise.get().map(|result| match result {
                Ok(_) => Ok(()),
                Err(error) => Err(error.clone()),
            })
        })
    }

    fn finish(mut self: Box<Self>, output: &mut dyn SegmentsMut) -> Result<(), Error> {
        if self.kind == Kind::Announcement {
            return self.wait();
        }
        let copies = self.call.op.is_none() && self.own.is_none();
        if copies
            && self.check(output).is_ok()
            && let Some(job) = self.turns.claim(self.ticket)
        {
            return job.run_into(&self.turns, output);
        }
        self.wait()?;
        self.check(output)?;
        if let Some(own) = &self.own {
            for segment in 0..output.count() {
                let own = own.bytes(segment);
                let own = own.expect("a root's input should be present");
                parallel::copy(own, output.bytes_mut(segment));
            }
        } else if let Some(Ok(scratch)) = self.promise.get() {
            self.copy_out(scratch, output);
        }
        Ok(())
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        // Nobody else holds the promise once it is kept and those that wait are told.
        if let Some(promise) = Arc::get_mut(&mut self.promise)
            && let Some(Ok(scratch)) = promise.take()
        {
            self.turns.shelf.give_back(scratch);
        }
    }
}
