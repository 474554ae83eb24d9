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
//! | `group.rs` | sub-groups |
//! | `reductions.rs`, `copies.rs` | who sends what when |
//! | `parts.rs`, `runs.rs` | which bytes |
//! | `line.rs` | the transport during one collective |
//! | `words.rs` | errors and calls as bytes |
//! | `verdict.rs` | whom to blame when time is up |
//! | `desk.rs` | memory |

mod copies;
mod desk;
mod group;
mod header;
mod line;
mod parts;
mod reductions;
mod runs;
mod turns;
mod verdict;
mod words;

pub(crate) use words::identity;
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
    split::Members,
    traffic::Traffic,
    transport::Transport,
};

use group::Group;
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
/// Sub-groups share the transport and its one queue: a collective waits until those have run that this rank has
/// started before in any group. A rank leaves them all together, with the last handle of any of them; one that drops
/// a sub-group alone is missed there by the deadline.
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
/// Fails as described at [`Communicator`]. The deadline of a call counts from its turn on, and from the
/// last time that anything was exchanged: a collective that moves is not late. It fails by its deadline
/// even if nobody waits for it yet. A failure also ends earlier collectives that some ranks have completed
/// and this one has not. Once time is up, a rank listens for a quarter of the deadline, at most a second, to
/// hear whom the others miss, so that all name the rank that is stopped and not one that waits for it.
///
/// The rank leaves when the last handle is dropped. That waits up to five seconds for collectives that
/// were started, which go on in the background after that, if the process does. If the handle is
/// dropped because of a panic, the others fail with [`Error::RankPanicked`].
#[derive(Debug)]
pub struct Pairwise {
    handle: Arc<Handle>,
    group: Arc<Group>,
    deadline: Mutex<Duration>,
}

/// What a rank's group and its sub-groups share; the rank leaves with the last of them.
#[derive(Debug)]
struct Handle {
    turns: Arc<Turns>,
    progress: Option<ThreadId>,
}

impl Pairwise {
    /// The rank that `transport` belongs to, with a thread of its own for collectives.
    ///
    /// If the system has no thread left, the group is poisoned with [`Error::Threads`] from the start.
    #[must_use]
    pub fn new(transport: impl Transport, deadline: Duration) -> Self {
        let (rank, world_size) = (transport.rank(), transport.world_size());
        let turns = Turns::new(transport);
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
            handle: Arc::new(Handle { turns, progress }),
            group: Arc::new(Group::new(rank, world_size)),
            deadline: Mutex::new(deadline),
        }
    }

    /// Checks arguments, and names the group if they are refused.
    fn checked(&self, check: impl FnOnce(Caller) -> Result<Call, Error>) -> Result<Call, Error> {
        let members = &self.group.members;
        check(Caller::member(members)).map_err(|error| members.named(error))
    }

    fn start(&self, call: Call, input: Option<Arc<dyn Segments>>) -> Result<Box<dyn Work>, Error> {
        Ok(Box::new(self.queue(call, Kind::Exchange, input)?))
    }

    fn queue(
        &self,
        call: Call,
        kind: Kind,
        input: Option<Arc<dyn Segments>>,
    ) -> Result<Started, Error> {
        let (turns, deadline) = (&self.handle.turns, self.deadline());
        Started::new(turns, &self.group, call, kind, deadline, input)
    }
}

impl Communicator for Pairwise {
    fn rank(&self) -> usize {
        self.group.members.rank
    }

    fn world_size(&self) -> usize {
        self.group.members.world_size()
    }

    fn members(&self) -> Members {
        self.group.members.clone()
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
        let call = self.checked(|caller| caller.all_gather(&*input, numels))?;
        self.start(call, Some(input))
    }

    fn reduce_scatter(
        &self,
        input: Arc<dyn Segments>,
        op: ReduceOp,
    ) -> Result<Box<dyn Work>, Error> {
        let collective = Collective::ReduceScatter;
        let call = self.checked(|caller| caller.reduction(collective, &*input, op))?;
        self.start(call, Some(input))
    }

    fn all_reduce(&self, input: Arc<dyn Segments>, op: ReduceOp) -> Result<Box<dyn Work>, Error> {
        let collective = Collective::AllReduce;
        let call = self.checked(|caller| caller.reduction(collective, &*input, op))?;
        self.start(call, Some(input))
    }

    fn broadcast(
        &self,
        input: Option<Arc<dyn Segments>>,
        layout: SegmentLayout,
        root: usize,
    ) -> Result<Box<dyn Work>, Error> {
        let call = self.checked(|caller| caller.broadcast(input.as_deref(), layout, root))?;
        self.start(call, input)
    }

    fn barrier(&self) -> Result<(), Error> {
        self.start(Caller::barrier(), None)?.wait()
    }

    fn announce(&self, call: Call) -> Result<Box<dyn Work>, Error> {
        Ok(Box::new(self.queue(call, Kind::Announcement, None)?))
    }

    fn split(
        &self,
        color: Option<usize>,
        key: usize,
    ) -> Result<Option<Arc<dyn Communicator>>, Error> {
        let number = self.group.begin_split();
        let members = self.group.members.split(self, color, key)?;
        Ok(color.zip(members).map(|(color, members)| {
            Arc::new(Self {
                handle: Arc::clone(&self.handle),
                group: Arc::new(self.group.sub_group(number, color, members)),
                deadline: Mutex::new(self.deadline()),
            }) as _
        }))
    }

    fn failure(&self) -> Option<Arc<Error>> {
        self.handle.turns.failure()
    }

    fn abort(&self, reason: &str) {
        let members = &self.group.members;
        self.handle.turns.fail(members.named(Error::Aborted {
            rank: members.root_rank(),
            reason: reason.to_owned(),
        }));
    }

    fn traffic(&self) -> Traffic {
        self.group.counter.traffic()
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        let own_thread = Some(thread::current().id()) == self.progress;
        if thread::panicking() {
            // What it says goes to the panic hook alone.
            self.turns.fail(Error::RankPanicked {
                rank: self.turns.rank,
                message: "its own output says why".to_owned(),
            });
        }
        // An input that the progress thread lets go of may own the last handle.
        let waits = !own_thread && self.progress.is_some();
        self.turns
            .leave(if waits { LINGER } else { Duration::ZERO });
    }
}
