//! What can be wrong with a launcher's variables.

use std::ffi::OsString;

use super::Launcher;

/// Why variables do not describe a place in a job. Nothing has been sent; no other rank knows.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlacementError {
    /// One variable of a family is set, another is not.
    #[error("{found} is {value:?}, but {missing} is not set ({})", way_out(*.launcher, .missing, .found))]
    Half {
        /// The launcher whose variables they are.
        launcher: Launcher,
        /// A variable that is there.
        found: &'static str,
        /// Its value.
        value: String,
        /// The variable that is not.
        missing: &'static str,
    },

    /// A variable is set to nothing.
    #[error("{variable} is set, but empty (unset it, or give it a value)")]
    Empty {
        /// The variable.
        variable: &'static str,
    },

    /// A variable that should be text is not: two such values could look alike.
    #[error("{variable} is {value:?}, which is not valid UTF-8 (correct or unset it)")]
    NotUnicode {
        /// The variable.
        variable: &'static str,
        /// Its value.
        value: OsString,
    },

    /// A variable that should be a number is something else.
    #[error("{variable} is {value:?}, which is not {expected} (correct or unset it)")]
    NotANumber {
        /// The variable.
        variable: &'static str,
        /// Its value.
        value: String,
        /// What it should be.
        expected: &'static str,
    },

    /// A variable that should be an address of this host is something else.
    #[error(
        "{variable} is {value:?}, which is not the IP address of an interface of this host (10.0.0.1 or fd00::1, as `ip address` shows it, without a port; 0.0.0.0 or :: for all interfaces; unset it to listen on loopback)"
    )]
    NotAnAddress {
        /// The variable.
        variable: &'static str,
        /// Its value.
        value: String,
    },

    /// A rank that the job, or its host, does not have.
    #[error(
        "{variable} is {value}, but {limit_variable} is {limit} (ranks are counted from 0; values of different launchers may be mixed, unset those of the outer one)"
    )]
    OutOfRange {
        /// The variable that holds the rank.
        variable: &'static str,
        /// The rank.
        value: usize,
        /// The variable that holds the number of ranks.
        limit_variable: &'static str,
        /// That number.
        limit: usize,
    },

    /// More processes on this host than in the job.
    #[error(
        "{variable} gives {local_world_size} processes on this host, but {world_size_variable} is {world_size} (values of different launchers may be mixed, unset those of the outer one)"
    )]
    MoreHereThanInAll {
        /// The variable that holds the number on this host.
        variable: &'static str,
        /// That number.
        local_world_size: usize,
        /// The variable that holds the number in the job.
        world_size_variable: &'static str,
        /// That number.
        world_size: usize,
    },

    /// A list in SLURM's notation cannot be read.
    #[error("{variable} is {value:?}, which is not {expected}")]
    BadList {
        /// The variable.
        variable: &'static str,
        /// Its value.
        value: String,
        /// What it should be, and the way out.
        expected: &'static str,
    },

    /// A batch script's own shell, which SLURM gives the variables of task 0.
    #[error(
        "SLURM_NTASKS is {world_size}, but SLURM_STEP_ID is not set: the batch script has started this process itself, once (start it with `srun`, or with `burn-shard launch`)"
    )]
    BatchShell {
        /// Tasks of the job.
        world_size: usize,
    },

    /// Nothing says where rank 0 is.
    #[error(
        "rank {rank} of {world_size} ({launcher}): MASTER_ADDR is not set, and no variable tells the host of rank 0 (set it to that host on all ranks, with mpirun: -x MASTER_ADDR=HOST or -genv MASTER_ADDR HOST)"
    )]
    NoMaster {
        /// The launcher whose variables won.
        launcher: Launcher,
        /// This rank.
        rank: usize,
        /// Processes in the job.
        world_size: usize,
    },

    /// Nothing says at which port rank 0 listens.
    #[error(
        "rank {rank} of {world_size} ({launcher}): MASTER_PORT is not set, and no name of the job to derive it from (set it to a free port of rank 0's host on all ranks, with mpirun: -x MASTER_PORT=29500 or -genv MASTER_PORT 29500)"
    )]
    NoPort {
        /// The launcher whose variables won.
        launcher: Launcher,
        /// This rank.
        rank: usize,
        /// Processes in the job.
        world_size: usize,
    },
}

fn way_out(launcher: Launcher, missing: &str, found: &str) -> String {
    match launcher {
        Launcher::Torchrun => format!(
            "start with `burn-shard launch` or torchrun, which set both; by hand, set {missing} too; to leave the choice to srun or mpirun, unset {found}"
        ),
        Launcher::Slurm => format!(
            "start with `srun`, which sets {missing}: a shell of salloc or sbatch is no task; or use `burn-shard launch` inside it"
        ),
        Launcher::OpenMpi => {
            format!("start with OpenMPI's mpirun, which sets {missing}, or unset {found}")
        }
        Launcher::Pmi => format!(
            "start with mpiexec of MPICH or Intel MPI, which sets {missing}, or unset {found}"
        ),
    }
}
