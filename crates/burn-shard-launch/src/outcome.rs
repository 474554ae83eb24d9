//! How a job ended.

use std::{fmt, time::Duration};

use signal_hook::consts::signal::{SIGBUS, SIGFPE, SIGILL, SIGKILL, SIGSEGV};

/// How much later than its consequences a death may be reported.
const LATE: Duration = Duration::from_millis(200);

/// How one process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ending {
    /// It exited with this code.
    Exited(i32),
    /// This signal ended it.
    Signaled(i32),
}

impl Ending {
    /// Whether it exited with 0.
    #[must_use]
    pub const fn is_success(self) -> bool {
        matches!(self, Self::Exited(0))
    }

    /// Whether this ending, seen `after` that of another rank, is more likely its cause.
    ///
    /// The system closes the connections of a process that is killed before it reports the death. Its
    /// peers may notice, and exit, in between.
    pub(crate) fn explains(self, other: Self, after: Duration) -> bool {
        let is_violent = |ending| {
            matches!(
                ending,
                Self::Signaled(SIGKILL | SIGSEGV | SIGBUS | SIGILL | SIGFPE)
            )
        };
        is_violent(self) && !is_violent(other) && after < LATE
    }

    /// The exit code, or 128 and the signal, as shells have it.
    #[must_use]
    pub fn exit_code(self) -> u8 {
        let code = match self {
            Self::Exited(code) => code,
            Self::Signaled(signal) => 128 + signal,
        };
        u8::try_from(code).unwrap_or(1)
    }
}

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exited(code) => write!(f, "exit code {code}"),
            Self::Signaled(signal) => match signal_hook::low_level::signal_name(*signal) {
                Some(name) => write!(f, "signal {signal} ({name})"),
                None => write!(f, "signal {signal}"),
            },
        }
    }
}

/// The rank that failed first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Which.
    pub rank: usize,
    /// How.
    pub ending: Ending,
    /// The last lines it wrote, to either stream; long ones are cut.
    pub last_lines: Vec<Vec<u8>>,
}

/// How every rank of this host ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Rank and ending, in the order of ranks.
    pub endings: Vec<(usize, Ending)>,
    /// The first that failed; `None` if none did.
    pub first_failure: Option<Failure>,
}

impl Outcome {
    /// What the launcher exits with: 0, or as the first failure ([`Ending::exit_code`]).
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        self.first_failure
            .as_ref()
            .map_or(0, |failure| failure.ending.exit_code())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_death_reported_late_explains_what_its_peers_made_of_it() {
        let soon = Duration::from_millis(50);
        let killed = Ending::Signaled(SIGKILL);
        assert!(killed.explains(Ending::Exited(1), soon));
        assert!(Ending::Signaled(SIGSEGV).explains(Ending::Signaled(6), soon));
        assert!(!killed.explains(Ending::Exited(1), 5 * LATE));
        assert!(!killed.explains(killed, soon));
        assert!(!Ending::Exited(1).explains(Ending::Exited(1), soon));
        assert!(!Ending::Signaled(15).explains(Ending::Exited(1), soon));
    }
}
