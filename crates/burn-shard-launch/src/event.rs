//! What the threads of a launch tell the one that decides.

use std::time::SystemTime;

use crate::outcome::Ending;

/// What happens to a job, sent by threads that wait for it.
#[derive(Debug)]
pub(crate) enum Event {
    /// A rank, by its number on this host, has ended, at this time.
    Ended(usize, Ending, SystemTime),
    /// One of the ranks' streams was closed, of the ranks that this attempt started.
    Closed { attempt: usize },
    /// The launcher got a signal.
    Signal(i32),
}
