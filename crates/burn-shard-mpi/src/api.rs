//! Checked calls of the MPI library: all of the `unsafe` but for the probe of `single_copy.rs` and two
//! calls that end the process.
//!
//! Here lives what makes the calls sound. One thread at a time calls MPI: each call takes
//! [`Calls`], a turn at the lock [`TURN`]. What MPI reads or writes after a call has returned is a
//! [`Slot`], memory that nobody else can reach until MPI says it is done with it, and that is never
//! freed if MPI never says so. When to call what is decided elsewhere.

use std::{
    ffi::{c_char, c_int},
    ptr::{self, NonNull},
};

use mpi_sys as sys;
use parking_lot::{Mutex, MutexGuard};

use crate::error::MpiError;

/// Where this process stands with MPI.
#[derive(Debug)]
pub(crate) struct State {
    /// This rank in the job; none before MPI is initialized.
    pub(crate) rank: Option<usize>,
    /// Transports that have not said farewell.
    pub(crate) open: usize,
    /// Whether an exchange failed: not all ranks may arrive at the end.
    pub(crate) failed: bool,
    /// Whether MPI is finalized, or was never ours.
    pub(crate) over: bool,
}

/// Who calls MPI. It is initialized with `MPI_THREAD_SERIALIZED`: any thread, one at a time.
pub(crate) static TURN: Mutex<State> = Mutex::new(State {
    rank: None,
    open: 0,
    failed: false,
    over: false,
});

/// A turn at calling MPI, which is initialized and not finalized.
#[derive(Debug)]
pub(crate) struct Calls<'a> {
    pub(crate) state: MutexGuard<'a, State>,
    rank: usize,
}

/// A communicator that lives until the process ends.
///
/// It is never freed: messages may be under way to a rank that has left, and MPI may give the next
/// communicator the number of one that was freed, so that they would turn up there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Comm(sys::MPI_Comm);

// SAFETY: a handle, which MPI_THREAD_SERIALIZED lets any thread use in turn; `Calls` sees to the
// turns.
unsafe impl Send for Comm {}
// SAFETY: as above.
unsafe impl Sync for Comm {}

/// What came.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arrival {
    pub(crate) from: usize,
    pub(crate) numel: usize,
}

/// Thread level, ranks and what else MPI says when it starts.
pub(crate) fn init() -> Result<(), MpiError> {
    let (mut initialized, mut finalized) = (0, 0);
    // SAFETY: allowed at any time; the pointer is to a live integer.
    let code = unsafe { sys::MPI_Initialized(&raw mut initialized) };
    check(None, "MPI_Initialized", code)?;
    // SAFETY: as above.
    let code = unsafe { sys::MPI_Finalized(&raw mut finalized) };
    check(None, "MPI_Finalized", code)?;
    if initialized != 0 || finalized != 0 {
        return Err(MpiError::NotOurs);
    }
    // SAFETY: a constant of the library.
    let required = unsafe { sys::RSMPI_THREAD_SERIALIZED };
    let mut provided = 0;
    // SAFETY: MPI allows null for both arguments of `main`; it is not initialized yet, and the caller
    // holds `TURN`, so that no other thread of ours initializes it now.
    let code = unsafe {
        sys::MPI_Init_thread(
            ptr::null_mut(),
            ptr::null_mut(),
            required,
            &raw mut provided,
        )
    };
    check(None, "MPI_Init_thread", code)?;
    if provided < required {
        return Err(MpiError::ThreadLevel { required, provided });
    }
    Ok(())
}

/// The communicator of all ranks of the job. MPI has to be initialized.
pub(crate) fn world() -> Comm {
    // SAFETY: a constant of the library.
    Comm(unsafe { sys::RSMPI_COMM_WORLD })
}

fn byte() -> sys::MPI_Datatype {
    // SAFETY: a constant of the library.
    unsafe { sys::RSMPI_UINT8_T }
}

fn null_request() -> sys::MPI_Request {
    // SAFETY: a constant of the library.
    unsafe { sys::RSMPI_REQUEST_NULL }
}

fn any_source() -> c_int {
    // SAFETY: a constant of the library.
    unsafe { sys::RSMPI_ANY_SOURCE }
}

fn null_comm() -> sys::MPI_Comm {
    // SAFETY: a constant of the library.
    unsafe { sys::RSMPI_COMM_NULL }
}

fn empty_status() -> sys::MPI_Status {
    // SAFETY: a struct of integers in every MPI library: zeros are a value of it.
    unsafe { std::mem::zeroed() }
}

/// An error of what `call` returned.
fn check(rank: Option<usize>, call: &'static str, code: c_int) -> Result<(), MpiError> {
    if code == 0 {
        return Ok(());
    }
    let mut text = [0u8; sys::MPI_MAX_ERROR_STRING as usize];
    let mut length = 0;
    // SAFETY: the text has the length that MPI asks for, the other pointer is to a live integer.
    let told =
        unsafe { sys::MPI_Error_string(code, text.as_mut_ptr().cast::<c_char>(), &raw mut length) };
    let length = usize::try_from(length).unwrap_or(0).min(text.len());
    let message = if told == 0 {
        String::from_utf8_lossy(&text[..length]).into_owned()
    } else {
        "(an error MPI has no text for)".to_owned()
    };
    Err(MpiError::Call {
        rank,
        call,
        code,
        message,
    })
}

/// A number of MPI as one of ours.
fn to_usize(number: c_int) -> usize {
    usize::try_from(number).expect("MPI should count from zero")
}

/// One of our numbers as MPI's; ranks come from MPI, lengths are those of slots.
fn to_int(number: usize) -> c_int {
    c_int::try_from(number).expect("a rank or the length of a slot should fit a C int")
}

impl<'a> Calls<'a> {
    /// A turn, or an error once the process is ending.
    pub(crate) fn take() -> Result<Self, MpiError> {
        Self::with(TURN.lock())
    }

    pub(crate) fn with(state: MutexGuard<'a, State>) -> Result<Self, MpiError> {
        match state.rank {
            Some(rank) if !state.over => Ok(Self { state, rank }),
            Some(rank) => Err(MpiError::Finalized { rank }),
            None => Err(MpiError::NotOurs),
        }
    }

    fn check(&self, call: &'static str, code: c_int) -> Result<(), MpiError> {
        check(Some(self.rank), call, code)
    }

    /// Makes failed calls return, where MPI would end the job.
    pub(crate) fn return_errors(&mut self, comm: Comm) -> Result<(), MpiError> {
        // SAFETY: a constant of the library.
        let handler = unsafe { sys::RSMPI_ERRORS_RETURN };
        // SAFETY: MPI is initialized and it is our turn (`self`); the handles are valid.
        let code = unsafe { sys::MPI_Comm_set_errhandler(comm.0, handler) };
        self.check("MPI_Comm_set_errhandler", code)
    }

    /// This rank in `comm`, and how many there are.
    pub(crate) fn place(&mut self, comm: Comm) -> Result<(usize, usize), MpiError> {
        let (mut rank, mut size) = (0, 0);
        // SAFETY: MPI is initialized and it is our turn; the pointer is to a live integer.
        let code = unsafe { sys::MPI_Comm_rank(comm.0, &raw mut rank) };
        self.check("MPI_Comm_rank", code)?;
        // SAFETY: as above.
        let code = unsafe { sys::MPI_Comm_size(comm.0, &raw mut size) };
        self.check("MPI_Comm_size", code)?;
        Ok((to_usize(rank), to_usize(size)))
    }

    /// The ranks of the job that share memory with this one. Waits for all of the job.
    pub(crate) fn neighbours(&mut self) -> Result<Comm, MpiError> {
        let mut comm = null_comm();
        // SAFETY: a constant of the library.
        let shared = unsafe { sys::RSMPI_COMM_TYPE_SHARED };
        // SAFETY: a constant of the library.
        let info = unsafe { sys::RSMPI_INFO_NULL };
        let key = to_int(self.rank);
        // SAFETY: MPI is initialized and it is our turn; the pointer is to a live handle.
        let code = unsafe { sys::MPI_Comm_split_type(world().0, shared, key, info, &raw mut comm) };
        self.check("MPI_Comm_split_type", code)?;
        Ok(Comm(comm))
    }

    /// Every rank of `comm` ends with the numbers of all. Waits for all of them.
    pub(crate) fn all_gather(
        &mut self,
        comm: Comm,
        size: usize,
        own: [u64; 2],
    ) -> Result<Vec<[u64; 2]>, MpiError> {
        let mut all = vec![[0u64; 2]; size];
        let numel = to_int(size_of_val(&own));
        let (from, to) = (own.as_ptr().cast(), all.as_mut_ptr().cast());
        // SAFETY: MPI is initialized and it is our turn; `own` has 16 bytes, `all` as many for each
        // rank of `comm`; the call returns when it is done with both.
        let code = unsafe { sys::MPI_Allgather(from, numel, byte(), to, numel, byte(), comm.0) };
        self.check("MPI_Allgather", code)?;
        Ok(all)
    }

    /// Starts to make a communicator of the ranks of the job; all of them have to.
    pub(crate) fn start_duplicate(&mut self) -> Result<Duplicate, MpiError> {
        // Kept forever, as the communicator is.
        let comm = NonNull::from(Box::leak(Box::new(null_comm())));
        let mut request = null_request();
        // SAFETY: MPI is initialized and it is our turn; `comm` points to memory that is never freed.
        let code = unsafe { sys::MPI_Comm_idup(world().0, comm.as_ptr(), &raw mut request) };
        self.check("MPI_Comm_idup", code)?;
        Ok(Duplicate { comm, request })
    }

    /// The communicator, once all ranks have started to make it.
    pub(crate) fn duplicate(
        &mut self,
        duplicate: &mut Duplicate,
    ) -> Result<Option<Comm>, MpiError> {
        if self
            .test(&mut duplicate.request, "MPI_Comm_idup")?
            .is_none()
        {
            return Ok(None);
        }
        // SAFETY: never freed, and MPI is done with it.
        let comm = Comm(unsafe { *duplicate.comm.as_ptr() });
        self.return_errors(comm)?;
        Ok(Some(comm))
    }

    /// A communicator of all ranks of the job. Waits for all of them.
    pub(crate) fn duplicate_world(&mut self) -> Result<Comm, MpiError> {
        let mut comm = null_comm();
        // SAFETY: MPI is initialized and it is our turn; the pointer is to a live handle.
        let code = unsafe { sys::MPI_Comm_dup(world().0, &raw mut comm) };
        self.check("MPI_Comm_dup", code)?;
        self.return_errors(Comm(comm))?;
        Ok(Comm(comm))
    }

    /// Starts to send the first `numel` bytes of an idle slot.
    pub(crate) fn send(
        &mut self,
        slot: &mut Slot,
        numel: usize,
        comm: Comm,
        (to, tag): (usize, c_int),
    ) -> Result<(), MpiError> {
        let bytes = slot.bytes_mut()[..numel].as_ptr().cast();
        let (numel, to) = (to_int(numel), to_int(to));
        let request = &raw mut slot.request;
        // SAFETY: MPI is initialized and it is our turn; the memory is that of an idle slot, which
        // nobody touches until the request is complete, and has `numel` bytes (indexed above).
        let code = unsafe { sys::MPI_Isend(bytes, numel, byte(), to, tag, comm.0, request) };
        self.check("MPI_Isend", code)
    }

    /// Starts to fill the first `numel` bytes of an idle slot.
    pub(crate) fn receive(
        &mut self,
        slot: &mut Slot,
        numel: usize,
        comm: Comm,
        (from, tag): (usize, c_int),
    ) -> Result<(), MpiError> {
        let bytes = slot.bytes_mut()[..numel].as_mut_ptr().cast();
        let (numel, from) = (to_int(numel), to_int(from));
        let request = &raw mut slot.request;
        // SAFETY: as in `send`.
        let code = unsafe { sys::MPI_Irecv(bytes, numel, byte(), from, tag, comm.0, request) };
        self.check("MPI_Irecv", code)
    }

    /// What came, or an arrival without meaning for what was sent, once MPI is done with the slot.
    /// An idle slot is done.
    pub(crate) fn done(&mut self, slot: &mut Slot) -> Result<Option<Arrival>, MpiError> {
        let status = self.test(&mut slot.request, "MPI_Test")?;
        status.map(|status| self.arrival(&status)).transpose()
    }

    /// A message with this tag that could be received, from whom and how long.
    pub(crate) fn probe(&mut self, comm: Comm, tag: c_int) -> Result<Option<Arrival>, MpiError> {
        let mut found = 0;
        let mut status = empty_status();
        // SAFETY: MPI is initialized and it is our turn; the pointers are to live values.
        let code =
            unsafe { sys::MPI_Iprobe(any_source(), tag, comm.0, &raw mut found, &raw mut status) };
        self.check("MPI_Iprobe", code)?;
        if found == 0 {
            return Ok(None);
        }
        self.arrival(&status).map(Some)
    }

    fn arrival(&mut self, status: &sys::MPI_Status) -> Result<Arrival, MpiError> {
        let mut numel = 0;
        // SAFETY: MPI is initialized and it is our turn; the pointers are to live values.
        let code = unsafe { sys::MPI_Get_count(status, byte(), &raw mut numel) };
        self.check("MPI_Get_count", code)?;
        Ok(Arrival {
            // Negative after a send or an idle slot, whose status says nothing.
            from: usize::try_from(status.MPI_SOURCE).unwrap_or(0),
            numel: usize::try_from(numel).unwrap_or(0),
        })
    }

    fn test(
        &mut self,
        request: &mut sys::MPI_Request,
        call: &'static str,
    ) -> Result<Option<sys::MPI_Status>, MpiError> {
        let mut done = 0;
        let mut status = empty_status();
        // SAFETY: MPI is initialized and it is our turn; the request is null or of this process, the
        // pointers are to live values.
        let code = unsafe { sys::MPI_Test(request, &raw mut done, &raw mut status) };
        self.check(call, code)?;
        Ok((done != 0).then_some(status))
    }

    /// Leaves MPI. Waits for all ranks of the job.
    pub(crate) fn finalize(mut self) -> Result<(), MpiError> {
        self.state.over = true;
        // SAFETY: MPI is initialized and it is our turn; `over` makes it the last one.
        let code = unsafe { sys::MPI_Finalize() };
        self.check("MPI_Finalize", code)
    }

    /// Ends all ranks of the job.
    pub(crate) fn abort(&mut self) {
        // SAFETY: MPI is initialized and it is our turn.
        let _code = unsafe { sys::MPI_Abort(world().0, 1) };
    }
}

/// A communicator that is being made. May be dropped: what MPI still writes is never freed.
#[derive(Debug)]
pub(crate) struct Duplicate {
    comm: NonNull<sys::MPI_Comm>,
    request: sys::MPI_Request,
}

/// Memory that MPI may read or write while a message is under way.
#[derive(Debug)]
pub(crate) struct Slot {
    memory: NonNull<[u8]>,
    /// Null: the slot is idle.
    request: sys::MPI_Request,
}

// SAFETY: it owns its memory; the handle may be used by any thread in turn, see `Comm`.
unsafe impl Send for Slot {}

impl Slot {
    pub(crate) fn new(numel: usize) -> Self {
        Self {
            memory: NonNull::from(Box::leak(vec![0u8; numel].into_boxed_slice())),
            request: null_request(),
        }
    }

    /// The bytes.
    ///
    /// # Panics
    ///
    /// While a message is under way.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        assert!(self.is_idle(), "a slot under way should be left alone");
        // SAFETY: from `Box::leak` in `new`, freed in `drop` only; idle, so MPI is done with it,
        // and `self` is borrowed for as long as the slice.
        unsafe { self.memory.as_mut() }
    }

    fn is_idle(&self) -> bool {
        self.request == null_request()
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        // A send cannot be taken back, and a receive not always: what MPI may still use is kept
        // forever.
        if self.is_idle() {
            // SAFETY: from `Box::leak` in `new`; idle, so MPI is done with it.
            drop(unsafe { Box::from_raw(self.memory.as_ptr()) });
        }
    }
}
