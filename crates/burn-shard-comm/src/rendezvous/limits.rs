//! How many files a rank may open: each connection is one.
//!
//! Looked at before ranks meet. A rank that ran out of files later would fail in the middle of connecting, and
//! look like one behind a firewall.

#[cfg(unix)]
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Files beyond those that are open already and the connections: listeners, and what programs open meanwhile.
#[cfg(unix)]
const SPARE: u64 = 16;

/// Too few files: how many are needed, and how many are allowed.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct TooFew {
    pub(super) needed: u64,
    pub(super) limit: u64,
}

/// Makes sure that this process may open `connections` more files, up to what the system allows it to allow
/// itself.
#[cfg(unix)]
pub(super) fn reserve(connections: usize) -> Result<(), TooFew> {
    let needed = open_files() + u64::try_from(connections).unwrap_or(u64::MAX) + SPARE;
    let limit = getrlimit(Resource::Nofile);
    let is_enough = |limit: Option<u64>| limit.is_none_or(|limit| limit >= needed);
    if is_enough(limit.current) {
        return Ok(());
    }
    let raised = Rlimit {
        current: Some(needed),
        maximum: limit.maximum,
    };
    if is_enough(limit.maximum) && setrlimit(Resource::Nofile, raised).is_ok() {
        log::info!(
            "raised the limit of open files from {:?} to {needed}",
            limit.current
        );
        return Ok(());
    }
    let limit = limit.maximum.or(limit.current).unwrap_or(u64::MAX);
    Err(TooFew { needed, limit })
}

/// Nothing is known to limit sockets there.
#[cfg(not(unix))]
pub(super) fn reserve(_connections: usize) -> Result<(), TooFew> {
    Ok(())
}

/// Files that this process has open; a guess where the system does not tell.
#[cfg(unix)]
fn open_files() -> u64 {
    let open = std::fs::read_dir("/proc/self/fd").or_else(|_| std::fs::read_dir("/dev/fd"));
    open.map_or(16, |open| open.count().try_into().unwrap_or(u64::MAX / 4))
}
