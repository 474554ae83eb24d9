//! How long collectives of this library take over MPI, beside MPI's own, in one run.
//!
//! `mpirun -n 2 collectives [rounds]`; for OpenMPI. MPI's reductions do without a copy of the input
//! and may add in any order. In place, MPI gathers into a buffer that has this rank's shard already; ours
//! keeps shards apart from what is gathered, and copies this rank's own, as MPI does not in place.
//! `exchange` is what both are made of: one message to the next rank, one from the one before.
#![allow(clippy::print_stdout, reason = "it is a report")]

use std::{
    error::Error,
    ffi::{c_int, c_void},
    ptr,
    sync::{Arc, atomic::AtomicBool},
    time::{Duration, Instant},
};

use burn_shard_comm::{Limit, OwnedSegments, Pairwise, ProcessGroup, ReduceOp, Transport};
use burn_shard_mpi::MpiTransport;
use mpi_sys as sys;

const LONG: Duration = Duration::from_secs(300);
const MIB: usize = 1 << 20;
/// `MPI_IN_PLACE` of OpenMPI, which the bindings leave out.
const IN_PLACE: *const c_void = ptr::without_provenance(1);

#[derive(Clone, Copy)]
enum What {
    Exchange,
    AllGather,
    AllGatherInPlace,
    ReduceScatter,
    AllReduce,
}

impl What {
    const ALL: [(Self, &str); 5] = [
        (Self::Exchange, "exchange"),
        (Self::AllGather, "all_gather"),
        (Self::AllGatherInPlace, "all_gather, MPI's in place"),
        (Self::ReduceScatter, "reduce_scatter"),
        (Self::AllReduce, "all_reduce"),
    ];
}

fn main() -> Result<(), Box<dyn Error>> {
    let rounds = std::env::args().nth(1).map_or(Ok(7), |text| text.parse())?;
    let transport = MpiTransport::init()?;
    let (rank, ranks) = (transport.rank(), transport.world_size());
    if rank == 0 {
        println!(
            "{ranks} ranks, the fastest of {rounds} rounds; {}",
            transport.single_copy()
        );
        println!("| MiB | | ours ms | MPI's ms | MPI's / ours |\n|---|---|---|---|---|");
    }
    leave(transport);
    for bytes in [MIB, 16 * MIB, 256 * MIB] {
        // A multiple of the ranks, for the calls of MPI.
        let numel = (bytes / 4).next_multiple_of(ranks);
        let mut best = [[f64::INFINITY; 2]; What::ALL.len()];
        for _ in 0..rounds {
            for ((what, _), best) in What::ALL.iter().zip(&mut best) {
                best[0] = best[0].min(ours(*what, numel)?);
                // Only one thread may call MPI: the group has left.
                best[1] = best[1].min(native(*what, numel, rank, ranks)?);
            }
        }
        for ((_, name), [ours, native]) in What::ALL.iter().zip(best) {
            if rank == 0 {
                let ratio = native / ours;
                println!(
                    "| {} | {name} | {ours:.2} | {native:.2} | {ratio:.2} |",
                    bytes / MIB
                );
            }
        }
    }
    Ok(())
}

fn leave(mut transport: MpiTransport) {
    let never = AtomicBool::new(false);
    let limit = Limit {
        at: Instant::now() + LONG,
        cancelled: &never,
    };
    transport.farewell(&[], limit);
}

fn ms(start: Instant) -> f64 {
    start.elapsed().as_secs_f64() * 1e3
}

/// The milliseconds of the slowest rank, nearly: all begin together.
fn ours(what: What, numel: usize) -> Result<f64, Box<dyn Error>> {
    let mut transport = MpiTransport::init()?;
    let ranks = transport.world_size();
    if matches!(what, What::Exchange) {
        // The first one meets the others.
        exchange(&mut transport, 4)?;
        let took = exchange(&mut transport, numel * 4 / ranks)?;
        leave(transport);
        return Ok(took);
    }
    let group = ProcessGroup::new(Arc::new(Pairwise::new(transport, LONG)));
    let communicator = group.communicator();
    let full = vec![1.0f32; numel];
    let mut part = OwnedSegments(vec![vec![2.0f32; numel / ranks]]);
    let mut whole = OwnedSegments(vec![vec![2.0f32; numel]]);
    let shard = Arc::new(part.clone());
    let full = Arc::new(OwnedSegments(vec![full]));
    let mut took = 0.0;
    // The first time, memory is new to both.
    for _ in 0..2 {
        group.barrier()?;
        let start = Instant::now();
        match what {
            What::Exchange => {}
            What::AllGather | What::AllGatherInPlace => {
                communicator
                    .all_gather(Arc::clone(&shard) as _, &[numel])?
                    .finish(&mut whole)?;
            }
            What::ReduceScatter => communicator
                .reduce_scatter(Arc::clone(&full) as _, ReduceOp::Sum)?
                .finish(&mut part)?,
            What::AllReduce => communicator
                .all_reduce(Arc::clone(&full) as _, ReduceOp::Sum)?
                .finish(&mut whole)?,
        }
        took = ms(start);
    }
    Ok(took)
}

fn exchange(transport: &mut MpiTransport, numel_bytes: usize) -> Result<f64, Box<dyn Error>> {
    let never = AtomicBool::new(false);
    let limit = Limit {
        at: Instant::now() + LONG,
        cancelled: &never,
    };
    let (rank, ranks) = (transport.rank(), transport.world_size());
    let (to, from) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    let sent = vec![1u8; numel_bytes];
    let mut received = vec![2u8; numel_bytes];
    let start = Instant::now();
    let done = transport.exchange(to, &sent, from, &mut received, limit);
    let took = ms(start);
    done.map_err(|fault| format!("{fault:?}"))?;
    Ok(took)
}

#[expect(
    clippy::multiple_unsafe_ops_per_block,
    reason = "constants; and one call of several"
)]
fn native(what: What, numel: usize, rank: usize, ranks: usize) -> Result<f64, Box<dyn Error>> {
    let share = numel / ranks;
    let input = vec![1.0f32; numel];
    let mut output = vec![2.0f32; numel];
    let (from, to) = (
        input.as_ptr().cast::<c_void>(),
        output.as_mut_ptr().cast::<c_void>(),
    );
    let (count, all) = (c_int::try_from(share)?, c_int::try_from(numel)?);
    let (next, previous) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    let (next, previous) = (c_int::try_from(next)?, c_int::try_from(previous)?);
    // SAFETY: constants of the library.
    let (world, float) = unsafe { (sys::RSMPI_COMM_WORLD, sys::RSMPI_FLOAT) };
    // SAFETY: constants of the library.
    let (sum, status) = unsafe { (sys::RSMPI_SUM, sys::RSMPI_STATUS_IGNORE) };
    let mut took = 0.0;
    for _ in 0..2 {
        // SAFETY: MPI is initialized, and no group has a thread that calls it.
        unsafe { sys::MPI_Barrier(world) };
        let start = Instant::now();
        // SAFETY: as above; both buffers have `numel` elements, `share` for each rank.
        let code = unsafe {
            match what {
                What::Exchange => sys::MPI_Sendrecv(
                    from, count, float, next, 0, to, count, float, previous, 0, world, status,
                ),
                What::AllGather => sys::MPI_Allgather(from, count, float, to, count, float, world),
                What::AllGatherInPlace => {
                    sys::MPI_Allgather(IN_PLACE, 0, float, to, count, float, world)
                }
                What::ReduceScatter => {
                    sys::MPI_Reduce_scatter_block(from, to, count, float, sum, world)
                }
                What::AllReduce => sys::MPI_Allreduce(from, to, all, float, sum, world),
            }
        };
        took = ms(start);
        if code != 0 {
            return Err(format!("MPI returned {code}").into());
        }
    }
    Ok(took)
}
