//! Where the ranks are: threads of this process, or processes of which this is one.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread::available_parallelism;
use std::time::Duration;

use burn_shard::{CommError, ProcessGroup};
use burn_shard_comm::Placement;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::cli::{Comm, Options, Run};
use crate::error::Error;

/// How long ranks wait at least while rank 0 reads text and trains a vocabulary.
const FOR_TEXT: Duration = Duration::from_secs(3600);

/// The ranks of a run, as this process sees them.
#[derive(Debug)]
pub enum Ranks {
    /// All of them are threads of this process.
    Threads(usize),
    /// This process is one; the group leads to the others.
    Process(ProcessGroup),
}

impl Ranks {
    /// Threads, unless a launcher's variables or `--comm mpi` say otherwise: then this process joins
    /// the others, and gets its share of the cores.
    ///
    /// # Errors
    /// The user, the launcher and MPI say different things, or the ranks do not find each other.
    pub fn join(options: &Options, run: &Run) -> Result<Self, Error> {
        let placement = Placement::from_env().map_err(CommError::from)?;
        let agree = |found| match options.world_size {
            Some(given) if given != found => Err(Error::WorldSize { given, found }),
            _ => Ok(()),
        };
        if let Some(placement) = &placement {
            agree(placement.world_size)?;
        }
        let group = match (options.comm, &placement) {
            (Comm::Tcp, None) => return Ok(Self::Threads(run.world_size)),
            (Comm::Tcp, Some(placement)) => {
                share_cores(placement)?;
                ProcessGroup::from_env()?
            }
            (Comm::Mpi, placement) => {
                if let Some(placement) = placement {
                    share_cores(placement)?;
                }
                mpi()?
            }
            (Comm::Nccl, None) => return Err(Error::NcclThreads),
            (Comm::Nccl, Some(placement)) => {
                share_cores(placement)?;
                nccl(&ProcessGroup::from_env()?, placement.local_rank)?
            }
        };
        match placement {
            Some(Placement {
                world_size: launched,
                ..
            }) if launched != group.world_size() => Err(Error::OtherJob {
                mpi: group.world_size(),
                launched,
            }),
            _ => agree(group.world_size()).map(|()| Self::Process(group)),
        }
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        match self {
            Self::Threads(world_size) => *world_size,
            Self::Process(group) => group.world_size(),
        }
    }

    /// Whether rank 0 is in this process, which reads files and prints.
    pub fn has_first(&self) -> bool {
        match self {
            Self::Threads(_) => true,
            Self::Process(group) => group.rank() == 0,
        }
    }

    /// What rank 0 makes of its files, in every process.
    ///
    /// # Errors
    /// What `make` says on rank 0, a failed collective on the others.
    pub fn from_first<T: Serialize + DeserializeOwned>(
        &self,
        make: impl FnOnce() -> Result<T, Error>,
    ) -> Result<T, Error> {
        let Self::Process(group) = self else {
            return make();
        };
        let deadline = group.deadline();
        group.set_deadline(deadline.max(FOR_TEXT));
        let value = if group.rank() == 0 {
            let value = make()?;
            group.broadcast_bytes(encode(group, &value)?, 0)?;
            value
        } else {
            decode(group, &group.broadcast_bytes(Vec::new(), 0)?)?
        };
        group.set_deadline(deadline);
        Ok(value)
    }

    /// Runs `work`, and tells the other processes why if it fails: they end with the cause instead of
    /// with "rank 0 has left". A panic (Burn's signatures return no error) is an error, too.
    ///
    /// # Errors
    /// As `work`.
    pub fn together<T>(&self, work: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
        let Self::Process(group) = self else {
            return work();
        };
        let result = catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
            let text = panic.downcast_ref::<&str>().copied();
            let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
            Err(Error::Comm(CommError::RankPanicked {
                rank: group.rank(),
                message: text.unwrap_or("(a panic without a text)").to_owned(),
            }))
        });
        if let Err(error) = &result {
            group.abort(&error.to_string());
        }
        result
    }
}

/// What every rank has, in rank order.
pub(crate) fn all_of<T: Serialize + DeserializeOwned>(
    group: &ProcessGroup,
    own: &T,
) -> Result<Vec<T>, Error> {
    let all = group.all_gather_bytes(&encode(group, own)?)?;
    all.iter().map(|bytes| decode(group, bytes)).collect()
}

fn encode(group: &ProcessGroup, value: &impl Serialize) -> Result<Vec<u8>, Error> {
    let rank = group.rank();
    postcard::to_stdvec(value).map_err(|source| Error::Message { rank, source })
}

fn decode<T: DeserializeOwned>(group: &ProcessGroup, bytes: &[u8]) -> Result<T, Error> {
    let rank = group.rank();
    postcard::from_bytes(bytes).map_err(|source| Error::Message { rank, source })
}

/// The ranks of a host divide its cores, as ranks that are threads do. `RAYON_NUM_THREADS` wins.
fn share_cores(placement: &Placement) -> Result<(), Error> {
    if std::env::var_os("RAYON_NUM_THREADS").is_some() {
        return Ok(());
    }
    let cores = available_parallelism().map_or(1, usize::from);
    let threads = (cores / placement.local_world_size.unwrap_or(1).max(1)).max(1);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
    pool.build_global().map_err(|error| {
        Error::Comm(CommError::Threads {
            rank: placement.rank,
            threads,
            message: error.to_string(),
        })
    })
}

#[cfg(feature = "cuda")]
fn nccl(control: &ProcessGroup, device: usize) -> Result<ProcessGroup, Error> {
    Ok(burn_shard_nccl::process_group(control, device)?)
}

#[cfg(not(feature = "cuda"))]
fn nccl(_control: &ProcessGroup, _device: usize) -> Result<ProcessGroup, Error> {
    Err(Error::NoNccl)
}

#[cfg(feature = "mpi")]
fn mpi() -> Result<ProcessGroup, Error> {
    Ok(burn_shard_mpi::process_group()?)
}

#[cfg(not(feature = "mpi"))]
fn mpi() -> Result<ProcessGroup, Error> {
    Err(Error::NoMpi)
}
