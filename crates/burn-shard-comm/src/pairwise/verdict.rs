//! Whom to blame when time is up.
//!
//! In the middle of a large collective a rank waits for one other at a time. If that one waits itself,
//! because a third is stopped, both run out of time together, and the first to notice names the wrong rank.
//! So ranks tell each other whom they miss before they leave ([`Transport::ask`]); a rank that says that it
//! waits is not the one that all wait for.

use std::time::Duration;

use super::line::Failure;
use crate::{
    error::Error,
    transport::{Fault, Transport},
};

/// Longest time that a rank listens to the others once time is up.
const HEARING: Duration = Duration::from_secs(1);

/// How long a rank listens to the others once `deadline` has passed.
pub(super) fn hearing(deadline: Duration) -> Duration {
    (deadline / 4).min(HEARING)
}

/// What others have told already when this rank runs out of time; otherwise `failure`.
pub(super) fn first_word(failure: Failure, transport: &mut dyn Transport) -> Failure {
    if !matches!(failure, Failure::Fault(Fault::TimedOut { .. })) {
        return failure;
    }
    match transport.poll() {
        Err(Fault::Farewell { peer, words }) if !words.is_empty() => {
            Fault::Farewell { peer, words }.into()
        }
        Err(Fault::Gone { peer, message }) => Fault::Gone { peer, message }.into(),
        Ok(()) | Err(Fault::Farewell { .. } | Fault::TimedOut { .. } | Fault::Cancelled) => failure,
    }
}

/// The one of the ranks' statements that names only ranks that are missed and do not wait themselves.
///
/// None if there are no such ranks: then the first to speak is right.
pub(super) fn verdict(statements: &[Error]) -> Option<Error> {
    let waits = |asked: usize| {
        let mut statements = statements.iter();
        statements
            .any(|said| matches!(said.root_cause(), Error::Deadline { rank, .. } if *rank == asked))
    };
    statements.iter().find_map(|said| {
        let Error::Deadline {
            rank,
            collective,
            sequence,
            waited,
            missing,
        } = said.root_cause()
        else {
            return None;
        };
        let silent = missing.iter().copied().filter(|&rank| !waits(rank));
        let missing: Vec<usize> = silent.collect();
        (!missing.is_empty()).then(|| {
            said.in_the_same_group(Error::Deadline {
                rank: *rank,
                collective: *collective,
                sequence: *sequence,
                waited: *waited,
                missing,
            })
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::communicator::Collective;

    fn said(rank: usize, missing: &[usize]) -> Error {
        Error::Deadline {
            rank,
            collective: Collective::AllReduce,
            sequence: 5,
            waited: Duration::from_secs(rank as u64),
            missing: missing.to_vec(),
        }
    }

    fn blamed(statements: &[Error]) -> Option<(usize, Vec<usize>)> {
        match verdict(statements) {
            Some(Error::Deadline { rank, missing, .. }) => Some((rank, missing)),
            _ => None,
        }
    }

    #[test]
    fn the_rank_that_is_missed_and_silent_is_named() {
        assert_eq!(blamed(&[said(0, &[1])]), Some((0, vec![1])));
        // 0 waits for 1, which waits for 2.
        let chain = [said(0, &[1]), said(1, &[2])];
        assert_eq!(blamed(&chain), Some((1, vec![2])));
        let both = [said(0, &[1, 2]), said(1, &[2])];
        assert_eq!(blamed(&both), Some((0, vec![2])));
        // Another host is cut off.
        let cut = [said(0, &[1, 2]), said(1, &[3])];
        assert_eq!(blamed(&cut), Some((0, vec![2])));
    }

    #[test]
    fn nobody_is_named_if_all_that_are_missed_wait() {
        assert_eq!(blamed(&[said(0, &[1]), said(1, &[0])]), None);
        assert_eq!(blamed(&[]), None);
        let aborted = Error::Aborted {
            rank: 1,
            reason: String::new(),
        };
        assert_eq!(blamed(&[said(0, &[1]), aborted]), Some((0, vec![1])));
    }
}
