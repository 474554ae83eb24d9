//! `--launch N`: this program starts itself, once per rank.

use std::ffi::OsString;

use crate::cli::Options;
use crate::error::Error;
use crate::paths;

/// Starts this program as `ranks` processes of this machine, and waits for all. Returns what to exit
/// with: 0, or as the first rank that failed.
///
/// # Errors
/// What can be refused by looking at the options, so that it is said once; or ranks could not be
/// started.
pub fn launch(options: &Options, ranks: usize) -> Result<u8, Error> {
    // Not the device: a launcher that opened a GPU would keep memory of it.
    options.run()?;
    paths::check(options)?;
    let program = std::env::current_exe().map_err(Error::NoProgram)?;
    let mut job = burn_shard_launch::Options::new(program, ranks);
    job.args = without_launch(std::env::args_os().skip(1));
    job.restarts.max = options.max_restarts.unwrap_or(0);
    Ok(burn_shard_launch::launch(&job)?.exit_code())
}

/// The arguments of a rank. The number is an argument of its own, or the end of the option's.
fn without_launch(arguments: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut kept = Vec::new();
    let mut arguments = arguments;
    while let Some(argument) = arguments.next() {
        let bytes = argument.as_encoded_bytes();
        let (name, has_value) = match bytes.iter().position(|&byte| byte == b'=') {
            Some(end) => (&bytes[..end], true),
            None => (bytes, false),
        };
        if !OF_LAUNCHER.contains(&name) {
            kept.push(argument);
        } else if !has_value {
            arguments.next();
        }
    }
    kept
}

/// Options that ranks do not get.
const OF_LAUNCHER: [&[u8]; 2] = [b"--launch", b"--max-restarts"];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_get_all_arguments_but_the_launch() {
        for launch in [
            &["--launch", "2"][..],
            &["--launch=2"],
            &["--max-restarts=1", "--launch", "2"],
            &["--launch=2", "--max-restarts", "1"],
        ] {
            let all = [&["--steps", "3"], launch, &["--corpus", "2"]].concat();
            let kept = without_launch(all.into_iter().map(OsString::from));
            assert_eq!(kept, ["--steps", "3", "--corpus", "2"]);
        }
    }
}
