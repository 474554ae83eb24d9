//! The directory in which checkpoints are kept: their names, which is the latest, and the operations
//! on directories that have to be durable.
//!
//! ```text
//! root/
//!   latest                                     the name of the newest checkpoint
//!   step-0000000200.000002/                    a complete checkpoint: step, sequence number
//!     manifest.json  manifest.xxh3  rank-00000.safetensors ..
//!   .step-0000000300.000003.1f..b2.partial/    one that is being written, or was not finished
//!   .step-0000000100.000001.9c..07.removed/    one that is being removed
//!   .lock                                      held by the writer of rank 0
//! ```
//!
//! A directory has its name without a dot only once it is complete and durable, so a name is enough
//! to know that. The sequence number orders checkpoints as they were published, also if a run goes
//! back to an earlier step.

use std::fmt;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use crate::Error;
use crate::tensor_file::{Links, open_regular};

pub(crate) const MANIFEST: &str = "manifest.json";
pub(crate) const MANIFEST_CHECKSUM: &str = "manifest.xxh3";
const LATEST: &str = "latest";
const LATEST_TEMPORARY: &str = ".latest.partial";
const LOCK: &str = ".lock";
pub(crate) const PARTIAL: &str = "partial";
pub(crate) const REMOVED: &str = "removed";

/// Step and sequence number of a checkpoint: the name of its directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Name {
    pub(crate) sequence: u64,
    pub(crate) step: u64,
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "step-{:010}.{:06}", self.step, self.sequence)
    }
}

impl Name {
    /// `None` unless `text` is what the name prints as.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let (step, sequence) = text.strip_prefix("step-")?.split_once('.')?;
        let name = Self {
            sequence: sequence.parse().ok()?,
            step: step.parse().ok()?,
        };
        (name.to_string() == text).then_some(name)
    }

    /// The name of a directory that is not a checkpoint yet, or no longer.
    pub(crate) fn hidden(self, nonce: u64, suffix: &str) -> String {
        format!(".{self}.{nonce:016x}.{suffix}")
    }
}

/// Tells hidden names of one step apart. Without a random one, that of the process has to do.
pub(crate) fn nonce() -> u64 {
    getrandom::u64().unwrap_or_else(|_| u64::from(std::process::id()))
}

/// Whether `text` is a [hidden](Name::hidden) name.
fn is_hidden_name(text: &str) -> bool {
    let parse = || {
        let (rest, suffix) = text.strip_prefix('.')?.rsplit_once('.')?;
        let (name, nonce) = rest.rsplit_once('.')?;
        Name::parse(name)?;
        let hexadecimal = nonce.len() == 16 && nonce.bytes().all(|byte| byte.is_ascii_hexdigit());
        Some(hexadecimal && (suffix == PARTIAL || suffix == REMOVED))
    };
    parse().unwrap_or(false)
}

/// Names of the directories that have the name of a checkpoint, oldest first.
pub(crate) fn checkpoints(root: &Path) -> Result<Vec<Name>, Error> {
    let mut names = Vec::new();
    for (text, file_type) in entries(root)? {
        if let (Some(name), true) = (Name::parse(&text), file_type.is_dir()) {
            names.push(name);
        }
    }
    names.sort_unstable();
    Ok(names)
}

/// What is left of saves that did not finish, and of removals.
pub(crate) fn leftovers(root: &Path) -> Result<Vec<PathBuf>, Error> {
    let mut found = Vec::new();
    for (text, file_type) in entries(root)? {
        if is_hidden_name(&text) && file_type.is_dir() {
            found.push(root.join(text));
        }
    }
    Ok(found)
}

fn entries(root: &Path) -> Result<Vec<(String, fs::FileType)>, Error> {
    let mut entries = Vec::new();
    for entry in fs::read_dir(root).map_err(Error::io("list", root))? {
        let entry = entry.map_err(Error::io("list", root))?;
        let file_type = entry.file_type().map_err(Error::io("list", entry.path()))?;
        if let Ok(text) = entry.file_name().into_string() {
            entries.push((text, file_type));
        }
    }
    Ok(entries)
}

/// The checkpoint that `latest` names, if it does name one that is there.
pub(crate) fn latest(root: &Path) -> Option<Name> {
    // Longer than any name of ours, and no more than that.
    const MAX_BYTES: u64 = 64;
    let (file, bytes) = open_regular(&root.join(LATEST), Links::Refused).ok()?;
    if bytes > MAX_BYTES {
        return None;
    }
    let name = Name::parse(io::read_to_string(file).ok()?.trim_end())?;
    root.join(name.to_string()).is_dir().then_some(name)
}

/// Moves `latest` to `name`. The caller makes that durable.
pub(crate) fn set_latest(root: &Path, name: Name) -> Result<(), Error> {
    let temporary = root.join(LATEST_TEMPORARY);
    write_durably(&temporary, format!("{name}\n").as_bytes())?;
    let latest = root.join(LATEST);
    fs::rename(&temporary, &latest).map_err(Error::io("replace", latest))
}

/// Writes a small file, over one that may be there, and makes its contents durable.
pub(crate) fn write_durably(path: &Path, contents: &[u8]) -> Result<(), Error> {
    let mut file = File::create(path).map_err(Error::io("create", path))?;
    file.write_all(contents).map_err(Error::io("write", path))?;
    file.sync_all().map_err(Error::io("sync", path))
}

/// Makes the names in a directory durable.
///
/// Not on Windows, which does not let a directory be synced: whether its names outlast a loss of power is up to
/// the journal of the file system there.
pub(crate) fn sync_directory(path: &Path) -> Result<(), Error> {
    if cfg!(unix) {
        let directory = File::open(path).map_err(Error::io("open", path))?;
        directory.sync_all().map_err(Error::io("sync", path))?;
    }
    Ok(())
}

/// Keeps other jobs from saving below `root` while it lives. The system gives the lock back when
/// the process dies.
#[derive(Debug)]
pub(crate) struct Lock {
    file: File,
}

impl Drop for Lock {
    /// Closing the file is not enough: a process that was just forked by another thread has it open
    /// until it becomes another program.
    fn drop(&mut self) {
        if let Err(error) = self.file.unlock() {
            log::warn!("cannot unlock the directory of checkpoints: {error}");
        }
    }
}

impl Lock {
    pub(crate) fn take(root: &Path) -> Result<Self, Error> {
        let path = root.join(LOCK);
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(Error::io("create", &path))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(Error::Locked { root: root.into() }),
            Err(TryLockError::Error(error)) if error.kind() == io::ErrorKind::Unsupported => {
                log::warn!(
                    "{}: the file system has no locks; nothing keeps two jobs from saving there",
                    root.display()
                );
            }
            Err(TryLockError::Error(error)) => return Err(Error::io("lock", path)(error)),
        }
        Ok(Self { file })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_is_given_back_also_if_a_fork_has_its_file_open() {
        let root = tempfile::tempdir().unwrap();
        let lock = Lock::take(root.path()).unwrap();
        let forked = lock.file.try_clone().unwrap();
        assert!(matches!(Lock::take(root.path()), Err(Error::Locked { .. })));
        drop(lock);
        Lock::take(root.path()).unwrap();
        drop(forked);
    }

    #[test]
    fn names_are_read_as_they_are_written_and_nothing_else_is_one() {
        let name = Name {
            sequence: 7,
            step: 12_345_678_901,
        };
        assert_eq!(name.to_string(), "step-12345678901.000007");
        assert_eq!(Name::parse(&name.to_string()), Some(name));
        for text in [
            "step-1.1",
            "step-0000000001.+00001",
            "step-0000000001",
            "../x",
            "",
            "step-..",
        ] {
            assert_eq!(Name::parse(text), None, "{text}");
        }
        let hidden = name.hidden(255, PARTIAL);
        assert_eq!(hidden, ".step-12345678901.000007.00000000000000ff.partial");
        assert!(is_hidden_name(&hidden));
        for text in [
            &hidden[1..],
            ".partial",
            ".step-1.1.00.partial",
            &hidden.replace("partial", "x"),
        ] {
            assert!(!is_hidden_name(text), "{text}");
        }
    }
}
