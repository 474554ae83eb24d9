//! The thread that runs what nobody waits for yet, looks for failures while nothing is exchanged, and leaves.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::MutexGuard;

use super::Turns;
use crate::{
    error::Error,
    pairwise::{words, work::Job},
    time::after,
    transport::Fault,
};

/// How often an idle rank looks for failures of others.
const IDLE: Duration = Duration::from_millis(50);

impl Turns {
    /// Leaves once what is queued is done, and waits up to `linger` for that.
    pub(in crate::pairwise) fn leave(&self, linger: Duration) {
        let mut state = self.state.lock();
        state.leaving = true;
        self.changed.notify_all();
        let limit = after(Instant::now(), linger);
        while !state.ended && !self.changed.wait_until(&mut state, limit).timed_out() {}
    }

    /// The progress thread: runs jobs until the rank leaves or fails.
    pub(in crate::pairwise) fn progress(&self) {
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
                let waited = if let Error::Deadline { waited, .. } = first.root_cause() {
                    *waited
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
