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
    group::Group,
    header::Numbered,
    line::{Failure, Line},
    verdict,
    work::Job,
};
use crate::{call::Call, error::Error, spawn::panic_message, time::after, transport::Transport};

/// What a transport may overrun a deadline by before it counts as stuck.
const OVERRUN: Duration = Duration::from_secs(10);

pub(super) struct Turns {
    pub(super) rank: usize,
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
}

impl Turns {
    pub(super) fn new(transport: impl Transport) -> Arc<Self> {
        Arc::new(Self {
            rank: transport.rank(),
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
            }),
            changed: Condvar::new(),
            cancelled: AtomicBool::new(false),
        })
    }

    /// Queues the collective or announcement of `group` that `job` makes of its ticket and its number;
    /// returns these.
    pub(super) fn queue(
        &self,
        group: &Group,
        call: &Call,
        job: impl FnOnce(u64, u64) -> Job,
    ) -> Result<(u64, u64), Error> {
        let mut state = self.state.lock();
        if let Some(cause) = &state.failure {
            return Err(group.members.named(Error::Poisoned {
                rank: self.rank,
                collective: call.collective,
                cause: Arc::clone(cause),
            }));
        }
        let (ticket, sequence) = (state.next, group.next());
        state.next += 1;
        state.jobs.push_back(job(ticket, sequence));
        drop(state);
        self.changed.notify_all();
        Ok((ticket, sequence))
    }

    /// Takes a job out of the queue if its turn has not begun: the caller has to run it.
    pub(super) fn claim(&self, ticket: u64) -> Option<Job> {
        let jobs = &mut self.state.lock().jobs;
        let index = jobs.iter().position(|job| job.ticket == ticket)?;
        jobs.remove(index)
    }

    /// Runs `work` when it is the turn of the collective with this number.
    pub(super) fn run(
        &self,
        numbered: Numbered<'_>,
        deadline: Duration,
        work: impl FnOnce(&mut Line<'_>, &mut Desk) -> Result<(), Failure>,
    ) -> Result<(), Error> {
        self.wait(numbered, deadline, |state| {
            if state.failure.is_some() {
                let others = numbered.group.members.others();
                Some(Err(self.interrupted(state, numbered, others)))
            } else {
                (state.turn == numbered.ticket).then_some(Ok(()))
            }
        })?;
        let drive = AssertUnwindSafe(|| self.drive(numbered, deadline, work));
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
        numbered: Numbered<'_>,
        deadline: Duration,
        work: impl FnOnce(&mut Line<'_>, &mut Desk) -> Result<(), Failure>,
    ) -> Result<(), Error> {
        let mut wire = self.wire.lock();
        let Wire { transport, desk } = &mut *wire;
        let state = self.state.lock();
        let members = &numbered.group.members;
        let (Some(transport), None) = (transport, &state.failure) else {
            return Err(self.interrupted(&state, numbered, members.others()));
        };
        drop(state);
        let mut line = Line::new(transport.as_mut(), members, deadline, &self.cancelled);
        work(&mut line, desk).map_err(|failure| {
            let (waited, missing) = (line.since.elapsed(), std::mem::take(&mut line.missing));
            let failure = verdict::first_word(failure, line.transport());
            let first = self.explain(failure, numbered, waited, missing.clone());
            let own = if matches!(first.root_cause(), Error::Deadline { rank, .. } if *rank == self.rank)
            {
                first.clone()
            } else {
                self.late(numbered, waited, missing.clone())
            };
            let blamed = self.ask(line.transport(), &first, Some(&own), deadline);
            let error = match blamed {
                None => first,
                Some(cause) if cause.origin() == Some(self.rank) => cause,
                Some(cause) => self.interrupted_by(Arc::new(cause), numbered, missing.clone()),
            };
            let mut state = self.state.lock();
            if state.failure.is_some() {
                return self.interrupted(&state, numbered, missing);
            }
            let cause = if let Error::Interrupted { cause, .. } = innermost(&error) {
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
        numbered: Numbered<'_>,
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
                let others = numbered.group.members.others();
                let error = self.late(numbered, start.elapsed(), others);
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

/// What happened in a sub-group, if `error` is of one.
fn innermost(error: &Error) -> &Error {
    if let Error::SubGroup { error, .. } = error {
        return error;
    }
    error
}

impl std::fmt::Debug for Turns {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = self.state.lock();
        f.debug_struct("Turns")
            .field("rank", &self.rank)
            .field("next", &state.next)
            .field("turn", &state.turn)
            .field("failure", &state.failure)
            .finish_non_exhaustive()
    }
}
