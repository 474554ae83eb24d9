//! What commands print when they have done what they were told.

use std::{
    io::{self, Write as _},
    process::ExitCode,
};

/// Prints `text` for the command `command`; a failure unless it is written, or nobody reads it.
pub(crate) fn print(command: &str, text: &str) -> ExitCode {
    match io::stdout().lock().write_all(text.as_bytes()) {
        Ok(()) => ExitCode::SUCCESS,
        // Nobody reads on: `burn-shard checkpoint inspect DIR | head`.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("burn-shard {command}: cannot write the report: {error}");
            ExitCode::FAILURE
        }
    }
}
