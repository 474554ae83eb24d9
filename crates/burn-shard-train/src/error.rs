//! What ends training, or keeps it from beginning.

use burn_train::TrainingError;
use burn_train::train::WorkerFailure;

/// Why [`ShardedTraining`](crate::ShardedTraining) did not train, or stopped.
///
/// Burn's `TrainingError` has no room for errors of others, so `LearningResult::error` has its text, as the
/// message of a [`WorkerFailure`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Checkpoints of a `Learner` would have the state of an optimizer that never stepped.
    #[error(
        "checkpointers of SupervisedTraining, and checkpoint(epoch), save and load the optimizer of the Learner, \
         which does not step in sharded training (leave them out, and save result.model; to resume a job, use a \
         loop of your own with burn_shard::checkpoint::Checkpoints)"
    )]
    Checkpointers,
    /// There is no device, so there is no rank.
    #[error("there is no device to train on (give one device for each rank)")]
    NoDevices,
    /// A rank would have nothing to train on.
    #[error(
        "the training data has {items} items for {world_size} ranks (use fewer ranks, or more data)"
    )]
    TooFewItems {
        /// The items of the training loader.
        items: usize,
        /// The number of ranks.
        world_size: usize,
    },
    /// Ranks that are processes were given different data.
    #[error(
        "rank {rank} has {items} {split} items, and rank {other} has {other_items} (give the loader of all data to \
         every rank: each takes its own part of it)"
    )]
    OtherData {
        /// This rank.
        rank: usize,
        /// `training` or `validation`.
        split: &'static str,
        /// What this rank's loader has.
        items: u64,
        /// The first rank with another number.
        other: usize,
        /// What its loader has.
        other_items: u64,
    },
    /// A rank that had validated all of its items could not read one more to take part in a forward.
    #[error("rank {rank} could not read the first validation item (the data set says why)")]
    NoFiller {
        /// The rank.
        rank: usize,
    },
    /// A rank could not go on.
    #[error("rank {rank}: {source}")]
    Rank {
        /// The rank.
        rank: usize,
        /// Why.
        source: burn_shard::Error,
    },
    /// A rank that is a thread panicked, or there is no thread for it.
    #[error(transparent)]
    Ranks(#[from] burn_shard::CommError),
    /// Another rank, which is a process of its own, stopped with an error.
    #[error("rank {rank} stopped because of an error, which it has in its own result")]
    Other {
        /// The rank.
        rank: usize,
    },
}

impl Error {
    /// The form in which Burn hands it on.
    pub(crate) fn into_training_error(self, rank: usize) -> TrainingError {
        TrainingError::Workers(vec![WorkerFailure {
            device_id: rank,
            message: self.to_string(),
        }])
    }
}
