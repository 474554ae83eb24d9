//! The command `burn-shard`.

use std::process::ExitCode;

#[cfg(unix)]
mod checkpoint_command;
#[cfg(unix)]
mod cli;
#[cfg(unix)]
mod estimate;
#[cfg(unix)]
mod estimate_command;
#[cfg(unix)]
mod report;

#[cfg(unix)]
fn main() -> ExitCode {
    cli::run()
}

/// Process groups and signals are what a launch is made of.
#[cfg(not(unix))]
fn main() -> ExitCode {
    eprintln!(
        "burn-shard launch: processes are launched on Unix only (run ranks as threads, ProcessGroup::spawn, or start each process with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT set)"
    );
    ExitCode::FAILURE
}
