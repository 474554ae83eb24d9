//! What goes wrong below the collectives: libraries, the driver, single calls.
//!
//! Once a communicator stands, these reach users inside [`burn_shard_comm::Error`].

use std::{fmt, path::PathBuf, time::Duration};

use burn_shard_comm::Error;

use crate::library::Version;

/// Why there is no communicator, or why one call of it failed.
#[non_exhaustive]
#[derive(Clone, Debug, thiserror::Error)]
pub enum NcclError {
    /// There is no NCCL for this system.
    #[error("NCCL is for Linux only (use another communicator, such as TCP)")]
    NotLinux,

    /// NCCL's library is not there.
    #[error(
        "NCCL is not installed, or not where the loader looks: {tried} (LD_LIBRARY_PATH is {search:?}). Install it with `apt-get install libnccl2`, or with `pip install nvidia-nccl-cu12` (-cu13 for CUDA 13) and the folder nvidia/nccl/lib of the package in LD_LIBRARY_PATH, or name the file in BURN_SHARD_NCCL"
    )]
    LibraryMissing {
        /// Each file that was looked for, with the loader's answer.
        tried: String,
        /// Where else the loader looked.
        search: String,
    },

    /// The library has not all functions.
    #[error(
        "{path} has no function {symbol} (is it NCCL, {minimum} or later? BURN_SHARD_NCCL may name another file)",
        path = path.display(),
        minimum = Version::MINIMUM
    )]
    SymbolMissing {
        /// The library.
        path: PathBuf,
        /// What it lacks.
        symbol: &'static str,
    },

    /// The library is older than what this crate was written for.
    #[error(
        "{path} is NCCL {found}, but {minimum} is needed (install a newer one, or name it in BURN_SHARD_NCCL)",
        path = path.display(),
        minimum = Version::MINIMUM
    )]
    TooOld {
        /// The library.
        path: PathBuf,
        /// Its version.
        found: Version,
    },

    /// The driver's library is not there.
    #[error(
        "the NVIDIA driver is not installed: no libcuda.so.1 where the loader looks (LD_LIBRARY_PATH is {search:?}). In a container, start it with `--gpus all`"
    )]
    DriverMissing {
        /// Where else the loader looked.
        search: String,
    },

    /// The driver is older than what this crate was written for.
    #[error(
        "the NVIDIA driver is for CUDA {found}, expected {minimum} or later (update it to 525 or later; a container uses the driver of its host)",
        minimum = CudaVersion::MINIMUM
    )]
    DriverTooOld {
        /// The newest CUDA that the driver is for.
        found: CudaVersion,
    },

    /// The device, or the container it is lent to, has no stream-ordered memory pools.
    #[error(
        "device {device} has no memory pools, as some virtual GPUs have none (use a whole GPU, or another communicator than NCCL)"
    )]
    NoMemoryPools {
        /// The device.
        device: usize,
    },

    /// CubeCL would not find the functions of its CUDA kernels.
    #[error(
        "no libdevice.10.bc for CUDA kernels with exp, log, tanh or erf: looked for {looked} ({})",
        match hidden {
            Some(good) => format!("unset CUDA_PATH: {} is there", good.display()),
            None => "install a CUDA toolkit, or `pip install nvidia-cuda-nvcc-cu12` and set CUDA_PATH to the folder nvidia/cuda_nvcc of the package; a driver does not bring it".to_owned(),
        }
    )]
    LibdeviceMissing {
        /// Where CubeCL looks.
        looked: String,
        /// What CubeCL would find, if `CUDA_PATH` were not set.
        hidden: Option<PathBuf>,
    },

    /// A call of the driver failed.
    #[error("device {device}: {function} failed: {message}")]
    Driver {
        /// The device.
        device: usize,
        /// What was called.
        function: &'static str,
        /// What the driver said.
        message: String,
    },

    /// A call of NCCL failed.
    #[error(
        "{function} returned {code} ({text}): {detail} (NCCL_DEBUG=INFO in the environment says more)"
    )]
    Call {
        /// What was called.
        function: &'static str,
        /// NCCL's code.
        code: i32,
        /// NCCL's name for it.
        text: String,
        /// What `ncclGetLastError` said.
        detail: String,
    },

    /// Two buffers do not have the lengths that a collective needs; nothing was called.
    #[error("{function} over {world_size} ranks of {send_bytes} bytes into {receive_bytes} bytes")]
    Lengths {
        /// What was to be called.
        function: &'static str,
        /// Ranks in the group.
        world_size: usize,
        /// Bytes of the input.
        send_bytes: usize,
        /// Bytes of the output.
        receive_bytes: usize,
    },

    /// NCCL was not done in time.
    #[error("{function} was not done after {waited:?}")]
    Timeout {
        /// What was waited for.
        function: &'static str,
        /// How long.
        waited: Duration,
    },

    /// The group failed while this rank waited for NCCL.
    #[error("{function} was given up, since the group has failed")]
    GivenUp {
        /// What was waited for.
        function: &'static str,
    },

    /// The communicator was aborted.
    #[error("{function} of a communicator that was aborted")]
    Aborted {
        /// What was to be called.
        function: &'static str,
    },

    /// A thread could not be started.
    #[error("a thread to watch collectives cannot be started: {message}")]
    Thread {
        /// What the system said.
        message: String,
    },

    /// The owner of a segment's memory could not order its own work with that on our stream.
    #[error("the memory's owner could not order its streams with NCCL's: {message}")]
    Owner {
        /// What the owner said.
        message: String,
    },

    /// Other ranks could not start.
    #[error("rank {rank} could start, but {}", failed.iter().map(|(rank, why)| format!("rank {rank} could not: {why}")).collect::<Vec<_>>().join("; "))]
    OtherRanks {
        /// The rank that returns the error.
        rank: usize,
        /// Those that could not, and why.
        failed: Vec<(usize, String)>,
    },

    /// The control group failed.
    #[error("the control group failed: {0}")]
    Group(#[from] Error),
}

/// A version of CUDA, as `cuDriverGetVersion` tells it: 12080 is 12.8.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct CudaVersion(pub i32);

impl CudaVersion {
    /// The oldest whose drivers (525 and later) are supported.
    pub const MINIMUM: Self = Self(12_000);
}

impl fmt::Display for CudaVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0 / 1000, self.0 / 10 % 100)
    }
}
