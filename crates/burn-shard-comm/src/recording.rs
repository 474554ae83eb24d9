//! A communicator around another: notes every call, delays it, fails one of them.
//!
//! For tests and traces. Nothing here changes a result.

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use parking_lot::Mutex;

use crate::{
    call::{Call, Caller},
    communicator::{Collective, Communicator, ReduceOp, Work},
    error::Error,
    segments::{SegmentLayout, Segments, SegmentsMut},
    split::Members,
    traffic::Traffic,
};

/// Wraps a communicator; see the examples.
///
/// # Examples
///
/// ```
/// # use std::{sync::Arc, time::Duration};
/// # use burn_shard_comm::{Collective, Error, ProcessGroup, Recording, ReduceOp};
/// # fn main() -> Result<(), Error> {
/// ProcessGroup::spawn(2, |group| -> Result<(), Error> {
///     let recording = Arc::new(
///         Recording::new(Arc::clone(group.communicator()))
///             .with_delays(7, Duration::from_millis(1)),
///     );
///     let group = ProcessGroup::new(recording.clone());
///     group.all_reduce(&mut [1.0f32; 3], ReduceOp::Mean)?;
///     assert_eq!(recording.count(Collective::AllReduce), 1);
///     assert_eq!(recording.calls()[0].to_string(), "all_reduce f32 mean [3]");
///     Ok(())
/// })?
/// .into_iter()
/// .collect()
/// # }
/// ```
#[derive(Debug)]
pub struct Recording {
    inner: Arc<dyn Communicator>,
    delays: Option<Arc<Delays>>,
    link: Option<Arc<Link>>,
    fail_call: Option<u64>,
    calls: Arc<Mutex<Vec<Call>>>,
}

impl Recording {
    /// Notes calls, and neither delays nor fails any.
    #[must_use]
    pub fn new(inner: Arc<dyn Communicator>) -> Self {
        Self {
            inner,
            delays: None,
            link: None,
            fail_call: None,
            calls: Arc::default(),
        }
    }

    /// Sleeps before each call and each wait, for a random time up to `longest`.
    ///
    /// The times follow from `seed` and the rank, so that ranks with one seed differ.
    #[must_use]
    pub fn with_delays(mut self, seed: u64, longest: Duration) -> Self {
        let seed = seed ^ (self.inner.rank() as u64 + 1).wrapping_mul(0xd134_2543_de82_ef95);
        self.delays = Some(Arc::new(Delays {
            state: Mutex::new(seed),
            longest,
        }));
        self
    }

    /// Lets collectives take as long as over a link: each takes `latency`, and the time of the bytes that this
    /// rank receives, one after the other, while the caller goes on until it waits. What is computed
    /// meanwhile costs nothing, which is what overlap means.
    ///
    /// # Panics
    ///
    /// If `bytes_per_second` is not above 0.
    #[must_use]
    pub fn with_link(mut self, latency: Duration, bytes_per_second: f64) -> Self {
        assert!(bytes_per_second > 0.0, "a link that carries nothing");
        self.link = Some(Arc::new(Link {
            latency,
            bytes_per_second,
            free: Mutex::new(Instant::now()),
        }));
        self
    }

    /// Fails the call with this number, counted from 0 on this rank, and aborts the group.
    #[must_use]
    pub fn fail_call(mut self, call: u64) -> Self {
        self.fail_call = Some(call);
        self
    }

    /// What this rank has called, in order; refused calls are left out, failed ones are not.
    #[must_use]
    pub fn calls(&self) -> Vec<Call> {
        self.calls.lock().clone()
    }

    /// How many calls of one kind there were.
    #[must_use]
    pub fn count(&self, collective: Collective) -> usize {
        self.calls
            .lock()
            .iter()
            .filter(|call| call.collective == collective)
            .count()
    }

    /// Forgets the calls so far; their numbers, for [`Recording::fail_call`], start again.
    pub fn clear(&self) {
        self.calls.lock().clear();
    }

    fn caller(&self) -> Caller {
        Caller::devices(self.rank(), self.world_size())
    }

    /// When the call is through, where there is a link.
    fn note(&self, call: Call) -> Result<Option<Instant>, Error> {
        if let Some(delays) = &self.delays {
            delays.sleep();
        }
        let collective = call.collective;
        let bytes = || call.received_bytes(self.rank(), self.world_size());
        let through = self.link.as_ref().map(|link| link.carry(bytes()));
        let number = {
            let mut calls = self.calls.lock();
            calls.push(call);
            calls.len() as u64 - 1
        };
        if self.fail_call == Some(number) {
            let error = Error::Injected {
                rank: self.rank(),
                call: number,
                collective,
            };
            self.inner.abort(&error.to_string());
            return Err(error);
        }
        Ok(through)
    }

    fn delayed(&self, work: Box<dyn Work>, through: Option<Instant>) -> Box<dyn Work> {
        if self.delays.is_none() && through.is_none() {
            return work;
        }
        Box::new(Delayed {
            work,
            delays: self.delays.clone(),
            through,
        })
    }
}

impl Communicator for Recording {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn world_size(&self) -> usize {
        self.inner.world_size()
    }

    fn members(&self) -> Members {
        self.inner.members()
    }

    fn memory_device(&self) -> Option<usize> {
        self.inner.memory_device()
    }

    fn deadline(&self) -> Duration {
        self.inner.deadline()
    }

    fn set_deadline(&self, deadline: Duration) {
        self.inner.set_deadline(deadline);
    }

    fn all_gather(
        &self,
        input: Arc<dyn Segments>,
        numels: &[usize],
    ) -> Result<Box<dyn Work>, Error> {
        let through = self.note(self.caller().all_gather(&*input, numels)?)?;
        self.inner
            .all_gather(input, numels)
            .map(|work| self.delayed(work, through))
    }

    fn reduce_scatter(
        &self,
        input: Arc<dyn Segments>,
        op: ReduceOp,
    ) -> Result<Box<dyn Work>, Error> {
        let through = self.note(self.caller().reduction(
            Collective::ReduceScatter,
            &*input,
            op,
        )?)?;
        self.inner
            .reduce_scatter(input, op)
            .map(|work| self.delayed(work, through))
    }

    fn all_reduce(&self, input: Arc<dyn Segments>, op: ReduceOp) -> Result<Box<dyn Work>, Error> {
        let through = self.note(
            self.caller()
                .reduction(Collective::AllReduce, &*input, op)?,
        )?;
        self.inner
            .all_reduce(input, op)
            .map(|work| self.delayed(work, through))
    }

    fn broadcast(
        &self,
        input: Option<Arc<dyn Segments>>,
        layout: SegmentLayout,
        root: usize,
    ) -> Result<Box<dyn Work>, Error> {
        let caller = self.caller();
        let through = self.note(caller.broadcast(input.as_deref(), layout.clone(), root)?)?;
        self.inner
            .broadcast(input, layout, root)
            .map(|work| self.delayed(work, through))
    }

    fn barrier(&self) -> Result<(), Error> {
        let through = self.note(Caller::barrier())?;
        sleep_until(through);
        self.inner.barrier()
    }

    /// Sub-groups are noted, delayed and failed together with this one.
    fn split(
        &self,
        color: Option<usize>,
        key: usize,
    ) -> Result<Option<Arc<dyn Communicator>>, Error> {
        let inner = self.inner.split(color, key)?;
        Ok(inner.map(|inner| {
            Arc::new(Self {
                inner,
                delays: self.delays.clone(),
                link: self.link.clone(),
                fail_call: self.fail_call,
                calls: Arc::clone(&self.calls),
            }) as _
        }))
    }

    fn announce(&self, call: Call) -> Result<Box<dyn Work>, Error> {
        let through = self.note(call.clone())?;
        self.inner
            .announce(call)
            .map(|work| self.delayed(work, through))
    }

    fn failure(&self) -> Option<Arc<Error>> {
        self.inner.failure()
    }

    fn abort(&self, reason: &str) {
        self.inner.abort(reason);
    }

    fn traffic(&self) -> Traffic {
        self.inner.traffic()
    }
}

#[derive(Debug)]
struct Delays {
    state: Mutex<u64>,
    longest: Duration,
}

impl Delays {
    fn sleep(&self) {
        // splitmix64
        let mut state = self.state.lock();
        *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = *state;
        drop(state);
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^= bits >> 31;
        thread::sleep(
            self.longest
                .mul_f64((bits >> 11) as f64 / (1u64 << 53) as f64),
        );
    }
}

/// One rank's way to the others.
#[derive(Debug)]
struct Link {
    latency: Duration,
    bytes_per_second: f64,
    /// When it has carried everything so far.
    free: Mutex<Instant>,
}

impl Link {
    /// When it will have carried `bytes` more.
    fn carry(&self, bytes: usize) -> Instant {
        let time = self.latency + Duration::from_secs_f64(bytes as f64 / self.bytes_per_second);
        let mut free = self.free.lock();
        *free = (*free).max(Instant::now()) + time;
        *free
    }
}

struct Delayed {
    work: Box<dyn Work>,
    delays: Option<Arc<Delays>>,
    through: Option<Instant>,
}

impl Delayed {
    fn sleep(&self) {
        if let Some(delays) = &self.delays {
            delays.sleep();
        }
        sleep_until(self.through);
    }
}

fn sleep_until(through: Option<Instant>) {
    if let Some(through) = through {
        thread::sleep(through.saturating_duration_since(Instant::now()));
    }
}

impl Work for Delayed {
    fn is_ready(&self) -> bool {
        self.through.is_none_or(|through| through <= Instant::now()) && self.work.is_ready()
    }

    fn wait(&mut self) -> Result<(), Error> {
        self.sleep();
        self.work.wait()
    }

    fn finish(self: Box<Self>, output: &mut dyn SegmentsMut) -> Result<(), Error> {
        self.sleep();
        self.work.finish(output)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{OwnedSegments, ProcessGroup};

    /// The link is what is late, and the caller is not kept.
    #[test]
    fn a_link_carries_one_collective_after_the_other_and_changes_no_result() {
        let latency = Duration::from_millis(20);
        ProcessGroup::spawn(2, |group| {
            let recording = Recording::new(Arc::clone(group.communicator()));
            let slow = recording.with_link(latency, 1e9);
            let start = Instant::now();
            let input = |value: f32| Arc::new(OwnedSegments(vec![vec![value; 3]])) as _;
            let first = slow.all_reduce(input(1.0), ReduceOp::Sum).expect("first");
            let second = slow.all_reduce(input(2.0), ReduceOp::Sum).expect("second");
            let mut sums = OwnedSegments(vec![vec![0.0f32; 3]]);
            second.finish(&mut sums).expect("second");
            assert!(start.elapsed() >= 2 * latency);
            assert_eq!(sums.0, [[4.0; 3]]);
            assert!(first.is_ready());
            first.finish(&mut sums).expect("first");
            assert_eq!(sums.0, [[2.0; 3]]);
        })
        .expect("no rank fails");
    }
}
