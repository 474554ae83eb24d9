//! A rank's end of the store.

use std::{
    fmt,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use rustix::event::PollFd;

use super::{
    error::RendezvousError,
    frame::{Framed, Received},
    message::{JobFault, MAX_KEY_BYTES, MAX_TEXT_BYTES, MAX_VALUE_BYTES, Reply, Request},
    secret::Nonce,
};
use crate::{
    ending::{Ending, record},
    sockets::{slice, wait},
    time::after,
};

/// How long after its deadline a rank waits to be told which ranks are missing.
const LAST_WORD: Duration = Duration::from_secs(3);
/// How long rank 0 waits, after a failure, for the others to have heard of it.
const FAREWELL: Duration = Duration::from_secs(1);

/// A rank's connection to the store of its job, which rank 0 serves; made by
/// [`Rendezvous::store`](crate::Rendezvous::store), once all ranks are there.
///
/// It holds small things that ranks have to tell each other before they have a group. After a failure on
/// any rank, all fail. A rank that drops it needs the store no more; the store itself ends with the last.
pub struct Store {
    pub(super) rank: usize,
    pub(super) world_size: usize,
    pub(super) deadline: Duration,
    /// Where this rank reached the store.
    pub(super) address: SocketAddr,
    pub(super) link: Framed,
    /// On rank 0: set when the thread that serves the store has ended.
    pub(super) ended: Option<Arc<AtomicBool>>,
}

impl Store {
    /// Number of this rank.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Number of ranks.
    #[must_use]
    pub fn world_size(&self) -> usize {
        self.world_size
    }

    /// Every rank that asks for `key` from now on gets `value`.
    ///
    /// # Errors
    ///
    /// Refuses a key of more than 128 bytes, a value of more than 64 KiB, and more than 16 MiB in all.
    /// Fails if the rendezvous has failed, or the store does not answer within the deadline.
    pub fn set(&mut self, key: &str, value: &[u8]) -> Result<(), RendezvousError> {
        let too_large = RendezvousError::TooLarge {
            rank: self.rank,
            key_bytes: key.len(),
            value_bytes: value.len(),
            max_key_bytes: MAX_KEY_BYTES,
            max_value_bytes: MAX_VALUE_BYTES,
        };
        if key.len() > MAX_KEY_BYTES || value.len() > MAX_VALUE_BYTES {
            return Err(too_large);
        }
        self.link.send(&Request::Set {
            key: key.to_owned(),
            value: value.to_vec(),
        });
        let stored = self.reply(after(Instant::now(), self.deadline), |reply| {
            if let Reply::Stored(stored) = reply {
                Some(stored)
            } else {
                None
            }
        })?;
        if stored { Ok(()) } else { Err(too_large) }
    }

    /// Waits until some rank has set `key`; its value.
    ///
    /// # Errors
    ///
    /// Fails if no rank sets it within the deadline, if the rendezvous has failed, or the store does not
    /// answer.
    pub fn get(&mut self, key: &str) -> Result<Vec<u8>, RendezvousError> {
        let start = Instant::now();
        let until = after(start, self.deadline);
        let mut pause = Duration::from_millis(2);
        loop {
            self.link.send(&Request::Get {
                key: key.to_owned(),
            });
            let value = self.reply(until + LAST_WORD, |reply| {
                if let Reply::Value(value) = reply {
                    Some(value)
                } else {
                    None
                }
            })?;
            if let Some(value) = value {
                return Ok(value);
            }
            let Some(slice) = slice(until, pause) else {
                return Err(RendezvousError::NoValue {
                    rank: self.rank,
                    key: key.to_owned(),
                    waited: start.elapsed(),
                });
            };
            thread::sleep(slice);
            pause = (pause * 2).min(Duration::from_millis(100));
        }
    }

    /// Returns once every rank has called it.
    ///
    /// # Errors
    ///
    /// Fails on every rank if some rank does not call it within the deadline of one that does, or ends.
    pub fn barrier(&mut self) -> Result<(), RendezvousError> {
        self.barrier_until(after(Instant::now(), self.deadline))
    }

    pub(crate) fn barrier_until(&mut self, until: Instant) -> Result<(), RendezvousError> {
        self.link.send(&Request::Arrive);
        self.reply(until, |reply| {
            matches!(reply, Reply::Released).then_some(())
        })
    }

    /// Waits for all ranks to have joined: the session, and where they listen.
    pub(crate) fn everyone(
        &mut self,
        until: Instant,
    ) -> Result<(Nonce, Vec<Option<SocketAddr>>), RendezvousError> {
        self.reply(until, |reply| {
            if let Reply::Everyone { session, listens } = reply {
                Some((session, listens))
            } else {
                None
            }
        })
    }

    /// Returns the error of the rendezvous, if there is one. Never waits, and is not to be called while
    /// a reply is awaited.
    pub(crate) fn watch(&mut self) -> Result<(), RendezvousError> {
        match self.link.receive::<Reply>() {
            Received::Message(Reply::Fault(fault)) => Err(self.job(fault)),
            Received::Message(_) => Err(self.lost("it sent what nobody asked for".to_owned())),
            Received::Ended(message) => Err(self.lost(message)),
            Received::Nothing => Ok(()),
        }
    }

    /// What to wait for before [`Store::watch`].
    pub(crate) fn poll_fd(&self) -> PollFd<'_> {
        self.link.poll_fd()
    }

    /// Where to connect to, given where a rank says it listens: an unspecified address is that of the store.
    pub(crate) fn seen_from_here(&self, mut listens: SocketAddr) -> SocketAddr {
        if listens.ip().is_unspecified() {
            listens.set_ip(self.address.ip());
        }
        listens
    }

    /// Tells all ranks that this one fails, and why; then waits a moment, see [`Store::see_off`].
    pub(crate) fn report(&mut self, error: &RendezvousError) {
        record(Ending::Failed);
        // A longer one would be taken for nonsense.
        let mut message = error.to_string();
        message.truncate(message.floor_char_boundary(MAX_TEXT_BYTES));
        self.link.send(&Request::Report { message });
        self.see_off();
    }

    /// On rank 0, after a failure: waits a moment until all others have heard of it, since the store ends
    /// with this process.
    pub(super) fn see_off(&mut self) {
        let Some(ended) = self.ended.take() else {
            return;
        };
        self.link.send(&Request::Bye);
        let until = Instant::now() + FAREWELL;
        while !ended.load(Ordering::Acquire) && Instant::now() < until {
            thread::sleep(Duration::from_millis(5));
        }
    }

    fn reply<T>(
        &mut self,
        until: Instant,
        wanted: impl Fn(Reply) -> Option<T>,
    ) -> Result<T, RendezvousError> {
        let start = Instant::now();
        let mut until = until;
        let mut given_up = false;
        loop {
            match self.link.receive() {
                Received::Message(Reply::Fault(fault)) => {
                    self.see_off();
                    return Err(self.job(fault));
                }
                Received::Message(reply) => {
                    return wanted(reply)
                        .ok_or_else(|| self.lost("it answered something else".to_owned()));
                }
                Received::Ended(message) => return Err(self.lost(message)),
                Received::Nothing => {}
            }
            match slice(until, Duration::from_millis(100)) {
                Some(slice) => {
                    if let Err(error) = wait(&mut [self.poll_fd()], slice) {
                        return Err(self.lost(error.to_string()));
                    }
                }
                None if given_up => {
                    return Err(self.lost(format!("no answer in {:.1?}", start.elapsed())));
                }
                None => {
                    // The store knows who is missing, and fails the job for all.
                    let waited = start.elapsed();
                    self.link.send(&Request::GiveUp { waited });
                    given_up = true;
                    until = Instant::now() + LAST_WORD;
                }
            }
        }
    }

    fn job(&self, fault: JobFault) -> RendezvousError {
        let rank = self.rank;
        RendezvousError::Job { rank, fault }
    }

    fn lost(&self, message: String) -> RendezvousError {
        RendezvousError::MasterLost {
            rank: self.rank,
            address: self.address,
            message,
        }
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        self.link.send(&Request::Bye);
    }
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Store")
            .field("rank", &self.rank)
            .field("world_size", &self.world_size)
            .field("deadline", &self.deadline)
            .field("address", &self.address)
            .finish_non_exhaustive()
    }
}
