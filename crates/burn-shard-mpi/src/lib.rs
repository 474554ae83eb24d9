//! MPI as a transport of process groups, for clusters of CPUs.
//!
//! Without the feature `mpi` this crate is empty: with it, an MPI library and its headers have to
//! be installed, and libclang for the bindings (Debian: `libopenmpi-dev openmpi-bin libclang-dev`).
//!
//! ```no_run
//! # #[cfg(feature = "mpi")]
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use burn_shard_comm::ReduceOp;
//!
//! // mpirun -n 4 program
//! let group = burn_shard_mpi::process_group()?;
//! let mut sum = [1.0f32];
//! group.all_reduce(&mut sum, ReduceOp::Sum)?;
//! # Ok(())
//! # }
//! # #[cfg(not(feature = "mpi"))]
//! # fn main() {}
//! ```
//!
//! # What MPI does here, and what it does not
//!
//! It moves bytes between two ranks (`MpiTransport`). What is added, and in which order, is the
//! business of [`Pairwise`](burn_shard_comm::Pairwise): results have the same bits as those of
//! ranks that are threads, while MPI's own reductions may add in any order.
//!
//! # How a job ends
//!
//! Groups are left in order when their last handle is dropped. MPI itself is finalized when the
//! process exits, by `return` from `main` or by [`std::process::exit`], once every rank of the job does.
//! It waits for those that are not there yet: after a failure five seconds, else as long as ranks wait
//! for each other. Then it names them and ends the job with `MPI_Abort`: so an error is to be printed
//! before. A rank that dies takes the job with it: `mpirun` notices, names the rank and ends the others.
//! A rank that stalls is named by the others'
//! [`Error::Deadline`](burn_shard_comm::Error::Deadline).
//!
//! # How long ranks wait
//!
//! As long as `BURN_SHARD_TIMEOUT` says, in seconds; five minutes if it is not set
//! ([`ProcessGroup::deadline_from_env`](burn_shard_comm::ProcessGroup::deadline_from_env)): for all
//! ranks to join the job, in each collective, and at the exit. `mpirun -x BURN_SHARD_TIMEOUT` hands it on
//! to other hosts. If one rank has more to do at the end than that, such as to write a large file, all
//! end with a [`barrier`](burn_shard_comm::ProcessGroup::barrier) that has a longer
//! [deadline](burn_shard_comm::ProcessGroup::set_deadline).
//!
//! # Running
//!
//! `mpirun -n 4 program`; as root, or in most containers, with `--allow-run-as-root`; more ranks
//! than cores, with `--oversubscribe`. A waiting rank sleeps here; while it joins
//! the job, MPI keeps a core busy, unless `--mca mpi_yield_when_idle 1`. Whether the ranks of a
//! host can copy from each other's memory is logged when the job begins (`SingleCopy`).

#[cfg(feature = "mpi")]
mod api;
#[cfg(feature = "mpi")]
mod error;
#[cfg(feature = "mpi")]
mod exit;
#[cfg(feature = "mpi")]
mod group;
#[cfg(feature = "mpi")]
mod patience;
#[cfg(feature = "mpi")]
mod peer;
#[cfg(feature = "mpi")]
mod process;
#[cfg(feature = "mpi")]
mod single_copy;
#[cfg(feature = "mpi")]
mod transport;
#[cfg(feature = "mpi")]
mod watchdog;

#[cfg(feature = "mpi")]
pub use error::MpiError;
#[cfg(feature = "mpi")]
pub use group::process_group;
#[cfg(feature = "mpi")]
pub use single_copy::SingleCopy;
#[cfg(feature = "mpi")]
pub use transport::MpiTransport;
