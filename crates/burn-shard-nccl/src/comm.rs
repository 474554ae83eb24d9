//! Checked calls of NCCL: lengths before, codes and texts after, groups that are always closed, waits
//! that always end.

use std::{
    ffi::{CStr, c_char, c_int, c_void},
    fmt, ptr,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use burn_shard_comm::{DType, ReduceOp};
use parking_lot::Mutex;

use crate::{
    api::{Config, IN_PROGRESS, RawComm, RawStream, SUCCESS, UniqueId},
    error::NcclError,
    library::Nccl,
    memory::Memory,
};

/// How long an orderly end may take before it becomes an abort.
const CLOSE_DEADLINE: Duration = Duration::from_secs(10);

impl Nccl {
    /// The error that `code` stands for, with what `comm` (or none) has to say about it.
    pub(crate) fn check(
        &self,
        function: &'static str,
        code: c_int,
        comm: RawComm,
    ) -> Result<(), NcclError> {
        if code == SUCCESS || code == IN_PROGRESS {
            return Ok(());
        }
        // SAFETY: takes any code, returns a static string.
        let text = unsafe { (self.api.get_error_string)(code) };
        // SAFETY: takes a communicator or null.
        let detail = unsafe { (self.api.get_last_error)(comm) };
        Err(NcclError::Call {
            function,
            code,
            // SAFETY: null or a C string that lives as long as the library.
            text: unsafe { text_of(text) },
            // SAFETY: null or a C string that lives until the next call of NCCL on this thread.
            detail: unsafe { text_of(detail) },
        })
    }
}

/// # Safety
///
/// `text` is null or a C string.
unsafe fn text_of(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: the caller's.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_string_lossy().into_owned()
}

/// When a wait for NCCL ends, done or not.
pub(crate) struct Patience<'a> {
    pub(crate) deadline: Duration,
    /// Whether the group has failed meanwhile.
    pub(crate) hopeless: &'a dyn Fn() -> bool,
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
            if (patience.hopeless)() {
                return Err(NcclError::GivenUp { function });
            }
            if start.elapsed() >= patience.deadline {
                let waited = start.elapsed();
                return Err(NcclError::Timeout { function, waited });
            }
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
        let group = Group::start(self, alive)?;
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

/// Bytes in a device's memory that a collective reads or writes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span {
    pub(crate) address: u64,
    pub(crate) bytes: usize,
}

impl Span {
    fn pointer(self) -> *mut c_void {
        ptr::with_exposed_provenance_mut(to_address(self.address))
    }
}

/// An open group of calls; closed when dropped.
///
/// Every call is unsafe for one reason: its spans have to be memory of the communicator's device that
/// lives, and is used by nobody else in a way that conflicts, until the stream has passed the group.
pub(crate) struct Group<'a> {
    comm: &'a Comm,
    raw: RawComm,
    stream: RawStream,
    open: bool,
}

impl<'a> Group<'a> {
    fn start(comm: &'a Comm, raw: RawComm) -> Result<Self, NcclError> {
        // SAFETY: closed by `end`, on this thread: `Group` is neither Send nor Sync.
        let code = unsafe { (comm.nccl.api.group_start)() };
        comm.nccl.check("ncclGroupStart", code, raw)?;
        Ok(Self {
            comm,
            raw,
            stream: ptr::with_exposed_provenance_mut(to_address(comm.memory.stream())),
            open: true,
        })
    }

    fn end(mut self) -> Result<(), NcclError> {
        self.open = false;
        // SAFETY: opened by `start`, on this thread.
        let code = unsafe { (self.comm.nccl.api.group_end)() };
        self.comm.nccl.check("ncclGroupEnd", code, self.raw)
    }

    /// # Safety
    ///
    /// See [`Group`].
    pub(crate) unsafe fn all_gather(&self, send: Span, receive: Span) -> Result<(), NcclError> {
        const FUNCTION: &str = "ncclAllGather";
        self.fits(
            FUNCTION,
            send,
            receive,
            send.bytes * self.comm.world_size == receive.bytes,
        )?;
        // SAFETY: the lengths fit, the memory is as the caller says.
        let code = unsafe {
            (self.comm.nccl.api.all_gather)(
                send.pointer(),
                receive.pointer(),
                send.bytes,
                BYTE,
                self.raw,
                self.stream,
            )
        };
        self.comm.nccl.check(FUNCTION, code, self.raw)
    }

    /// # Safety
    ///
    /// See [`Group`].
    pub(crate) unsafe fn broadcast(
        &self,
        send: Span,
        receive: Span,
        root: usize,
    ) -> Result<(), NcclError> {
        const FUNCTION: &str = "ncclBroadcast";
        self.fits(FUNCTION, send, receive, send.bytes == receive.bytes)?;
        let root = to_int(root);
        // SAFETY: the lengths fit, the memory is as the caller says.
        let code = unsafe {
            (self.comm.nccl.api.broadcast)(
                send.pointer(),
                receive.pointer(),
                send.bytes,
                BYTE,
                root,
                self.raw,
                self.stream,
            )
        };
        self.comm.nccl.check(FUNCTION, code, self.raw)
    }

    /// # Safety
    ///
    /// See [`Group`].
    pub(crate) unsafe fn all_reduce(
        &self,
        send: Span,
        receive: Span,
        kind: Kind,
    ) -> Result<(), NcclError> {
        const FUNCTION: &str = "ncclAllReduce";
        self.fits(
            FUNCTION,
            send,
            receive,
            send.bytes == receive.bytes && kind.divides(send),
        )?;
        let numel = receive.bytes / kind.size_bytes;
        // SAFETY: the lengths fit, the memory is as the caller says.
        let code = unsafe {
            (self.comm.nccl.api.all_reduce)(
                send.pointer(),
                receive.pointer(),
                numel,
                kind.dtype,
                kind.op,
                self.raw,
                self.stream,
            )
        };
        self.comm.nccl.check(FUNCTION, code, self.raw)
    }

    /// # Safety
    ///
    /// See [`Group`].
    pub(crate) unsafe fn reduce_scatter(
        &self,
        send: Span,
        receive: Span,
        kind: Kind,
    ) -> Result<(), NcclError> {
        const FUNCTION: &str = "ncclReduceScatter";
        let fits = receive.bytes * self.comm.world_size == send.bytes && kind.divides(receive);
        self.fits(FUNCTION, send, receive, fits)?;
        let numel = receive.bytes / kind.size_bytes;
        // SAFETY: the lengths fit, the memory is as the caller says.
        let code = unsafe {
            (self.comm.nccl.api.reduce_scatter)(
                send.pointer(),
                receive.pointer(),
                numel,
                kind.dtype,
                kind.op,
                self.raw,
                self.stream,
            )
        };
        self.comm.nccl.check(FUNCTION, code, self.raw)
    }

    fn fits(
        &self,
        function: &'static str,
        send: Span,
        receive: Span,
        fits: bool,
    ) -> Result<(), NcclError> {
        if fits {
            return Ok(());
        }
        Err(NcclError::Lengths {
            function,
            world_size: self.comm.world_size,
            send_bytes: send.bytes,
            receive_bytes: receive.bytes,
        })
    }
}

impl Drop for Group<'_> {
    fn drop(&mut self) {
        if self.open {
            // SAFETY: opened by `start`, on this thread. Whoever left the group open has an error already.
            let _code = unsafe { (self.comm.nccl.api.group_end)() };
        }
    }
}

/// `ncclUint8`: what is only moved is moved as bytes.
const BYTE: c_int = 1;

/// What a reduction does, in NCCL's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Kind {
    dtype: c_int,
    op: c_int,
    size_bytes: usize,
}

impl Kind {
    /// None: NCCL has no 16-bit integers.
    pub(crate) const fn new(dtype: DType, op: ReduceOp) -> Option<Self> {
        let size_bytes = dtype.size_bytes();
        let dtype = match dtype {
            DType::I8 => 0,
            DType::U8 => 1,
            DType::I32 => 2,
            DType::U32 => 3,
            DType::I64 => 4,
            DType::U64 => 5,
            DType::F16 => 6,
            DType::F32 => 7,
            DType::F64 => 8,
            DType::BF16 => 9,
            DType::I16 | DType::U16 => return None,
        };
        let op = match op {
            ReduceOp::Sum => 0,
            ReduceOp::Max => 2,
            ReduceOp::Min => 3,
            ReduceOp::Mean => 4,
        };
        Some(Self {
            dtype,
            op,
            size_bytes,
        })
    }

    const fn divides(self, span: Span) -> bool {
        span.bytes.is_multiple_of(self.size_bytes)
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

/// A rank or a number of ranks.
fn to_int(value: usize) -> c_int {
    c_int::try_from(value).expect("a group should have fewer ranks than a C int can count")
}

fn to_address(address: u64) -> usize {
    usize::try_from(address).expect("an address should fit this machine's")
}
