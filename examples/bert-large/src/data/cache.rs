//! Where trained vocabularies are kept: in the user's own cache directory, and nowhere else.
//!
//! Whoever can write there decides what a later run reads, so a file or directory of another user is
//! not used (on Unix; elsewhere owners are not asked). Files come into place complete, from a scratch file that
//! nobody could have put there.

use std::fs::{self, File, Metadata};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use crate::paths;

/// Directories below the cache directory of all programs.
const BELOW: [&str; 2] = ["burn-shard", "bert-large"];

/// A directory of this user's.
#[derive(Clone, Debug)]
pub(super) struct Cache {
    directory: PathBuf,
}

impl Cache {
    /// `$XDG_CACHE_HOME/burn-shard/bert-large`, by default under `~/.cache`, made if it is not there.
    ///
    /// # Errors
    /// There is no home, or the directory cannot be made or belongs to another user. The temporary
    /// directory is no substitute: all users share it.
    pub(super) fn open() -> io::Result<Self> {
        let set = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
        // The specification: what is relative counts as unset.
        let cache = set.filter(|path| path.is_absolute());
        let home = || std::env::home_dir().filter(|home| home.is_absolute());
        let cache = cache.or_else(|| home().map(|home| home.join(".cache")));
        let cache = cache.ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::NotFound,
                "neither XDG_CACHE_HOME nor a home directory is set",
            )
        })?;
        Self::below(&cache)
    }

    pub(super) fn below(cache: &Path) -> io::Result<Self> {
        let mut directory = cache.to_owned();
        for name in BELOW {
            directory.push(name);
            make_directory(&directory)?;
            let metadata = fs::symlink_metadata(&directory)?;
            if !metadata.is_dir() {
                return Err(refused(&directory, "it is no directory"));
            }
            check_owner(&directory, &metadata)?;
        }
        Ok(Self { directory })
    }

    /// Where a file is, or will be.
    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// The bytes of a file.
    ///
    /// # Errors
    /// It is not there, cannot be read, or is no file of this user's.
    pub(super) fn read(&self, name: &str) -> io::Result<Vec<u8>> {
        let path = self.path(name);
        // Asked before opening: a pipe would be waited for.
        let metadata = fs::symlink_metadata(&path)?;
        if !metadata.is_file() {
            return Err(refused(&path, "it is no file"));
        }
        let mut file = File::open(&path)?;
        check_owner(&path, &file.metadata()?)?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    /// Puts a file in place, whatever is there.
    ///
    /// # Errors
    /// The directory cannot be written to.
    pub(super) fn write(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        // For this user alone.
        paths::replace(&self.path(name), bytes, &tempfile::Builder::new())
    }
}

fn refused(path: &Path, why: &str) -> io::Error {
    io::Error::new(
        io::ErrorKind::PermissionDenied,
        format!("{}: {why}", path.display()),
    )
}

fn make_directory(path: &Path) -> io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(path)
}

/// Whoever owns a file may write to it.
#[cfg(unix)]
fn check_owner(path: &Path, metadata: &Metadata) -> io::Result<()> {
    use std::os::unix::fs::MetadataExt;

    // A group may be one of this user alone, as on Debian.
    if metadata.uid() != rustix::process::geteuid().as_raw() || metadata.mode() & 0o002 != 0 {
        return Err(refused(path, "another user could have written it"));
    }
    Ok(())
}

/// Not asked there. The default lies in the user's profile, where other users of Windows cannot write.
#[cfg(not(unix))]
fn check_owner(_: &Path, _: &Metadata) -> io::Result<()> {
    Ok(())
}

#[cfg(all(test, unix))]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn what_is_written_is_read_and_only_this_user_can_write_it() {
        let root = tempfile::tempdir().unwrap();
        let cache = Cache::below(root.path()).unwrap();
        assert_eq!(cache.read("a").unwrap_err().kind(), io::ErrorKind::NotFound);
        cache.write("a", b"text").unwrap();
        assert_eq!(cache.read("a").unwrap(), b"text");
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&cache.directory), 0o700);
        assert_eq!(mode(&cache.path("a")), 0o600);
        assert_eq!(fs::read_dir(&cache.directory).unwrap().count(), 1);

        fs::set_permissions(cache.path("a"), fs::Permissions::from_mode(0o602)).unwrap();
        let error = cache.read("a").unwrap_err().to_string();
        assert!(
            error.ends_with("another user could have written it"),
            "{error}"
        );
        fs::set_permissions(&cache.directory, fs::Permissions::from_mode(0o777)).unwrap();
        assert!(Cache::below(root.path()).is_err());
    }

    #[test]
    fn a_link_is_neither_read_nor_written_through() {
        let root = tempfile::tempdir().unwrap();
        let private = root.path().join("private");
        fs::write(&private, "mine").unwrap();
        let cache = Cache::below(root.path()).unwrap();
        symlink(&private, cache.path("a")).unwrap();
        assert!(cache.read("a").is_err());
        cache.write("a", b"text").unwrap();
        assert_eq!(fs::read_to_string(&private).unwrap(), "mine");
        assert_eq!(cache.read("a").unwrap(), b"text");

        let other = tempfile::tempdir().unwrap();
        symlink(root.path(), other.path().join("burn-shard")).unwrap();
        assert!(Cache::below(other.path()).is_err());
    }
}
