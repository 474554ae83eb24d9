//! The variables of each rank: those that the launcher sets, and those that it takes away.

use std::{
    ffi::OsString,
    net::{Ipv4Addr, TcpListener},
    thread,
};

use crate::{
    error::LaunchError,
    options::{Master, Options},
};

/// Variables by which other launchers tell a process its place. The launcher may run under one of them, as
/// one process, and its ranks are others.
const OF_OTHERS: [&str; 14] = [
    "GROUP_WORLD_SIZE",
    "MPI_LOCALNRANKS",
    "MPI_LOCALRANKID",
    "NODE_RANK",
    "ROLE_NAME",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "SLURM_GTIDS",
    "SLURM_LOCALID",
    "SLURM_NPROCS",
    "SLURM_NTASKS",
    "SLURM_PROCID",
    "SLURM_STEP_ID",
    "SLURM_TASK_PID",
];
/// Beginnings of such variables.
const OF_OTHERS_PREFIXES: [&str; 4] = ["OMPI_COMM_WORLD_", "PMIX_", "PMI_", "TORCHELASTIC_"];
/// Our own, which the caller may have exported for another job: ranks get them from [`Environment::of`] only.
const OF_OURS: [&str; 5] = [
    "BURN_SHARD_BIND",
    "BURN_SHARD_ERROR_FILE",
    "BURN_SHARD_JOB_ID",
    "BURN_SHARD_RESTART_COUNT",
    "BURN_SHARD_TOKEN",
];

/// Where ranks write their last collectives.
pub(crate) const FLIGHT_RECORDER: &str = "BURN_SHARD_FLIGHT_RECORDER";

/// What is alike on all ranks of this host.
pub(crate) struct Environment {
    pub(crate) master: Master,
    job_id: Option<String>,
    token: OsString,
    bind: Option<OsString>,
    attempt: usize,
    /// `RAYON_NUM_THREADS`, unless the caller's environment has it.
    pub(crate) threads_per_rank: Option<usize>,
}

impl Environment {
    pub(crate) fn new(options: &Options, attempt: usize) -> Result<Self, LaunchError> {
        let master = match &options.master {
            Some(master) => master.clone(),
            None => Master {
                host: Ipv4Addr::LOCALHOST.to_string(),
                port: free_port()?,
            },
        };
        let token = match &options.token {
            Some(token) => token.clone(),
            None => random::<32>()?.into(),
        };
        let job_id = match &options.job_id {
            Some(job_id) => Some(job_id.clone()),
            None if options.nodes.count == 1 => Some(random::<8>()?),
            None => None,
        };
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let threads = (cores / options.local_world_size).max(1);
        let threads_per_rank = set("RAYON_NUM_THREADS").is_none().then_some(threads);
        // On loopback, an address that was exported for another job is none of this one's.
        let bind = match options.bind {
            Some(bind) => Some(bind.to_string().into()),
            None if master.is_loopback() => None,
            None => set("BURN_SHARD_BIND"),
        };
        Ok(Self {
            master,
            job_id,
            token,
            bind,
            attempt,
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
            ("BURN_SHARD_TOKEN", self.token.clone()),
            ("BURN_SHARD_RESTART_COUNT", self.attempt.to_string().into()),
        ];
        if let Some(job_id) = &self.job_id {
            variables.push(("BURN_SHARD_JOB_ID", job_id.into()));
        }
        if let Some(bind) = &self.bind {
            variables.push(("BURN_SHARD_BIND", bind.clone()));
        }
        if let Some(directory) = &options.flight_recorder {
            variables.push((FLIGHT_RECORDER, directory.into()));
        }
        if let Some(threads) = self.threads_per_rank {
            variables.push(("RAYON_NUM_THREADS", threads.to_string().into()));
        }
        variables
    }
}

/// Variables of the caller that ranks do not inherit.
pub(crate) fn removed() -> Vec<OsString> {
    let names = std::env::vars_os().map(|(name, _)| name);
    names
        .filter(|name| {
            let Some(name) = name.to_str() else {
                return false;
            };
            OF_OTHERS.contains(&name)
                || OF_OURS.contains(&name)
                || OF_OTHERS_PREFIXES
                    .iter()
                    .any(|start| name.starts_with(start))
        })
        .collect()
}

/// The value of a variable, unless it is empty.
pub(crate) fn set(name: &str) -> Option<OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
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
