//! What to launch.

use std::{ffi::OsString, fmt, net::IpAddr, path::PathBuf, str::FromStr, time::Duration};

use crate::error::LaunchError;

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
