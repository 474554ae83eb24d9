//! Launchers, and the names of the variables by which each tells a process its place.

use std::fmt;

/// A launcher whose variables are understood.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Launcher {
    /// `RANK`, `WORLD_SIZE`, ...: torchrun, and `burn-shard launch`.
    Torchrun,
    /// `SLURM_PROCID`, `SLURM_NTASKS`, ...: srun.
    Slurm,
    /// `OMPI_COMM_WORLD_RANK`, ...: OpenMPI's mpirun.
    OpenMpi,
    /// `PMI_RANK`, `PMI_SIZE`: mpiexec of MPICH and Intel MPI.
    Pmi,
}

impl Launcher {
    /// Every launcher, the one that wins first.
    pub(super) const ALL: [Self; 4] = [Self::Torchrun, Self::OpenMpi, Self::Pmi, Self::Slurm];

    /// The name used in messages.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Torchrun => "torchrun",
            Self::Slurm => "SLURM",
            Self::OpenMpi => "OpenMPI",
            Self::Pmi => "PMI",
        }
    }

    pub(super) const fn rank_variable(self) -> &'static str {
        match self {
            Self::Torchrun => "RANK",
            Self::Slurm => "SLURM_PROCID",
            Self::OpenMpi => "OMPI_COMM_WORLD_RANK",
            Self::Pmi => "PMI_RANK",
        }
    }

    pub(super) const fn world_size_variable(self) -> &'static str {
        match self {
            Self::Torchrun => "WORLD_SIZE",
            Self::Slurm => "SLURM_NTASKS",
            Self::OpenMpi => "OMPI_COMM_WORLD_SIZE",
            Self::Pmi => "PMI_SIZE",
        }
    }

    pub(super) const fn local_rank_variable(self) -> &'static str {
        match self {
            Self::Torchrun => "LOCAL_RANK",
            Self::Slurm => "SLURM_LOCALID",
            Self::OpenMpi => "OMPI_COMM_WORLD_LOCAL_RANK",
            Self::Pmi => "MPI_LOCALRANKID",
        }
    }

    /// SLURM has a list instead, see `slurm.rs`.
    pub(super) const fn local_world_size_variable(self) -> Option<&'static str> {
        match self {
            Self::Torchrun => Some("LOCAL_WORLD_SIZE"),
            Self::Slurm => None,
            Self::OpenMpi => Some("OMPI_COMM_WORLD_LOCAL_SIZE"),
            Self::Pmi => Some("MPI_LOCALNRANKS"),
        }
    }

    /// Where a name of the job is found, the best first.
    pub(super) const fn job_variables(self) -> &'static [&'static str] {
        match self {
            Self::Torchrun => &["BURN_SHARD_JOB_ID", "TORCHELASTIC_RUN_ID"],
            Self::Slurm => &["BURN_SHARD_JOB_ID"],
            Self::OpenMpi => &["BURN_SHARD_JOB_ID", "PMIX_NAMESPACE", "SLURM_JOB_ID"],
            Self::Pmi => &["BURN_SHARD_JOB_ID", "SLURM_JOB_ID"],
        }
    }
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
