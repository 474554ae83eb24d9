//! The variables of each rank.

use std::{
    ffi::OsString,
    net::{Ipv4Addr, TcpListener},
    thread,
};

use crate::{
    error::LaunchError,
    options::{Master, Options},
};

/// What is alike on all ranks of this host.
pub(crate) struct Environment {
    pub(crate) master: Master,
    job_id: Option<String>,
    token: String,
    /// `RAYON_NUM_THREADS`, unless the caller's environment has it.
    pub(crate) threads_per_rank: Option<usize>,
}

impl Environment {
    pub(crate) fn new(options: &Options) -> Result<Self, LaunchError> {
        let master = match &options.master {
            Some(master) => master.clone(),
            None => Master {
                host: Ipv4Addr::LOCALHOST.to_string(),
                port: free_port()?,
            },
        };
        let token = options.token.clone().map_or_else(random::<32>, Ok)?;
        let job_id = match &options.job_id {
            Some(job_id) => Some(job_id.clone()),
            None if options.nodes.count == 1 => Some(random::<8>()?),
            None => None,
        };
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let threads = (cores / options.local_world_size).max(1);
        let threads_per_rank = std::env::var_os("RAYON_NUM_THREADS")
            .is_none()
            .then_some(threads);
        Ok(Self {
            master,
            job_id,
            token,
            threads_per_rank,
        })
    }

    /// Variables of the rank that is number `local_rank` on this host.
    pub(crate) fn of(&self, options: &Options, local_rank: usize) -> Vec<(&'static str, OsString)> {
        let rank = options.first_rank() + local_rank;
        let mut variables: Vec<(&'static str, OsString)> = vec![
            ("RANK", rank.to_string().into()),
            ("WORLD_SIZE", options.world_size().to_string().into()),
            ("LOCAL_RANK", local_rank.to_string().into()),
            (
                "LOCAL_WORLD_SIZE",
                options.local_world_size.to_string().into(),
            ),
            ("GROUP_RANK", options.nodes.rank.to_string().into()),
            ("MASTER_ADDR", self.master.host.clone().into()),
            ("MASTER_PORT", self.master.port.to_string().into()),
            ("BURN_SHARD_TOKEN", self.token.clone().into()),
        ];
        if let Some(job_id) = &self.job_id {
            variables.push(("BURN_SHARD_JOB_ID", job_id.into()));
        }
        if let Some(bind) = options.bind {
            variables.push(("BURN_SHARD_BIND", bind.to_string().into()));
        }
        if let Some(threads) = self.threads_per_rank {
            variables.push(("RAYON_NUM_THREADS", threads.to_string().into()));
        }
        variables
    }
}

/// A port that was free a moment ago. Another program may take it before rank 0 does; rank 0 then says
/// that the port is taken, and the job ends.
fn free_port() -> Result<u16, LaunchError> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0));
    let address = listener.and_then(|listener| listener.local_addr());
    let failed = |source| LaunchError::System {
        what: "find a free port on loopback",
        source,
    };
    Ok(address.map_err(failed)?.port())
}

/// `N` random bytes in hexadecimal.
fn random<const N: usize>() -> Result<String, LaunchError> {
    let mut bytes = [0u8; N];
    getrandom::fill(&mut bytes).map_err(|error| LaunchError::System {
        what: "get random numbers for the token of the job",
        source: error.into(),
    })?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}
