//! Points in time: those that are far away, and those that other processes can read.

use std::time::{Duration, Instant, SystemTime};

/// `duration` after `start`, or so late that nobody will know the difference.
pub(crate) fn after(start: Instant, duration: Duration) -> Instant {
    const LATE: Duration = Duration::from_secs(1 << 30);
    start + duration.min(LATE)
}

/// What the clock of this host shows, since 1970.
pub(crate) fn since_1970() -> Duration {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.unwrap_or(Duration::ZERO)
}
