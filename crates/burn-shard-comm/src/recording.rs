//! A communicator around another: notes every call, or the last ones for the flight recorder; delays calls, fails
//! one of them.
//!
//! Nothing here changes a result.

use std::{
    path::PathBuf,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use parking_lot::Mutex;

use crate::{
    call::{Call, Caller},
    communicator::{Collective, Communicator, ReduceOp, Work},
    error::Error,
    flight::{Flight, InFlight, State},
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
    /// `None` in a flight recorder, which keeps the last ones only.
    calls: Option<Arc<Mutex<Vec<Call>>>>,
    /// And which of its groups this is.
    flight: Option<(Arc<Flight>, usize)>,
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
            calls: Some(Arc::default()),
            flight: None,
        }
    }

    /// Keeps the last 1,000 collectives of a rank, sub-groups included, and writes them into a directory when the group
    /// fails or is left, if `BURN_SHARD_FLIGHT_RECORDER` names one; otherwise `inner` as it is.
    ///
    /// Communicators that come from the environment, and ranks that are threads, are wrapped already. Of NCCL
    /// the announcements are noted: that a rank has started a collective, not that it has its result.
    #[must_use]
    pub fn flight_from_env(inner: Arc<dyn Communicator>) -> Arc<dyn Communicator> {
        match Flight::from_env(&inner.members()) {
            Some(flight) => Arc::new(Self::flight(inner, flight)),
            None => inner,
        }
    }

    /// Keeps the last 1,000 collectives of a rank, sub-groups included, and writes them into `directory` when the group
    /// fails or is left. [`flight`](crate::flight) reads the files.
    #[must_use]
    pub fn flight_recorder(inner: Arc<dyn Communicator>, directory: impl Into<PathBuf>) -> Self {
        let flight = Flight::new(directory.into(), &inner.members());
        Self::flight(inner, flight)
    }

    fn flight(inner: Arc<dyn Communicator>, flight: Flight) -> Self {
        let mut recording = Self::new(inner);
        recording.calls = None;
        recording.flight = Some((Arc::new(flight), 0));
        recording
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
        let calls = self.calls.as_ref();
        calls.map(|calls| calls.lock().clone()).unwrap_or_default()
    }

    /// How many calls of one kind there were.
    #[must_use]
    pub fn count(&self, collective: Collective) -> usize {
        let is_it = |call: &&Call| call.collective == collective;
        let calls = self.calls.as_ref();
        calls.map_or(0, |calls| calls.lock().iter().filter(is_it).count())
    }

    /// Forgets the calls so far; their numbers, for [`Recording::fail_call`], start again.
    pub fn clear(&self) {
        if let Some(calls) = &self.calls {
            calls.lock().clear();
        }
    }

    fn caller(&self) -> Caller {
        Caller::devices(self.rank(), self.world_size())
    }

    fn note(&self, call: Call, input: Option<&dyn Segments>) -> Result<Noted, Error> {
        self.note_until(call, input, State::Finished)
    }

    /// `done`: what it is for the flight recorder once it has ended well.
    fn note_until(
        &self,
        call: Call,
        input: Option<&dyn Segments>,
        done: State,
    ) -> Result<Noted, Error> {
        if let Some(delays) = &self.delays {
            delays.sleep();
        }
        let collective = call.collective;
        let bytes = || call.received_bytes(self.rank(), self.world_size());
        let through = self.link.as_ref().map(|link| link.carry(bytes()));
        let flight = self.flight.as_ref();
        let flight = flight.map(|(flight, group)| flight.begin(*group, &call, input, done));
        let number = self.calls.as_ref().map(|calls| {
            let mut calls = calls.lock();
            calls.push(call);
            calls.len() as u64 - 1
        });
        if let Some(number) = number
            && self.fail_call == Some(number)
        {
            let error = Error::Injected {
                rank: self.rank(),
                call: number,
                collective,
            };
            self.inner.abort(&error.to_string());
            return Err(error);
        }
        Ok(Noted { through, flight })
    }

    /// The work of a call that was noted.
    fn noted(
        &self,
        noted: Noted,
        work: Result<Box<dyn Work>, Error>,
    ) -> Result<Box<dyn Work>, Error> {
        let Noted { through, flight } = noted;
        match work {
            Err(error) => {
                if let Some(flight) = flight {
                    flight.end(Err(&error));
                }
                Err(error)
            }
            Ok(work) if self.delays.is_none() && through.is_none() && flight.is_none() => Ok(work),
            Ok(work) => Ok(Box::new(NotedWork {
                work,
                delays: self.delays.clone(),
                through,
                flight,
            })),
        }
    }
}

/// What is known of a call that begins.
struct Noted {
    /// When it is through, where there is a link.
    through: Option<Instant>,
    flight: Option<InFlight>,
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
        let call = self.caller().all_gather(&*input, numels)?;
        let noted = self.note(call, Some(&*input))?;
        self.noted(noted, self.inner.all_gather(input, numels))
    }

    fn reduce_scatter(
        &self,
        input: Arc<dyn Segments>,
        op: ReduceOp,
    ) -> Result<Box<dyn Work>, Error> {
        let collective = Collective::ReduceScatter;
        let call = self.caller().reduction(collective, &*input, op)?;
        let noted = self.note(call, Some(&*input))?;
        self.noted(noted, self.inner.reduce_scatter(input, op))
    }

    fn all_reduce(&self, input: Arc<dyn Segments>, op: ReduceOp) -> Result<Box<dyn Work>, Error> {
        let collective = Collective::AllReduce;
        let call = self.caller().reduction(collective, &*input, op)?;
        let noted = self.note(call, Some(&*input))?;
        self.noted(noted, self.inner.all_reduce(input, op))
    }

    fn broadcast(
        &self,
        input: Option<Arc<dyn Segments>>,
        layout: SegmentLayout,
        root: usize,
    ) -> Result<Box<dyn Work>, Error> {
        let caller = self.caller();
        let call = caller.broadcast(input.as_deref(), layout.clone(), root)?;
        let noted = self.note(call, input.as_deref())?;
        self.noted(noted, self.inner.broadcast(input, layout, root))
    }

    fn barrier(&self) -> Result<(), Error> {
        let Noted { through, flight } = self.note(Caller::barrier(), None)?;
        sleep_until(through);
        ended(flight, self.inner.barrier())
    }

    /// Sub-groups are noted, delayed and failed together with this one.
    fn split(
        &self,
        color: Option<usize>,
        key: usize,
    ) -> Result<Option<Arc<dyn Communicator>>, Error> {
        let flight = self.flight.as_ref();
        let began = flight.map(|(flight, group)| {
            flight.begin(*group, &self.caller().split(), None, State::Finished)
        });
        let inner = ended(began, self.inner.split(color, key))?;
        // A split is one for the ranks without a color, too.
        let flight = flight.map(|(flight, group)| {
            let members = inner.as_ref().map(|inner| inner.members());
            (Arc::clone(flight), flight.split(*group, members.as_ref()))
        });
        Ok(inner.map(|inner| {
            Arc::new(Self {
                inner,
                delays: self.delays.clone(),
                link: self.link.clone(),
                fail_call: self.fail_call,
                calls: self.calls.clone(),
                flight,
            }) as _
        }))
    }

    fn announce(&self, call: Call) -> Result<Box<dyn Work>, Error> {
        // What it announces is moved by other means, and may be under way for long.
        let noted = self.note_until(call.clone(), None, State::Agreed)?;
        self.noted(noted, self.inner.announce(call))
    }

    fn failure(&self) -> Option<Arc<Error>> {
        self.inner.failure()
    }

    fn abort(&self, reason: &str) {
        // The others hear of it before a file is written, which may take long.
        self.inner.abort(reason);
        if let Some((flight, _)) = &self.flight {
            flight.fail(reason);
        }
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

struct NotedWork {
    work: Box<dyn Work>,
    delays: Option<Arc<Delays>>,
    through: Option<Instant>,
    /// Until it has ended.
    flight: Option<InFlight>,
}

impl NotedWork {
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

/// Notes how a collective has ended.
fn ended<T>(flight: Option<InFlight>, result: Result<T, Error>) -> Result<T, Error> {
    if let Some(flight) = flight {
        flight.end(result.as_ref().map(drop));
    }
    result
}

impl Work for NotedWork {
    fn is_ready(&self) -> bool {
        self.through.is_none_or(|through| through <= Instant::now()) && self.work.is_ready()
    }

    fn wait(&mut self) -> Result<(), Error> {
        self.sleep();
        let result = self.work.wait();
        ended(self.flight.take(), result)
    }

    fn finish(mut self: Box<Self>, output: &mut dyn SegmentsMut) -> Result<(), Error> {
        self.sleep();
        let flight = self.flight.take();
        ended(flight, self.work.finish(output))
    }
}

/// A rank that leaves may have heard of a failure that was not its own.
impl Drop for Recording {
    fn drop(&mut self) {
        if let Some((flight, _)) = &self.flight
            && let Some(failure) = self.inner.failure()
        {
            flight.fail(&failure.to_string());
        }
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
