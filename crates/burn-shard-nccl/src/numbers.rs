//! Numbers of collectives in errors: those of the control group count what NCCL's start took there, too.

use std::sync::Arc;

use burn_shard_comm::{Error, Members};

/// How many collectives of a group's control group come before the first of its own.
#[derive(Clone, Debug)]
pub(crate) struct Numbers {
    /// The group that all sub-groups with NCCL come from; it may itself be a sub-group of its control group's.
    first: Members,
    /// How many they are for that group.
    of_first: u64,
}

impl Numbers {
    /// How many they are for each sub-group: its rank 0 broadcasts NCCL's id (a length and bytes), and all say that they have joined.
    pub(crate) const OF_SUB_GROUPS: u64 = 3;

    pub(crate) const fn new(first: Members, of_first: u64) -> Self {
        Self { first, of_first }
    }

    /// An error that the control group of `members` has returned, with our numbers.
    pub(crate) fn of_group(&self, members: &Members, error: Error) -> Error {
        self.counted(self.before(members.color(), members.ranks()), error)
    }

    /// What has poisoned the group, with our numbers.
    pub(crate) fn of_cause(&self, cause: Error) -> Error {
        self.counted(self.before(None, &[]), cause)
    }

    /// How many of the control group's collectives come before the first of the group with this name.
    fn before(&self, color: Option<usize>, ranks: &[usize]) -> u64 {
        match color {
            _ if color == self.first.color()
                && (color.is_none() || ranks == self.first.ranks()) =>
            {
                self.of_first
            }
            // The control group comes from another, of which this one knows nothing.
            None => 0,
            Some(_) => Self::OF_SUB_GROUPS,
        }
    }

    /// `error`, of a group in which `before` collectives were not ours.
    fn counted(&self, before: u64, mut error: Error) -> Error {
        if let Error::SubGroup {
            color,
            ranks,
            error,
        } = &mut error
        {
            let before = self.before(Some(*color), ranks);
            *error = Arc::new(self.counted(before, (**error).clone()));
        }
        if let Error::Mismatch { sequence, .. }
        | Error::Deadline { sequence, .. }
        | Error::RankLeft { sequence, .. }
        | Error::Interrupted { sequence, .. }
        | Error::Backend { sequence, .. } = &mut error
        {
            *sequence = sequence.saturating_sub(before);
        }
        if let Error::Interrupted { cause, .. } | Error::Poisoned { cause, .. } = &mut error {
            *cause = Arc::new(self.of_cause((**cause).clone()));
        }
        error
    }
}
