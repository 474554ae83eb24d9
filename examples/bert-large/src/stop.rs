//! Ctrl-C and SIGTERM: the first asks training to end after the step it is in, the second ends the
//! program at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::{SigId, flag, low_level};

/// Listens from when it is made until it is dropped.
#[derive(Debug)]
pub struct Stop {
    signal: Arc<AtomicUsize>,
    registered: Vec<SigId>,
}

impl Stop {
    /// Starts to listen. Where the system does not let it, signals do what they did before.
    pub fn listen() -> Self {
        let signal = Arc::new(AtomicUsize::new(0));
        let is_second = Arc::new(AtomicBool::new(false));
        let mut registered = Vec::new();
        for (number, value) in [(SIGINT, 2), (SIGTERM, 15)] {
            let actions = [
                // In this order: it asks what the signal before has set.
                flag::register_conditional_default(number, Arc::clone(&is_second)),
                flag::register(number, Arc::clone(&is_second)),
                flag::register_usize(number, Arc::clone(&signal), value),
            ];
            registered.extend(actions.into_iter().flatten());
        }
        Self { signal, registered }
    }

    /// The signal that came, if one did.
    pub fn signal(&self) -> Option<u8> {
        let signal = self.signal.load(Ordering::Relaxed);
        u8::try_from(signal).ok().filter(|&signal| signal > 0)
    }
}

impl Drop for Stop {
    fn drop(&mut self) {
        for id in self.registered.drain(..) {
            low_level::unregister(id);
        }
    }
}
