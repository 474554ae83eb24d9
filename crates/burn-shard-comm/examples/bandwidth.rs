//! Measures the collectives over ranks that are threads.
//!
//! `cargo run --release -p burn-shard-comm --example bandwidth -- [world_size] [MiB] [pairwise]`
//!
//! With `pairwise`, the ranks exchange bytes through pipes in memory instead of reading each other's.
//!
//! Prints the bytes of the full buffer per second: of the output for `all_gather`, of the input
//! otherwise. `memcpy` is a plain copy of that buffer on every rank at once, for comparison.
#![expect(clippy::print_stdout, reason = "the table is the purpose")]

use std::{
    hint::black_box,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use burn_shard_comm::{
    Element, Error, OwnedSegments, Pairwise, ProcessGroup, ReduceOp, SegmentLayout, SlicesMut,
    conformance::MemoryTransport, shard_numel,
};

const ROUNDS: usize = 30;

/// Median time of `work`, all ranks starting together.
fn median(
    group: &ProcessGroup,
    mut work: impl FnMut() -> Result<(), Error>,
) -> Result<Duration, Error> {
    let mut times = Vec::with_capacity(ROUNDS);
    for _ in 0..ROUNDS {
        group.barrier()?;
        let start = Instant::now();
        work()?;
        group.barrier()?;
        times.push(start.elapsed());
    }
    times.sort_unstable();
    Ok(times[ROUNDS / 2])
}

fn measure<T: Element>(
    group: &ProcessGroup,
    numel: usize,
    one: T,
) -> Result<Vec<(String, Duration)>, Error> {
    let communicator = group.communicator();
    let full = Arc::new(OwnedSegments(vec![vec![one; numel]]));
    let shard = Arc::new(OwnedSegments(vec![vec![
        one;
        shard_numel(
            numel,
            group.world_size()
        )
    ]]));
    let mut full_out = OwnedSegments(vec![vec![one; numel]]);
    let mut shard_out = OwnedSegments(shard.0.clone());
    let mut rows = Vec::new();
    rows.push((
        "memcpy".to_owned(),
        median(group, || {
            full_out.0[0].copy_from_slice(black_box(&full.0[0]));
            Ok(())
        })?,
    ));
    rows.push((
        "all_gather".to_owned(),
        median(group, || {
            communicator
                .all_gather(shard.clone(), &[numel])?
                .finish(&mut full_out)
        })?,
    ));
    for op in [ReduceOp::Sum, ReduceOp::Mean] {
        rows.push((
            format!("reduce_scatter {op}"),
            median(group, || {
                communicator
                    .reduce_scatter(full.clone(), op)?
                    .finish(&mut shard_out)
            })?,
        ));
        rows.push((
            format!("all_reduce {op}"),
            median(group, || {
                communicator
                    .all_reduce(full.clone(), op)?
                    .finish(&mut full_out)
            })?,
        ));
    }
    rows.push((
        "broadcast".to_owned(),
        median(group, || {
            let mut output = SlicesMut(vec![&mut full_out.0[0][..]]);
            let layout = SegmentLayout::of(&*full);
            if group.rank() == 0 {
                communicator
                    .broadcast(Some(full.clone()), layout, 0)?
                    .wait()
            } else {
                communicator.broadcast(None, layout, 0)?.finish(&mut output)
            }
        })?,
    ));
    Ok(rows)
}

fn print(world_size: usize, numel: usize, dtype: &str, rows: &[(String, Duration)], bytes: usize) {
    for (name, time) in rows {
        let rate = bytes as f64 / time.as_secs_f64() / 1e9;
        println!(
            "{world_size} ranks {numel:>9} {dtype:<4} {name:<20} {time:>10.2?} {rate:>7.2} GB/s"
        );
    }
}

fn main() -> Result<(), Error> {
    let mut arguments = std::env::args().skip(1);
    let mut next = |default| {
        arguments
            .next()
            .and_then(|text| text.parse().ok())
            .unwrap_or(default)
    };
    let (world_size, mib): (usize, usize) = (next(2), next(64));
    let bytes = mib << 20;
    let run = |group: ProcessGroup| -> Result<_, Error> {
        let single = measure(&group, bytes / 4, 1.0f32)?;
        let half = measure(&group, bytes / 2, half::bf16::ONE)?;
        let half_ieee = measure(&group, bytes / 2, half::f16::ONE)?;
        let small = median(&group, || {
            group.all_reduce(&mut [1.0f32; 256], ReduceOp::Sum)
        })?;
        Ok((single, half, half_ieee, small))
    };
    let results: Vec<Result<_, Error>> = if std::env::args().any(|text| text == "pairwise") {
        thread::scope(|scope| {
            let ranks: Vec<_> = MemoryTransport::group_with_pipes(world_size, 256 << 10)
                .into_iter()
                .map(|transport| {
                    let pairwise = Pairwise::new(transport, Duration::from_secs(60));
                    scope.spawn(|| run(ProcessGroup::new(Arc::new(pairwise))))
                })
                .collect();
            let joined = ranks.into_iter().map(thread::ScopedJoinHandle::join);
            joined.collect::<Result<_, _>>()
        })
        .expect("no rank should panic")
    } else {
        ProcessGroup::spawn(world_size, run)?
    };
    for result in results.into_iter().take(1) {
        let (single, half, half_ieee, small) = result?;
        print(world_size, bytes / 4, "f32", &single, bytes);
        print(world_size, bytes / 2, "bf16", &half, bytes);
        print(world_size, bytes / 2, "f16", &half_ieee, bytes);
        println!("{world_size} ranks       256 f32  all_reduce sum       {small:>10.2?}");
    }
    Ok(())
}
