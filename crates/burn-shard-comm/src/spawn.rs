//! Starting ranks as threads of this process.

use std::{
    any::Any,
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, OnceLock},
    thread,
    time::Duration,
};

use crate::{
    communicator::Communicator,
    error::Error,
    group::ProcessGroup,
    hub::Hub,
    local::{DEFAULT_DEADLINE, LocalCommunicator},
    recording::Recording,
};

/// Most threads that the ranks of one process may have: what is more is a mistake, and is refused before
/// memory is asked for.
const MAX_THREADS: usize = 1 << 15;

type Wrap = Box<dyn Fn(Arc<dyn Communicator>) -> Arc<dyn Communicator> + Send + Sync>;

/// The builder of a group whose ranks are threads.
///
/// # Examples
///
/// ```
/// # use std::time::Duration;
/// # use burn_shard_comm::{Error, Local};
/// # fn main() -> Result<(), Error> {
/// let ranks = Local::new(2)
///     .deadline(Duration::from_secs(10))
///     .threads_per_rank(1)
///     .spawn(|group| group.rank())?;
/// assert_eq!(ranks, [0, 1]);
/// # Ok(())
/// # }
/// ```
pub struct Local {
    world_size: usize,
    deadline: Duration,
    threads_per_rank: Option<usize>,
    wrap: Option<Wrap>,
}

impl Local {
    /// A group of `world_size` ranks with a deadline of five minutes.
    #[must_use]
    pub fn new(world_size: usize) -> Self {
        Self {
            world_size,
            deadline: DEFAULT_DEADLINE,
            threads_per_rank: None,
            wrap: None,
        }
    }

    /// Sets how long ranks wait for each other.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Sets how many threads each rank's pool has under [`Local::spawn`]; at least one.
    ///
    /// Without this call: the cores of the machine divided by the world size.
    #[must_use]
    pub fn threads_per_rank(mut self, threads: usize) -> Self {
        self.threads_per_rank = Some(threads.max(1));
        self
    }

    /// Puts something around each rank's communicator, a [`Recording`] for one.
    #[must_use]
    pub fn wrap(
        mut self,
        wrap: impl Fn(Arc<dyn Communicator>) -> Arc<dyn Communicator> + Send + Sync + 'static,
    ) -> Self {
        self.wrap = Some(Box::new(wrap));
        self
    }

    /// One handle per rank, in rank order, for threads the caller starts.
    ///
    /// A rank leaves when its last handle is dropped. Large collectives use the thread pool they are
    /// called in: the global one, unless the caller installs another.
    #[must_use]
    pub fn groups(&self) -> Vec<ProcessGroup> {
        let hub = Hub::new(self.world_size);
        self.communicators(&hub)
            .into_iter()
            .map(|c| ProcessGroup::new(self.wrapped(c)))
            .collect()
    }

    /// Runs `f` once per rank, each on its own thread inside its own thread pool; results in rank
    /// order.
    ///
    /// A rank leaves the group when `f` returns, whatever becomes of its handles: what it has posted
    /// stays readable, and only ranks that need more of it fail.
    ///
    /// # Errors
    ///
    /// Refuses a world size of zero, and more threads than one process should have ([`Error::Threads`]). Fails
    /// with the same error before `f` is called on any rank if the system has no thread left. If ranks
    /// panic, the group is poisoned by the first, and its panic is returned as [`Error::RankPanicked`] once
    /// all ranks are done.
    pub fn spawn<T: Send, F: Fn(ProcessGroup) -> T + Sync>(&self, f: F) -> Result<Vec<T>, Error> {
        if self.world_size == 0 {
            return Err(Error::NoRanks);
        }
        let threads = self.threads_per_rank.unwrap_or_else(|| {
            let cores = thread::available_parallelism().map_or(1, usize::from);
            (cores / self.world_size).max(1)
        });
        let all = threads
            .checked_add(1)
            .and_then(|own| own.checked_mul(self.world_size));
        if all.is_none_or(|all| all > MAX_THREADS) {
            return Err(Error::Threads {
                rank: 0,
                threads,
                message: format!(
                    "for each of {} ranks, more than {MAX_THREADS} in all (is the number of ranks right?)",
                    self.world_size
                ),
            });
        }
        let mut pools = Vec::with_capacity(self.world_size);
        for rank in 0..self.world_size {
            let pool = rayon::ThreadPoolBuilder::new()
                .num_threads(threads)
                .thread_name(move |thread| format!("rank {rank} thread {thread}"))
                .build()
                .map_err(|error| Error::Threads {
                    rank,
                    threads,
                    message: error.to_string(),
                })?;
            pools.push(pool);
        }
        let hub = Hub::new(self.world_size);
        // Kept until all ranks are done: dropping the last handle while unwinding must not look as
        // if the rank had left before it is known to have panicked.
        let communicators = self.communicators(&hub);
        let run = |rank: usize, pool: &rayon::ThreadPool, communicator: Arc<LocalCommunicator>| {
            let whole = || pool.install(|| f(ProcessGroup::new(self.wrapped(communicator))));
            match catch_unwind(AssertUnwindSafe(whole)) {
                Ok(value) => {
                    hub.leave(rank);
                    Some(value)
                }
                Err(payload) => {
                    hub.panicked(rank, panic_message(payload.as_ref()));
                    None
                }
            }
        };
        // No rank begins before all have a thread: one that waited for a rank without would meet its deadline.
        let start = OnceLock::<bool>::new();
        let values: Result<Vec<Option<T>>, Error> = thread::scope(|scope| {
            let (run, start) = (&run, &start);
            let mut ranks = Vec::with_capacity(self.world_size);
            for (rank, (pool, communicator)) in pools.iter().zip(&communicators).enumerate() {
                let wait_and_run = move || {
                    start
                        .wait()
                        .then(|| run(rank, pool, Arc::clone(communicator)))
                };
                let spawned = thread::Builder::new()
                    .name(format!("rank {rank}"))
                    .spawn_scoped(scope, wait_and_run);
                ranks.push(spawned.map_err(|error| {
                    start.get_or_init(|| false);
                    Error::Threads {
                        rank,
                        threads: 1,
                        message: error.to_string(),
                    }
                })?);
            }
            start.get_or_init(|| true);
            let values = ranks.into_iter().map(|rank| rank.join());
            Ok(values.map(|value| value.ok().flatten().flatten()).collect())
        });
        let values = values?;
        if let Some(panic) = hub.first_panic() {
            return Err(panic);
        }
        Ok(values.into_iter().flatten().collect())
    }

    fn communicators(&self, hub: &Arc<Hub>) -> Vec<Arc<LocalCommunicator>> {
        (0..self.world_size)
            .map(|rank| Arc::new(LocalCommunicator::new(Arc::clone(hub), rank, self.deadline)))
            .collect()
    }

    fn wrapped(&self, communicator: Arc<LocalCommunicator>) -> Arc<dyn Communicator> {
        let communicator = Recording::flight_from_env(communicator);
        match &self.wrap {
            Some(wrap) => wrap(communicator),
            None => communicator,
        }
    }
}

impl fmt::Debug for Local {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Local")
            .field("world_size", &self.world_size)
            .field("deadline", &self.deadline)
            .field("threads_per_rank", &self.threads_per_rank)
            .field("wrapped", &self.wrap.is_some())
            .finish()
    }
}

pub(crate) fn panic_message(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().copied();
    let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("(a panic without a text)").to_owned()
}
