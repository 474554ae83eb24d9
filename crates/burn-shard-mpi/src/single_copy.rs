//! Whether ranks on one host can copy from each other's memory directly (CMA, `process_vm_readv`).
//!
//! OpenMPI and others then copy a message once; otherwise twice, through shared memory in small
//! pieces, which takes 2 to 7 times as long. They do not say which they do; this file tries it.

use std::{env, fmt, io, ptr};

use crate::{
    api::{Calls, Comm},
    error::MpiError,
};

/// Read by the neighbour.
static MARK: u64 = 0x6275_726e_5f73_6861;

/// How messages travel between the ranks of one host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SingleCopy {
    /// This rank is alone on its host.
    NoNeighbour,
    /// By one copy, if the MPI library makes use of it.
    Usable,
    /// `OMPI_MCA_btl_vader_single_copy_mechanism` names another way.
    OtherWay,
    /// By two copies: the system refused to read the neighbour's memory, with this error number.
    Refused(i32),
    /// By two copies: the neighbour has its processes numbered in another way (a container of its
    /// own).
    OtherNamespace,
}

impl SingleCopy {
    /// Reads from the next rank on this host. All ranks of `neighbours` have to call it.
    pub(crate) fn probe(calls: &mut Calls<'_>, neighbours: Comm) -> Result<Self, MpiError> {
        let (rank, size) = calls.place(neighbours)?;
        let own = [
            u64::from(std::process::id()),
            (&raw const MARK).addr() as u64,
        ];
        let all = calls.all_gather(neighbours, size, own)?;
        if size == 1 {
            return Ok(Self::NoNeighbour);
        }
        let way = env::var("OMPI_MCA_btl_vader_single_copy_mechanism");
        if way.is_ok_and(|way| way != "cma") {
            return Ok(Self::OtherWay);
        }
        let [pid, address] = all[(rank + 1) % size];
        Ok(match read(pid, address) {
            Ok(mark) if mark == MARK => Self::Usable,
            Ok(_) => Self::OtherNamespace,
            Err(error) => Self::Refused(error.raw_os_error().unwrap_or(0)),
        })
    }

    pub(crate) fn log(self) {
        match self {
            Self::NoNeighbour | Self::Usable | Self::OtherWay => log::info!("{self}"),
            Self::Refused(_) | Self::OtherNamespace => log::warn!("{self}"),
        }
    }
}

/// What to do, too.
impl fmt::Display for SingleCopy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SLOW: &str = "messages between ranks of this host are copied twice";
        match self {
            Self::NoNeighbour => f.write_str("one rank per host"),
            Self::Usable => f.write_str("ranks of this host can copy from each other (CMA)"),
            Self::OtherWay => {
                f.write_str("OMPI_MCA_btl_vader_single_copy_mechanism names another way than CMA")
            }
            Self::Refused(libc::EPERM) => write!(
                f,
                "{SLOW}: CMA is not permitted (in a container: --cap-add=SYS_PTRACE; else as root: sysctl kernel.yama.ptrace_scope=0{})",
                scope()
            ),
            Self::Refused(libc::ENOSYS) => {
                write!(
                    f,
                    "{SLOW}: this system has no CMA (Linux with CONFIG_CROSS_MEMORY_ATTACH)"
                )
            }
            Self::Refused(code) => {
                write!(
                    f,
                    "{SLOW}: CMA fails: {}",
                    io::Error::from_raw_os_error(*code)
                )
            }
            Self::OtherNamespace => write!(
                f,
                "{SLOW}: they number processes differently (start all ranks of a host in one container, or with --pid=host)"
            ),
        }
    }
}

/// What the setting is now, where there is one.
fn scope() -> String {
    std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope")
        .map_or_else(|_| String::new(), |scope| format!(", now {}", scope.trim()))
}

/// Eight bytes of another process of this host.
#[cfg(target_os = "linux")]
fn read(pid: u64, address: u64) -> io::Result<u64> {
    let mut mark = 0u64;
    let local = libc::iovec {
        iov_base: (&raw mut mark).cast(),
        iov_len: size_of::<u64>(),
    };
    let remote = libc::iovec {
        iov_base: ptr::without_provenance_mut(usize::try_from(address).unwrap_or(0)),
        iov_len: size_of::<u64>(),
    };
    let pid = libc::pid_t::try_from(pid).unwrap_or(0);
    // SAFETY: writes eight bytes at most, into a live integer; the other address is checked by the
    // system, which fails if that process has nothing there.
    let numel =
        unsafe { libc::process_vm_readv(pid, &raw const local, 1, &raw const remote, 1, 0) };
    match usize::try_from(numel) {
        Ok(8) => Ok(mark),
        Ok(_) => Err(io::Error::from_raw_os_error(libc::EFAULT)),
        Err(_) => Err(io::Error::last_os_error()),
    }
}

#[cfg(not(target_os = "linux"))]
fn read(_: u64, _: u64) -> io::Result<u64> {
    Err(io::Error::from_raw_os_error(libc::ENOSYS))
}
