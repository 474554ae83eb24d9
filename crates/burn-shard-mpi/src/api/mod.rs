//! Checked calls of the MPI library: all of the `unsafe` but for the probe of `single_copy.rs` and two
//! calls that end the process.
//!
//! Here lives what makes the calls sound. One thread at a time calls MPI: each call takes
//! [`Calls`], a turn at the lock [`TURN`]. What MPI reads or writes after a call has returned is a
//! [`Slot`], memory that nobody else can reach until MPI says it is done with it, and that is never
//! freed if MPI never says so; or a [`Landing`], which is not left before. When to call what is decided
//! elsewhere.

mod comm;
mod landing;
mod slot;

use std::{
    ffi::{c_char, c_int},
    ptr,
};

use mpi_sys as sys;
use parking_lot::{Mutex, MutexGuard};

pub(crate) use comm::{Comm, world};
pub(crate) use landing::{Landing, land};
pub(crate) use slot::Slot;

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
