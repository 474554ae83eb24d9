//! NCCL's functions, as its header declares them.
//!
//! Declared here and not taken from `cudarc`: its loader does not look for `libnccl.so.2`, the only name
//! that packages other than `-dev` install, panics where a library or function is missing, and its
//! Rust enums have no room for the result codes of newer releases.

use std::{
    ffi::{c_char, c_int, c_uint, c_void},
    mem::{ManuallyDrop, offset_of},
    path::Path,
    ptr,
};

use libloading::Library;

use crate::error::NcclError;

/// An `ncclComm_t`.
pub(crate) type RawComm = *mut c_void;
/// A `cudaStream_t`.
pub(crate) type RawStream = *mut c_void;

pub(crate) const SUCCESS: c_int = 0;
pub(crate) const REMOTE_ERROR: c_int = 6;
pub(crate) const IN_PROGRESS: c_int = 7;

/// An `ncclUniqueId`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct UniqueId(pub(crate) [u8; UniqueId::BYTES]);

impl UniqueId {
    pub(crate) const BYTES: usize = 128;
}

/// The fields of `ncclConfig_t` that NCCL 2.18 has; later ones stay undefined.
#[repr(C)]
pub(crate) struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
}

impl Config {
    /// Calls return before they are done, so that waiting for them can have a deadline.
    pub(crate) const fn non_blocking() -> Self {
        const UNDEFINED: c_int = c_int::MIN;
        Self {
            size: offset_of!(Self, split_share) + size_of::<c_int>(),
            magic: 0xcafe_beef,
            version: 21_800,
            blocking: 0,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: UNDEFINED,
            net_name: ptr::null(),
            split_share: UNDEFINED,
        }
    }
}

macro_rules! api {
    ($($field:ident = $symbol:literal : fn($($argument:ty),*) -> $result:ty;)*) => {
        /// Pointers into a loaded library, which stays loaded: NCCL starts threads of its own.
        pub(crate) struct Api {
            $(pub(crate) $field: unsafe extern "C" fn($($argument),*) -> $result,)*
            loaded: ManuallyDrop<Library>,
        }

        impl Api {
            /// Looks all functions up in `library`, which was loaded from `path`.
            ///
            /// # Safety
            ///
            /// The library's functions of these names have to be NCCL's, or do what those do.
            pub(crate) unsafe fn new(library: Library, path: &Path) -> Result<Self, NcclError> {
                let missing = |symbol| NcclError::SymbolMissing { path: path.to_owned(), symbol };
                Ok(Self {
                    $($field: {
                        // SAFETY: the caller vouches for the function's type.
                        let symbol = unsafe { library.get($symbol.as_bytes()) };
                        *symbol.map_err(|_| missing($symbol))?
                    },)*
                    loaded: ManuallyDrop::new(library),
                })
            }
        }
    };
}

api! {
    get_version = "ncclGetVersion": fn(*mut c_int) -> c_int;
    get_unique_id = "ncclGetUniqueId": fn(*mut UniqueId) -> c_int;
    get_error_string = "ncclGetErrorString": fn(c_int) -> *const c_char;
    get_last_error = "ncclGetLastError": fn(RawComm) -> *const c_char;
    init_rank = "ncclCommInitRankConfig":
        fn(*mut RawComm, c_int, UniqueId, c_int, *mut Config) -> c_int;
    get_async_error = "ncclCommGetAsyncError": fn(RawComm, *mut c_int) -> c_int;
    finalize = "ncclCommFinalize": fn(RawComm) -> c_int;
    destroy = "ncclCommDestroy": fn(RawComm) -> c_int;
    abort = "ncclCommAbort": fn(RawComm) -> c_int;
    group_start = "ncclGroupStart": fn() -> c_int;
    group_end = "ncclGroupEnd": fn() -> c_int;
    all_gather = "ncclAllGather":
        fn(*const c_void, *mut c_void, usize, c_int, RawComm, RawStream) -> c_int;
    all_reduce = "ncclAllReduce":
        fn(*const c_void, *mut c_void, usize, c_int, c_int, RawComm, RawStream) -> c_int;
    reduce_scatter = "ncclReduceScatter":
        fn(*const c_void, *mut c_void, usize, c_int, c_int, RawComm, RawStream) -> c_int;
    broadcast = "ncclBroadcast":
        fn(*const c_void, *mut c_void, usize, c_int, c_int, RawComm, RawStream) -> c_int;
}

impl Api {
    /// The library itself, for functions that only a test double has.
    pub(crate) fn loaded(&self) -> &Library {
        &self.loaded
    }
}
