//! Starts one process per rank on this host, and ends them together.
//!
//! [`launch()`] is what the command `burn-shard launch` does, for programs that offer to launch
//! themselves. It blocks until every rank has ended, and prints: each line of a rank with its rank
//! before it, on the stream it was written to, and its own remarks on the standard error.
//!
//! Ranks find the variables of torchrun (`RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`,
//! `GROUP_RANK`, `MASTER_ADDR`, `MASTER_PORT`), `BURN_SHARD_TOKEN`, `BURN_SHARD_JOB_ID`,
//! `BURN_SHARD_ERROR_FILE`, `BURN_SHARD_RESTART_COUNT`, and `RAYON_NUM_THREADS` unless it is set; their standard input is empty. They do not
//! inherit what other launchers have set (`SLURM_PROCID`, `OMPI_COMM_WORLD_RANK`, `TORCHELASTIC_RUN_ID` and the
//! like; `environment.rs` has the list), nor `BURN_SHARD_BIND` for a job on loopback.
//!
//! # How a job ends
//!
//! - All ranks exit with 0: so does the launcher.
//! - A rank fails: the others get SIGTERM, and SIGKILL after a time of grace. Ranks whose group has failed
//!   already are left alone until the grace is over, so that each can say why and clean up. The launcher
//!   names the rank that failed first, by the times that ranks record in `BURN_SHARD_ERROR_FILE`
//!   (`blame.rs`), prints its last lines, and ends with its exit code.
//! - With [`Restarts`], all ranks are started again after that, up to so many times, with a new token and
//!   `BURN_SHARD_RESTART_COUNT` one higher. They find by themselves what they have saved.
//! - The launcher gets SIGINT, SIGTERM or SIGHUP: it passes it on, kills what is left after the time of
//!   grace, and ends with 128 and the signal unless all ranks ended with 0. How ranks end after that is no
//!   failure of theirs. SIGUSR1 and SIGUSR2 are passed on only.
//! - The launcher is killed: so are the ranks, by the kernel (`PR_SET_PDEATHSIG`, Linux only), and what
//!   they started, by a shell that watches a pipe from the launcher (`watch.rs`).
//!
//! Every rank leads a process group, and signals go to the group: what a rank has started ends with it.
//! Not covered: a process that leaves its rank's group (`setsid`, daemons), and what ranks have started
//! if launcher and watching shell are killed at once.
//!
//! # Platforms
//!
//! Processes are launched on Unix only: elsewhere [`launch()`] is there, and refuses.
//!
//! # Examples
//!
//! A program that offers `--launch N`: it starts itself N times, without that option.
//!
//! ```no_run
//! use std::process::ExitCode;
//!
//! fn launch(ranks: usize, args: Vec<std::ffi::OsString>) -> std::io::Result<ExitCode> {
//!     let mut options = burn_shard_launch::Options::new(std::env::current_exe()?, ranks);
//!     options.args = args;
//!     Ok(match burn_shard_launch::launch(&options) {
//!         Ok(outcome) => ExitCode::from(outcome.exit_code()),
//!         Err(error) => {
//!             eprintln!("{error}");
//!             ExitCode::from(error.exit_code())
//!         }
//!     })
//! }
//! ```
#![deny(unsafe_code)]

#[cfg(unix)]
mod blame;
#[cfg(unix)]
mod checks;
#[cfg(unix)]
mod environment;
mod error;
#[cfg(unix)]
mod event;
#[cfg(unix)]
mod job;
#[cfg(unix)]
mod launch;
#[cfg(not(unix))]
mod not_unix;
mod options;
mod outcome;
#[cfg(unix)]
mod output;
#[cfg(unix)]
mod ranks;
#[cfg(unix)]
mod records;
#[cfg(unix)]
mod signals;
#[cfg(unix)]
mod watch;

pub use error::LaunchError;
#[cfg(unix)]
pub use launch::launch;
#[cfg(not(unix))]
pub use not_unix::launch;
pub use options::{Master, Nodes, Options, Restarts};
pub use outcome::{Ending, Failure, Outcome};
