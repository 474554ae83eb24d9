//! Files that the user names, whatever they are for: opened only if they are files, and named for
//! what they are if a reader cannot use them.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;

use crate::error::Error;

/// How many bytes tell what a file is.
const HEAD: u64 = 512;

/// Opens a regular file. A directory would be read as nothing, and a pipe would be waited for.
///
/// # Errors
/// There is no such file, it may not be read, or it is something else.
pub fn open(path: &Path) -> Result<File, Error> {
    let failed = |source| Error::Read {
        path: path.into(),
        source,
    };
    let metadata = fs::metadata(path).map_err(failed)?;
    if !metadata.is_file() {
        let what = match metadata.is_dir() {
            true => "a directory",
            false => "a pipe, a socket or a device",
        };
        return Err(Error::NotAFile {
            path: path.into(),
            what,
        });
    }
    File::open(path).map_err(failed)
}

/// All bytes of a regular file.
///
/// # Errors
/// The errors of [`open`].
pub fn read(path: &Path) -> Result<Vec<u8>, Error> {
    let mut bytes = Vec::new();
    open(path)?
        .read_to_end(&mut bytes)
        .map_err(|source| Error::Read {
            path: path.into(),
            source,
        })?;
    Ok(bytes)
}

/// The first bytes of a file, for [`kind_of`].
///
/// # Errors
/// The errors of [`open`].
pub fn head(path: &Path) -> Result<Vec<u8>, Error> {
    let mut bytes = Vec::new();
    let result: io::Result<usize> = open(path)?.take(HEAD).read_to_end(&mut bytes);
    result.map_err(|source| Error::Read {
        path: path.into(),
        source,
    })?;
    Ok(bytes)
}

/// What a file is, by its first bytes, if that is something people mistake for another file.
pub fn kind_of(head: &[u8]) -> Option<&'static str> {
    let starts = |prefix: &[u8]| head.starts_with(prefix);
    let text = head.trim_ascii_start();
    Some(match () {
        () if head.is_empty() => "an empty file",
        () if starts(b"version https://git-lfs") => {
            "a Git LFS pointer, not the file itself (run git lfs pull)"
        }
        () if starts(b"PK\x03\x04") => "a zip archive, as PyTorch writes them",
        () if starts(b"\x80\x02") || starts(b"\x80\x04") => {
            "a Python pickle, as PyTorch writes them"
        }
        () if starts(b"\x89HDF") => "an HDF5 file, as Keras writes them",
        () if starts(b"GGUF") => "a GGUF file",
        () if starts(b"\x1f\x8b") => "a gzip archive",
        () if starts(b"PAR1") => "a Parquet file",
        // The length of a JSON header, then the header.
        () if head.len() > 9 && head[8] == b'{' && head[5..8] == [0; 3] => "a safetensors file",
        () if starts(b"[PAD]\n") || starts(b"[PAD]\r") => "a vocab.txt",
        () if text.starts_with(b"<") => "an HTML or XML page",
        () if text.starts_with(b"{") || text.starts_with(b"[") => "a JSON file",
        () => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_told_apart_by_how_they_start() {
        let named = |head: &[u8]| kind_of(head).unwrap_or("nothing known");
        assert_eq!(named(b""), "an empty file");
        assert_eq!(
            named(b"version https://git-lfs.github.com/spec/v1\noid"),
            "a Git LFS pointer, not the file itself (run git lfs pull)"
        );
        assert_eq!(
            named(b"PK\x03\x04..."),
            "a zip archive, as PyTorch writes them"
        );
        assert_eq!(named(b"\n {\"weight_map\": "), "a JSON file");
        assert_eq!(named(b"<!doctype html>"), "an HTML or XML page");
        assert_eq!(named(b"\x10\x02\0\0\0\0\0\0{\"a\":"), "a safetensors file");
        assert_eq!(named(b"plain words"), "nothing known");
    }

    #[test]
    fn what_is_no_file_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let error = read(directory.path()).unwrap_err().to_string();
        assert!(error.ends_with(": a directory, not a file"), "{error}");
        #[cfg(unix)]
        {
            let pipe = directory.path().join("pipe");
            let made = std::process::Command::new("mkfifo").arg(&pipe).status();
            assert!(made.unwrap().success());
            // Would wait for a writer that never comes.
            let error = read(&pipe).unwrap_err().to_string();
            assert!(error.contains("a pipe, a socket or a device"), "{error}");
        }
    }
}
