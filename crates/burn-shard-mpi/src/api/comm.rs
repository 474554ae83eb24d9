//! Communicators: which ranks a message can reach, and which messages can meet.

use std::ptr::NonNull;

use mpi_sys as sys;

use super::{Calls, null_request, to_int, to_usize};
use crate::error::MpiError;

/// A communicator that lives until the process ends.
///
/// It is never freed: messages may be under way to a rank that has left, and MPI may give the next
/// communicator the number of one that was freed, so that they would turn up there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Comm(pub(super) sys::MPI_Comm);

// SAFETY: a handle, which MPI_THREAD_SERIALIZED lets any thread use in turn; `Calls` sees to the
// turns.
unsafe impl Send for Comm {}
// SAFETY: as above.
unsafe impl Sync for Comm {}

/// The communicator of all ranks of the job. MPI has to be initialized.
pub(crate) fn world() -> Comm {
    // SAFETY: a constant of the library.
    Comm(unsafe { sys::RSMPI_COMM_WORLD })
}

fn null_comm() -> sys::MPI_Comm {
    // SAFETY: a constant of the library.
    unsafe { sys::RSMPI_COMM_NULL }
}

/// A communicator that is being made. May be dropped: what MPI still writes is never freed.
#[derive(Debug)]
pub(crate) struct Duplicate {
    comm: NonNull<sys::MPI_Comm>,
    request: sys::MPI_Request,
}

impl Calls<'_> {
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
}
