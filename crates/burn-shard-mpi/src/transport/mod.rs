//! [`MpiTransport`]: messages between the ranks of an MPI job.
//!
//! Bytes travel in chunks, which keeps every message below what a C int can count. They are sent from
//! memory of the transport, not from the caller's: MPI has no way to take back a send, so an exchange
//! that is over, late or cancelled, would leave it reading memory that the caller has freed. The copy
//! costs nothing: a chunk is in the caches when another process reads it, which is faster than to read it
//! from the caller's. It is received straight into the caller's memory ([`land`]).

mod exchange;

use std::time::Duration;

use burn_shard_comm::{Fault, Limit, Transport};

use crate::{
    api::{Calls, Comm, Slot, land},
    error::MpiError,
    exit,
    patience::Patience,
    peer::Peer,
    process::{self, Job},
    single_copy::SingleCopy,
};

use exchange::Lane;

/// Tags of messages.
const DATA: i32 = 0;
const FAREWELL: i32 = 1;

/// The ranks of an MPI job, or the first of them, as a [`Transport`].
///
/// # Memory
///
/// 1 MiB. After a failed exchange, what MPI may still read of it is kept until the process ends.
#[derive(Debug)]
pub struct MpiTransport {
    job: Job,
    world_size: usize,
    comm: Comm,
    outgoing: Lane,
    /// Small messages that nobody waits for.
    loose: Vec<Slot>,
    peers: Vec<Peer>,
    /// A farewell that is being received.
    letter: Option<Letter>,
    open: bool,
}

/// A farewell under way.
#[derive(Debug)]
struct Letter {
    peer: usize,
    numel: usize,
    slot: Slot,
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
        Self::failed(land(receive, from, |back| {
            self.drive((to, send), (from, back), limit)
        }))
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
