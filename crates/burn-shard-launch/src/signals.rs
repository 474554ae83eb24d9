//! Signals the launcher passes on, and the state of signals that it starts from.
//!
//! A process inherits which signals are ignored and which are blocked. Whoever starts the launcher may have
//! left either in any state, so the launcher sets both for the signals it needs.

use std::{
    io,
    mem::MaybeUninit,
    ptr,
    sync::{Arc, atomic::AtomicBool, mpsc::Sender},
    thread,
};

use signal_hook::{
    consts::signal::{SIGCHLD, SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2},
    iterator::{Handle, Signals},
};

use crate::event::Event;

const PASSED_ON: [i32; 5] = [SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2];

/// Receives signals until dropped. Thereafter they are ignored, as no handler can be taken back safely.
#[derive(Debug)]
pub(crate) struct Receiver(Handle);

impl Receiver {
    pub(crate) fn start(events: Sender<Event>) -> io::Result<Self> {
        if is_ignored(SIGCHLD) {
            // Where it is ignored, the system forgets how a child ended. Any handler prevents that.
            signal_hook::flag::register(SIGCHLD, Arc::new(AtomicBool::new(false)))?;
        }
        // Whoever has these ignored (`nohup`, a script's `&`) means the whole job to ignore them.
        let kept = |signal: &i32| matches!(*signal, SIGINT | SIGHUP) && is_ignored(*signal);
        let wanted = PASSED_ON.into_iter().filter(|signal| !kept(signal));
        let mut signals = Signals::new(wanted)?;
        // Before the thread below is started: threads inherit what is blocked.
        unblock()?;
        let handle = signals.handle();
        thread::Builder::new()
            .name("signals".to_owned())
            .spawn(move || {
                for signal in &mut signals {
                    if events.send(Event::Signal(signal)).is_err() {
                        return;
                    }
                }
            })?;
        Ok(Self(handle))
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// Whether the job is to end upon `signal`.
pub(crate) const fn ends(signal: i32) -> bool {
    matches!(signal, SIGINT | SIGTERM | SIGHUP)
}

/// Whether this process ignores `signal`.
#[allow(unsafe_code, reason = "the standard library does not tell")]
fn is_ignored(signal: i32) -> bool {
    let mut action = MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: the null pointer asks for no change, the other is to memory for one action.
    let code = unsafe { libc::sigaction(signal, ptr::null(), action.as_mut_ptr()) };
    // SAFETY: a call that succeeds has filled the action.
    code == 0 && unsafe { action.assume_init_ref() }.sa_sigaction == libc::SIG_IGN
}

/// Lets this thread, and those it starts, receive the signals that are passed on.
#[allow(unsafe_code, reason = "the standard library has no signal masks")]
fn unblock() -> io::Result<()> {
    let mut set = MaybeUninit::uninit();
    // SAFETY: the pointer is to memory for one set, which the call initializes.
    unsafe { libc::sigemptyset(set.as_mut_ptr()) };
    for signal in PASSED_ON {
        // SAFETY: the set was initialized above.
        unsafe { libc::sigaddset(set.as_mut_ptr(), signal) };
    }
    // SAFETY: the set is initialized, and a null pointer asks for no copy of the mask before.
    let error = unsafe { libc::pthread_sigmask(libc::SIG_UNBLOCK, set.as_ptr(), ptr::null_mut()) };
    match error {
        0 => Ok(()),
        error => Err(io::Error::from_raw_os_error(error)),
    }
}
