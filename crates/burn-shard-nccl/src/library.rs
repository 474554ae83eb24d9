//! Finding NCCL: which files are looked for, what is asked of them.

use std::{
    env,
    ffi::{CStr, c_char, c_int},
    fmt,
    path::{Path, PathBuf},
    sync::Arc,
};

use libloading::Library;

use crate::{
    api::{Api, IN_PROGRESS, RawComm, SUCCESS, UniqueId},
    error::NcclError,
};

/// Names the file to load as NCCL, instead of those the loader finds.
const VARIABLE: &str = "BURN_SHARD_NCCL";
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// A loaded NCCL.
pub struct Nccl {
    pub(crate) api: Api,
    path: PathBuf,
    version: Version,
}

impl Nccl {
    /// Loads the file that `BURN_SHARD_NCCL` names, or else `libnccl.so.2` or `libnccl.so` from where the
    /// system's loader looks.
    ///
    /// # Errors
    ///
    /// If none can be loaded, if it lacks a function, or if it is too old; says how to install one.
    pub fn open() -> Result<Arc<Self>, NcclError> {
        let named = env::var_os(VARIABLE).filter(|value| !value.is_empty());
        if named.is_none() && !cfg!(target_os = "linux") {
            return Err(NcclError::NotLinux);
        }
        let files = named.map_or_else(|| NAMES.map(PathBuf::from).to_vec(), |f| vec![f.into()]);
        let mut tried = Vec::new();
        for path in files {
            // SAFETY: what has this name, or is named for this purpose, is NCCL.
            match unsafe { Library::new(&path) } {
                // SAFETY: as above.
                Ok(library) => return unsafe { Self::new(library, path) },
                Err(error) => tried.push(format!("{}: {}", path.display(), cause(&error))),
            }
        }
        Err(NcclError::LibraryMissing {
            tried: tried.join("; "),
            search: search_path(),
        })
    }

    /// Loads `path` as NCCL.
    ///
    /// # Safety
    ///
    /// The file has to be NCCL, or a library whose functions do what NCCL's do.
    ///
    /// # Errors
    ///
    /// The errors of [`Nccl::open`].
    pub unsafe fn open_file(path: &Path) -> Result<Arc<Self>, NcclError> {
        // SAFETY: the caller vouches for the library.
        let library = unsafe { Library::new(path) };
        let library = library.map_err(|error| NcclError::LibraryMissing {
            tried: format!("{}: {}", path.display(), cause(&error)),
            search: search_path(),
        })?;
        // SAFETY: the caller vouches for the library.
        unsafe { Self::new(library, path.to_owned()) }
    }

    /// # Safety
    ///
    /// The conditions of [`Nccl::open_file`] hold.
    unsafe fn new(library: Library, path: PathBuf) -> Result<Arc<Self>, NcclError> {
        // SAFETY: the caller vouches for the library.
        let api = unsafe { Api::new(library, &path) }?;
        let mut code = 0;
        // SAFETY: the function writes one `int`.
        let result = unsafe { (api.get_version)(&raw mut code) };
        if result != SUCCESS {
            return Err(NcclError::Call {
                function: "ncclGetVersion",
                code: result,
                text: String::new(),
                detail: path.display().to_string(),
            });
        }
        let found = Version(code);
        if found < Version::MINIMUM {
            return Err(NcclError::TooOld { path, found });
        }
        Ok(Arc::new(Self {
            api,
            path,
            version: found,
        }))
    }

    /// The file it was loaded from, as it was named.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What `ncclGetVersion` answered.
    #[must_use]
    pub fn version(&self) -> Version {
        self.version
    }

    /// The loaded library.
    #[must_use]
    pub fn loaded(&self) -> &Library {
        self.api.loaded()
    }

    /// The name under which the ranks of one communicator find each other.
    pub(crate) fn unique_id(&self) -> Result<UniqueId, NcclError> {
        let mut id = UniqueId([0; UniqueId::BYTES]);
        // SAFETY: the function fills the id.
        let code = unsafe { (self.api.get_unique_id)(&raw mut id) };
        self.check("ncclGetUniqueId", code, std::ptr::null_mut())?;
        Ok(id)
    }

    /// The error that `code` stands for, with what `comm` (or none) has to say about it.
    pub(crate) fn check(
        &self,
        function: &'static str,
        code: c_int,
        comm: RawComm,
    ) -> Result<(), NcclError> {
        if code == SUCCESS || code == IN_PROGRESS {
            return Ok(());
        }
        // SAFETY: takes any code, returns a static string.
        let text = unsafe { (self.api.get_error_string)(code) };
        // SAFETY: takes a communicator or null.
        let detail = unsafe { (self.api.get_last_error)(comm) };
        Err(NcclError::Call {
            function,
            code,
            // SAFETY: null or a C string that lives as long as the library.
            text: unsafe { text_of(text) },
            // SAFETY: null or a C string that lives until the next call of NCCL on this thread.
            detail: unsafe { text_of(detail) },
        })
    }
}

/// # Safety
///
/// `text` is null or a C string.
unsafe fn text_of(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: the caller's.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_string_lossy().into_owned()
}

/// The dynamic loader's text, which `libloading`'s own leaves out.
fn cause(error: &libloading::Error) -> String {
    let source = std::error::Error::source(error);
    source.map_or_else(|| error.to_string(), ToString::to_string)
}

pub(crate) fn search_path() -> String {
    env::var("LD_LIBRARY_PATH").unwrap_or_default()
}

impl fmt::Debug for Nccl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nccl")
            .field("path", &self.path)
            .field("version", &self.version)
            .finish_non_exhaustive()
    }
}

/// A release of NCCL, as its `NCCL_VERSION_CODE`: 23007 is 2.30.7.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub i32);

impl Version {
    /// The oldest that has all functions this crate calls, and takes its configuration.
    pub const MINIMUM: Self = Self(21_800);
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (major, minor, patch) = (self.0 / 10_000, self.0 / 100 % 100, self.0 % 100);
        write!(f, "{major}.{minor}.{patch}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_read_as_releases() {
        assert_eq!(Version(21_800).to_string(), "2.18.0");
        assert_eq!(Version(23_007).to_string(), "2.30.7");
    }

    #[test]
    fn a_library_that_is_missing_is_named() {
        // SAFETY: there is no such file.
        let error = unsafe { Nccl::open_file(Path::new("/nowhere/libnccl.so.2")) }.unwrap_err();
        let text = error.to_string();
        for part in [
            "/nowhere/libnccl.so.2: ",
            "libnccl2",
            "nvidia-nccl-cu12",
            "BURN_SHARD_NCCL",
        ] {
            assert!(text.contains(part), "{text}");
        }
    }

    #[test]
    fn a_library_that_is_not_nccl_is_told_apart() {
        // SAFETY: the C library has none of NCCL's functions, so none is called.
        let error = unsafe { Nccl::open_file(Path::new("libc.so.6")) }.unwrap_err();
        assert!(
            matches!(&error, NcclError::SymbolMissing { symbol, .. } if *symbol == "ncclGetVersion"),
            "{error}"
        );
    }
}
