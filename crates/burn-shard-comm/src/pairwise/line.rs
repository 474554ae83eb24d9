//! The transport, as one collective sees it while it has its turn.

use std::{
    sync::{Arc, atomic::AtomicBool},
    time::{Duration, Instant},
};

use crate::{
    call::Call,
    time::after,
    transport::{Fault, Limit, Transport},
};

/// Why a collective did not complete.
#[derive(Debug)]
pub(super) enum Failure {
    /// The transport says so.
    Fault(Fault),
    /// The ranks called different things.
    Mismatch(Arc<[Call]>),
    /// What a peer sent is not what ranks of this version send.
    OutOfStep { peer: usize, message: String },
}

impl From<Fault> for Failure {
    fn from(fault: Fault) -> Self {
        Self::Fault(fault)
    }
}

#[derive(Debug)]
pub(super) struct Line<'a> {
    transport: &'a mut dyn Transport,
    deadline: Duration,
    cancelled: &'a AtomicBool,
    /// When the present wait began.
    pub(super) since: Instant,
    /// Ranks it waits for.
    pub(super) missing: Vec<usize>,
}

impl<'a> Line<'a> {
    pub(super) fn new(
        transport: &'a mut dyn Transport,
        deadline: Duration,
        cancelled: &'a AtomicBool,
    ) -> Self {
        Self {
            transport,
            deadline,
            cancelled,
            since: Instant::now(),
            missing: Vec::new(),
        }
    }

    pub(super) fn rank(&self) -> usize {
        self.transport.rank()
    }

    pub(super) fn world_size(&self) -> usize {
        self.transport.world_size()
    }

    /// The other ranks as `(to, from)`, each once on either side: in round `k` this rank sends to the
    /// `k`-th after it and receives from the `k`-th before it.
    pub(super) fn rounds(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let (rank, world_size) = (self.rank(), self.world_size());
        (1..world_size).map(move |k| {
            (
                (rank + k) % world_size,
                (rank + world_size - k) % world_size,
            )
        })
    }

    /// The transport itself, once the collective has failed.
    pub(super) fn transport(&mut self) -> &mut dyn Transport {
        self.transport
    }

    /// Begins a wait of its own: the deadline counts from here on.
    pub(super) fn begin(&mut self, missing: Vec<usize>) {
        self.since = Instant::now();
        self.missing = missing;
    }

    /// One exchange, which is a wait of its own: what moves is not late.
    pub(super) fn exchange(
        &mut self,
        to: usize,
        send: &[u8],
        from: usize,
        receive: &mut [u8],
    ) -> Result<(), Failure> {
        if send.is_empty() && receive.is_empty() {
            return Ok(());
        }
        self.missing.clear();
        if !receive.is_empty() {
            self.missing.push(from);
        }
        if !send.is_empty() && !self.missing.contains(&to) {
            self.missing.push(to);
        }
        self.since = Instant::now();
        self.transfer(to, send, from, receive)
    }

    /// Sends within the present wait.
    pub(super) fn send(&mut self, to: usize, bytes: &[u8]) -> Result<(), Failure> {
        self.transfer(to, bytes, to, &mut [])
    }

    /// Receives within the present wait.
    pub(super) fn receive(&mut self, from: usize, bytes: &mut [u8]) -> Result<(), Failure> {
        self.transfer(from, &[], from, bytes)
    }

    fn transfer(
        &mut self,
        to: usize,
        send: &[u8],
        from: usize,
        receive: &mut [u8],
    ) -> Result<(), Failure> {
        let limit = Limit {
            at: after(self.since, self.deadline),
            cancelled: self.cancelled,
        };
        Ok(self.transport.exchange(to, send, from, receive, limit)?)
    }
}
