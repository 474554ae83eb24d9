//! Points in time that are far away.

use std::time::{Duration, Instant};

/// `duration` after `start`, or so late that nobody will know the difference.
pub(crate) fn after(start: Instant, duration: Duration) -> Instant {
    const LATE: Duration = Duration::from_secs(1 << 30);
    start + duration.min(LATE)
}
