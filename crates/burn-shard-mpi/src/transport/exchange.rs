//! One exchange: what is under way, and what is possible next.

use std::collections::VecDeque;

use burn_shard_comm::{Fault, Limit};

use super::{DATA, MpiTransport, gone, left};
use crate::{
    api::{Calls, Landing, Slot},
    patience::Patience,
};

/// Bytes of one message. Large enough for few of them, small enough for the caches.
const CHUNK: usize = 256 << 10;
/// Messages under way in each direction.
const DEPTH: usize = 4;
/// Bytes that are sent without waiting for a receiver, as [`Transport::exchange`](burn_shard_comm::Transport::exchange) promises.
const SMALL: usize = 4 << 10;

/// What messages are sent from: slots under way, in order, and idle ones.
#[derive(Debug, Default)]
pub(super) struct Lane {
    busy: VecDeque<(Slot, usize)>,
    idle: Vec<Slot>,
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

/// How far the sends of an exchange are.
struct Sending {
    started: usize,
    finished: usize,
    numel: usize,
}

impl Sending {
    fn new(numel: usize) -> Self {
        Self {
            started: 0,
            finished: 0,
            numel,
        }
    }

    fn is_over(&self) -> bool {
        self.finished == self.numel
    }
}

impl MpiTransport {
    /// Sends and receives until both are done.
    pub(super) fn drive(
        &mut self,
        (to, send): (usize, &[u8]),
        (from, back): (usize, &mut Landing<'_>),
        limit: Limit<'_>,
    ) -> Result<(), Fault> {
        let mut out = Sending::new(send.len());
        let mut patience = Patience::default();
        loop {
            let moved = self.step((to, send, &mut out), (from, back))?;
            let peers = match (out.is_over(), back.is_over()) {
                (true, true) => return Ok(()),
                (true, false) => &[from][..],
                (false, true) => &[to],
                (false, false) if to == from => &[to],
                (false, false) => &[to.min(from), to.max(from)],
            };
            let slice = limit.slice(peers)?;
            if moved {
                patience.reset();
            } else {
                patience.pause(slice);
            }
        }
    }

    /// Sends and receives what is possible now; whether it was anything.
    fn step(
        &mut self,
        (to, send, out): (usize, &[u8], &mut Sending),
        (from, back): (usize, &mut Landing<'_>),
    ) -> Result<bool, Fault> {
        let mut calls = Calls::take().map_err(|_ending| Fault::Cancelled)?;
        self.listen(&mut calls)?;
        let mut moved = false;
        // Receives first: a message that is expected is not stored by MPI.
        while back.unstarted() > 0 && back.under_way() < DEPTH {
            let numel = back.unstarted().min(CHUNK);
            let started = calls.land(back, numel, self.comm, DATA);
            started.map_err(|error| gone(from, &error))?;
        }
        moved |= self.start_sends(&mut calls, to, send, out)?;
        while let Some((expected, found)) =
            calls.landed(back).map_err(|error| gone(from, &error))?
        {
            if found != expected {
                let message = format!("sent {found} bytes where {expected} were expected");
                return Err(Fault::Gone {
                    peer: from,
                    message,
                });
            }
            self.peers[from].received += 1;
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
        out: &mut Sending,
    ) -> Result<bool, Fault> {
        let before = out.started;
        self.loose
            .retain_mut(|slot| matches!(calls.done(slot), Ok(None)));
        while out.started < out.numel && self.outgoing.busy.len() < DEPTH {
            if self.peers[to].left.is_some() {
                return Err(left(to));
            }
            let numel = (out.numel - out.started).min(CHUNK);
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
        out: &Sending,
        back: &Landing<'_>,
    ) -> Result<(), Fault> {
        if !back.is_over() && !self.peers[from].may_send() {
            return Err(left(from));
        }
        if !out.is_over() && !self.peers[to].may_receive() {
            return Err(left(to));
        }
        Ok(())
    }
}
