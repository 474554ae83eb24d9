//! Reductions and announcements on their way: the job that runs, the promise of its result, the handle
//! that takes it.

use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};

use super::{
    copies::barrier,
    desk::Scratch,
    reductions::{all_reduce, reduce_scatter, result_bytes},
    runs::{padded_bytes, size_bytes},
    turns::Turns,
};
use crate::{
    call::{Call, Caller, shard_range},
    communicator::{Collective, Work},
    error::Error,
    parallel,
    segments::{Segments, SegmentsMut},
};

/// A reduction or announcement that waits for its turn.
pub(super) struct Job {
    pub(super) ticket: u64,
    pub(super) call: Arc<Call>,
    deadline: Duration,
    /// None: an announcement, which is nothing but its header.
    pub(super) input: Option<Arc<dyn Segments>>,
    promise: Arc<Promise>,
}

/// The result of a job, once it is there.
type Promise = OnceLock<Result<Scratch, Error>>;

impl Job {
    /// Reduces, lets go of the input, and keeps the promise.
    pub(super) fn run(self, turns: &Turns) {
        let call = &*self.call;
        let Some(input) = self.input.as_deref() else {
            let numbered = (self.ticket, call);
            let done = turns.run(numbered, self.deadline, |line, desk| {
                barrier(line, desk, numbered)
            });
            return self.keep(done.map(|()| Scratch::default()), turns);
        };
        let bytes = result_bytes(call, turns.rank, turns.world_size);
        let mut scratch = turns.shelf.take(bytes);
        let result = &mut bytemuck::cast_slice_mut(&mut scratch)[..bytes];
        let numbered = (self.ticket, call);
        let done = turns.run(numbered, self.deadline, |line, desk| {
            if call.collective == Collective::ReduceScatter {
                reduce_scatter(line, desk, numbered, input, result)
            } else {
                all_reduce(line, desk, numbered, input, result)
            }
        });
        self.keep(done.map(|()| scratch), turns);
    }

    pub(super) fn fail(self, error: Error, turns: &Turns) {
        self.keep(Err(error), turns);
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

/// The handle of a reduction.
pub(super) struct Reduction {
    turns: Arc<Turns>,
    ticket: u64,
    call: Arc<Call>,
    deadline: Duration,
    promise: Arc<Promise>,
}

impl Reduction {
    /// Queues a reduction of `input`, or the announcement of one.
    pub(super) fn start(
        turns: &Arc<Turns>,
        call: Call,
        deadline: Duration,
        input: Option<Arc<dyn Segments>>,
    ) -> Result<Self, Error> {
        let call = Arc::new(call);
        let promise = Arc::<Promise>::default();
        let ticket = turns.queue(&call, |ticket| Job {
            ticket,
            call: Arc::clone(&call),
            deadline,
            input,
            promise: Arc::clone(&promise),
        })?;
        Ok(Self {
            turns: Arc::clone(turns),
            ticket,
            call,
            deadline,
            promise,
        })
    }
}

impl Work for Reduction {
    fn is_ready(&self) -> bool {
        self.promise.get().is_some() || self.turns.has_failed()
    }

    fn wait(&mut self) -> Result<(), Error> {
        let collective = self.call.collective;
        self.turns
            .wait(collective, self.ticket, self.deadline, |_| {
                self.promise.get().map(|result| match result {
                    Ok(_) => Ok(()),
                    Err(error) => Err(error.clone()),
                })
            })
    }

    fn finish(mut self: Box<Self>, output: &mut dyn SegmentsMut) -> Result<(), Error> {
        self.wait()?;
        let Turns {
            rank, world_size, ..
        } = *self.turns;
        Caller::host(rank, world_size).reduction_output(&self.call, output)?;
        let Some(Ok(scratch)) = self.promise.get() else {
            return Ok(());
        };
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
        Ok(())
    }
}

impl Drop for Reduction {
    fn drop(&mut self) {
        // Nobody else holds the promise once it is kept and those that wait are told.
        if let Some(promise) = Arc::get_mut(&mut self.promise)
            && let Some(Ok(scratch)) = promise.take()
        {
            self.turns.shelf.give_back(scratch);
        }
    }
}

/// The handle of an announcement.
pub(super) struct Announcement(Reduction);

impl Announcement {
    /// Queues the header of `call`.
    pub(super) fn start(turns: &Arc<Turns>, call: Call, deadline: Duration) -> Result<Self, Error> {
        Reduction::start(turns, call, deadline, None).map(Self)
    }
}

impl Work for Announcement {
    fn is_ready(&self) -> bool {
        self.0.is_ready()
    }

    fn wait(&mut self) -> Result<(), Error> {
        self.0.wait()
    }

    fn finish(mut self: Box<Self>, _: &mut dyn SegmentsMut) -> Result<(), Error> {
        self.wait()
    }
}
