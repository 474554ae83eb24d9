//! What to launch, and what is refused before anything is started.

use std::{ffi::OsString, fmt, net::IpAddr, str::FromStr, time::Duration};

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
    pub token: Option<String>,
    /// Name of the job, the same on each host; `None`: a random one, or none if there are several hosts.
    pub job_id: Option<String>,
    /// Time between SIGTERM and SIGKILL.
    pub grace: Duration,
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
}

fn inherited_bind() -> bool {
    std::env::var_os("BURN_SHARD_BIND").is_some()
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
            .finish()
    }
}

impl Master {
    fn is_loopback(&self) -> bool {
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
