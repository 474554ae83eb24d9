//! The command `burn-shard`.

use std::process::ExitCode;

mod checkpoint_command;
mod cli;
mod report;

fn main() -> ExitCode {
    cli::run()
}
