//! The command `burn-shard`.

use std::process::ExitCode;

mod checkpoint_command;
mod cli;
mod estimate;
mod estimate_command;
mod report;

fn main() -> ExitCode {
    cli::run()
}
