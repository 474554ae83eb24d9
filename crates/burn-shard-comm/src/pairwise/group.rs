//! The group that a collective belongs to: the whole of the transport, or a sub-group of it.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use siphasher::sip128::SipHasher13;

use crate::split::{Members, TrafficCounter};

/// One rank's part in a group.
#[derive(Debug)]
pub(super) struct Group {
    /// The number of the group: equal on all its ranks, and as good as never that of another group.
    pub(super) number: u32,
    pub(super) members: Members,
    pub(super) counter: Arc<TrafficCounter>,
    /// Number of the next collective.
    next: AtomicU64,
    /// Number of the next split.
    splits: AtomicU64,
}

impl Group {
    /// The group of all ranks of a transport.
    pub(super) fn new(rank: usize, world_size: usize) -> Self {
        Self::numbered(0, Members::root(rank, world_size), Arc::default())
    }

    fn numbered(number: u32, members: Members, counter: Arc<TrafficCounter>) -> Self {
        Self {
            number,
            members,
            counter,
            next: AtomicU64::new(0),
            splits: AtomicU64::new(0),
        }
    }

    /// The number of a split that begins.
    pub(super) fn begin_split(&self) -> u64 {
        self.splits.fetch_add(1, Ordering::Relaxed)
    }

    /// The sub-group of `members` that split number `split` makes for `color`.
    pub(super) fn sub_group(&self, split: u64, color: usize, members: Members) -> Self {
        let mut name = Vec::with_capacity(20);
        name.extend(self.number.to_le_bytes());
        name.extend(split.to_le_bytes());
        name.extend((color as u64).to_le_bytes());
        let hash = SipHasher13::new_with_key(b"burn-shard group").hash(&name);
        let number = u32::from_le_bytes(hash.as_bytes()[..4].try_into().expect("4 bytes are 4"));
        Self::numbered(number, members, TrafficCounter::split_from(&self.counter))
    }

    /// The number of a collective that is queued; called under the lock that gives it its turn.
    pub(super) fn next(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }
}
