//! The flight recorder: the last collectives of a rank, which it writes down when its group fails or is left.
//!
//! Its counterpart is PyTorch's flight recorder for NCCL. [`Recording`](crate::Recording) notes the collectives; what they say side by
//! side is in `report.rs`.

mod dump;
mod report;

use std::{
    collections::{BTreeSet, VecDeque},
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
};

use parking_lot::Mutex;

use crate::{
    call::Call, error::Error, replace::replace, segments::Segments, split::Members,
    time::since_1970,
};

pub use dump::{Dump, DumpError, Entry, Failure, FlightGroup, State};
pub use report::FlightReport;

/// The variable that names the directory.
const VARIABLE: &str = "BURN_SHARD_FLIGHT_RECORDER";
/// How often the launcher has started the ranks before.
const RESTARTS: &str = "BURN_SHARD_RESTART_COUNT";
/// Collectives that a rank keeps of each of its groups.
const CAPACITY: usize = 1000;

/// Files in which this process has told of a failure: another group of it leaves them as they are.
static FAILED: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

/// The last collectives of one rank, in each of its groups.
#[derive(Debug)]
pub(crate) struct Flight {
    directory: PathBuf,
    path: PathBuf,
    log: Mutex<Log>,
}

#[derive(Debug)]
struct Log {
    /// Without entries, until it is written.
    dump: Dump,
    /// By group; the last one is the group's newest.
    entries: Vec<VecDeque<Entry>>,
    is_written: bool,
}

/// A collective that was started, and is noted as dropped unless it ends.
#[derive(Debug)]
pub(crate) struct InFlight {
    flight: Arc<Flight>,
    group: usize,
    number: u64,
    /// What it is once it has ended well.
    done: State,
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
        let path = directory.join(dump.file_name());
        if !FAILED.lock().contains(&path) {
            // Those of an earlier job would be taken for this one's, if this rank is killed.
            dump.remove_older(&directory);
        }
        Self {
            directory,
            path,
            log: Mutex::new(Log {
                dump,
                entries: vec![VecDeque::new()],
                is_written: false,
            }),
        }
    }

    /// Adds a sub-group that was split from group `parent`, if this rank is in one; returns its number.
    pub(crate) fn split(&self, parent: usize, members: Option<&Members>) -> usize {
        let mut log = self.log.lock();
        let group = log.dump.split(parent, members);
        log.entries.resize_with(group + 1, VecDeque::new);
        group
    }

    /// Notes a collective of a group that begins with `input`, and is in state `done` once it has ended well.
    pub(crate) fn begin(
        self: &Arc<Self>,
        group: usize,
        call: &Call,
        input: Option<&dyn Segments>,
        done: State,
    ) -> InFlight {
        // A caller's description may take its time: before anything is locked.
        let call = call.described(input);
        let mut log = self.log.lock();
        let number = log.dump.count(group);
        let entries = &mut log.entries[group];
        if entries.len() == CAPACITY {
            entries.pop_front();
        }
        entries.push_back(Entry::new(group, number, call));
        InFlight {
            flight: Arc::clone(self),
            group,
            number,
            done,
        }
    }

    /// Writes the file of a group that has failed. The first failure stays.
    pub(crate) fn fail(&self, reason: &str) {
        self.write(Some(reason));
    }

    /// A failure to write is no reason for a rank to fail. Nothing is locked while it writes: a disk that hangs
    /// stops this thread only.
    fn write(&self, failure: Option<&str>) {
        let dump = {
            let mut log = self.log.lock();
            if std::mem::replace(&mut log.is_written, true) {
                return;
            }
            log.dump.failure = failure.map(|text| Failure {
                at_ns: now_ns(),
                text: text.to_owned(),
            });
            let mut dump = log.dump.clone();
            dump.entries = log.entries.iter().flatten().cloned().collect();
            dump.entries.sort_by_key(|entry| entry.started_ns);
            dump
        };
        {
            let mut failed = FAILED.lock();
            if failed.contains(&self.path) {
                return;
            }
            if failure.is_some() {
                failed.insert(self.path.clone());
            }
        }
        let path = self.path.display();
        match write(&self.path, &dump) {
            Ok(()) if failure.is_some() => log::error!(
                "rank {}: its last collectives are in {path} (burn-shard flight-recorder {} compares those of all ranks)",
                dump.rank,
                self.directory.display()
            ),
            Ok(()) => {}
            Err(error) => log::warn!("cannot write {path}: {error}"),
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
            Ok(()) => self.set(self.done),
            Err(error) if error.is_refusal() => self.set(State::Refused),
            Err(error) => {
                self.set(if is_poisoned(error) {
                    State::Late
                } else {
                    State::Failed
                });
                self.flight.fail(&error.to_string());
            }
        }
    }

    fn set(&self, state: State) {
        let mut log = self.flight.log.lock();
        let entries = &mut log.entries[self.group];
        let entry = entries
            .iter_mut()
            .rfind(|entry| entry.number == self.number);
        if let Some(entry) = entry
            && entry.state == State::Started
        {
            entry.state = state;
            entry.ended_ns = Some(now_ns());
        }
    }
}

/// Whether the group had failed before the collective began.
fn is_poisoned(error: &Error) -> bool {
    if let Error::SubGroup { error, .. } = error {
        return is_poisoned(error);
    }
    matches!(error, Error::Poisoned { .. })
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.set(State::Dropped);
    }
}

fn write(path: &Path, dump: &Dump) -> io::Result<()> {
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory)?;
    }
    replace(path, &serde_json::to_vec(dump)?)
}

/// Nanoseconds since 1970; hosts may differ.
fn now_ns() -> u64 {
    u64::try_from(since_1970().as_nanos()).unwrap_or(u64::MAX)
}
