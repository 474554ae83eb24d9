//! The transport, as one collective sees it while it has its turn: with the rank numbers of its group.

use std::{
    sync::{Arc, atomic::AtomicBool},
    time::{Duration, Instant},
};

use crate::{
    call::Call,
    split::Members,
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
    /// What a peer (as the transport numbers it) sent is not what ranks of this version send.
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
    members: &'a Members,
    deadline: Duration,
    cancelled: &'a AtomicBool,
    /// When the present wait began.
    pub(super) since: Instant,
    /// Ranks it waits for, as the transport numbers them.
    pub(super) missing: Vec<usize>,
}

impl<'a> Line<'a> {
    pub(super) fn new(
        transport: &'a mut dyn Transport,
        members: &'a Members,
        deadline: Duration,
        cancelled: &'a AtomicBool,
    ) -> Self {
        Self {
            transport,
            members,
            deadline,
            cancelled,
            since: Instant::now(),
            missing: Vec::new(),
        }
    }

    pub(super) fn rank(&self) -> usize {
        self.members.rank
    }

    pub(super) fn world_size(&self) -> usize {
        self.members.world_size()
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

    /// The number that the transport gives to `rank` of the group.
    pub(super) fn peer(&self, rank: usize) -> usize {
        self.members.ranks[rank]
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
            self.missing.push(self.peer(from));
        }
        if !send.is_empty() && !self.missing.contains(&self.peer(to)) {
            self.missing.push(self.peer(to));
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
        let (to, from) = (self.peer(to), self.peer(from));
        Ok(self.transport.exchange(to, send, from, receive, limit)?)
    }
}
