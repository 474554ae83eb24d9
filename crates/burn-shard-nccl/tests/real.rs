//! NVIDIA's own library, on a machine that may lack a GPU.
//!
//! `BURN_SHARD_NCCL=$(scripts/fetch-nccl.sh)` says where it is; without it, or a system's NCCL, these
//! tests fail and say how to get one.

#![allow(clippy::unwrap_used, reason = "a test ends at the first error")]

use std::sync::Arc;

use burn_shard_comm::Local;
use burn_shard_nccl::{Memory, Nccl, NcclCommunicator, NcclError, Version};
use burn_shard_nccl_double::HostMemory;

fn real() -> Arc<Nccl> {
    Nccl::open().unwrap_or_else(|error| panic!("{error}"))
}

#[test]
#[ignore = "needs libnccl.so.2: scripts/fetch-nccl.sh"]
fn the_real_library_has_all_functions_and_a_version() {
    let nccl = real();
    println!("{} is NCCL {}", nccl.path().display(), nccl.version());
    assert!(nccl.version() >= Version::MINIMUM);
    assert!(nccl.version() < Version(100_000), "{}", nccl.version());
}

/// One rank needs nobody, so where there is a GPU it starts.
#[test]
#[ignore = "needs libnccl.so.2: scripts/fetch-nccl.sh"]
fn what_nccl_says_is_in_the_error() {
    let result = Local::new(1).spawn(|control| {
        let memory: Arc<dyn Memory> = Arc::new(HostMemory::new(0));
        let communicator = NcclCommunicator::new(&control, Ok(real()), Ok(memory));
        communicator.map(drop)
    });
    let result = result.unwrap().remove(0);
    if is_driver_there() {
        return result.unwrap();
    }
    let error = result.unwrap_err();
    let NcclError::Call {
        function,
        code,
        text,
        detail,
    } = &error
    else {
        panic!("{error}")
    };
    println!("{error}");
    assert_eq!(*function, "ncclCommInitRankConfig");
    assert!([1, 2, 3, 5].contains(code), "{error}");
    assert!(!text.is_empty() && !detail.is_empty(), "{error}");
}

#[cfg(feature = "cuda")]
#[test]
#[ignore = "needs libnccl.so.2: scripts/fetch-nccl.sh"]
fn without_a_driver_the_error_says_so() {
    if is_driver_there() {
        burn_shard_nccl::Cuda::new(0).unwrap();
        return;
    }
    let error =
        Local::new(1).spawn(|control| burn_shard_nccl::process_group(&control, 0).map(drop));
    let error = error.unwrap().remove(0).unwrap_err();
    assert!(matches!(error, NcclError::DriverMissing { .. }), "{error}");
    for part in ["driver", "libcuda.so.1", "--gpus all"] {
        assert!(error.to_string().contains(part), "{error}");
    }
}

fn is_driver_there() -> bool {
    std::path::Path::new("/proc/driver/nvidia/version").exists()
}
