//! What one rank writes down.

use std::{
    fs,
    io::Read as _,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use super::now_ns;
use crate::{call::Call, pairwise::identity, split::Members};

/// The only version so far.
const VERSION: u32 = 1;
/// No file of ours is longer: a thousand collectives of a few hundred bytes.
const MOST_BYTES: u64 = 64 << 20;

/// The file of one rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Dump {
    version: u32,
    /// The rank that wrote it.
    pub rank: usize,
    /// Ranks of the job.
    pub world_size: usize,
    /// How often the launcher had started the ranks before.
    pub attempt: u64,
    /// Process id.
    pub pid: u32,
    /// Why its group failed, as this rank was told. `None`: it left in order.
    pub failure: Option<Failure>,
    /// The first is that of all ranks, the others were split.
    pub groups: Vec<FlightGroup>,
    /// The last collectives of each group, in the order in which they were started.
    pub entries: Vec<Entry>,
}

/// What a rank says of a failure.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// Nanoseconds since 1970.
    pub at_ns: u64,
    /// The error's text.
    pub text: String,
}

/// A group of ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FlightGroup {
    /// The splits that lead to it, each as its number and color; empty for the group of all ranks. The same on all
    /// its ranks, and on no others.
    pub path: Vec<(u64, usize)>,
    /// Its ranks, numbered as in the group of all ranks.
    pub ranks: Vec<usize>,
    /// Collectives so far.
    pub collectives: u64,
    /// Splits so far.
    pub splits: u64,
}

/// One collective.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// Which of the groups.
    pub group: usize,
    /// Its number in the group, from 0.
    pub number: u64,
    /// What was called: `all_gather f32 [4096]`.
    pub call: String,
    /// Which elements it is for, for people; may be empty.
    pub purpose: String,
    /// What tells it from others on all ranks: a hash, in hexadecimal.
    pub identity: String,
    /// Nanoseconds since 1970.
    pub started_ns: u64,
    /// Nanoseconds since 1970, once it has ended.
    pub ended_ns: Option<u64>,
    /// How far it came.
    pub state: State,
}

/// How far a collective came on a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// It was started, and not finished yet.
    Started,
    /// This rank has its result.
    Finished,
    /// All ranks had started it; its end is known to what moves the data only (NCCL).
    Agreed,
    /// This rank gave its result up.
    Dropped,
    /// An argument was refused.
    Refused,
    /// The group failed meanwhile.
    Failed,
    /// The group had failed before.
    Late,
}

/// Why a file is none of the flight recorder.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DumpError {
    /// It cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file or directory.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// It is no dump.
    #[error("{}: not a file of the flight recorder: {source}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// Why.
        source: serde_json::Error,
    },
    /// It contradicts itself or what this version knows.
    #[error("{}: not a file of this flight recorder: {what}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        what: &'static str,
    },
    /// There are none.
    #[error("{}: no files of the flight recorder (BURN_SHARD_FLIGHT_RECORDER names the directory)", path.display())]
    Empty {
        /// The directory.
        path: PathBuf,
    },
}

impl Dump {
    pub(super) fn new(members: &Members, attempt: u64) -> Self {
        let root = FlightGroup {
            path: Vec::new(),
            ranks: members.ranks().to_vec(),
            collectives: 0,
            splits: 0,
        };
        Self {
            version: VERSION,
            rank: members.root_rank(),
            world_size: members.world_size(),
            attempt,
            pid: std::process::id(),
            failure: None,
            groups: vec![root],
            entries: Vec::new(),
        }
    }

    pub(super) fn file_name(&self) -> String {
        format!("attempt-{}-rank-{:05}.json", self.attempt, self.rank)
    }

    /// Removes this rank's files of this attempt and later ones, and as rank 0 those of ranks that the job does not
    /// have.
    pub(super) fn remove_older(&self, directory: &Path) {
        for (path, attempt, rank) in files(directory).into_iter().flatten() {
            let is_own = rank == self.rank || (self.rank == 0 && rank >= self.world_size);
            if is_own && attempt >= self.attempt {
                let removed = fs::remove_file(&path);
                if let Err(error) = removed {
                    log::warn!("cannot remove {}: {error}", path.display());
                }
            }
        }
    }

    /// Counts a collective of a group; returns its number.
    pub(super) fn count(&mut self, group: usize) -> u64 {
        let group = &mut self.groups[group];
        group.collectives += 1;
        group.collectives - 1
    }

    /// Counts a split, and adds the group that this rank is in, if it is in one.
    pub(super) fn split(&mut self, parent: usize, members: Option<&Members>) -> usize {
        let parent = &mut self.groups[parent];
        let number = parent.splits;
        parent.splits += 1;
        let mut path = parent.path.clone();
        if let Some(members) = members {
            path.push((number, members.color().unwrap_or(0)));
            self.groups.push(FlightGroup {
                path,
                ranks: members.ranks().to_vec(),
                collectives: 0,
                splits: 0,
            });
        }
        self.groups.len() - 1
    }

    /// Reads one file.
    ///
    /// # Errors
    ///
    /// See [`DumpError`].
    pub fn read(path: &Path) -> Result<Self, DumpError> {
        #[derive(Deserialize)]
        struct Version {
            version: u32,
        }
        let failed = |source| DumpError::Read {
            path: path.into(),
            source,
        };
        let content = |what| DumpError::Content {
            path: path.into(),
            what,
        };
        // Not a pipe, which would be waited for, and not a link to a device.
        if !fs::symlink_metadata(path).map_err(failed)?.is_file() {
            return Err(content("it is not a regular file"));
        }
        let file = fs::File::open(path).map_err(failed)?;
        let mut bytes = Vec::new();
        let read = file.take(MOST_BYTES + 1).read_to_end(&mut bytes);
        if read.map_err(failed)? as u64 > MOST_BYTES {
            return Err(content("it is longer than any of them"));
        }
        let format = |source| DumpError::Format {
            path: path.into(),
            source,
        };
        let Version { version } = serde_json::from_slice(&bytes).map_err(format)?;
        if version != VERSION {
            return Err(content("it is of another version"));
        }
        let dump: Self = serde_json::from_slice(&bytes).map_err(format)?;
        dump.check().map_err(content)?;
        Ok(dump)
    }

    /// Reads all files of a directory, in the order of ranks: those of the last attempt that has any.
    ///
    /// # Errors
    ///
    /// See [`DumpError`].
    pub fn read_all(directory: &Path) -> Result<Vec<Self>, DumpError> {
        let failed = |source| DumpError::Read {
            path: directory.into(),
            source,
        };
        let files = files(directory).map_err(failed)?;
        let newest = files.iter().map(|&(_, attempt, _)| attempt).max();
        let newest = newest.ok_or_else(|| DumpError::Empty {
            path: directory.into(),
        })?;
        let files = files
            .into_iter()
            .filter(|&(_, attempt, _)| attempt == newest);
        let read = |(path, attempt, rank): (PathBuf, u64, usize)| {
            let dump = Self::read(&path)?;
            if (dump.attempt, dump.rank) != (attempt, rank) {
                let what = "its name is that of another rank or attempt";
                return Err(DumpError::Content { path, what });
            }
            Ok(dump)
        };
        let mut dumps = files.map(read).collect::<Result<Vec<Self>, _>>()?;
        dumps.sort_by_key(|dump| dump.rank);
        let content = |what| DumpError::Content {
            path: directory.into(),
            what,
        };
        if dumps
            .iter()
            .any(|dump| dump.world_size != dumps[0].world_size)
        {
            return Err(content("its files are of jobs of different sizes"));
        }
        if dumps.windows(2).any(|pair| pair[0].rank == pair[1].rank) {
            return Err(content("two of its files are of one rank"));
        }
        Ok(dumps)
    }

    fn check(&self) -> Result<(), &'static str> {
        if self.rank >= self.world_size {
            return Err("its rank is not below its world_size");
        }
        let all = self.groups.first().map(|group| group.ranks.len());
        if all.is_none_or(|all| all != self.world_size) {
            return Err("its first group is not that of all ranks");
        }
        let is_known = |entry: &Entry| entry.group < self.groups.len();
        if !self.entries.iter().all(is_known) {
            return Err("a collective is of a group that it does not have");
        }
        Ok(())
    }
}

/// The files of a directory, with their attempts and ranks.
fn files(directory: &Path) -> std::io::Result<Vec<(PathBuf, u64, usize)>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let parts = name
            .strip_prefix("attempt-")
            .and_then(|name| name.strip_suffix(".json")?.split_once("-rank-"));
        if let Some((attempt, rank)) = parts
            && let (Ok(attempt), Ok(rank)) = (attempt.parse(), rank.parse())
        {
            files.push((path, attempt, rank));
        }
    }
    Ok(files)
}

impl Entry {
    pub(super) fn new(group: usize, number: u64, mut call: Call) -> Self {
        let identity = format!("{:032x}", identity(&call));
        // What the call is for stands beside its text.
        let purpose = std::mem::take(&mut call.description);
        call.label = 0;
        Self {
            group,
            number,
            call: call.to_string(),
            purpose,
            identity,
            started_ns: now_ns(),
            ended_ns: None,
            state: State::Started,
        }
    }
}

impl std::fmt::Display for Entry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.call)?;
        if !self.purpose.is_empty() {
            write!(f, " of {}", self.purpose)?;
        }
        Ok(())
    }
}
