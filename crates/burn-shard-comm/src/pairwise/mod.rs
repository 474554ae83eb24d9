//! A communicator over any way to move bytes between processes.
//!
//! Ranks exchange in pairs, round by round: in round `k` of `world_size - 1` each sends to the `k`-th
//! rank after it and receives from the `k`-th before it, so every link carries as much as any other.
//! No rank adds on behalf of others on the way: each receives the parts of all ranks and combines them in
//! rank order, so that results have the bits of ranks that are threads.
//!
//! | collective of `n` bytes on `N` ranks | each rank sends |
//! |---|---|
//! | any | 40 bytes to each of the others first: the header |
//! | any, of at most 2000 bytes | its part right behind the header, and nothing more |
//! | `all_gather`, `reduce_scatter` | `n (N - 1) / N` |
//! | `all_reduce` | `2 n (N - 1) / N` |
//! | `broadcast` | `n (N - 1) / N`; the root twice that |
//!
//! | file | what |
//! |---|---|
//! | `turns/` | one collective at a time, the progress thread, failure |
//! | `work.rs` | collectives that are not finished |
//! | `header.rs` | agreement before each collective |
//! | `reductions.rs`, `copies.rs` | who sends what when |
//! | `parts.rs`, `runs.rs` | which bytes |
//! | `line.rs` | the transport during one collective |
//! | `words.rs` | errors and calls as bytes |
//! | `verdict.rs` | whom to blame when time is up |
//! | `desk.rs` | memory |

mod copies;
mod desk;
mod header;
mod line;
mod parts;
mod reductions;
mod runs;
mod turns;
mod verdict;
mod words;
mod work;

use std::{
    sync::Arc,
    thread::{self, ThreadId},
    time::Duration,
};

use parking_lot::Mutex;

use crate::{
    call::{Call, Caller},
    communicator::{Collective, Communicator, ReduceOp, Work},
    error::Error,
    segments::{SegmentLayout, Segments},
    traffic::Traffic,
    transport::Transport,
};

use turns::Turns;
use work::{Kind, Started};

/// How long the last handle waits for what is queued.
const LINGER: Duration = Duration::from_secs(5);

/// One rank of a group of processes, or of anything else that has a [`Transport`].
///
/// Results are those of ranks that are threads, bit by bit.
///
/// # Ordering
///
/// Collectives run one at a time, in the order of the calls: on a thread of this rank's own, or on the thread that
/// waits for one that has not begun.
///
/// # Memory
///
/// Scratch of `N + 1` chunks of at most 1 MiB. The result of each collective that is not finished: a shard
/// for `reduce_scatter`, all of it otherwise, but for an `all_gather` or broadcast that is finished before it
/// has begun, which writes the output directly; up to 64 MiB of results are kept for later ones. An input is
/// let go when its collective is done on this rank, that of a broadcast with the root's [`Work`].
///
/// # Errors
///
/// As [`Communicator`]. The deadline of a call counts from its turn on, and from the last time that
/// anything was exchanged: a collective that moves is not late. It fails by its deadline even if
/// nobody waits for it yet. A failure also ends earlier collectives that some ranks have completed and this
/// one has not. Once time is up, a rank listens for a quarter of the deadline, at most a second, to hear whom
/// the others miss, so that all name the rank that is stopped and not one that waits for it.
///
/// The rank leaves when the last handle is dropped. That waits up to five seconds for collectives that
/// were started, which go on in the background after that, if the process does. If the handle is
/// dropped because of a panic, the others fail with [`Error::RankPanicked`].
#[derive(Debug)]
pub struct Pairwise {
    turns: Arc<Turns>,
    progress: Option<ThreadId>,
    deadline: Mutex<Duration>,
}

impl Pairwise {
    /// The rank that `transport` belongs to, with a thread of its own for collectives.
    ///
    /// If the system has no thread left, the group is poisoned with [`Error::Threads`] from the start.
    #[must_use]
    pub fn new(transport: impl Transport, deadline: Duration) -> Self {
        let turns = Turns::new(transport);
        let rank = turns.rank;
        let theirs = Arc::clone(&turns);
        let progress = thread::Builder::new()
            .name(format!("rank {rank} progress"))
            .spawn(move || theirs.progress());
        let progress = match progress {
            Ok(handle) => Some(handle.thread().id()),
            Err(error) => {
                turns.fail(Error::Threads {
                    rank,
                    threads: 1,
                    message: error.to_string(),
                });
                None
            }
        };
        Self {
            turns,
            progress,
            deadline: Mutex::new(deadline),
        }
    }

    fn caller(&self) -> Caller {
        Caller::host(self.rank(), self.world_size())
    }

    fn start(&self, call: Call, input: Option<Arc<dyn Segments>>) -> Result<Box<dyn Work>, Error> {
        let work = Started::new(&self.turns, call, Kind::Exchange, self.deadline(), input)?;
        Ok(Box::new(work))
    }
}

impl Communicator for Pairwise {
    fn rank(&self) -> usize {
        self.turns.rank
    }

    fn world_size(&self) -> usize {
        self.turns.world_size
    }

    fn deadline(&self) -> Duration {
        *self.deadline.lock()
    }

    fn set_deadline(&self, deadline: Duration) {
        *self.deadline.lock() = deadline;
    }

    fn all_gather(
        &self,
        input: Arc<dyn Segments>,
        numels: &[usize],
    ) -> Result<Box<dyn Work>, Error> {
        self.start(self.caller().all_gather(&*input, numels)?, Some(input))
    }

    fn reduce_scatter(
        &self,
        input: Arc<dyn Segments>,
        op: ReduceOp,
    ) -> Result<Box<dyn Work>, Error> {
        let collective = Collective::ReduceScatter;
        self.start(
            self.caller().reduction(collective, &*input, op)?,
            Some(input),
        )
    }

    fn all_reduce(&self, input: Arc<dyn Segments>, op: ReduceOp) -> Result<Box<dyn Work>, Error> {
        let collective = Collective::AllReduce;
        self.start(
            self.caller().reduction(collective, &*input, op)?,
            Some(input),
        )
    }

    fn broadcast(
        &self,
        input: Option<Arc<dyn Segments>>,
        layout: SegmentLayout,
        root: usize,
    ) -> Result<Box<dyn Work>, Error> {
        let call = self.caller().broadcast(input.as_deref(), layout, root)?;
        self.start(call, input)
    }

    fn barrier(&self) -> Result<(), Error> {
        self.start(Caller::barrier(), None)?.wait()
    }

    fn announce(&self, call: Call) -> Result<Box<dyn Work>, Error> {
        let work = Started::new(&self.turns, call, Kind::Announcement, self.deadline(), None)?;
        Ok(Box::new(work))
    }

    fn failure(&self) -> Option<Arc<Error>> {
        self.turns.failure()
    }

    fn abort(&self, reason: &str) {
        self.turns.fail(Error::Aborted {
            rank: self.rank(),
            reason: reason.to_owned(),
        });
    }

    fn traffic(&self) -> Traffic {
        self.turns.traffic()
    }
}

impl Drop for Pairwise {
    fn drop(&mut self) {
        let own_thread = Some(thread::current().id()) == self.progress;
        if thread::panicking() {
            // What it says goes to the panic hook alone.
            self.turns.fail(Error::RankPanicked {
                rank: self.rank(),
                message: "its own output says why".to_owned(),
            });
        }
        // An input that the progress thread lets go of may own the last handle.
        let waits = !own_thread && self.progress.is_some();
        self.turns
            .leave(if waits { LINGER } else { Duration::ZERO });
    }
}
