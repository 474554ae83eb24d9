//! The life of an NCCL communicator: waits that always end, and an end that is always reached.

use std::{
    ffi::c_int,
    fmt, ptr,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use parking_lot::Mutex;

use crate::{
    api::{Config, IN_PROGRESS, RawComm, SUCCESS, UniqueId},
    error::NcclError,
    group::{Group, to_int},
    library::Nccl,
    memory::Memory,
};

/// How long an orderly end may take before it becomes an abort.
const CLOSE_DEADLINE: Duration = Duration::from_secs(10);

/// When a wait for NCCL ends, done or not.
pub(crate) struct Patience<'a> {
    pub(crate) deadline: Duration,
    /// Whether the group has failed meanwhile.
    pub(crate) hopeless: &'a dyn Fn() -> bool,
}

impl Patience<'_> {
    /// The error of a wait for `function` that began at `start`, if it has to end.
    pub(crate) fn check(&self, function: &'static str, start: Instant) -> Result<(), NcclError> {
        if (self.hopeless)() {
            return Err(NcclError::GivenUp { function });
        }
        let waited = start.elapsed();
        if waited >= self.deadline {
            return Err(NcclError::Timeout { function, waited });
        }
        Ok(())
    }
}

/// One rank of an NCCL communicator that does not block.
pub(crate) struct Comm {
    nccl: Arc<Nccl>,
    /// With the stream; stays as long as the communicator.
    memory: Arc<dyn Memory>,
    world_size: usize,
    /// None: aborted or destroyed. All calls are made under the lock.
    raw: Mutex<Option<Raw>>,
}

/// A communicator that is alive.
#[derive(Clone, Copy)]
struct Raw(RawComm);

// SAFETY: NCCL lets any thread use a communicator, one at a time; the lock in `Comm` sees to that.
unsafe impl Send for Raw {}

impl Comm {
    /// Joins the ranks that share `id`.
    pub(crate) fn init(
        nccl: &Arc<Nccl>,
        memory: &Arc<dyn Memory>,
        id: UniqueId,
        rank: usize,
        world_size: usize,
        patience: &Patience<'_>,
    ) -> Result<Self, NcclError> {
        const FUNCTION: &str = "ncclCommInitRankConfig";
        let mut config = Config::non_blocking();
        let mut raw = ptr::null_mut();
        memory.enter()?;
        let ranks = (to_int(world_size), to_int(rank));
        // SAFETY: `raw` and `config` are ours; the configuration says itself how long it is.
        let code =
            unsafe { (nccl.api.init_rank)(&raw mut raw, ranks.0, id, ranks.1, &raw mut config) };
        let started = nccl.check(FUNCTION, code, ptr::null_mut());
        let comm = Self {
            nccl: Arc::clone(nccl),
            memory: Arc::clone(memory),
            world_size,
            raw: Mutex::new((!raw.is_null()).then_some(Raw(raw))),
        };
        started
            .and_then(|()| comm.settle(FUNCTION, raw, patience))
            .inspect_err(|_| comm.abort())?;
        Ok(comm)
    }

    pub(crate) const fn nccl(&self) -> &Arc<Nccl> {
        &self.nccl
    }

    /// Waits until what was called last has done its work on the host.
    fn settle(
        &self,
        function: &'static str,
        raw: RawComm,
        patience: &Patience<'_>,
    ) -> Result<(), NcclError> {
        let start = Instant::now();
        loop {
            let state = self.state(function, raw)?;
            if state != IN_PROGRESS {
                return Ok(());
            }
            patience.check(function, start)?;
            pause(start);
        }
    }

    /// Success, in progress, or the error that the communicator has met.
    fn state(&self, function: &'static str, raw: RawComm) -> Result<c_int, NcclError> {
        let mut state = SUCCESS;
        // SAFETY: `raw` is alive, and the state is ours.
        let code = unsafe { (self.nccl.api.get_async_error)(raw, &raw mut state) };
        self.nccl.check("ncclCommGetAsyncError", code, raw)?;
        self.nccl.check(function, state, raw)?;
        Ok(state)
    }

    /// The error that the communicator has met, if any.
    pub(crate) fn async_error(&self) -> Result<(), NcclError> {
        const FUNCTION: &str = "an NCCL kernel or its network";
        let raw = self.raw.lock();
        let Some(Raw(alive)) = *raw else {
            return Err(NcclError::Aborted { function: FUNCTION });
        };
        self.state(FUNCTION, alive).map(drop)
    }

    /// Makes the calls of `calls` as one group, and waits until they are on their streams.
    pub(crate) fn group(
        &self,
        patience: &Patience<'_>,
        calls: impl FnOnce(&Group<'_>) -> Result<(), NcclError>,
    ) -> Result<(), NcclError> {
        const FUNCTION: &str = "ncclGroupEnd";
        let raw = self.raw.lock();
        let Some(Raw(alive)) = *raw else {
            return Err(NcclError::Aborted { function: FUNCTION });
        };
        self.memory.enter()?;
        // SAFETY: alive and locked; the stream lives as long as the memory.
        let group =
            unsafe { Group::start(&self.nccl, self.world_size, alive, self.memory.stream()) }?;
        let called = calls(&group);
        let ended = group.end();
        called.and(ended)?;
        self.settle(FUNCTION, alive, patience)
    }

    /// Ends the communicator at once: its kernels stop, its waits return. Later calls fail.
    pub(crate) fn abort(&self) {
        if let Some(Raw(alive)) = self.raw.lock().take() {
            // SAFETY: alive until here, and gone from the lock. An error would leave nothing to do.
            let _code = unsafe { (self.nccl.api.abort)(alive) };
        }
    }

    /// Ends the communicator after all that was called; aborts it if that does not work.
    pub(crate) fn close(&self) -> Result<(), NcclError> {
        let Some(Raw(alive)) = self.raw.lock().take() else {
            return Ok(());
        };
        let patience = Patience {
            deadline: CLOSE_DEADLINE,
            hopeless: &|| false,
        };
        // SAFETY: alive, and nobody else's any more.
        let code = unsafe { (self.nccl.api.finalize)(alive) };
        let finalized = self
            .nccl
            .check("ncclCommFinalize", code, alive)
            .and_then(|()| self.settle("ncclCommFinalize", alive, &patience));
        if finalized.is_err() {
            // SAFETY: alive, and used no more.
            let _code = unsafe { (self.nccl.api.abort)(alive) };
            return finalized;
        }
        // SAFETY: finalized, and used no more.
        let code = unsafe { (self.nccl.api.destroy)(alive) };
        self.nccl.check("ncclCommDestroy", code, ptr::null_mut())
    }
}

impl Drop for Comm {
    /// Closes on a thread of its own: neither waits nor panics. If there is no thread, the
    /// communicator stays until the process ends.
    fn drop(&mut self) {
        let Some(raw) = self.raw.get_mut().take() else {
            return;
        };
        let comm = Self {
            nccl: Arc::clone(&self.nccl),
            memory: Arc::clone(&self.memory),
            world_size: self.world_size,
            raw: Mutex::new(Some(raw)),
        };
        let close = move || {
            // Nobody is left to hear of it.
            let _result = comm.close();
        };
        let _thread = thread::Builder::new()
            .name("nccl close".to_owned())
            .spawn(close);
    }
}

impl fmt::Debug for Comm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Comm")
            .field("nccl", &self.nccl)
            .field("world_size", &self.world_size)
            .finish_non_exhaustive()
    }
}

/// Lets others run, longer the longer the wait has been: a core is worth more than a microsecond.
pub(crate) fn pause(start: Instant) {
    let waited = start.elapsed();
    if waited < Duration::from_micros(50) {
        thread::yield_now();
    } else {
        thread::sleep((waited / 10).clamp(Duration::from_micros(20), Duration::from_millis(1)));
    }
}
