//! One rank's collectives, one at a time: tickets and turns. The thread that runs reductions is in
//! `progress.rs`, what is done about a failure in `failure.rs`.
//!
//! A collective takes its ticket when it is called; the ticket is its number. When its turn comes, it
//! runs on the rank's progress thread, unless a thread has begun to wait for it before: then on that one,
//! which can receive straight into the output. Either way it has the transport for itself.
//!
//! The first failure is kept. Whoever notices it cancels what is running and says farewell; nothing
//! is sent after that.

mod failure;
mod progress;

use std::{
    collections::VecDeque,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, atomic::AtomicBool},
    time::{Duration, Instant},
};

use parking_lot::{Condvar, Mutex};

use super::{
    desk::{Desk, Shelf},
    header::Numbered,
    line::{Failure, Line},
    verdict,
    work::{Job, Kind},
};
use crate::{
    call::Call, communicator::Collective, error::Error, spawn::panic_message, time::after,
    traffic::Traffic, transport::Transport,
};

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

    /// Queues the collective or announcement that `job` makes of its ticket.
    pub(super) fn queue(&self, call: &Call, job: impl FnOnce(u64) -> Job) -> Result<u64, Error> {
        let mut state = self.state.lock();
        let ticket = self.ticket(&mut state, call)?;
        let job = job(ticket);
        if job.kind == Kind::Exchange {
            state.traffic.record(call, self.rank, self.world_size);
        }
        state.jobs.push_back(job);
        drop(state);
        self.changed.notify_all();
        Ok(ticket)
    }

    /// Takes a job out of the queue if its turn has not begun: the caller has to run it.
    pub(super) fn claim(&self, ticket: u64) -> Option<Job> {
        let jobs = &mut self.state.lock().jobs;
        let index = jobs.iter().position(|job| job.ticket == ticket)?;
        jobs.remove(index)
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

    /// Runs `work` when it is the turn of the collective with this number.
    pub(super) fn run(
        &self,
        numbered: Numbered<'_>,
        deadline: Duration,
        work: impl FnOnce(&mut Line<'_>, &mut Desk) -> Result<(), Failure>,
    ) -> Result<(), Error> {
        let (ticket, collective) = (numbered.sequence, numbered.call.collective);
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
