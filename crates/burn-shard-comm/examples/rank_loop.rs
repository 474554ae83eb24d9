//! One rank that joins from its environment and repeats collectives until it is done or something fails.
//!
//! ```sh
//! burn-shard launch -n 4 -- target/debug/examples/rank_loop [ROUNDS [NUMEL]]
//! ```
//!
//! Prints `ready` once the group is there, `done` at the end, `failed: ...` with the error and exit code 1
//! otherwise. Without rounds it goes on until it is killed. Every result is checked.
#![allow(
    clippy::print_stdout,
    reason = "a program for tests and for trying things out"
)]

use std::{io::Write, process::ExitCode, sync::Arc};

use burn_shard_comm::{Error, OwnedSegments, ProcessGroup, ReduceOp, shard_numel};

fn main() -> ExitCode {
    let mut arguments = std::env::args()
        .skip(1)
        .map(|argument| argument.parse::<usize>());
    let (rounds, numel) = match (arguments.next().transpose(), arguments.next().transpose()) {
        (Ok(rounds), Ok(numel)) => (rounds.unwrap_or(usize::MAX), numel.unwrap_or(100_003)),
        (Err(error), _) | (_, Err(error)) => {
            println!("failed: {error} (arguments: ROUNDS NUMEL)");
            return ExitCode::FAILURE;
        }
    };
    match run(rounds, numel) {
        Ok(()) => {
            println!("done");
            ExitCode::SUCCESS
        }
        Err(error) => {
            println!("failed: {error}");
            ExitCode::FAILURE
        }
    }
}

pub(crate) fn run(rounds: usize, numel: usize) -> Result<(), Error> {
    let group = ProcessGroup::from_env()?;
    println!("ready: rank {} of {}", group.rank(), group.world_size());
    // A launcher's pipe is not flushed at the end of a line.
    let _flushed = std::io::stdout().flush();
    for round in 0..rounds {
        collectives(&group, round, numel)?;
    }
    group.barrier()
}

/// One round of all collectives, with results that can be told without the other ranks.
fn collectives(group: &ProcessGroup, round: usize, numel: usize) -> Result<(), Error> {
    let (rank, world_size) = (group.rank(), group.world_size());
    let value = |rank: usize, index: usize| (round % 64 + rank + index % 128) as f32;
    let sum = |index: usize| (0..world_size).map(|rank| value(rank, index)).sum::<f32>();

    let input: Vec<f32> = (0..numel).map(|index| value(rank, index)).collect();
    let mut buffer = input.clone();
    group.all_reduce(&mut buffer, ReduceOp::Sum)?;
    assert!(
        buffer
            .iter()
            .enumerate()
            .all(|(index, &found)| found == sum(index))
    );

    let shard = shard_numel(numel, world_size);
    let mut own = OwnedSegments(vec![vec![0.0f32; shard]]);
    let work = group
        .communicator()
        .reduce_scatter(Arc::new(OwnedSegments(vec![input])), ReduceOp::Sum)?;
    work.finish(&mut own)?;

    let mut gathered = vec![0.0f32; numel];
    group.all_gather(&own.0[0], &mut gathered)?;
    assert_eq!(gathered, buffer);

    let root = round % world_size;
    let mut buffer = [value(rank, 0)];
    group.broadcast(&mut buffer, root)?;
    assert_eq!(buffer, [value(root, 0)]);
    group.barrier()
}
