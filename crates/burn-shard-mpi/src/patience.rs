//! How to wait without keeping a core from those who compute.

use std::{
    hint, thread,
    time::{Duration, Instant},
};

/// Longest a waiting rank looks without pause: about what a message takes between two processes.
const SPIN: Duration = Duration::from_micros(20);
/// Longest it lets others run, but comes back at once.
const YIELD: Duration = Duration::from_micros(500);
/// Shortest and longest sleep.
const SLEEP: [Duration; 2] = [Duration::from_micros(50), Duration::from_millis(1)];

/// The time since something happened last.
#[derive(Debug, Default)]
pub(crate) struct Patience {
    since: Option<Instant>,
}

impl Patience {
    /// Something happened.
    pub(crate) fn reset(&mut self) {
        self.since = None;
    }

    /// Nothing happened: spins, then yields, then sleeps, a sixteenth of the time it has waited.
    pub(crate) fn pause(&mut self, at_most: Duration) {
        let waited = self.since.get_or_insert_with(Instant::now).elapsed();
        if waited < SPIN {
            hint::spin_loop();
        } else if waited < YIELD {
            thread::yield_now();
        } else {
            thread::sleep((waited / 16).clamp(SLEEP[0], SLEEP[1]).min(at_most));
        }
    }
}
