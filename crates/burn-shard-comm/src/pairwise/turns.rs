//! One rank's collectives, one at a time: tickets, the thread that runs reductions, and failure.
//!
//! A collective takes its ticket when it is called; the ticket is its number. When its turn comes, a
//! reduction runs on the rank's progress thread, any other collective on the thread that called it, so
//! that it can receive straight into the output. Either way it has the transport for itself.
//!
//! The first failure is kept. Whoever notices it cancels what is running and says farewell; nothing
//! is sent after that.

use std::{
    collections::VecDeque,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::{
    desk::{Desk, Shelf},
    line::{Failure, Line},
    verdict, words,
    work::Job,
};
use crate::{
    call::Call,
    communicator::Collective,
    error::Error,
    spawn::panic_message,
    time::after,
    traffic::Traffic,
    transport::{Fault, Limit, Transport},
};

/// Longest time a farewell takes.
const FAREWELL: Duration = Duration::from_secs(2);
/// How often an idle rank looks for failures of others.
const IDLE: Duration = Duration::from_millis(50);
/// What a transport may overrun a deadline by before it counts as stuck.
const OVERRUN: Duration = Duration::from_secs(10);

pub(super) struct Turns {
    pub(super) rank: usize,
    pub(super) world_size: usize,
    pub(super) shelf: Shelf,
    /// Locked before `state`, never after it.
    wire: Mutex<Wire>,
    state: Mutex<State>,
    /// Signalled when a turn ends, a result is there, a job is queued or the state changes.
    changed: Condvar,
    /// Ends the exchange that is going on.
    cancelled: AtomicBool,
}

struct Wire {
    /// None after the farewell.
    transport: Option<Box<dyn Transport>>,
    desk: Desk,
}

pub(super) struct State {
    /// The next ticket.
    next: u64,
    /// The ticket whose turn it is.
    turn: u64,
    jobs: VecDeque<Job>,
    failure: Option<Arc<Error>>,
    /// No handle is left: nothing more will be called.
    leaving: bool,
    /// The progress thread has ended.
    ended: bool,
    traffic: Traffic,
}

impl Turns {
    pub(super) fn new(transport: impl Transport) -> Arc<Self> {
        Arc::new(Self {
            rank: transport.rank(),
            world_size: transport.world_size(),
            shelf: Shelf::default(),
            wire: Mutex::new(Wire {
                transport: Some(Box::new(transport)),
                desk: Desk::default(),
            }),
            state: Mutex::new(State {
                next: 0,
                turn: 0,
                jobs: VecDeque::new(),
                failure: None,
                leaving: false,
                ended: false,
                traffic: Traffic::default(),
            }),
            changed: Condvar::new(),
            cancelled: AtomicBool::new(false),
        })
    }

    pub(super) fn traffic(&self) -> Traffic {
        self.state.lock().traffic
    }

    /// Takes the ticket of `call`, unless the group is poisoned.
    pub(super) fn enter(&self, call: &Call) -> Result<u64, Error> {
        let mut state = self.state.lock();
        let ticket = self.ticket(&mut state, call)?;
        state.traffic.record(call, self.rank, self.world_size);
        Ok(ticket)
    }

    /// Queues the reduction or announcement that `job` makes of its ticket.
    pub(super) fn queue(&self, call: &Call, job: impl FnOnce(u64) -> Job) -> Result<u64, Error> {
        let mut state = self.state.lock();
        let ticket = self.ticket(&mut state, call)?;
        let job = job(ticket);
        if job.input.is_some() {
            state.traffic.record(call, self.rank, self.world_size);
        }
        state.jobs.push_back(job);
        drop(state);
        self.changed.notify_all();
        Ok(ticket)
    }

    fn ticket(&self, state: &mut State, call: &Call) -> Result<u64, Error> {
        if let Some(cause) = &state.failure {
            return Err(Error::Poisoned {
                rank: self.rank,
                collective: call.collective,
                cause: Arc::clone(cause),
            });
        }
        let ticket = state.next;
        state.next += 1;
        Ok(ticket)
    }

    /// Runs `work` when it is the turn of `ticket`.
    pub(super) fn run(
        &self,
        (ticket, call): (u64, &Call),
        deadline: Duration,
        work: impl FnOnce(&mut Line<'_>, &mut Desk) -> Result<(), Failure>,
    ) -> Result<(), Error> {
        let collective = call.collective;
        self.wait(collective, ticket, deadline, |state| {
            if state.failure.is_some() {
                Some(Err(self.interrupted(
                    state,
                    collective,
                    ticket,
                    self.others(),
                )))
            } else {
                (state.turn == ticket).then_some(Ok(()))
            }
        })?;
        let drive = AssertUnwindSafe(|| self.drive((ticket, collective), deadline, work));
        let result = catch_unwind(drive).unwrap_or_else(|payload| {
            // A buffer of the caller's panicked; what it was to send is still expected.
            let error = Error::RankPanicked {
                rank: self.rank,
                message: panic_message(payload.as_ref()),
            };
            self.fail_locked(&mut self.state.lock(), Arc::new(error.clone()));
            Err(error)
        });
        self.state.lock().turn += 1;
        self.changed.notify_all();
        if result.is_err() {
            self.part();
        }
        result
    }

    fn drive(
        &self,
        (ticket, collective): (u64, Collective),
        deadline: Duration,
        work: impl FnOnce(&mut Line<'_>, &mut Desk) -> Result<(), Failure>,
    ) -> Result<(), Error> {
        let mut wire = self.wire.lock();
        let Wire { transport, desk } = &mut *wire;
        let state = self.state.lock();
        let (Some(transport), None) = (transport, &state.failure) else {
            return Err(self.interrupted(&state, collective, ticket, self.others()));
        };
        drop(state);
        let mut line = Line::new(transport.as_mut(), deadline, &self.cancelled);
        work(&mut line, desk).map_err(|failure| {
            let (waited, missing) = (line.since.elapsed(), std::mem::take(&mut line.missing));
            let failure = verdict::first_word(failure, line.transport());
            let numbered = (collective, ticket);
            let first = self.explain(failure, numbered, waited, missing.clone());
            let own = if matches!(first, Error::Deadline { .. }) {
                first.clone()
            } else {
                self.late(numbered, waited, missing.clone())
            };
            let blamed = self.ask(line.transport(), first.root_cause(), Some(&own), deadline);
            let error = match blamed {
                None => first,
                Some(cause) if cause.origin() == Some(self.rank) => cause,
                Some(cause) => Error::Interrupted {
                    rank: self.rank,
                    collective,
                    sequence: ticket,
                    missing: missing.clone(),
                    cause: Arc::new(cause),
                },
            };
            let mut state = self.state.lock();
            if state.failure.is_some() {
                return self.interrupted(&state, collective, ticket, missing);
            }
            let cause = if let Error::Interrupted { cause, .. } = &error {
                Arc::clone(cause)
            } else {
                Arc::new(error.clone())
            };
            self.fail_locked(&mut state, cause);
            error
        })
    }

    /// If time is up, on this rank or on the one that `first` is from: the cause that all ranks should name,
    /// if another than that. `own` is what this rank misses.
    fn ask(
        &self,
        transport: &mut dyn Transport,
        first: &Error,
        own: Option<&Error>,
        deadline: Duration,
    ) -> Option<Error> {
        if !matches!(first, Error::Deadline { .. }) || self.cancelled.load(Ordering::Acquire) {
            return None;
        }
        let limit = Limit {
            at: after(Instant::now(), verdict::hearing(deadline)),
            cancelled: &self.cancelled,
        };
        let said = transport.ask(&words::encode(self.rank, own.unwrap_or(first)), limit)?;
        let mut statements = vec![first.clone()];
        statements.extend(own.cloned());
        let decoded = said
            .iter()
            .map(|(peer, words)| words::decode(self.rank, *peer, words));
        statements.extend(decoded);
        verdict::verdict(&statements)
    }

    const fn late(
        &self,
        (collective, sequence): (Collective, u64),
        waited: Duration,
        missing: Vec<usize>,
    ) -> Error {
        Error::Deadline {
            rank: self.rank,
            collective,
            sequence,
            waited,
            missing,
        }
    }

    /// What this rank returns for a failure that is the first it knows of.
    fn explain(
        &self,
        failure: Failure,
        (collective, sequence): (Collective, u64),
        waited: Duration,
        missing: Vec<usize>,
    ) -> Error {
        let rank = self.rank;
        match failure {
            Failure::Mismatch(calls) => Error::Mismatch {
                rank,
                sequence,
                calls,
            },
            Failure::OutOfStep { peer, message } => Error::OutOfStep {
                rank,
                peer,
                message,
            },
            Failure::Fault(Fault::TimedOut { peers }) => {
                self.late((collective, sequence), waited, peers)
            }
            Failure::Fault(Fault::Farewell { peer, words }) if words.is_empty() => {
                Error::RankLeft {
                    rank,
                    collective,
                    sequence,
                    missing: vec![peer],
                }
            }
            Failure::Fault(Fault::Farewell { peer, words }) => Error::Interrupted {
                rank,
                collective,
                sequence,
                missing,
                cause: Arc::new(words::decode(rank, peer, &words)),
            },
            Failure::Fault(Fault::Gone { peer, message }) => Error::RankDied {
                rank,
                peer,
                message,
            },
            Failure::Fault(Fault::Cancelled) => Error::Aborted {
                rank,
                reason: "the transport was cancelled".to_owned(),
            },
        }
    }

    fn interrupted(
        &self,
        state: &State,
        collective: Collective,
        sequence: u64,
        missing: Vec<usize>,
    ) -> Error {
        let cause = state.failure.clone();
        Error::Interrupted {
            rank: self.rank,
            collective,
            sequence,
            missing,
            cause: cause.expect("only a failure should interrupt"),
        }
    }

    fn others(&self) -> Vec<usize> {
        (0..self.world_size)
            .filter(|&rank| rank != self.rank)
            .collect()
    }

    /// Waits until `done` has a result; it is asked whenever something has changed.
    ///
    /// Each turn ends by its own deadline, so this one is for a transport that does not keep to it.
    pub(super) fn wait<T>(
        &self,
        collective: Collective,
        sequence: u64,
        deadline: Duration,
        done: impl Fn(&State) -> Option<Result<T, Error>>,
    ) -> Result<T, Error> {
        let start = Instant::now();
        let mut state = self.state.lock();
        let (mut turn, mut since) = (state.turn, start);
        loop {
            if let Some(result) = done(&state) {
                return result;
            }
            if state.turn != turn {
                (turn, since) = (state.turn, Instant::now());
            }
            let late = after(since, deadline.saturating_add(OVERRUN));
            if self.changed.wait_until(&mut state, late).timed_out() && Instant::now() >= late {
                let error = self.late((collective, sequence), start.elapsed(), self.others());
                self.fail_locked(&mut state, Arc::new(error.clone()));
                return Err(error);
            }
        }
    }

    /// Tells those that wait that a result is there.
    pub(super) fn wake(&self) {
        // A waiter either sees the result before it sleeps or holds the lock until it sleeps.
        drop(self.state.lock());
        self.changed.notify_all();
    }

    /// The error of a collective that will not have its turn.
    fn skipped(&self, state: &State, job: &Job) -> Error {
        self.interrupted(state, job.call.collective, job.ticket, self.others())
    }

    pub(super) fn failure(&self) -> Option<Arc<Error>> {
        self.state.lock().failure.clone()
    }

    pub(super) fn has_failed(&self) -> bool {
        self.state.lock().failure.is_some()
    }

    /// Poisons the group, unless it is already, and tells the others.
    pub(super) fn fail(&self, error: Error) {
        self.fail_locked(&mut self.state.lock(), Arc::new(error));
        self.part();
    }

    fn fail_locked(&self, state: &mut State, cause: Arc<Error>) {
        if state.failure.is_none() {
            state.failure = Some(cause);
        }
        self.cancelled.store(true, Ordering::Release);
        self.changed.notify_all();
    }

    /// Says farewell, if that has not been said: with words if the group has failed.
    fn part(&self) {
        // Whoever has the transport gives it back within its deadline, or soon if it is cancelled.
        let Some(mut transport) = self.wire.lock().transport.take() else {
            return;
        };
        let failure = self.state.lock().failure.clone();
        let words = match failure.as_deref() {
            // All ranks know of a mismatch; words would overtake the calls that some still read.
            None | Some(Error::Mismatch { .. }) => Vec::new(),
            Some(error) => words::encode(self.rank, error),
        };
        let limit = Limit {
            at: after(Instant::now(), FAREWELL),
            cancelled: &AtomicBool::new(false),
        };
        transport.farewell(&words, limit);
    }

    /// Leaves once what is queued is done, and waits up to `linger` for that.
    pub(super) fn leave(&self, linger: Duration) {
        let mut state = self.state.lock();
        state.leaving = true;
        self.changed.notify_all();
        let limit = after(Instant::now(), linger);
        while !state.ended && !self.changed.wait_until(&mut state, limit).timed_out() {}
    }

    /// The progress thread: runs jobs until the rank leaves or fails.
    pub(super) fn progress(&self) {
        while let Some(job) = self.next_job() {
            job.run(self);
        }
        self.part();
        let mut state = self.state.lock();
        let jobs = std::mem::take(&mut state.jobs);
        let errors: Vec<Error> = jobs.iter().map(|job| self.skipped(&state, job)).collect();
        drop(state);
        for (job, error) in jobs.into_iter().zip(errors) {
            job.fail(error, self);
        }
        self.state.lock().ended = true;
        self.changed.notify_all();
    }

    /// The job whose turn it is; none when there will be no more.
    fn next_job(&self) -> Option<Job> {
        let mut state = self.state.lock();
        loop {
            if state.failure.is_some() {
                return None;
            }
            let turn = state.turn;
            if state.jobs.front().is_some_and(|job| job.ticket == turn) {
                return state.jobs.pop_front();
            }
            if state.turn != state.next {
                // Another thread has the turn.
                self.changed.wait(&mut state);
            } else if state.leaving {
                return None;
            } else if self.changed.wait_for(&mut state, IDLE).timed_out() {
                MutexGuard::unlocked(&mut state, || self.poll());
            }
        }
    }

    /// Looks for failures of others while nothing is exchanged.
    fn poll(&self) {
        let Some(mut wire) = self.wire.try_lock() else {
            return;
        };
        let Some(transport) = &mut wire.transport else {
            return;
        };
        let cause = match transport.poll() {
            Ok(()) => return,
            Err(Fault::Farewell { peer, words }) if !words.is_empty() => {
                let first = words::decode(self.rank, peer, &words);
                let waited = if let Error::Deadline { waited, .. } = first {
                    waited
                } else {
                    Duration::ZERO
                };
                let blamed = self.ask(transport.as_mut(), &first, None, waited);
                blamed.unwrap_or(first)
            }
            Err(Fault::Gone { peer, message }) => Error::RankDied {
                rank: self.rank,
                peer,
                message,
            },
            // Nothing was exchanged: neither concerns anybody.
            Err(Fault::Farewell { .. } | Fault::TimedOut { .. } | Fault::Cancelled) => return,
        };
        self.fail_locked(&mut self.state.lock(), Arc::new(cause));
    }
}

impl std::fmt::Debug for Turns {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = self.state.lock();
        f.debug_struct("Turns")
            .field("rank", &self.rank)
            .field("world_size", &self.world_size)
            .field("next", &state.next)
            .field("turn", &state.turn)
            .field("failure", &state.failure)
            .finish_non_exhaustive()
    }
}
