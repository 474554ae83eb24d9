//! Counts of calls and bytes, to prove how much a training step communicates.

use std::ops::Sub;

use crate::{call::Call, communicator::Collective};

/// What was counted for one kind of collective.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    /// Calls that were started.
    pub calls: u64,
    /// Bytes received from other ranks.
    pub bytes: u64,
}

/// Calls and bytes received from other ranks, per kind of collective.
///
/// Bytes follow from the lengths alone, for `N` ranks, `n` elements in all and `own` of them in this
/// rank's shard (padding not counted):
///
/// | collective | elements received |
/// |---|---|
/// | `all_gather` | `n - own` |
/// | `reduce_scatter` | `(N - 1) * own` |
/// | `all_reduce` | `(N - 1) * own + (n - own)` |
/// | `broadcast` | `n`, on the root 0 |
/// | `barrier` | 0 |
///
/// An absent contribution counts as the zeros it stands for. A collective is counted when it is
/// started, even if it fails later; a refused one is not.
///
/// # Examples
///
/// ```
/// # use burn_shard_comm::{Collective, Error, ProcessGroup, ReduceOp};
/// # fn main() -> Result<(), Error> {
/// ProcessGroup::spawn(2, |group| -> Result<(), Error> {
///     let before = group.traffic();
///     group.all_reduce(&mut [1.0f32; 6], ReduceOp::Sum)?;
///     let step = group.traffic() - before;
///     assert_eq!(step.get(Collective::AllReduce).calls, 1);
///     assert_eq!(step.total_bytes(), (3 + 3) * 4);
///     Ok(())
/// })?
/// .into_iter()
/// .collect()
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    counts: [Count; Collective::ALL.len()],
}

impl Traffic {
    /// The count of one kind.
    #[must_use]
    pub const fn get(&self, collective: Collective) -> Count {
        self.counts[collective as usize]
    }

    /// Bytes of all kinds.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        self.counts.iter().map(|count| count.bytes).sum()
    }

    /// Calls of all kinds.
    #[must_use]
    pub fn total_calls(&self) -> u64 {
        self.counts.iter().map(|count| count.calls).sum()
    }

    /// Counts a collective that `rank` has started; for communicators.
    pub fn record(&mut self, call: &Call, rank: usize, world_size: usize) {
        let count = &mut self.counts[call.collective as usize];
        count.calls += 1;
        count.bytes += call.received_bytes(rank, world_size) as u64;
    }
}

/// What happened between two readings: `after - before`.
impl Sub for Traffic {
    type Output = Self;

    fn sub(self, before: Self) -> Self {
        let mut difference = self;
        for (count, before) in difference.counts.iter_mut().zip(before.counts) {
            count.calls -= before.calls;
            count.bytes -= before.bytes;
        }
        difference
    }
}
