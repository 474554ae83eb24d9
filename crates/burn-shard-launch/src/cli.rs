//! The command line of `burn-shard`.
#![allow(clippy::doc_markdown, reason = "the comments are what --help prints")]

use std::{
    ffi::OsString,
    net::IpAddr,
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use burn_shard_comm::flight::{Dump, FlightReport};
use burn_shard_launch::{LaunchError, Master, Nodes, Options, Restarts, launch};
use burn_shard_nccl::doctor::{Finding, Report as Machine};
use clap::{Args, Parser, Subcommand};

use crate::{
    checkpoint_command::{self, CheckpointCommand},
    estimate_command::{self, Estimate},
    report,
};

/// Tools for sharded training with Burn.
#[derive(Parser)]
#[command(name = "burn-shard", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Starts one process per rank on this host, and ends them together.
    ///
    /// Each process finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and
    /// BURN_SHARD_TOKEN in its environment, and RAYON_NUM_THREADS (cores by ranks) unless it is set. If
    /// one fails the others get SIGTERM, and SIGKILL after the time of grace. Unix only.
    Launch(Launch),
    /// Looks at checkpoints, verifies them, and writes them in other forms.
    #[command(subcommand)]
    Checkpoint(CheckpointCommand),
    /// Says what a model takes of memory and time on some GPUs, by formula, and which strategy to take.
    ///
    /// The formulas are those of docs/performance.md; nothing is measured. `Estimate` of the library counts a given
    /// module exactly.
    Estimate(Estimate),
    /// Says which rank of a failed job stopped where, and who waited for whom.
    ///
    /// Reads what ranks have written into the directory that `launch --flight-recorder`, or the variable
    /// BURN_SHARD_FLIGHT_RECORDER, has named: the last 1,000 collectives of each rank in each of its groups. If the job
    /// was started again, the last attempt counts.
    FlightRecorder {
        /// The directory.
        directory: PathBuf,
    },
    /// Says what of this machine training needs is there, and what each lack means.
    ///
    /// Looks for the driver, its devices and whether they reach each other's memory, libdevice, NCCL, MPI, cores,
    /// huge pages, /dev/shm, and the limits of locked memory and open files, as this process sees them. Exits with 0
    /// if nothing is missing, and with 1 if anything is: a machine without GPUs, too, trains on its CPU. On systems
    /// other than Linux it looks for cores only, says so, and exits with 1.
    Doctor,
}

#[derive(Args)]
struct Launch {
    /// Ranks on this host.
    #[arg(short = 'n', long = "nproc", value_name = "RANKS")]
    local_world_size: usize,
    /// Hosts of the job; start the same command on each.
    #[arg(long, default_value_t = 1)]
    nnodes: usize,
    /// Number of this host, from 0.
    #[arg(long, default_value_t = 0)]
    node_rank: usize,
    /// Where ranks meet: the first host, and a port that is free there. One host: any free port.
    #[arg(long, value_name = "HOST:PORT")]
    master: Option<Master>,
    /// Address of this host that ranks may listen on (0.0.0.0: all). Without it: loopback only.
    #[arg(long, value_name = "ADDRESS")]
    bind: Option<IpAddr>,
    /// A file with the secret of the job, which nobody else may read. Otherwise BURN_SHARD_TOKEN, or on
    /// one host a random one.
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// Name of the job, the same on all hosts. Otherwise BURN_SHARD_JOB_ID.
    #[arg(long)]
    job_id: Option<String>,
    /// Seconds between SIGTERM and SIGKILL.
    #[arg(long, value_name = "SECONDS", default_value_t = 5)]
    grace: u64,
    /// Starts all ranks again after a failure, at most so many times. Ranks find what they have saved by
    /// themselves, and in BURN_SHARD_RESTART_COUNT which start this is. One host only.
    #[arg(long, value_name = "RESTARTS", default_value_t = 0)]
    max_restarts: usize,
    /// A rank that was killed by a signal is not replaced at a restart, down to so many ranks. Without it: always
    /// as many as before.
    #[arg(long, value_name = "RANKS")]
    min_ranks: Option<usize>,
    /// Ranks write their last collectives there when their group fails or is left; `burn-shard flight-recorder`
    /// compares them. Otherwise BURN_SHARD_FLIGHT_RECORDER.
    #[arg(long, value_name = "DIR")]
    flight_recorder: Option<PathBuf>,
    /// The program and its arguments.
    #[arg(last = true, required = true, value_name = "PROGRAM")]
    command: Vec<OsString>,
}

/// Does what the command line says; what to exit with.
pub(crate) fn run() -> ExitCode {
    match Cli::parse().command {
        Command::Launch(arguments) => run_launch(arguments),
        Command::Checkpoint(command) => checkpoint_command::run(&command),
        Command::Estimate(options) => estimate_command::run(&options),
        Command::FlightRecorder { directory } => run_flight_recorder(&directory),
        Command::Doctor => run_doctor(),
    }
}

fn run_launch(arguments: Launch) -> ExitCode {
    let options = match arguments.options() {
        Ok(options) => options,
        Err(error) => {
            eprintln!("burn-shard launch: {error}");
            return ExitCode::from(2);
        }
    };
    match launch(&options) {
        Ok(outcome) => ExitCode::from(outcome.exit_code()),
        Err(error) => {
            eprintln!("burn-shard launch: {error}");
            ExitCode::from(LaunchError::exit_code(&error))
        }
    }
}

fn run_flight_recorder(directory: &Path) -> ExitCode {
    match Dump::read_all(directory) {
        Ok(dumps) => {
            let report = FlightReport::new(&dumps);
            report::print("flight-recorder", &format!("{report}\n"))
        }
        Err(error) => {
            eprintln!("burn-shard flight-recorder: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run_doctor() -> ExitCode {
    let machine = Machine::new();
    let printed = report::print("doctor", &machine.to_string());
    if machine.findings().iter().all(Finding::is_good) {
        return printed;
    }
    ExitCode::FAILURE
}

impl Launch {
    fn options(self) -> Result<Options, String> {
        let mut command = self.command.into_iter();
        let program = command.next().ok_or("no program")?;
        let mut options = Options::new(program, self.local_world_size);
        options.args = command.collect();
        options.nodes = Nodes {
            count: self.nnodes,
            rank: self.node_rank,
        };
        options.master = self.master;
        options.bind = self.bind;
        options.grace = Duration::from_secs(self.grace);
        options.restarts = Restarts {
            max: self.max_restarts,
            min_ranks: self.min_ranks,
        };
        options.flight_recorder = self.flight_recorder;
        options.token = match self.token_file {
            Some(file) => Some(token_from(&file)?),
            None => std::env::var_os("BURN_SHARD_TOKEN").filter(|token| !token.is_empty()),
        };
        let job_id = || std::env::var("BURN_SHARD_JOB_ID").ok();
        let job_id = self.job_id.or_else(job_id);
        options.job_id = job_id.filter(|job_id| !job_id.is_empty());
        Ok(options)
    }
}

#[cfg(unix)]
fn token_from(file: &Path) -> Result<OsString, String> {
    use std::{
        fs,
        os::unix::{ffi::OsStringExt, fs::PermissionsExt},
    };

    let name = file.display();
    let failed = |error: std::io::Error| format!("--token-file {name}: {error}");
    let mode = fs::metadata(file).map_err(failed)?.permissions().mode();
    if mode & 0o077 != 0 {
        return Err(format!(
            "--token-file {name}: others may read or write it, its mode is {:o} (chmod 600 {name})",
            mode & 0o777
        ));
    }
    let token = fs::read(file).map_err(failed)?.trim_ascii().to_vec();
    if token.is_empty() {
        return Err(format!(
            "--token-file {name} is empty (to make one: head -c 32 /dev/urandom | base64)"
        ));
    }
    Ok(OsString::from_vec(token))
}

/// Who may read a file is asked as Unix has it, and nothing is launched elsewhere.
#[cfg(not(unix))]
fn token_from(_file: &Path) -> Result<OsString, String> {
    Err(LaunchError::NotUnix.to_string())
}
