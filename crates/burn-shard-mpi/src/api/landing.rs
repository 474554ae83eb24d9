//! Memory of a caller, while messages arrive in it.
//!
//! To receive into memory of ours ([`Slot`](super::Slot)) and copy costs a third of the time of a large
//! message. But what a caller has lent must be back when the call returns, whatever has happened: the
//! caller may free it. MPI can take back a receive, where it cannot take back a send.

use std::{
    collections::VecDeque,
    ffi::c_int,
    marker::PhantomData,
    process,
    ptr::NonNull,
    time::{Duration, Instant},
};

use mpi_sys as sys;

use super::{Calls, Comm, byte, null_request, to_int};
use crate::{error::MpiError, patience::Patience, watchdog::last_words};

/// How long MPI may take to give memory back. It does at once, but for a message that has begun to
/// arrive and whose sender has stopped in the midst of it.
const PATIENCE: Duration = Duration::from_secs(5);

/// Bytes that messages fill one after the other.
#[derive(Debug)]
pub(crate) struct Landing<'a> {
    from: usize,
    first: NonNull<u8>,
    numel: usize,
    started: usize,
    arrived: usize,
    under_way: VecDeque<Receive>,
    bytes: PhantomData<&'a mut [u8]>,
}

#[derive(Debug)]
struct Receive {
    numel: usize,
    /// Null once MPI is done with the memory.
    request: sys::MPI_Request,
}

/// Lets `body` receive into `bytes` what rank `from` sends. MPI has nothing to do with them any more
/// when this returns.
///
/// If MPI does not give them back, ends the job: this cannot return then.
pub(crate) fn land<T>(
    bytes: &mut [u8],
    from: usize,
    body: impl FnOnce(&mut Landing<'_>) -> T,
) -> T {
    // Dropped here whatever `body` does, which cannot forget what it only borrows, nor swap it for
    // another one, which has another lifetime.
    let mut landing = Landing {
        from,
        numel: bytes.len(),
        first: NonNull::from(bytes).cast(),
        started: 0,
        arrived: 0,
        under_way: VecDeque::new(),
        bytes: PhantomData,
    };
    body(&mut landing)
}

impl Landing<'_> {
    pub(crate) fn is_over(&self) -> bool {
        self.arrived == self.numel
    }

    /// Bytes for which no receive was started.
    pub(crate) fn unstarted(&self) -> usize {
        self.numel - self.started
    }

    /// Receives that were started and are not done.
    pub(crate) fn under_way(&self) -> usize {
        self.under_way.len()
    }
}

impl Calls<'_> {
    /// Starts to receive the next `numel` bytes.
    pub(crate) fn land(
        &mut self,
        landing: &mut Landing<'_>,
        numel: usize,
        comm: Comm,
        tag: c_int,
    ) -> Result<(), MpiError> {
        assert!(
            numel <= landing.unstarted(),
            "a message should have room where it lands"
        );
        // SAFETY: at most the end of the caller's bytes, by the line above.
        let bytes = unsafe { landing.first.add(landing.started) };
        let mut request = null_request();
        let (count, from) = (to_int(numel), to_int(landing.from));
        // SAFETY: MPI is initialized and it is our turn; the bytes are lent to the landing, of which
        // no two receives have the same, and it is not gone before MPI is done with them.
        let code = unsafe {
            sys::MPI_Irecv(
                bytes.as_ptr().cast(),
                count,
                byte(),
                from,
                tag,
                comm.0,
                &raw mut request,
            )
        };
        landing.started += numel;
        landing.under_way.push_back(Receive { numel, request });
        self.check("MPI_Irecv", code)
    }

    /// Whether the oldest message under way has arrived: how long it was to be, and how long it is.
    pub(crate) fn landed(
        &mut self,
        landing: &mut Landing<'_>,
    ) -> Result<Option<(usize, usize)>, MpiError> {
        let Some(oldest) = landing.under_way.front_mut() else {
            return Ok(None);
        };
        let Some(status) = self.test(&mut oldest.request, "MPI_Irecv")? else {
            return Ok(None);
        };
        let (expected, found) = (oldest.numel, self.arrival(&status)?.numel);
        landing.under_way.pop_front();
        landing.arrived += found.min(expected);
        Ok(Some((expected, found)))
    }
}

impl Drop for Landing<'_> {
    fn drop(&mut self) {
        let start = Instant::now();
        let mut patience = Patience::default();
        let mut cancelled = false;
        loop {
            self.under_way
                .retain(|receive| receive.request != null_request());
            if self.under_way.is_empty() {
                return;
            }
            // MPI that is finalized writes nothing.
            let Ok(mut calls) = Calls::take() else { return };
            for receive in &mut self.under_way {
                if !cancelled {
                    // SAFETY: MPI is initialized and it is our turn; the request is under way. By the
                    // standard, `MPI_Test` succeeds then whatever other ranks do.
                    let _code = unsafe { sys::MPI_Cancel(&raw mut receive.request) };
                }
                // Of an error nothing is to be known but whether MPI is done.
                let _done = calls.test(&mut receive.request, "MPI_Cancel");
            }
            cancelled = true;
            if start.elapsed() > PATIENCE {
                let rank = calls.state.rank.unwrap_or(0);
                last_words(format_args!(
                    "rank {rank}: rank {} stopped in the midst of a message, which MPI does not take back; ending the job",
                    self.from
                ));
                calls.abort();
                // To return would let MPI write into memory that is not ours.
                process::abort();
            }
            drop(calls);
            patience.pause(Duration::from_millis(1));
        }
    }
}
