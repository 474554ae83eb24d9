//! [`MpiTransport`]: messages between the ranks of an MPI job.
//!
//! Bytes travel in chunks through memory of the transport, not from and to the caller's: MPI has no
//! way to take back a send, so an exchange that is over, late or cancelled, would leave it reading
//! memory that the caller has freed. That costs a copy on either side, from or to a cache mostly;
//! and it keeps every message below what a C int can count.

use std::{collections::VecDeque, time::Duration};

use burn_shard_comm::{Fault, Limit, Transport};

use crate::{
    api::{Calls, Comm, Slot},
    error::MpiError,
    exit,
    patience::Patience,
    peer::Peer,
    process::{self, Job},
    single_copy::SingleCopy,
};

/// Bytes of one message. Large enough for few of them, small enough for the caches.
const CHUNK: usize = 256 << 10;
/// Messages under way in each direction.
const DEPTH: usize = 4;
/// Bytes that are sent without waiting for a receiver, as [`Transport::exchange`] promises.
const SMALL: usize = 4 << 10;

/// Tags of messages.
const DATA: i32 = 0;
const FAREWELL: i32 = 1;

/// The ranks of an MPI job, or the first of them, as a [`Transport`].
///
/// # Memory
///
/// Up to 2 MiB. After a failed exchange, what MPI may still use of it is kept until the process ends.
#[derive(Debug)]
pub struct MpiTransport {
    job: Job,
    world_size: usize,
    comm: Comm,
    outgoing: Lane,
    incoming: Lane,
    /// Small messages that nobody waits for.
    loose: Vec<Slot>,
    peers: Vec<Peer>,
    /// A farewell that is being received.
    letter: Option<Letter>,
    open: bool,
}

/// The slots of one direction, those under way first, in order.
#[derive(Debug, Default)]
struct Lane {
    busy: VecDeque<(Slot, usize)>,
    idle: Vec<Slot>,
}

/// A farewell under way.
#[derive(Debug)]
struct Letter {
    peer: usize,
    numel: usize,
    slot: Slot,
}

/// How far one direction of an exchange is.
struct Progress {
    started: usize,
    finished: usize,
    numel: usize,
}

impl Progress {
    fn new(numel: usize) -> Self {
        Self {
            started: 0,
            finished: 0,
            numel,
        }
    }

    fn next_chunk(&self) -> usize {
        (self.numel - self.started).min(CHUNK)
    }

    fn is_over(&self) -> bool {
        self.finished == self.numel
    }
}

impl MpiTransport {
    /// Joins all ranks of the job: those that `mpirun` started. Without `mpirun` the job is this
    /// process.
    ///
    /// Each call makes a transport with messages of its own. All ranks of the job have to make the
    /// same calls in the same order, of this and of [`MpiTransport::first`]; each waits for the
    /// others, at most as long as `BURN_SHARD_TIMEOUT` says
    /// ([`ProcessGroup::deadline_from_env`](burn_shard_comm::ProcessGroup::deadline_from_env)).
    ///
    /// # Errors
    ///
    /// See [`MpiError`]. If initializing MPI itself fails, OpenMPI may end the process with a
    /// message of its own; if it does not return in time, because some ranks do not come to it, this
    /// library does, as nothing else can.
    pub fn init() -> Result<Self, MpiError> {
        let job = Job::join()?;
        Self::new(job, job.size)
    }

    /// Joins the first `world_size` ranks of the job; none on the others. See [`MpiTransport::init`].
    ///
    /// # Errors
    ///
    /// As [`MpiTransport::init`]; refuses more ranks than the job has, and none.
    pub fn first(world_size: usize) -> Result<Option<Self>, MpiError> {
        let job = Job::join()?;
        if world_size == 0 || world_size > job.size {
            return Err(MpiError::GroupSize {
                rank: job.rank,
                world_size,
                job_size: job.size,
            });
        }
        let transport = Self::new(job, world_size)?;
        Ok((job.rank < world_size).then_some(transport))
    }

    fn new(job: Job, world_size: usize) -> Result<Self, MpiError> {
        let comm = job.duplicate()?;
        let open = job.rank < world_size;
        if open {
            exit::open();
        }
        Ok(Self {
            job,
            world_size,
            comm,
            outgoing: Lane::default(),
            incoming: Lane::default(),
            loose: Vec::new(),
            peers: vec![Peer::default(); world_size],
            letter: None,
            open,
        })
    }

    /// How long ranks wait for each other: what `BURN_SHARD_TIMEOUT` said when this one joined the job.
    #[must_use]
    pub fn deadline(&self) -> Duration {
        self.job.deadline
    }

    /// Number of this rank among those of the job on the same host.
    #[must_use]
    pub fn local_rank(&self) -> usize {
        self.job.local_rank
    }

    /// Ranks of the job on the same host.
    #[must_use]
    pub fn local_size(&self) -> usize {
        self.job.local_size
    }

    /// How messages travel between the ranks of this host.
    #[must_use]
    pub fn single_copy(&self) -> SingleCopy {
        self.job.single_copy
    }

    /// Sends and receives what is possible now; whether it was anything.
    fn step(
        &mut self,
        (to, send, out): (usize, &[u8], &mut Progress),
        (from, receive, back): (usize, &mut [u8], &mut Progress),
    ) -> Result<bool, Fault> {
        let mut calls = Calls::take().map_err(|_ending| Fault::Cancelled)?;
        self.listen(&mut calls)?;
        let mut moved = false;
        // Receives first: a message that is expected is not stored by MPI.
        while back.started < back.numel && self.incoming.busy.len() < DEPTH {
            let numel = back.next_chunk();
            let mut slot = self.incoming.take();
            let started = calls.receive(&mut slot, numel, self.comm, (from, DATA));
            started.map_err(|error| gone(from, &error))?;
            self.incoming.busy.push_back((slot, numel));
            back.started += numel;
        }
        moved |= self.start_sends(&mut calls, to, send, out)?;
        while let Some((slot, numel)) = self.incoming.busy.front_mut() {
            let numel = *numel;
            let arrived = calls.done(slot).map_err(|error| gone(from, &error))?;
            let Some(arrived) = arrived else { break };
            if arrived.numel != numel {
                let message = format!("sent {} bytes where {numel} were expected", arrived.numel);
                return Err(Fault::Gone {
                    peer: from,
                    message,
                });
            }
            receive[back.finished..][..numel].copy_from_slice(&slot.bytes_mut()[..numel]);
            self.incoming.recycle();
            self.peers[from].received += 1;
            back.finished += numel;
            moved = true;
        }
        while let Some((slot, numel)) = self.outgoing.busy.front_mut() {
            let numel = *numel;
            let done = calls.done(slot).map_err(|error| gone(to, &error))?;
            if done.is_none() {
                break;
            }
            self.outgoing.recycle();
            out.finished += numel;
            moved = true;
        }
        if !moved {
            self.still_there(to, from, out, back)?;
        }
        Ok(moved)
    }

    fn start_sends(
        &mut self,
        calls: &mut Calls<'_>,
        to: usize,
        send: &[u8],
        out: &mut Progress,
    ) -> Result<bool, Fault> {
        let before = out.started;
        self.loose
            .retain_mut(|slot| matches!(calls.done(slot), Ok(None)));
        while out.started < out.numel && self.outgoing.busy.len() < DEPTH {
            if self.peers[to].left.is_some() {
                return Err(left(to));
            }
            let numel = out.next_chunk();
            let mut slot = if send.len() <= SMALL {
                Slot::new(numel)
            } else {
                self.outgoing.take()
            };
            slot.bytes_mut()[..numel].copy_from_slice(&send[out.started..][..numel]);
            let started = calls.send(&mut slot, numel, self.comm, (to, DATA));
            started.map_err(|error| gone(to, &error))?;
            self.peers[to].sent += 1;
            out.started += numel;
            if send.len() <= SMALL {
                self.loose.push(slot);
                out.finished += numel;
            } else {
                self.outgoing.busy.push_back((slot, numel));
            }
        }
        Ok(out.started > before)
    }

    /// Whether those that were to send or receive have not left before they did.
    fn still_there(
        &self,
        to: usize,
        from: usize,
        out: &Progress,
        back: &Progress,
    ) -> Result<(), Fault> {
        if !back.is_over() && !self.peers[from].may_send() {
            return Err(left(from));
        }
        if !out.is_over() && !self.peers[to].may_receive() {
            return Err(left(to));
        }
        Ok(())
    }

    /// Looks for farewells.
    fn listen(&mut self, calls: &mut Calls<'_>) -> Result<(), Fault> {
        loop {
            if self.letter.is_none() {
                let found = calls.probe(self.comm, FAREWELL);
                let Some(found) = found.map_err(|error| gone(self.job.rank, &error))? else {
                    return Ok(());
                };
                let (peer, numel) = (found.from, found.numel);
                let mut slot = Slot::new(numel);
                calls
                    .receive(&mut slot, numel, self.comm, (peer, FAREWELL))
                    .map_err(|error| gone(peer, &error))?;
                self.letter = Some(Letter { peer, numel, slot });
            }
            let Some(Letter { peer, numel, slot }) = &mut self.letter else {
                return Ok(());
            };
            let peer = *peer;
            let done = calls.done(slot).map_err(|error| gone(peer, &error))?;
            if done.is_none() {
                return Ok(());
            }
            let (counts, words) = Peer::open(&slot.bytes_mut()[..*numel]);
            self.letter = None;
            if !words.is_empty() {
                return Err(Fault::Farewell { peer, words });
            }
            self.peers[peer].left = Some(counts);
        }
    }

    fn failed<T>(result: Result<T, Fault>) -> Result<T, Fault> {
        if result.is_err() {
            process::failed();
        }
        result
    }

    fn close(&mut self) {
        if self.open {
            self.open = false;
            exit::closed();
        }
    }
}

impl Transport for MpiTransport {
    fn rank(&self) -> usize {
        self.job.rank
    }

    fn world_size(&self) -> usize {
        self.world_size
    }

    fn exchange(
        &mut self,
        to: usize,
        send: &[u8],
        from: usize,
        receive: &mut [u8],
        limit: Limit<'_>,
    ) -> Result<(), Fault> {
        let (mut out, mut back) = (Progress::new(send.len()), Progress::new(receive.len()));
        let mut patience = Patience::default();
        loop {
            let moved = Self::failed(self.step((to, send, &mut out), (from, receive, &mut back)))?;
            let peers = match (out.is_over(), back.is_over()) {
                (true, true) => return Ok(()),
                (true, false) => &[from][..],
                (false, true) => &[to],
                (false, false) if to == from => &[to],
                (false, false) => &[to.min(from), to.max(from)],
            };
            let slice = Self::failed(limit.slice(peers))?;
            if moved {
                patience.reset();
            } else {
                patience.pause(slice);
            }
        }
    }

    fn poll(&mut self) -> Result<(), Fault> {
        let mut calls = Calls::take().map_err(|_ending| Fault::Cancelled)?;
        let heard = self.listen(&mut calls);
        drop(calls);
        Self::failed(heard)
    }

    fn farewell(&mut self, words: &[u8], limit: Limit<'_>) {
        if !words.is_empty() {
            process::failed();
        }
        let others = (0..self.world_size).filter(|&peer| peer != self.job.rank);
        for peer in others {
            let Ok(mut calls) = Calls::take() else { break };
            let letter = self.peers[peer].letter(words);
            let mut slot = Slot::new(letter.len());
            slot.bytes_mut().copy_from_slice(&letter);
            // One that cannot be told is not there to hear it.
            let to = (peer, FAREWELL);
            if calls.send(&mut slot, letter.len(), self.comm, to).is_ok() {
                self.loose.push(slot);
            }
        }
        let mut patience = Patience::default();
        while let Ok(mut calls) = Calls::take() {
            self.loose
                .retain_mut(|slot| matches!(calls.done(slot), Ok(None)));
            drop(calls);
            if self.loose.is_empty() {
                break;
            }
            let Ok(slice) = limit.slice(&[]) else { break };
            patience.pause(slice);
        }
        self.close();
    }
}

impl Drop for MpiTransport {
    fn drop(&mut self) {
        if self.open {
            // Without a farewell: the others meet their deadline.
            process::failed();
        }
        self.close();
    }
}

impl Lane {
    fn take(&mut self) -> Slot {
        self.idle.pop().unwrap_or_else(|| Slot::new(CHUNK))
    }

    /// The first slot is done.
    fn recycle(&mut self) {
        self.idle
            .extend(self.busy.pop_front().map(|(slot, _)| slot));
    }
}

fn gone(peer: usize, error: &MpiError) -> Fault {
    Fault::Gone {
        peer,
        message: error.to_string(),
    }
}

/// Without a word.
fn left(peer: usize) -> Fault {
    Fault::Farewell {
        peer,
        words: Vec::new(),
    }
}
