//! What this process records of its own failure, for the launcher that started it.
//!
//! The launcher names a file in `BURN_SHARD_ERROR_FILE`. It holds one line, `failed` or `left` and the time in
//! nanoseconds since 1970, written before any other rank can notice: so of all ranks that fail, the one with
//! the earliest time is the cause, in whatever order their processes end.

use std::{io, path::Path};

use parking_lot::Mutex;

use crate::{replace::replace, time::since_1970};

const VARIABLE: &str = "BURN_SHARD_ERROR_FILE";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// A group failed.
    Failed,
    /// A group was left in order. The process may still fail, and its peers may because of it.
    Left,
}

/// What was recorded last: the first failure stays.
static RECORDED: Mutex<Option<Ending>> = Mutex::new(None);

/// Records that a group of this process ends. Without a launcher that wants to know, nothing happens.
pub(crate) fn record(ending: Ending) {
    let Some(path) = std::env::var_os(VARIABLE).filter(|path| !path.is_empty()) else {
        return;
    };
    let mut recorded = RECORDED.lock();
    if *recorded == Some(Ending::Failed) {
        return;
    }
    match write(Path::new(&path), ending) {
        Ok(()) => *recorded = Some(ending),
        Err(error) => log::warn!("cannot write {VARIABLE} ({}): {error}", path.display()),
    }
}

fn write(path: &Path, ending: Ending) -> io::Result<()> {
    let word = match ending {
        Ending::Failed => "failed",
        Ending::Left => "left",
    };
    let line = format!("{word} {}\n", since_1970().as_nanos());
    replace(path, line.as_bytes())
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        time::{Duration, SystemTime},
    };

    use super::*;

    #[test]
    fn a_record_is_one_line_that_replaces_the_one_before() {
        let folder = std::env::temp_dir().join(format!("burn-shard-record-{}", std::process::id()));
        fs::create_dir(&folder).unwrap();
        let path = folder.join("rank-0");
        for (ending, word) in [(Ending::Left, "left "), (Ending::Failed, "failed ")] {
            write(&path, ending).unwrap();
            let line = fs::read_to_string(&path).unwrap();
            let nanoseconds = line.strip_prefix(word).unwrap().trim_end();
            let since = Duration::from_nanos(nanoseconds.parse().unwrap());
            let age = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH + since);
            assert!(age.unwrap() < Duration::from_secs(600), "{line}");
        }
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1);
        fs::remove_dir_all(&folder).unwrap();
    }
}
