//! What a way to move bytes between processes has to provide, so that
//! [`Pairwise`](crate::Pairwise) makes a communicator of it.

use std::{
    fmt,
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

/// Longest time a transport waits for the system before it looks at its [`Limit`] again.
pub const LIMIT_GRANULARITY: Duration = Duration::from_millis(20);

/// How long a transport may wait.
#[derive(Clone, Copy, Debug)]
pub struct Limit<'a> {
    /// When the wait is over.
    pub at: Instant,
    /// Set by another thread of the rank to end the wait at once.
    pub cancelled: &'a AtomicBool,
}

impl Limit<'_> {
    /// What is left of the wait, at most [`LIMIT_GRANULARITY`].
    ///
    /// # Errors
    ///
    /// [`Fault::Cancelled`], or [`Fault::TimedOut`] naming `peers`.
    pub fn slice(&self, peers: &[usize]) -> Result<Duration, Fault> {
        if self.cancelled.load(Ordering::Acquire) {
            return Err(Fault::Cancelled);
        }
        let left = self.at.saturating_duration_since(Instant::now());
        if left.is_zero() {
            let peers = peers.to_vec();
            return Err(Fault::TimedOut { peers });
        }
        Ok(left.min(LIMIT_GRANULARITY))
    }
}

/// Why an exchange did not happen. After one, only [`Transport::poll`], [`Transport::ask`] and
/// [`Transport::farewell`] are called.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Nothing came from, or could be sent to, these ranks in time.
    TimedOut {
        /// The ranks that were waited for.
        peers: Vec<usize>,
    },
    /// Another thread of this rank ended the wait.
    Cancelled,
    /// The other end is gone without a word: its process has ended, or the connection broke.
    Gone {
        /// Its rank.
        peer: usize,
        /// What the system said.
        message: String,
    },
    /// The other end has said farewell: see [`Transport::farewell`].
    Farewell {
        /// Its rank.
        peer: usize,
        /// What it said; empty if it left in order.
        words: Vec<u8>,
    },
}

/// Messages between the ranks of a group; driven by one thread per rank.
///
/// Messages between two ranks arrive in the order in which they were sent; they have no borders that a
/// transport needs to know: both ends always agree on lengths.
pub trait Transport: Send + fmt::Debug + 'static {
    /// Number of this rank, below [`Transport::world_size`].
    fn rank(&self) -> usize;

    /// Number of ranks.
    fn world_size(&self) -> usize;

    /// Sends all of `send` to rank `to` while it fills all of `receive` from rank `from`.
    ///
    /// Neither waits for the other: ranks that send to each other in a ring, more than any buffer of
    /// the system holds, do not block each other. `to` and `from` are other ranks, possibly the same;
    /// an empty slice sends or receives nothing. Up to 4 KiB to each rank are sent without its receiving
    /// them: ranks tell each other that they have arrived before they listen.
    ///
    /// # Errors
    ///
    /// A [`Fault`] that concerns any rank of the group, this exchange or not: a farewell or death of
    /// a third rank should be noticed here too, so that its reason arrives before the deadline.
    /// A farewell *without* words concerns only exchanges with that rank, after all it sent was received.
    fn exchange(
        &mut self,
        to: usize,
        send: &[u8],
        from: usize,
        receive: &mut [u8],
        limit: Limit<'_>,
    ) -> Result<(), Fault>;

    /// Looks for farewells with words and for deaths while nothing is exchanged. Never waits.
    ///
    /// # Errors
    ///
    /// As [`Transport::exchange`].
    fn poll(&mut self) -> Result<(), Fault>;

    /// Says this rank's last `words` to all others, and returns what the others have said or say within
    /// `limit`: the words of each rank that leaves with any, but of those that a [`Fault`] has told
    /// already. Ends early once every other rank has left or is gone. Called at most once.
    ///
    /// None, for a transport that cannot do this: nothing was said. Then a rank that is stopped may be
    /// reported under the name of one that waits for it.
    fn ask(&mut self, words: &[u8], limit: Limit<'_>) -> Option<Vec<(usize, Vec<u8>)>> {
        let _ = (words, limit);
        None
    }

    /// Tells all others that this rank leaves: in order (no words), or why it failed, unless
    /// [`Transport::ask`] has said words already. Waits until what was sent is out of this process's hands,
    /// no longer than `limit`; never fails. Called once, as the last thing.
    fn farewell(&mut self, words: &[u8], limit: Limit<'_>);
}
