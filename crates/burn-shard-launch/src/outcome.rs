//! How a job ended.

use std::fmt;

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
    /// Number of the rank in the job.
    pub rank: usize,
    /// How its process ended.
    pub ending: Ending,
    /// The last lines it wrote, to either stream; long ones are cut.
    pub last_lines: Vec<Vec<u8>>,
}

/// How every rank of this host ended, the last time it was started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Rank and ending, in the order of ranks.
    pub endings: Vec<(usize, Ending)>,
    /// The first rank that failed by itself; `None` if none did. What a rank made of a signal to the
    /// launcher is no failure of the rank.
    pub first_failure: Option<Failure>,
    /// The signal to the launcher that ended the job (Ctrl-C is SIGINT), if one did.
    pub interruption: Option<i32>,
    /// How often the ranks were started again. Everything else is of the last time.
    pub restarts: usize,
}

impl Outcome {
    /// What the launcher exits with: the code of the first failure ([`Ending::exit_code`]); 128 and the
    /// signal if one ended the job and a rank did not end with 0; otherwise 0.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        if let Some(failure) = &self.first_failure {
            return failure.ending.exit_code();
        }
        match self.interruption {
            Some(signal) if self.endings.iter().any(|(_, end)| !end.is_success()) => {
                Ending::Signaled(signal).exit_code()
            }
            _ => 0,
        }
    }
}
