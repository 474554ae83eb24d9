//! What ranks record about their own failures: one file per rank, named by `BURN_SHARD_ERROR_FILE`.
//!
//! `burn-shard-comm` writes the file when a rank's group fails or is left, before any other rank can notice.
//! The order in which processes end says little: a rank that cleans up after its own failure outlives the
//! ranks that failed because of it.

use std::{
    ffi::OsString,
    fs::{self, Permissions},
    io,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use tempfile::TempDir;

/// Longest file that is read.
const MAX_BYTES: u64 = 256;

/// The folder of a job's files; it is removed with this.
#[derive(Debug)]
pub(crate) struct Records(TempDir);

/// What one rank recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Record {
    /// Its group failed, at this time.
    Failed(SystemTime),
    /// It left its group in order, at this time. Ranks that still needed it have failed because of that.
    Left(SystemTime),
}

impl Records {
    /// Makes the folder, which only this user may enter.
    pub(crate) fn new() -> io::Result<Self> {
        tempfile::Builder::new()
            .prefix("burn-shard-")
            .permissions(Permissions::from_mode(0o700))
            .tempdir()
            .map(Self)
    }

    pub(crate) fn folder(&self) -> &Path {
        self.0.path()
    }

    fn path(&self, local_rank: usize) -> PathBuf {
        self.0.path().join(format!("rank-{local_rank}"))
    }

    /// The variable that tells a rank its file.
    pub(crate) fn variable(&self, local_rank: usize) -> (&'static str, OsString) {
        ("BURN_SHARD_ERROR_FILE", self.path(local_rank).into())
    }

    /// What the rank has recorded so far, if anything that is understood here.
    pub(crate) fn read(&self, local_rank: usize) -> Option<Record> {
        let path = self.path(local_rank);
        if fs::metadata(&path).ok()?.len() > MAX_BYTES {
            return None;
        }
        parse(&fs::read_to_string(path).ok()?)
    }
}

/// `failed` or `left`, and the time in nanoseconds since 1970.
fn parse(line: &str) -> Option<Record> {
    let (kind, nanoseconds) = line.trim_end().split_once(' ')?;
    let since = Duration::from_nanos(nanoseconds.parse().ok()?);
    let at = SystemTime::UNIX_EPOCH.checked_add(since)?;
    match kind {
        "failed" => Some(Record::Failed(at)),
        "left" => Some(Record::Left(at)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_a_word_and_a_time_and_anything_else_is_none() {
        let at = |nanoseconds| SystemTime::UNIX_EPOCH + Duration::from_nanos(nanoseconds);
        assert_eq!(parse("failed 17\n"), Some(Record::Failed(at(17))));
        assert_eq!(parse("left 18"), Some(Record::Left(at(18))));
        for nonsense in ["", "failed", "failed -1", "gone 17", "failed 17 18", "\0"] {
            assert_eq!(parse(nonsense), None, "{nonsense:?}");
        }
    }

    #[test]
    fn only_this_user_may_enter_the_folder_and_it_goes_with_the_job() {
        let records = Records::new().unwrap();
        let folder = records.folder().to_owned();
        assert_eq!(
            fs::metadata(&folder).unwrap().permissions().mode() & 0o777,
            0o700
        );
        assert_eq!(records.read(0), None);
        fs::write(folder.join("rank-0"), "failed 1\n").unwrap();
        assert!(matches!(records.read(0), Some(Record::Failed(_))));
        fs::write(folder.join("rank-0"), "9".repeat(10_000)).unwrap();
        assert_eq!(records.read(0), None);
        drop(records);
        assert!(!folder.exists());
    }
}
