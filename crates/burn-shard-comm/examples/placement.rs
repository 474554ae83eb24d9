//! Prints where this process stands in its job, as a training program would log it.
//!
//! Run it as the training will be run, before the first training:
//! `srun -N 2 -n 8 target/release/examples/placement`.
#![allow(clippy::print_stdout, reason = "a program")]

use std::process::ExitCode;

use burn_shard_comm::Placement;

fn main() -> ExitCode {
    let vars = |name: &str| std::env::var_os(name);
    println!("{}", Placement::explain(vars));
    match Placement::from_vars(vars) {
        Ok(Some(_)) => ExitCode::SUCCESS,
        Ok(None) | Err(_) => ExitCode::FAILURE,
    }
}
