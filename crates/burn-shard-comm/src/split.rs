//! Sub-groups: who is in one, and how its errors say so.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::{
    call::Call, communicator::Communicator, error::Error, segments::OwnedSegments, traffic::Traffic,
};

/// The ranks that a communicator connects.
#[derive(Clone, Debug)]
pub(crate) struct Members {
    /// The color of the split; none for a group that was not split from another.
    color: Option<usize>,
    /// In the order of this group, numbered as in the group that all sub-groups come from.
    pub(crate) ranks: Arc<[usize]>,
    /// This rank's number in this group.
    pub(crate) rank: usize,
}

impl Members {
    /// A group that was not split from another.
    pub(crate) fn root(rank: usize, world_size: usize) -> Self {
        Self {
            color: None,
            ranks: (0..world_size).collect(),
            rank,
        }
    }

    pub(crate) fn world_size(&self) -> usize {
        self.ranks.len()
    }

    /// This rank's number in the group that all sub-groups come from.
    pub(crate) fn root_rank(&self) -> usize {
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

    /// `error` with the name of this group, if it is a sub-group and the error does not name it yet.
    pub(crate) fn named(&self, error: Error) -> Error {
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
        let world_size = self.world_size();
        let mut all = OwnedSegments(vec![vec![0; 3 * world_size]]);
        communicator
            .all_gather(
                Arc::new(OwnedSegments(vec![own.to_vec()])),
                &[3 * world_size],
            )?
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

/// The traffic of a group, which is also that of the groups it was split from.
#[derive(Debug, Default)]
pub(crate) struct Counter {
    traffic: Mutex<Traffic>,
    parent: Option<Arc<Self>>,
}

impl Counter {
    /// The counter of a group that is split from that of `parent`.
    pub(crate) fn split_from(parent: &Arc<Self>) -> Arc<Self> {
        Arc::new(Self {
            traffic: Mutex::default(),
            parent: Some(Arc::clone(parent)),
        })
    }

    /// Counts a collective that this rank of `members` has started.
    pub(crate) fn record(&self, call: &Call, members: &Members) {
        let mut counter = Some(self);
        while let Some(Self { traffic, parent }) = counter {
            let world_size = members.world_size();
            traffic.lock().record(call, members.rank, world_size);
            counter = parent.as_deref();
        }
    }

    pub(crate) fn traffic(&self) -> Traffic {
        *self.traffic.lock()
    }
}
