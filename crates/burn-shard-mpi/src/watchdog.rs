//! A limit for calls of MPI that wait for other ranks and cannot be polled.
//!
//! While one of them runs, no other thread may call MPI, not even to abort the job. So this ends the
//! process; the launcher notices that it did not finalize MPI, and ends the others.

use std::{
    fmt,
    sync::mpsc::{RecvTimeoutError, Sender, channel},
    thread,
    time::Duration,
};

/// Ends this process unless it is dropped in time.
#[derive(Debug)]
pub(crate) struct Watchdog {
    _over: Sender<()>,
}

impl Watchdog {
    /// After `limit` the process ends, with `why` as its last words.
    pub(crate) fn new(limit: Duration, why: String) -> Self {
        let (over, told) = channel::<()>();
        let watch = move || {
            if told.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
                last_words(format_args!("{why}; ending this process"));
                // SAFETY: ends the process without running handlers of its exit, one of which may be
                // what is waited for.
                unsafe { libc::_exit(1) };
            }
        };
        let started = thread::Builder::new()
            .name("mpi watchdog".to_owned())
            .spawn(watch);
        if let Err(error) = started {
            log::warn!("nothing will end a wait for ranks that do not come: {error}");
        }
        Self { _over: over }
    }
}

/// Not by `eprintln`, which panics if nobody reads.
pub(crate) fn last_words(words: fmt::Arguments<'_>) {
    let _ignored = std::io::Write::write_fmt(&mut std::io::stderr(), format_args!("{words}\n"));
}
