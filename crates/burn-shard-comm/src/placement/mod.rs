//! Where one process stands in its job, read from the variables its launcher set.
//!
//! Nothing here connects to anything. Which variables there are depends on the launcher; more than
//! one family is normal, since launchers start each other (`srun torchrun`, `mpirun` inside `sbatch`)
//! and children inherit. The innermost launcher knows best:
//!
//! 1. torchrun's `RANK` and `WORLD_SIZE` (also `burn-shard launch`), never set by accident by another;
//! 2. OpenMPI's `OMPI_COMM_WORLD_*`;
//! 3. PMI's `PMI_RANK` and `PMI_SIZE` (Hydra: MPICH, Intel MPI), if SLURM says something else or nothing;
//! 4. SLURM's `SLURM_PROCID` and `SLURM_NTASKS`: `srun --mpi=pmi2` sets PMI's too, but alike, and SLURM
//!    knows hosts as well.
//!
//! A family that is half there is an error, unless one before it in this list is complete.

mod error;
mod launcher;
mod slurm;
mod token;

use std::{ffi::OsString, net::IpAddr, str::FromStr};

pub use error::PlacementError;
pub use launcher::Launcher;
pub use token::Token;

/// Where one process stands in its job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Number of this process, below `world_size`.
    pub rank: usize,
    /// Processes in the job.
    pub world_size: usize,
    /// Number of this process among those on its host.
    pub local_rank: usize,
    /// Processes of the job on this host, if the launcher tells.
    pub local_world_size: Option<usize>,
    /// Host of rank 0: a name or an address. `127.0.0.1` if all ranks are known to share a host and
    /// `MASTER_ADDR` is not set.
    pub master_addr: String,
    /// Port on which rank 0 listens; 0 in a job of one process that was given none. The one after
    /// `MASTER_PORT` under torchrun, whose own store has that.
    pub master_port: u16,
    /// Name of the job, the same on all ranks; empty if unknown.
    pub job_id: String,
    /// `BURN_SHARD_TOKEN`, the shared secret of the job.
    pub token: Option<Token>,
    /// The launcher whose variables won.
    pub launcher: Launcher,
}

/// Variables that [`Placement::explain`] shows, besides those of [`Launcher`].
const OTHERS: [&str; 14] = [
    "SLURM_NODEID",
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_TASKS_PER_NODE",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_STEP_NODELIST",
    "SLURM_JOB_NODELIST",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "PMIX_NAMESPACE",
    "MASTER_ADDR",
    "MASTER_PORT",
    AGENT_STORE,
    "BURN_SHARD_JOB_ID",
    TOKEN,
];
const TOKEN: &str = token::VARIABLE;
/// Set by torchrun itself, and not by others that set torchrun's variables.
const AGENT_STORE: &str = "TORCHELASTIC_USE_AGENT_STORE";
const LOOPBACK: &str = "127.0.0.1";

impl Placement {
    /// The placement of this process, from its environment; `None` without any launcher's variables.
    ///
    /// What was found and which family won goes to the log, at level `info`.
    ///
    /// # Errors
    ///
    /// As [`Placement::from_vars`].
    pub fn from_env() -> Result<Option<Self>, PlacementError> {
        let vars = |name: &str| std::env::var_os(name);
        log::info!("{}", Self::explain(vars));
        Self::from_vars(vars)
    }

    /// The placement that variables describe; `None` without any launcher's variables.
    ///
    /// # Errors
    ///
    /// When a family is half there, when values are no numbers or contradict each other, or when
    /// rank 0 cannot be found: no `MASTER_ADDR` or `MASTER_PORT`, and nothing to derive them from.
    pub fn from_vars<V: Into<OsString>>(
        vars: impl Fn(&str) -> Option<V>,
    ) -> Result<Option<Self>, PlacementError> {
        let vars = |name: &str| vars(name).map(Into::into);
        Self::read(Vars(&vars))
    }

    fn read(vars: Vars<'_>) -> Result<Option<Self>, PlacementError> {
        let Some(standing) = winner(vars)? else {
            return Ok(None);
        };
        let Standing {
            launcher,
            rank,
            world_size,
        } = standing;
        let (local_rank, local_world_size) = local(vars, standing)?;
        let job_id = job_id(vars, standing)?;
        let one_host = local_world_size == Some(world_size);
        let master_addr = match vars.text("MASTER_ADDR")? {
            Some(address) => address,
            None if one_host && launcher != Launcher::Torchrun || world_size == 1 => {
                LOOPBACK.to_owned()
            }
            None if launcher == Launcher::Torchrun => {
                return Err(half(vars, launcher, "MASTER_ADDR"));
            }
            None => slurm::first_host(vars)?.ok_or(PlacementError::NoMaster {
                launcher,
                rank,
                world_size,
            })?,
        };
        let master_port = match vars.number::<u16>("MASTER_PORT")? {
            Some(0) if world_size > 1 => {
                return Err(PlacementError::NotANumber {
                    variable: "MASTER_PORT",
                    value: "0".to_owned(),
                    expected: "a port from 1 to 65535, the same on all ranks",
                });
            }
            // torchrun's own store listens there.
            Some(port)
                if launcher == Launcher::Torchrun
                    && vars.text(AGENT_STORE)?.as_deref() == Some("True") =>
            {
                port.checked_add(1).unwrap_or(port - 1)
            }
            Some(port) => port,
            None if world_size == 1 => 0,
            None if launcher == Launcher::Torchrun => {
                return Err(half(vars, launcher, "MASTER_PORT"));
            }
            None if job_id.is_empty() => {
                return Err(PlacementError::NoPort {
                    launcher,
                    rank,
                    world_size,
                });
            }
            None => derived_port(&job_id),
        };
        let token = (vars.0)(TOKEN).map(|token| Token::new(token.into_encoded_bytes()));
        let token = token.transpose()?;
        Ok(Some(Self {
            rank,
            world_size,
            local_rank,
            local_world_size,
            master_addr,
            master_port,
            job_id,
            token,
            launcher,
        }))
    }

    /// A table of what was found and which launcher won, for the log. The token is not in it.
    pub fn explain<V: Into<OsString>>(vars: impl Fn(&str) -> Option<V>) -> String {
        let vars = |name: &str| vars(name).map(Into::into);
        let mut lines = Vec::new();
        match Self::read(Vars(&vars)) {
            Ok(Some(placement)) => {
                let Self {
                    launcher,
                    rank,
                    world_size,
                    ..
                } = placement;
                lines.push(format!(
                    "placement: {launcher}'s variables say rank {rank} of {world_size}"
                ));
                for other in Launcher::ALL.into_iter().filter(|&other| other != launcher) {
                    match standing(Vars(&vars), other) {
                        Ok(Some(found)) if found.rank == rank && found.world_size == world_size => {
                        }
                        Ok(Some(found)) => lines.push(format!(
                            "  {other} says rank {} of {}: {launcher} wins, as the inner launcher",
                            found.rank, found.world_size
                        )),
                        Ok(None) => {}
                        Err(error) => lines.push(format!("  {other} is not looked at: {error}")),
                    }
                }
                lines.push(format!("  {placement:?}"));
            }
            Ok(None) => lines.push("placement: no launcher's variables are set".to_owned()),
            Err(error) => lines.push(format!("placement: {error}")),
        }
        let families = Launcher::ALL.into_iter().flat_map(|launcher| {
            let fixed = [
                launcher.rank_variable(),
                launcher.world_size_variable(),
                launcher.local_rank_variable(),
            ];
            fixed
                .into_iter()
                .chain(launcher.local_world_size_variable())
        });
        for name in families.chain(OTHERS) {
            if let Some(value) = vars(name) {
                let shown = if name == TOKEN {
                    "(set, not shown)".into()
                } else {
                    format!("{value:?}")
                };
                lines.push(format!("  {name:<27} {shown}"));
            }
        }
        lines.join("\n")
    }

    /// Whether rank 0 is named by a loopback address, or as `localhost`.
    #[must_use]
    pub fn master_is_loopback(&self) -> bool {
        self.master_addr.eq_ignore_ascii_case("localhost")
            || self
                .master_addr
                .parse::<IpAddr>()
                .is_ok_and(|address| address.is_loopback())
    }
}

/// The environment, or what a test takes for it.
#[derive(Clone, Copy)]
struct Vars<'a>(&'a dyn Fn(&str) -> Option<OsString>);

impl Vars<'_> {
    fn text(self, variable: &'static str) -> Result<Option<String>, PlacementError> {
        let Some(value) = (self.0)(variable) else {
            return Ok(None);
        };
        match value.into_string() {
            Ok(value) if value.trim().is_empty() => Err(PlacementError::Empty { variable }),
            Ok(value) => Ok(Some(value)),
            Err(value) => Err(PlacementError::NotUnicode { variable, value }),
        }
    }

    fn number<T: FromStr>(self, variable: &'static str) -> Result<Option<T>, PlacementError> {
        let Some(value) = self.text(variable)? else {
            return Ok(None);
        };
        let expected = if size_of::<T>() == size_of::<u16>() {
            "a port from 1 to 65535, the same on all ranks"
        } else {
            "a number, not negative"
        };
        value
            .parse()
            .map(Some)
            .map_err(|_| PlacementError::NotANumber {
                variable,
                value,
                expected,
            })
    }
}

/// What one family says.
#[derive(Clone, Copy)]
struct Standing {
    launcher: Launcher,
    rank: usize,
    world_size: usize,
}

fn winner(vars: Vars<'_>) -> Result<Option<Standing>, PlacementError> {
    for launcher in [Launcher::Torchrun, Launcher::OpenMpi] {
        if let Some(standing) = standing(vars, launcher)? {
            return Ok(Some(standing));
        }
    }
    let Some(pmi) = standing(vars, Launcher::Pmi)? else {
        return standing(vars, Launcher::Slurm);
    };
    // Half of SLURM's variables is what `salloc` gives; a Hydra started there is complete.
    match standing(vars, Launcher::Slurm) {
        Ok(Some(slurm)) if slurm.rank == pmi.rank && slurm.world_size == pmi.world_size => {
            Ok(Some(slurm))
        }
        _ => Ok(Some(pmi)),
    }
}

fn standing(vars: Vars<'_>, launcher: Launcher) -> Result<Option<Standing>, PlacementError> {
    let (rank_variable, world_size_variable) =
        (launcher.rank_variable(), launcher.world_size_variable());
    let rank = vars.number::<usize>(rank_variable)?;
    let world_size = vars.number::<usize>(world_size_variable)?;
    match (rank, world_size) {
        (None, None) => Ok(None),
        (Some(_), None) => Err(half(vars, launcher, world_size_variable)),
        (None, Some(_)) => Err(half(vars, launcher, rank_variable)),
        (Some(rank), Some(world_size)) => {
            below(rank_variable, rank, world_size_variable, world_size)?;
            Ok(Some(Standing {
                launcher,
                rank,
                world_size,
            }))
        }
    }
}

fn local(
    vars: Vars<'_>,
    Standing {
        launcher,
        world_size,
        ..
    }: Standing,
) -> Result<(usize, Option<usize>), PlacementError> {
    let variable = launcher.local_rank_variable();
    let local_rank = match vars.number(variable)? {
        Some(local_rank) => local_rank,
        None if world_size == 1 => 0,
        None => return Err(half(vars, launcher, variable)),
    };
    below(
        variable,
        local_rank,
        launcher.world_size_variable(),
        world_size,
    )?;
    let (from, local_world_size) = match launcher.local_world_size_variable() {
        Some(from) => (from, vars.number(from)?),
        None => slurm::local_world_size(vars)?,
    };
    if let Some(local_world_size) = local_world_size {
        below(variable, local_rank, from, local_world_size)?;
        if local_world_size > world_size {
            return Err(PlacementError::MoreHereThanInAll {
                variable: from,
                local_world_size,
                world_size_variable: launcher.world_size_variable(),
                world_size,
            });
        }
    }
    Ok((local_rank, local_world_size))
}

fn job_id(
    vars: Vars<'_>,
    Standing {
        launcher,
        world_size,
        ..
    }: Standing,
) -> Result<String, PlacementError> {
    let from_slurm = if launcher == Launcher::Slurm {
        slurm::job_id(vars, world_size)?
    } else {
        String::new()
    };
    for variable in launcher.job_variables() {
        if let Some(job) = vars.text(variable)? {
            return Ok(job);
        }
    }
    Ok(from_slurm)
}

/// A port below those that Linux hands out itself, the same wherever the job has the same name.
fn derived_port(job_id: &str) -> u16 {
    const FIRST: u16 = 20_000;
    const COUNT: u64 = 12_000;
    // FNV-1a; two jobs that get the same port are told that it is taken.
    let hash = job_id.bytes().fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    FIRST + u16::try_from(hash % COUNT).expect("the remainder should be small")
}

fn below(
    variable: &'static str,
    value: usize,
    limit_variable: &'static str,
    limit: usize,
) -> Result<(), PlacementError> {
    if value < limit {
        return Ok(());
    }
    Err(PlacementError::OutOfRange {
        variable,
        value,
        limit_variable,
        limit,
    })
}

/// The error of a family without `missing`.
fn half(vars: Vars<'_>, launcher: Launcher, missing: &'static str) -> PlacementError {
    let candidates = [launcher.rank_variable(), launcher.world_size_variable()];
    let found = candidates
        .into_iter()
        .find(|&name| (vars.0)(name).is_some());
    let found = found.unwrap_or(launcher.rank_variable());
    let value = (vars.0)(found).unwrap_or_default();
    let value = value.to_string_lossy().into_owned();
    PlacementError::Half {
        launcher,
        found,
        value,
        missing,
    }
}
