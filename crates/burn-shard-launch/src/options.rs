//! What to launch, and what is refused before anything is started.

use std::{
    ffi::{OsStr, OsString},
    fmt,
    net::IpAddr,
    path::PathBuf,
    str::FromStr,
    time::Duration,
};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::{
    environment::set,
    error::LaunchError,
    outcome::{Ending, Failure},
};

/// Most ranks of a job; what `burn-shard-comm` allows.
const MAX_WORLD_SIZE: usize = 1 << 15;
/// Files of the launcher per rank: the ends of two pipes.
const FILES_PER_RANK: usize = 2;
/// Files that the launcher needs besides: its own streams, what it watches, and what starting a process takes.
const OTHER_FILES: usize = 64;

/// What [`launch`](crate::launch()) starts.
#[derive(Clone)]
pub struct Options {
    /// The program, looked up in `PATH` unless it has a slash.
    pub program: OsString,
    /// Its arguments.
    pub args: Vec<OsString>,
    /// Ranks on this host.
    pub local_world_size: usize,
    /// Hosts of the job, and which this is.
    pub nodes: Nodes,
    /// Where ranks meet; `None`: a free port on loopback, for one host only.
    pub master: Option<Master>,
    /// Address that ranks may listen on, handed on as `BURN_SHARD_BIND`; `None`: loopback only, or what
    /// `BURN_SHARD_BIND` says already.
    pub bind: Option<IpAddr>,
    /// The shared secret of the job; `None`: a random one, for one host only.
    pub token: Option<OsString>,
    /// Name of the job, the same on each host; `None`: a random one, or none if there are several hosts.
    pub job_id: Option<String>,
    /// Time between SIGTERM and SIGKILL.
    pub grace: Duration,
    /// Whether ranks are started again after a failure.
    pub restarts: Restarts,
    /// Where ranks write their last collectives, handed on as `BURN_SHARD_FLIGHT_RECORDER`; `None`: what that says
    /// already.
    pub flight_recorder: Option<PathBuf>,
}

/// How often, and how many, ranks are started again after one of them has failed; `--max-restarts` and
/// `--nnodes MIN:MAX` of torchrun, on one host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Restarts {
    /// At most so many times.
    pub max: usize,
    /// `Some`: a rank that was killed by a signal is not replaced, down to this number of ranks. The system kills
    /// what takes too much memory, and drivers what used a broken device; the same number would die again.
    /// `None`: always as many as before.
    pub min_ranks: Option<usize>,
}

impl Restarts {
    /// How many ranks to start after one of `ranks` has failed like this.
    pub(crate) fn ranks(self, ranks: usize, failure: &Failure) -> usize {
        match (self.min_ranks, failure.ending) {
            (Some(least), Ending::Signaled(_)) => (ranks - 1).max(least),
            (Some(_), Ending::Exited(_)) | (None, _) => ranks,
        }
    }
}

/// Hosts of a job that starts as many ranks on each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Nodes {
    /// Hosts in the job.
    pub count: usize,
    /// Number of this host.
    pub rank: usize,
}

impl Nodes {
    /// This host alone.
    pub const ONE: Self = Self { count: 1, rank: 0 };
}

/// Where the ranks of a job meet: `HOST:PORT`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Master {
    /// Name or address of rank 0's host.
    pub host: String,
    /// Port on which rank 0 listens.
    pub port: u16,
}

impl Options {
    /// `local_world_size` ranks of `program` on this host alone, with five seconds of grace.
    #[must_use]
    pub fn new(program: impl Into<OsString>, local_world_size: usize) -> Self {
        Self {
            program: program.into(),
            args: Vec::new(),
            local_world_size,
            nodes: Nodes::ONE,
            master: None,
            bind: None,
            token: None,
            job_id: None,
            grace: Duration::from_secs(5),
            restarts: Restarts::default(),
            flight_recorder: None,
        }
    }

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

impl fmt::Debug for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Options")
            .field("program", &self.program)
            .field("args", &self.args)
            .field("local_world_size", &self.local_world_size)
            .field("nodes", &self.nodes)
            .field("master", &self.master)
            .field("bind", &self.bind)
            .field("token", &self.token.as_ref().map(|_| "..."))
            .field("job_id", &self.job_id)
            .field("grace", &self.grace)
            .field("restarts", &self.restarts)
            .finish()
    }
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

impl FromStr for Master {
    type Err = LaunchError;

    fn from_str(value: &str) -> Result<Self, LaunchError> {
        let parsed = || {
            let (host, port) = value.rsplit_once(':')?;
            let host = match host.strip_prefix('[') {
                Some(v6) => v6.strip_suffix(']')?,
                None if host.contains(':') => return None,
                None => host,
            };
            let port = port.parse().ok().filter(|&port| port != 0)?;
            (!host.is_empty()).then(|| Self {
                host: host.to_owned(),
                port,
            })
        };
        parsed().ok_or_else(|| LaunchError::BadMaster {
            value: value.to_owned(),
        })
    }
}

impl fmt::Display for Master {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}
