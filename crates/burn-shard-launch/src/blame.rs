//! Which rank was the first to fail.
//!
//! A rank's own record of its failure comes before anything that other ranks can notice, so records are
//! compared by their time. A rank without a record was killed, ended without leaving its group, or has no
//! group: the launcher learns of it a moment after its peers do, which is allowed for.

use std::time::{Duration, SystemTime};

use signal_hook::consts::signal::{SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGKILL, SIGSEGV};

use crate::{outcome::Ending, records::Record};

/// How much later than its consequences the end of a process may be reported.
pub(crate) const LATE: Duration = Duration::from_millis(200);

/// What is known of one rank that has ended.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ended {
    pub(crate) ending: Ending,
    /// The time at which the launcher noticed.
    pub(crate) seen: SystemTime,
    /// The launcher had told it to end before.
    pub(crate) was_told: bool,
    pub(crate) record: Option<Record>,
}

/// A signal to the launcher that ends the job.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Interruption {
    pub(crate) signal: i32,
    pub(crate) at: SystemTime,
}

/// The index of the rank whose failure came first; none if no rank failed by itself.
pub(crate) fn first_to_fail(ranks: &[Ended], interruption: Option<Interruption>) -> Option<usize> {
    let last_failure = ranks.iter().filter_map(|rank| match rank.record {
        Some(Record::Failed(at)) => Some(at),
        Some(Record::Left(_)) | None => None,
    });
    let last_failure = last_failure.max();
    let failures = ranks.iter().enumerate().filter_map(|(index, rank)| {
        let at = rank.failed_at(last_failure)?;
        let is_own = interruption.is_none_or(|interruption| rank.precedes(interruption));
        is_own.then_some((at, index))
    });
    failures.min().map(|(_, index)| index)
}

impl Ended {
    /// The time at which it failed, if it did so by itself. `last_failure`: the last that any rank recorded.
    fn failed_at(&self, last_failure: Option<SystemTime>) -> Option<SystemTime> {
        if self.ending.is_success() {
            return None;
        }
        match self.record {
            Some(Record::Failed(at)) => Some(at),
            // If nobody has failed since, leaving was no failure, and what came after it was.
            Some(Record::Left(at)) if last_failure.is_some_and(|last| last >= at) => Some(at),
            Some(Record::Left(_)) => (!self.was_told).then_some(self.seen),
            None if self.was_told && !self.ended_by_its_own_signal() => None,
            // A process that is killed loses its connections first, and its peers may exit before its own
            // end is reported.
            None if self.ending.is_violent() => Some(earlier(self.seen, 2 * LATE)),
            None => Some(earlier(self.seen, LATE)),
        }
    }

    /// Whether it was a signal that no launcher sends, told or not.
    fn ended_by_its_own_signal(&self) -> bool {
        self.ending.is_violent() && self.ending != Ending::Signaled(SIGKILL)
    }

    /// Whether its failure has nothing to do with a signal to the launcher, which may have gone to the
    /// ranks too.
    fn precedes(&self, interruption: Interruption) -> bool {
        let at = match self.record {
            Some(Record::Failed(at)) => at,
            Some(Record::Left(_)) | None => self.seen,
        };
        self.ending != Ending::Signaled(interruption.signal) && at < earlier(interruption.at, LATE)
    }
}

impl Ending {
    const fn is_violent(self) -> bool {
        matches!(
            self,
            Self::Signaled(SIGKILL | SIGSEGV | SIGBUS | SIGILL | SIGFPE | SIGABRT)
        )
    }
}

fn earlier(at: SystemTime, by: Duration) -> SystemTime {
    at.checked_sub(by).unwrap_or(SystemTime::UNIX_EPOCH)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIGTERM: i32 = 15;

    fn at(milliseconds: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(1000) + Duration::from_millis(milliseconds)
    }

    fn ended(ending: Ending, seen: u64, record: Option<Record>) -> Ended {
        Ended {
            ending,
            seen: at(seen),
            was_told: false,
            record,
        }
    }

    fn failed(milliseconds: u64) -> Option<Record> {
        Some(Record::Failed(at(milliseconds)))
    }

    fn left(milliseconds: u64) -> Option<Record> {
        Some(Record::Left(at(milliseconds)))
    }

    const OK: Ending = Ending::Exited(0);
    const ONE: Ending = Ending::Exited(1);
    const KILLED: Ending = Ending::Signaled(SIGKILL);

    #[test]
    fn a_rank_that_cleans_up_after_its_failure_comes_before_those_that_failed_of_it() {
        let panicked = ended(Ending::Exited(101), 4000, failed(10));
        let peer = ended(ONE, 20, failed(12));
        assert_eq!(first_to_fail(&[peer, panicked, peer], None), Some(1));
    }

    #[test]
    fn a_rank_that_left_is_the_cause_only_if_others_needed_it() {
        let returned = ended(ONE, 4000, left(10));
        assert_eq!(
            first_to_fail(&[ended(ONE, 20, failed(12)), returned], None),
            Some(1)
        );
        // All have left in order; what failed is what came after.
        let ranks = [ended(Ending::Exited(3), 50, left(11)), returned];
        assert_eq!(first_to_fail(&ranks, None), Some(0));
        let ranks = [ended(OK, 5000, left(9)), returned];
        assert_eq!(first_to_fail(&ranks, None), Some(1));
    }

    #[test]
    fn a_death_reported_late_explains_what_its_peers_made_of_it() {
        let peer = ended(ONE, 20, failed(12));
        for death in [KILLED, Ending::Signaled(SIGABRT), Ending::Exited(3)] {
            assert_eq!(
                first_to_fail(&[peer, ended(death, 150, None)], None),
                Some(1)
            );
            assert_eq!(
                first_to_fail(&[peer, ended(death, 5000, None)], None),
                Some(0)
            );
        }
        // Without any records.
        let script = ended(ONE, 20, None);
        assert_eq!(
            first_to_fail(&[script, ended(KILLED, 60, None)], None),
            Some(1)
        );
        assert_eq!(
            first_to_fail(&[script, ended(ONE, 60, None)], None),
            Some(0)
        );
    }

    #[test]
    fn ranks_that_the_launcher_ended_have_not_failed() {
        let mut told = ended(Ending::Signaled(SIGTERM), 5, None);
        told.was_told = true;
        assert_eq!(first_to_fail(&[told, ended(ONE, 900, None)], None), Some(1));
        assert_eq!(first_to_fail(&[told], None), None);
        // It was ending by itself when it was told.
        told.ending = Ending::Signaled(SIGABRT);
        assert_eq!(first_to_fail(&[told, ended(ONE, 900, None)], None), Some(0));
    }

    #[test]
    fn an_interruption_is_no_failure_of_a_rank_and_a_failure_before_it_is() {
        let interruption = Some(Interruption {
            signal: SIGTERM,
            at: at(1000),
        });
        // The signal has gone to the ranks, too, and one has noticed before the launcher.
        let by_signal = ended(Ending::Signaled(SIGTERM), 500, None);
        let peer = ended(ONE, 1010, failed(999));
        assert_eq!(first_to_fail(&[by_signal, peer], interruption), None);
        let before = ended(ONE, 1500, failed(500));
        assert_eq!(
            first_to_fail(&[by_signal, peer, before], interruption),
            Some(2)
        );
    }
}
