//! Memory traffic of the fused AdamW step beside that of a triad with as many streams.
//!
//! `cargo run --release -p burn-shard-kernels --example host_bandwidth -- [million elements]`

#![allow(clippy::print_stdout, reason = "printing is what it is for")]

use std::time::Instant;

use burn_shard_kernels::{AdamHyper, WeightDecay, adamw_step};
use rayon::prelude::*;

/// Four `f32` read and three written; every line written was read, so nothing else moves.
const BYTES_PER_ELEMENT: usize = 28;
const CHUNK_NUMEL: usize = 64 * 1024;
const REPEATS: usize = 15;

fn main() {
    let million = std::env::args()
        .nth(1)
        .and_then(|arg| arg.parse().ok())
        .unwrap_or(32);
    let numel = million * 1_000_000;
    let mut streams: [Vec<f32>; 4] = std::array::from_fn(|_| vec![0.5; numel]);
    let hyper = AdamHyper {
        weight_decay: WeightDecay::Decoupled(0.01),
        ..AdamHyper::default()
    };
    println!("{million} million elements, best of {REPEATS}");
    for threads in [1, 2] {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .expect("a pool of threads should start");
        // Interleaved, so that a noisy neighbour hits both.
        let (mut best_triad, mut best_adamw) = (0f64, 0f64);
        for time in 1..=REPEATS {
            let [a, b, c, d] = &mut streams;
            best_triad = best_triad.max(gb_per_s(numel, || pool.install(|| triad(a, b, c, d))));
            best_adamw = best_adamw.max(gb_per_s(numel, || {
                pool.install(|| adamw_step(a, b, c, d, time, 1e-9, &hyper))
                    .expect("the step should be accepted");
            }));
        }
        println!(
            "threads {threads}: triad {best_triad:5.1} GB/s, adamw {best_adamw:5.1} GB/s, \
             ratio {:.2}",
            best_adamw / best_triad
        );
    }
}

#[allow(clippy::cast_precision_loss, reason = "figures for people")]
fn gb_per_s(numel: usize, run: impl FnOnce()) -> f64 {
    let start = Instant::now();
    run();
    (numel * BYTES_PER_ELEMENT) as f64 / start.elapsed().as_secs_f64() / 1e9
}

/// Reads four streams and writes three of them, with hardly any arithmetic.
fn triad(a: &mut [f32], b: &[f32], c: &mut [f32], d: &mut [f32]) {
    a.par_chunks_mut(CHUNK_NUMEL)
        .zip(b.par_chunks(CHUNK_NUMEL))
        .zip(
            c.par_chunks_mut(CHUNK_NUMEL)
                .zip(d.par_chunks_mut(CHUNK_NUMEL)),
        )
        .for_each(|((a, b), (c, d))| {
            for ((a, &b), (c, d)) in a.iter_mut().zip(b).zip(c.iter_mut().zip(d)) {
                *a += b * 1e-9;
                *c += b * 1e-9;
                *d += b * 1e-9;
            }
        });
}
