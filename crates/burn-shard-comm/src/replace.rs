//! Files that nobody reads half of.

use std::{ffi::OsString, fs, io, path::Path};

/// Puts a file in place of whatever is there: written beside it, then renamed.
pub(crate) fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut unfinished = OsString::from(path);
    unfinished.push(format!(".{}", std::process::id()));
    fs::write(&unfinished, bytes)?;
    fs::rename(&unfinished, path)
}
