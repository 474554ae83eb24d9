//! Sub-groups: who is in one, and how its errors say so.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::{
    call::{Call, Caller},
    communicator::Communicator,
    error::Error,
    segments::OwnedSegments,
    traffic::Traffic,
};

/// The ranks that a communicator connects: all of them, or those of a sub-group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Members {
    /// The color of the split; none for a group that was not split from another.
    color: Option<usize>,
    /// In the order of this group, numbered as in the group that all sub-groups come from.
    pub(crate) ranks: Arc<[usize]>,
    /// This rank's number in this group.
    pub(crate) rank: usize,
}

impl Members {
    /// The ranks of a group that was not split from another.
    #[must_use]
    pub fn root(rank: usize, world_size: usize) -> Self {
        Self {
            color: None,
            ranks: (0..world_size).collect(),
            rank,
        }
    }

    /// This rank's number in this group.
    #[must_use]
    pub const fn rank(&self) -> usize {
        self.rank
    }

    /// Number of ranks.
    #[must_use]
    pub fn world_size(&self) -> usize {
        self.ranks.len()
    }

    /// The color of the split that made this sub-group; none for a group that was not split from another.
    #[must_use]
    pub const fn color(&self) -> Option<usize> {
        self.color
    }

    /// The ranks in order, numbered as in the group that all sub-groups come from.
    #[must_use]
    pub fn ranks(&self) -> &[usize] {
        &self.ranks
    }

    /// This rank's number in the group that all sub-groups come from: the one that errors show.
    #[must_use]
    pub fn root_rank(&self) -> usize {
        self.ranks[self.rank]
    }

    /// All ranks but this one.
    pub(crate) fn others(&self) -> Vec<usize> {
        let own = self.root_rank();
        self.ranks
            .iter()
            .copied()
            .filter(|&rank| rank != own)
            .collect()
    }

    /// `error` as an [`Error::SubGroup`] with the color and ranks of this group, if it is a sub-group and what caused
    /// the error does not name it already.
    #[must_use]
    pub fn named(&self, error: Error) -> Error {
        let Some(color) = self.color else {
            return error;
        };
        if let Error::Interrupted { cause, .. } | Error::Poisoned { cause, .. } = &error
            && matches!(&**cause, Error::SubGroup { ranks, .. } if *ranks == self.ranks)
        {
            return error;
        }
        Error::SubGroup {
            color,
            ranks: Arc::clone(&self.ranks),
            error: Arc::new(error),
        }
    }

    /// The members of the sub-group of `color` that this rank is in, if it is in one: a collective of
    /// `communicator`, the group that is split.
    pub(crate) fn split(
        &self,
        communicator: &dyn Communicator,
        color: Option<usize>,
        key: usize,
    ) -> Result<Option<Self>, Error> {
        let own = match color {
            Some(color) => [1, color as u64, key as u64],
            None => [0; 3],
        };
        let numels = Caller::member(self).split().numels;
        let mut all = OwnedSegments(vec![vec![0; numels[0]]]);
        communicator
            .all_gather(Arc::new(OwnedSegments(vec![own.to_vec()])), &numels)?
            .finish(&mut all)?;
        let mut members: Vec<(u64, usize)> = all.0[0]
            .chunks_exact(3)
            .enumerate()
            .filter(|(_, theirs)| theirs[..2] == own[..2])
            .map(|(rank, theirs)| (theirs[2], rank))
            .collect();
        members.sort_unstable();
        let rank = members.iter().position(|&(_, rank)| rank == self.rank);
        Ok(color.zip(rank).map(|(color, rank)| Self {
            color: Some(color),
            ranks: members.iter().map(|&(_, rank)| self.ranks[rank]).collect(),
            rank,
        }))
    }
}

/// The traffic of a group, which is also that of the groups it was split from; for communicators.
#[derive(Debug, Default)]
pub struct TrafficCounter {
    traffic: Mutex<Traffic>,
    parent: Option<Arc<Self>>,
}

impl TrafficCounter {
    /// The counter of a group that is split from that of `parent`.
    #[must_use]
    pub fn split_from(parent: &Arc<Self>) -> Arc<Self> {
        Arc::new(Self {
            traffic: Mutex::default(),
            parent: Some(Arc::clone(parent)),
        })
    }

    /// Counts a collective that this rank of `members` has started.
    pub fn record(&self, call: &Call, members: &Members) {
        let mut counter = Some(self);
        while let Some(Self { traffic, parent }) = counter {
            let world_size = members.world_size();
            traffic.lock().record(call, members.rank, world_size);
            counter = parent.as_deref();
        }
    }

    /// What was counted since the start.
    pub fn traffic(&self) -> Traffic {
        *self.traffic.lock()
    }
}
