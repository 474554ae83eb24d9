//! What is refused before anything is started, and what follows from the options.

use std::{ffi::OsStr, net::IpAddr};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::{
    environment::set,
    error::LaunchError,
    options::{Master, Nodes, Options, Restarts},
    outcome::{Ending, Failure},
};

/// Most ranks of a job; what `burn-shard-comm` allows.
const MAX_WORLD_SIZE: usize = 1 << 15;
/// Files of the launcher per rank: the ends of two pipes.
const FILES_PER_RANK: usize = 2;
/// Files that the launcher needs besides: its own streams, what it watches, and what starting a process takes.
const OTHER_FILES: usize = 64;

impl Restarts {
    /// How many ranks to start after one of `ranks` has failed like this.
    pub(crate) fn ranks(self, ranks: usize, failure: &Failure) -> usize {
        match (self.min_ranks, failure.ending) {
            (Some(least), Ending::Signaled(_)) => (ranks - 1).max(least),
            (Some(_), Ending::Exited(_)) | (None, _) => ranks,
        }
    }
}

impl Options {
    pub(crate) fn world_size(&self) -> usize {
        self.local_world_size * self.nodes.count
    }

    pub(crate) fn first_rank(&self) -> usize {
        self.local_world_size * self.nodes.rank
    }

    pub(crate) fn check(&self) -> Result<(), LaunchError> {
        let Nodes {
            count: nnodes,
            rank: node_rank,
        } = self.nodes;
        if self.local_world_size == 0 {
            return Err(LaunchError::NoRanks);
        }
        if node_rank >= nnodes {
            return Err(LaunchError::NodeRankOutOfRange { node_rank, nnodes });
        }
        let world_size = self.local_world_size.checked_mul(nnodes);
        if world_size.is_none_or(|world_size| world_size > MAX_WORLD_SIZE) {
            return Err(LaunchError::TooManyRanks {
                local_world_size: self.local_world_size,
                nnodes,
                max_world_size: MAX_WORLD_SIZE,
            });
        }
        self.check_restarts()?;
        if let Some(token) = &self.token {
            check_token(token)?;
        }
        if nnodes > 1 && self.token.is_none() {
            return Err(LaunchError::NoToken { nnodes });
        }
        match &self.master {
            None if nnodes > 1 => Err(LaunchError::NoMaster { nnodes }),
            Some(master) if !master.is_loopback() && self.bind.is_none() && inherited_bind() => {
                Ok(())
            }
            Some(master) if !master.is_loopback() && self.bind.is_none() => {
                Err(LaunchError::NoBind {
                    master: master.to_string(),
                })
            }
            _ => Ok(()),
        }
    }

    fn check_restarts(&self) -> Result<(), LaunchError> {
        let Restarts { max, min_ranks } = self.restarts;
        if max > 0 && self.nodes.count > 1 {
            let nnodes = self.nodes.count;
            return Err(LaunchError::RestartsAcrossNodes { nnodes });
        }
        let ranks = self.local_world_size;
        match min_ranks {
            Some(min_ranks) if min_ranks == 0 || min_ranks > ranks || max == 0 => {
                Err(LaunchError::BadMinRanks {
                    min_ranks,
                    ranks,
                    max_restarts: max,
                })
            }
            Some(_) | None => Ok(()),
        }
    }
}

fn inherited_bind() -> bool {
    set("BURN_SHARD_BIND").is_some()
}

/// What no rank would accept, so that it is said once.
fn check_token(token: &OsStr) -> Result<(), LaunchError> {
    if token.is_empty() {
        return Err(LaunchError::BadToken { reason: "empty" });
    }
    if token.as_encoded_bytes().contains(&0) {
        let reason = "not fit for a variable: it has a zero byte in it";
        return Err(LaunchError::BadToken { reason });
    }
    Ok(())
}

/// Makes sure that the launcher may open as many files as `ranks` need, up to what the system allows.
pub(crate) fn reserve_files(ranks: usize) -> Result<(), LaunchError> {
    let needed = ranks * FILES_PER_RANK + OTHER_FILES;
    let limit = getrlimit(Resource::Nofile);
    let needed_files = u64::try_from(needed).unwrap_or(u64::MAX);
    let is_enough = |limit: Option<u64>| limit.is_none_or(|limit| limit >= needed_files);
    if is_enough(limit.current) {
        return Ok(());
    }
    let raised = Rlimit {
        current: Some(needed_files),
        maximum: limit.maximum,
    };
    if is_enough(limit.maximum) && setrlimit(Resource::Nofile, raised).is_ok() {
        return Ok(());
    }
    Err(LaunchError::TooFewFiles {
        ranks,
        needed,
        limit: limit.maximum.or(limit.current).unwrap_or(u64::MAX),
    })
}

impl Master {
    pub(crate) fn is_loopback(&self) -> bool {
        self.host.eq_ignore_ascii_case("localhost")
            || self
                .host
                .parse::<IpAddr>()
                .is_ok_and(|address| address.is_loopback())
    }
}
