//! Signals the launcher passes on.

use std::{fs, io, sync::mpsc::Sender, thread};

use signal_hook::{
    consts::signal::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2},
    iterator::{Handle, Signals},
};

use crate::event::Event;

/// Receives signals until dropped. Thereafter they are ignored, as no handler can be taken back safely.
#[derive(Debug)]
pub(crate) struct Receiver(Handle);

impl Receiver {
    pub(crate) fn start(events: Sender<Event>) -> io::Result<Self> {
        let ignored = ignored();
        // Whoever ignores a signal (`nohup`, a shell's `&`) means the whole job to ignore it.
        let wanted = [SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2];
        let wanted = wanted
            .into_iter()
            .filter(|signal| ignored & (1 << (signal - 1)) == 0);
        let mut signals = Signals::new(wanted)?;
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

/// Signals this process ignores, as a set of bits; none where the system does not tell.
fn ignored() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .unwrap_or(0)
}
