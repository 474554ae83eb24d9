//! Which part of the data each rank has.

use burn_shard::ProcessGroup;
use burn_train::{LearnerModel, TrainLoader, ValidLoader};

use crate::Error;

/// One rank's part of the data.
pub(crate) struct Share<M: LearnerModel> {
    pub(crate) train: TrainLoader<M>,
    /// `None` if there are fewer items than ranks.
    pub(crate) valid: Option<ValidLoader<M>>,
    /// One item, for a rank that has no more batches but is needed in a forward of the others.
    pub(crate) filler: Option<ValidLoader<M>>,
    pub(crate) totals: Totals,
}

impl<M: LearnerModel> Share<M> {
    /// How many items this rank has.
    pub(crate) fn own(&self) -> Totals {
        Totals {
            train: self.train.num_items(),
            valid: self.valid.as_ref().map_or(0, |valid| valid.num_items()),
        }
    }
}

/// How many items are trained on and validated in an epoch.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Totals {
    pub(crate) train: usize,
    pub(crate) valid: usize,
}

/// The parts of all ranks, in rank order.
///
/// A loader that shuffles hands each part a random stream of its own, so parts are always cut all and in
/// this order: a rank has the same items as a thread and as a process.
pub(crate) fn cut<M: LearnerModel>(
    train: &TrainLoader<M>,
    valid: &ValidLoader<M>,
    world_size: usize,
) -> Result<Vec<Share<M>>, Error> {
    let items = train.num_items();
    let each = items / world_size;
    if each == 0 {
        return Err(Error::TooFewItems { items, world_size });
    }
    let valid_items = valid.num_items();
    let totals = Totals {
        train: each * world_size,
        valid: valid_items,
    };
    let share = |rank: usize| {
        let (start, end) = valid_range(valid_items, rank, world_size);
        Share {
            train: train.slice(rank * each, (rank + 1) * each),
            valid: (start < end).then(|| valid.slice(start, end)),
            filler: (valid_items > 0).then(|| valid.slice(0, 1)),
            totals,
        }
    };
    Ok((0..world_size).map(share).collect())
}

/// Refuses loaders of processes that differ in length: ranks would train on overlapping parts.
pub(crate) fn compare(group: &ProcessGroup, train: usize, valid: usize) -> Result<(), Error> {
    let rank = group.rank();
    let own = [train as u64, valid as u64];
    let mut all = vec![0_u64; 2 * group.world_size()];
    group.all_gather(&own, &mut all)?;
    for (split, column) in [("training", 0), ("validation", 1)] {
        let differs = |of: &[u64]| of[column] != own[column];
        if let Some(other) = all.chunks(2).position(differs) {
            return Err(Error::OtherData {
                rank,
                split,
                items: own[column],
                other,
                other_items: all[2 * other + column],
            });
        }
    }
    Ok(())
}

fn valid_range(items: usize, rank: usize, world_size: usize) -> (usize, usize) {
    let start = |rank: usize| rank * items / world_size;
    (start(rank), start(rank + 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn validation_ranges_cover_every_item_once() {
        for (items, world_size) in [(0, 3), (2, 3), (7, 3), (9, 3), (10, 4), (5, 1)] {
            let mut next = 0;
            for rank in 0..world_size {
                let (start, end) = valid_range(items, rank, world_size);
                assert_eq!(start, next);
                next = end;
            }
            assert_eq!(next, items);
        }
    }
}
