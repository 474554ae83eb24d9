//! The flight recorder: the last collectives of a rank, which it writes down when its group fails or is left.
//!
//! After PyTorch's NCCL flight recorder. [`Recording`](crate::Recording) notes the collectives; what they say side by
//! side is in `report.rs`.

mod dump;
mod report;

use std::{
    collections::VecDeque,
    fs, io,
    path::PathBuf,
    sync::Arc,
    time::{Duration, SystemTime},
};

use parking_lot::Mutex;

use crate::{call::Call, error::Error, split::Members};

pub use dump::{Dump, DumpError, Entry, Failure, FlightGroup, State};
pub use report::FlightReport;

/// The variable that names the directory.
const VARIABLE: &str = "BURN_SHARD_FLIGHT_RECORDER";
/// How often the launcher has started the ranks before.
const RESTARTS: &str = "BURN_SHARD_RESTART_COUNT";
/// Collectives that a rank keeps.
const CAPACITY: usize = 1000;

/// The last collectives of one rank, in all of its groups.
#[derive(Debug)]
pub(crate) struct Flight {
    directory: PathBuf,
    log: Mutex<Log>,
}

#[derive(Debug)]
struct Log {
    dump: Dump,
    /// In the dump when it is written. The front one is the `dump.forgotten`-th of all.
    entries: VecDeque<Entry>,
    is_written: bool,
}

/// A collective that was started, and is noted as dropped unless it ends.
#[derive(Debug)]
pub(crate) struct InFlight {
    flight: Arc<Flight>,
    /// Among all entries.
    index: u64,
}

impl Flight {
    /// What `BURN_SHARD_FLIGHT_RECORDER` asks for, for the rank of `members`.
    pub(crate) fn from_env(members: &Members) -> Option<Self> {
        let directory = std::env::var_os(VARIABLE).filter(|directory| !directory.is_empty())?;
        Some(Self::new(directory.into(), members))
    }

    pub(crate) fn new(directory: PathBuf, members: &Members) -> Self {
        let attempt = std::env::var(RESTARTS).ok();
        let attempt = attempt.and_then(|count| count.parse().ok());
        let dump = Dump::new(members, attempt.unwrap_or(0));
        // Those of an earlier job would be taken for this one's, if this rank is killed.
        dump.remove_older(&directory);
        Self {
            directory,
            log: Mutex::new(Log {
                dump,
                entries: VecDeque::with_capacity(CAPACITY),
                is_written: false,
            }),
        }
    }

    /// Adds a sub-group that was split from group `parent`, if this rank is in one; returns its number.
    pub(crate) fn split(&self, parent: usize, members: Option<&Members>) -> usize {
        self.log.lock().dump.split(parent, members)
    }

    /// Notes a collective of a group that begins.
    pub(crate) fn begin(self: &Arc<Self>, group: usize, call: &Call) -> InFlight {
        let mut log = self.log.lock();
        let number = log.dump.count(group);
        if log.entries.len() == CAPACITY {
            log.entries.pop_front();
            log.dump.forgotten += 1;
        }
        log.entries.push_back(Entry::new(group, number, call));
        InFlight {
            flight: Arc::clone(self),
            index: log.dump.forgotten + log.entries.len() as u64 - 1,
        }
    }

    /// Writes the file of a group that has failed. The first failure stays.
    pub(crate) fn fail(&self, reason: &str) {
        self.write(Some(reason));
    }

    /// A failure to write is no reason for a rank to fail.
    fn write(&self, failure: Option<&str>) {
        let mut log = self.log.lock();
        if log.is_written {
            return;
        }
        log.is_written = true;
        log.dump.failure = failure.map(|text| Failure {
            at_ns: now_ns(),
            text: text.to_owned(),
        });
        log.dump.entries = log.entries.iter().cloned().collect();
        let path = self.directory.join(log.dump.file_name());
        match write(&path, &log.dump) {
            Ok(()) if failure.is_some() => log::error!(
                "rank {}: its last collectives are in {} (burn-shard flight-recorder {} compares those of all ranks)",
                log.dump.rank,
                path.display(),
                self.directory.display()
            ),
            Ok(()) => {}
            Err(error) => log::warn!("cannot write {}: {error}", path.display()),
        }
    }
}

/// A rank that leaves is one that the others may still wait for.
impl Drop for Flight {
    fn drop(&mut self) {
        let panicked = std::thread::panicking().then_some("this rank panicked");
        self.write(panicked);
    }
}

impl InFlight {
    /// Notes how it ended; a failure is written down at once.
    pub(crate) fn end(self, result: Result<(), &Error>) {
        match result {
            Ok(()) => self.set(State::Finished),
            Err(error) if error.is_refusal() => self.set(State::Refused),
            Err(error) => {
                self.set(State::Failed);
                self.flight.fail(&error.to_string());
            }
        }
    }

    fn set(&self, state: State) {
        let mut log = self.flight.log.lock();
        let index = self.index.checked_sub(log.dump.forgotten);
        let place = index.and_then(|index| usize::try_from(index).ok());
        if let Some(entry) = place.and_then(|place| log.entries.get_mut(place))
            && entry.state == State::Started
        {
            entry.state = state;
            entry.ended_ns = Some(now_ns());
        }
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.set(State::Dropped);
    }
}

/// Writes beside and renames, so that nobody reads half of it.
fn write(path: &std::path::Path, dump: &Dump) -> io::Result<()> {
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory)?;
    }
    let beside = path.with_extension(format!("{}.tmp", std::process::id()));
    fs::write(&beside, serde_json::to_vec(dump)?)?;
    fs::rename(&beside, path)
}

/// Since 1970; hosts may differ.
fn now_ns() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    u64::try_from(since.unwrap_or(Duration::ZERO).as_nanos()).unwrap_or(u64::MAX)
}
