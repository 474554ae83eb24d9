//! What went wrong first, how it is told to the others, and what each call returns for it.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use super::{State, Turns};
use crate::{
    ending::{Ending, record},
    error::Error,
    pairwise::{header::Numbered, line::Failure, verdict, words, work::Job},
    time::after,
    transport::{Fault, Limit, Transport},
};

/// Longest time a farewell takes.
const FAREWELL: Duration = Duration::from_secs(2);

impl Turns {
    /// If time is up, on this rank or on the one that `first` is from: the cause that all ranks should name,
    /// if another than that. `own` is what this rank misses.
    pub(super) fn ask(
        &self,
        transport: &mut dyn Transport,
        first: &Error,
        own: Option<&Error>,
        deadline: Duration,
    ) -> Option<Error> {
        if !matches!(first.root_cause(), Error::Deadline { .. })
            || self.cancelled.load(Ordering::Acquire)
        {
            return None;
        }
        let limit = Limit {
            at: after(Instant::now(), verdict::hearing(deadline)),
            cancelled: &self.cancelled,
        };
        record(Ending::Failed);
        let said = transport.ask(&words::encode(self.rank, own.unwrap_or(first)), limit)?;
        let mut statements = vec![first.clone()];
        statements.extend(own.cloned());
        let decoded = said
            .iter()
            .map(|(peer, words)| words::decode(self.rank, *peer, words));
        statements.extend(decoded);
        verdict::verdict(&statements)
    }

    pub(super) fn late(
        &self,
        numbered: Numbered<'_>,
        waited: Duration,
        missing: Vec<usize>,
    ) -> Error {
        numbered.group.members.named(Error::Deadline {
            rank: self.rank,
            collective: numbered.call.collective,
            sequence: numbered.sequence,
            waited,
            missing,
        })
    }

    /// What this rank returns for a failure that is the first it knows of.
    pub(super) fn explain(
        &self,
        failure: Failure,
        numbered: Numbered<'_>,
        waited: Duration,
        missing: Vec<usize>,
    ) -> Error {
        let rank = self.rank;
        let (collective, sequence) = (numbered.call.collective, numbered.sequence);
        let error = match failure {
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
            Failure::Fault(Fault::TimedOut { peers }) => return self.late(numbered, waited, peers),
            Failure::Fault(Fault::Farewell { peer, words }) if words.is_empty() => {
                Error::RankLeft {
                    rank,
                    collective,
                    sequence,
                    missing: vec![peer],
                }
            }
            Failure::Fault(Fault::Farewell { peer, words }) => {
                let cause = Arc::new(words::decode(rank, peer, &words));
                return self.interrupted_by(cause, numbered, missing);
            }
            // It concerns the rank, not the collective in which it was noticed.
            Failure::Fault(Fault::Gone { peer, message }) => {
                return Error::RankDied {
                    rank,
                    peer,
                    message,
                };
            }
            Failure::Fault(Fault::Cancelled) => Error::Aborted {
                rank,
                reason: "the transport was cancelled".to_owned(),
            },
        };
        numbered.group.members.named(error)
    }

    /// What a collective returns that `cause` has ended.
    pub(super) fn interrupted_by(
        &self,
        cause: Arc<Error>,
        numbered: Numbered<'_>,
        missing: Vec<usize>,
    ) -> Error {
        numbered.group.members.named(Error::Interrupted {
            rank: self.rank,
            collective: numbered.call.collective,
            sequence: numbered.sequence,
            missing,
            cause,
        })
    }

    pub(super) fn interrupted(
        &self,
        state: &State,
        numbered: Numbered<'_>,
        missing: Vec<usize>,
    ) -> Error {
        let cause = state.failure.clone();
        let cause = cause.expect("only a failure should interrupt");
        self.interrupted_by(cause, numbered, missing)
    }

    /// The error of a collective that will not have its turn.
    pub(super) fn skipped(&self, state: &State, job: &Job) -> Error {
        let numbered = job.numbered();
        self.interrupted(state, numbered, numbered.group.members.others())
    }

    pub(in crate::pairwise) fn failure(&self) -> Option<Arc<Error>> {
        self.state.lock().failure.clone()
    }

    pub(in crate::pairwise) fn has_failed(&self) -> bool {
        self.state.lock().failure.is_some()
    }

    /// Poisons the group, unless it is already, and tells the others.
    pub(in crate::pairwise) fn fail(&self, error: Error) {
        self.fail_locked(&mut self.state.lock(), Arc::new(error));
        self.part();
    }

    pub(super) fn fail_locked(&self, state: &mut State, cause: Arc<Error>) {
        if state.failure.is_none() {
            // Before a caller can see it, who may end the process.
            if fails_this_rank(&cause) {
                record(Ending::Failed);
            }
            state.failure = Some(cause);
        }
        self.cancelled.store(true, Ordering::Release);
        self.changed.notify_all();
    }

    /// Says farewell, if that has not been said: with words if the group has failed.
    pub(super) fn part(&self) {
        // Whoever has the transport gives it back within its deadline, or soon if it is cancelled. Held until
        // all is said: the caller may end the process.
        let mut wire = self.wire.lock();
        let Some(mut transport) = wire.transport.take() else {
            return;
        };
        let failure = self.state.lock().failure.clone();
        let words = match failure.filter(|error| fails_this_rank(error)) {
            None => {
                record(Ending::Left);
                Vec::new()
            }
            Some(error) => words::encode(self.rank, &error),
        };
        let limit = Limit {
            at: after(Instant::now(), FAREWELL),
            cancelled: &AtomicBool::new(false),
        };
        transport.farewell(&words, limit);
    }
}

/// Whether others have to hear of it: all ranks know of a mismatch, but for one in a sub-group.
const fn fails_this_rank(error: &Error) -> bool {
    !matches!(error, Error::Mismatch { .. })
}
