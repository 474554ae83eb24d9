//! A test double of NCCL: its functions over host memory, for machines without a GPU.
//!
//! The cdylib exports the functions of NCCL that burn-shard calls, under their own names and with their
//! own arguments. Ranks may be threads of one process or processes of one machine; they meet in a folder
//! that the unique id names, and send each other whole buffers through Unix sockets. It is stricter than
//! NCCL where NCCL trusts its callers: handles, groups, arguments, calls of a communicator that is still
//! busy. Where NCCL would hang, it hangs.
//!
//! The rlib has what stands for the device: [`HostMemory`], with a stream that is a thread. A copy from or to
//! host memory that is not page-locked holds its caller until the stream has come to it, as a driver does.
//!
//! Reductions are in rank order, so that they equal those of ranks as threads, bit by bit.

mod comm;
mod exports;
mod fault;
mod host;
mod reduce;

pub use host::HostMemory;

use std::{
    env,
    path::PathBuf,
    sync::{Arc, OnceLock},
};

use burn_shard_nccl::Nccl;

/// How a communicator is to fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Fault {
    /// Its kernel never ends.
    Hang = 1,
    /// Its kernel fails after it was launched.
    AsyncError = 2,
    /// Its launch is refused.
    Launch = 3,
    /// It cannot be initialized.
    Init = 4,
    /// It never finishes its initialization.
    InitHang = 5,
}

/// Where the cdylib is: beside the running test.
///
/// # Panics
///
/// If it is not there.
#[must_use]
pub fn library_path() -> PathBuf {
    let name = "libburn_shard_nccl_double.so";
    let program = env::current_exe().expect("a program should know where it is");
    let folders = program.ancestors().skip(1).take(3);
    let mut files = folders.flat_map(|folder| [folder.join(name), folder.join("deps").join(name)]);
    files.find(|file| file.is_file()).unwrap_or_else(|| {
        panic!(
            "{name} is not beside {} (cargo should have built it)",
            program.display()
        )
    })
}

/// The double, loaded as NCCL is.
///
/// # Panics
///
/// If it cannot be loaded.
#[must_use]
pub fn load() -> Arc<Nccl> {
    static DOUBLE: OnceLock<Arc<Nccl>> = OnceLock::new();
    let double = DOUBLE.get_or_init(|| {
        // SAFETY: the double is made for this.
        let loaded = unsafe { Nccl::open_file(&library_path()) };
        loaded.unwrap_or_else(|error| panic!("{error}"))
    });
    Arc::clone(double)
}

/// Lets the next communicator of `rank` in this process fail at its `op`-th collective, from 0.
///
/// # Panics
///
/// If the double cannot be loaded.
pub fn inject(rank: usize, op: u64, fault: Fault) {
    let rank = i32::try_from(rank).expect("a test should have few ranks");
    let double = load();
    // SAFETY: the type is that in `exports.rs`.
    let symbol = unsafe {
        double
            .loaded()
            .get::<unsafe extern "C" fn(i32, u64, i32)>("nccl_double_inject")
    };
    let symbol = symbol.expect("the double should have what the double exports");
    // SAFETY: takes any numbers.
    unsafe { symbol(rank, op, fault as i32) };
}

/// Communicators of this process that were neither destroyed nor aborted.
///
/// # Panics
///
/// If the double cannot be loaded.
#[must_use]
pub fn alive() -> usize {
    let double = load();
    // SAFETY: the type is that in `exports.rs`.
    let symbol = unsafe {
        double
            .loaded()
            .get::<unsafe extern "C" fn() -> usize>("nccl_double_alive")
    };
    let symbol = symbol.expect("the double should have what the double exports");
    // SAFETY: takes nothing.
    unsafe { symbol() }
}
