//! Memory of ours that messages are sent from, or received into.

use std::{ffi::c_int, ptr::NonNull};

use mpi_sys as sys;

use super::{Arrival, Calls, Comm, byte, null_request, to_int};
use crate::error::MpiError;

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

impl Calls<'_> {
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
}
