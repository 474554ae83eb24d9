//! Where the ranks are: threads of this process, or processes of which this is one.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::{self, available_parallelism};
use std::time::Duration;

use burn_shard::{CommError, ProcessGroup, ReduceOp};
use burn_shard_comm::Placement;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::cli::{Comm, Options};
use crate::error::Error;
use crate::run::Run;

/// While rank 0 reads text, ranks hear of each other at least this often.
const BETWEEN_SIGNS: Duration = Duration::from_secs(5);

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
    /// However long it takes, every wait has the group's deadline: ranks tell each other that they are
    /// still there, so that one that is not is noticed as at any other time.
    ///
    /// # Errors
    /// What `make` says on rank 0, a failed collective on the others.
    ///
    /// # Panics
    /// If `make` panics, on rank 0.
    pub fn from_first<T: Serialize + DeserializeOwned + Send + 'static>(
        &self,
        make: impl FnOnce() -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        let Self::Process(group) = self else {
            return make();
        };
        if group.rank() > 0 {
            while !all_know(group, Made::No)? {}
            return decode(group, &group.broadcast_bytes(Vec::new(), 0)?);
        }
        // Not a scoped thread: when a rank is lost nobody waits for what it would have got.
        let (sender, receiver) = mpsc::channel();
        let control = group.clone();
        let worker = thread::spawn(move || {
            let value = make()?;
            let bytes = encode(&control, &value)?;
            sender.send((value, bytes)).ok();
            Ok(())
        });
        let between = (group.deadline() / 4).min(BETWEEN_SIGNS);
        loop {
            match receiver.recv_timeout(between) {
                Ok((value, bytes)) => {
                    all_know(group, Made::Yes)?;
                    group.broadcast_bytes(bytes, 0)?;
                    return Ok(value);
                }
                Err(RecvTimeoutError::Timeout) => {
                    all_know(group, Made::No)?;
                }
                Err(RecvTimeoutError::Disconnected) => {
                    return match worker.join() {
                        Ok(Err(error)) => Err(error),
                        Err(panic) => resume_unwind(panic),
                        Ok(Ok(())) => unreachable!("what is made was sent before"),
                    };
                }
            }
        }
    }

    /// Runs `work`, and tells the other processes why if it fails: they end with the cause instead of
    /// with "rank 0 has left". A panic (Burn's signatures return no error) is an error, too.
    ///
    /// # Errors
    /// The errors of `work`.
    pub fn together<T>(&self, work: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
        let Self::Process(group) = self else {
            return work();
        };
        let result = catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
            Err(Error::Comm(CommError::RankPanicked {
                rank: group.rank(),
                message: message_of(panic.as_ref()).to_owned(),
            }))
        });
        if let Err(error) = &result {
            group.abort(&error.to_string());
        }
        result
    }
}

/// What a panic says.
pub fn message_of(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("(a panic without a text)")
}

/// Whether rank 0 has made what the others wait for.
#[derive(Clone, Copy)]
enum Made {
    No,
    Yes,
}

/// A sign of life of every rank to every other. Returns whether rank 0 says [`Made::Yes`].
fn all_know(group: &ProcessGroup, made: Made) -> Result<bool, Error> {
    let mut sign = [f64::from(u8::from(matches!(made, Made::Yes)))];
    group.all_reduce(&mut sign, ReduceOp::Max)?;
    Ok(sign[0] > 0.0)
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

#[cfg(test)]
mod tests {
    use burn_shard::Local;

    use super::*;

    #[test]
    fn rank_0_may_take_longer_than_the_deadline() {
        let ranks = Local::new(2).deadline(Duration::from_secs(2));
        let made = ranks.spawn(|group| {
            let ranks = Ranks::Process(group);
            ranks.from_first(|| {
                thread::sleep(Duration::from_secs(5));
                Ok(7_u64)
            })
        });
        for value in made.unwrap() {
            assert_eq!(value.unwrap(), 7);
        }
    }

    #[test]
    fn a_rank_that_is_not_there_is_missed_while_rank_0_works() {
        let ranks = Local::new(2).deadline(Duration::from_secs(1));
        let (finish, finished) = mpsc::channel::<()>();
        let finished = std::sync::Mutex::new(Some(finished));
        let results = ranks.spawn(|group| {
            if group.rank() == 1 {
                // Its thread goes on, as a stopped process does, until the other has given up.
                let finished = finished.lock().unwrap().take().unwrap();
                finished.recv().ok();
                return Ok(());
            }
            let finish = finish.clone();
            let found = Ranks::Process(group).from_first(|| {
                // An hour of text: only the deadline can end this.
                thread::sleep(Duration::from_secs(3600));
                Ok(())
            });
            finish.send(()).unwrap();
            found
        });
        let results = results.unwrap();
        let error = results[0].as_ref().unwrap_err();
        assert!(matches!(error, Error::Comm(_)), "{error}");
    }

    #[test]
    fn what_rank_0_refuses_or_panics_with_ends_all() {
        let results = Local::new(2).spawn(|group| {
            let ranks = Ranks::Process(group);
            ranks.together(|| ranks.from_first::<()>(|| panic!("no text")))
        });
        for result in results.unwrap() {
            let error = result.unwrap_err().to_string();
            assert!(error.contains("no text"), "{error}");
        }
    }
}
