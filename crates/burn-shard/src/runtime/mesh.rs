//! How the ranks of a process group are arranged: which share one copy of what is sharded, and which
//! hold the same shards. A two-dimensional device mesh of PyTorch's HSDP, in rank order.

use burn_shard_comm::ProcessGroup;

use crate::Error;

/// The process groups that a module's collectives run in.
#[derive(Clone, Debug)]
pub(crate) struct Mesh {
    /// All ranks.
    pub(crate) world: ProcessGroup,
    /// Neighbours that share one copy.
    pub(crate) shard: ProcessGroup,
    /// Ranks of the same place in each copy; `None` if there is one copy.
    pub(crate) replicate: Option<ProcessGroup>,
}

impl Mesh {
    /// Splits `world` into copies of `shard_ranks` ranks each. A collective, unless there is one copy.
    pub(crate) fn new(world: &ProcessGroup, shard_ranks: Option<usize>) -> Result<Self, Error> {
        let copies = copies(world.rank(), world.world_size(), shard_ranks)?;
        if copies == 1 {
            return Ok(Self {
                world: world.clone(),
                shard: world.clone(),
                replicate: None,
            });
        }
        let (rank, size) = (world.rank(), world.world_size() / copies);
        let all_take_part = "every rank takes part in the split";
        let shard = world.split(Some(rank / size), rank)?.expect(all_take_part);
        let replicate = world.split(Some(rank % size), rank)?.expect(all_take_part);
        Ok(Self {
            world: world.clone(),
            shard,
            replicate: Some(replicate),
        })
    }

    /// Whether this rank's shards are those that a checkpoint takes.
    pub(crate) fn is_first_copy(&self) -> bool {
        self.replicate
            .as_ref()
            .is_none_or(|group| group.rank() == 0)
    }
}

/// How many copies there are.
///
/// # Errors
///
/// [`Error::ShardRanks`].
pub(crate) fn copies(
    rank: usize,
    world_size: usize,
    shard_ranks: Option<usize>,
) -> Result<usize, Error> {
    let shard_ranks = shard_ranks.unwrap_or(world_size);
    if shard_ranks == 0 || !world_size.is_multiple_of(shard_ranks) {
        return Err(Error::ShardRanks {
            rank,
            world_size,
            shard_ranks,
        });
    }
    Ok(world_size / shard_ranks)
}
