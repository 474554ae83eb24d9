//! Memory traffic of the kernels beside that of the machine, as ratios within one run.
//!
//! `cargo run --release -p burn-shard-kernel-checks --features cpu -- [runtime] [million elements] [steps]`
//!
//! Everything is measured in turns, so that a neighbour that is noisy for a while hits all alike. Each
//! line has the median and the best of its rounds, and the ratios of both to those of the first line:
//! on a machine that does nothing else they agree.

#![allow(clippy::print_stdout, reason = "printing is what it is for")]
#![allow(clippy::cast_precision_loss, reason = "figures for people")]

use std::cell::RefCell;
use std::time::Instant;

use burn_shard_kernel_checks::{client, is_exact};
use burn_shard_kernels::cube::{
    self, AdamBuffers, Dtype, FlatBuffer, NormBuffers, Slot, StepControl, Strategy, StridedTensor,
};
use burn_shard_kernels::{AdamHyper, WeightDecay};
use cubecl::client::Client;
use rayon::prelude::*;

const ROUNDS: usize = 21;
const CHUNK_NUMEL: usize = 64 * 1024;

/// One thing to measure: its name, the bytes it moves, and the work, finished when it returns.
struct Case<'a> {
    name: String,
    bytes: usize,
    work: Box<dyn FnMut() + 'a>,
}

impl<'a> Case<'a> {
    fn new(name: impl Into<String>, bytes: usize, work: impl FnMut() + 'a) -> Self {
        Self {
            name: name.into(),
            bytes,
            work: Box::new(work),
        }
    }
}

/// Measures all `cases` in turns, and prints each as a fraction of the first.
fn compare(title: &str, mut cases: Vec<Case<'_>>) {
    println!("\n{title}");
    let mut rates: Vec<Vec<f64>> = vec![Vec::new(); cases.len()];
    let mut first_ms = Vec::new();
    for case in &mut cases {
        let start = Instant::now();
        (case.work)();
        first_ms.push(start.elapsed().as_secs_f64() * 1e3);
    }
    for _ in 0..ROUNDS {
        for (case, rates) in cases.iter_mut().zip(&mut rates) {
            let start = Instant::now();
            (case.work)();
            rates.push(case.bytes as f64 / start.elapsed().as_secs_f64() / 1e9);
        }
    }
    let mut reference = None;
    for ((case, rates), first_ms) in cases.iter().zip(&mut rates).zip(first_ms) {
        rates.sort_by(f64::total_cmp);
        let (median, best) = (rates[ROUNDS / 2], rates[ROUNDS - 1]);
        let (median_0, best_0) = *reference.get_or_insert((median, best));
        println!(
            "  {:42} {median:6.2} {best:6.2} GB/s   {:.2} {:.2}   first time {first_ms:.0} ms",
            case.name,
            median / median_0,
            best / best_0
        );
    }
}

fn main() {
    let mut args = std::env::args().skip(1);
    let runtime = args.next().unwrap_or_else(|| "cpu".into());
    let million: usize = args.next().map_or(32, |arg| arg.parse().expect("a number"));
    let client = client(&runtime);
    println!(
        "{runtime} ({}), {million} million elements; median and best of {ROUNDS}, their ratios to the first line",
        client.properties().identity.name
    );
    adamw(&client, million * 1_000_000);
    if args.next().as_deref() == Some("steps") {
        return;
    }
    // BERT: matrices, their biases, a few odd ones.
    let sizes: Vec<usize> = [768 * 768, 768, 3072 * 768, 3072, 1000, 77]
        .into_iter()
        .cycle()
        .take(100)
        .collect();
    packing(&client, "100 tensors of a BERT", &sizes);
    packing(&client, "2000 tensors of 1024 elements", &[1024; 2000]);
}

fn buffer(client: &Client, numel: usize, dtype: Dtype) -> FlatBuffer {
    let bytes = numel * dtype.size_bytes();
    let handle = client.create_from_slice(&vec![0u8; bytes.next_multiple_of(512)]);
    FlatBuffer::new(client, &handle, 0, numel, dtype).expect("a fresh buffer should be fine")
}

fn sync(client: &Client) {
    cubecl::future::block_on(client.sync()).expect("the device should answer");
}

fn adamw(client: &Client, numel: usize) {
    let hyper = AdamHyper {
        weight_decay: WeightDecay::Decoupled(0.01),
        ..AdamHyper::default()
    };
    let on_host = is_exact(client);
    // Shared, since which pages one gets is worth a tenth either way.
    let host: [RefCell<Vec<f32>>; 4] =
        std::array::from_fn(|_| RefCell::new(vec![0.5; if on_host { numel } else { 0 }]));
    let [param, moment_1, moment_2, grad, other] =
        std::array::from_fn(|_| buffer(client, numel, Dtype::F32));
    let half = Dtype::BF16.is_supported(client).then(|| {
        let [grad, copy] = std::array::from_fn(|_| buffer(client, numel, Dtype::BF16));
        (grad, copy)
    });
    let [x, y, z] = std::array::from_fn(|_| buffer(client, 1, Dtype::F32));
    let step = |grad: &FlatBuffer, copy: Option<&FlatBuffer>| {
        let buffers = AdamBuffers {
            param: &param,
            grad,
            moment_1: &moment_1,
            moment_2: &moment_2,
            copy,
        };
        let ranges = std::slice::from_ref(&(0..numel)).to_vec();
        let control = StepControl::default();
        cube::adamw_step(client, &buffers, &control, &ranges, 2, 1e-9, &hyper)
            .expect("the step should be accepted");
        sync(client);
    };
    let mut cases = Vec::new();
    if on_host {
        cases.push(Case::new("triad, 4 streams, host", 28 * numel, || {
            let [mut a, b, mut c, mut d] = host.each_ref().map(RefCell::borrow_mut);
            triad(&mut a, &b, &mut c, &mut d);
        }));
        cases.push(Case::new("adamw, host", 28 * numel, || {
            let [mut a, b, mut c, mut d] = host.each_ref().map(RefCell::borrow_mut);
            burn_shard_kernels::adamw_step(&mut a, &b, &mut c, &mut d, 2, 1e-9, &hyper)
                .expect("the step should be accepted");
        }));
    } else {
        cases.push(Case::new("copy from buffer to buffer", 8 * numel, || {
            let tensor = [StridedTensor::of_flat(&grad)];
            let slot = [Slot {
                offset: 0,
                padded_numel: numel,
            }];
            cube::pack(client, &tensor, &other, &slot, 1.0, Strategy::PerTensor)
                .expect("the copy should be accepted");
            sync(client);
        }));
    }
    cases.push(Case::new("adamw, f32", 28 * numel, || step(&grad, None)));
    if let Some((grad, copy)) = &half {
        let name = "adamw, bf16 gradient and copy";
        cases.push(Case::new(name, 28 * numel, || step(grad, Some(copy))));
    }
    cases.push(Case::new("norms", 4 * numel, || {
        let out = NormBuffers {
            sum_of_squares: &x,
            max_abs: &y,
            found_inf: &z,
        };
        cube::norms(client, &[&grad], &out).expect("the norms should be accepted");
        sync(client);
    }));
    compare("steps", cases);
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

fn packing(client: &Client, title: &str, sizes: &[usize]) {
    let numel: usize = sizes.iter().sum();
    let mut slots = Vec::new();
    let mut end = 0;
    for size in sizes {
        let padded_numel = size.next_multiple_of(128);
        slots.push(Slot {
            offset: end,
            padded_numel,
        });
        end += padded_numel;
    }
    let sources: Vec<_> = sizes
        .iter()
        .map(|&numel| buffer(client, numel, Dtype::F32))
        .collect();
    let tensors: Vec<_> = sources.iter().map(StridedTensor::of_flat).collect();
    let flat = buffer(client, end, Dtype::F32);
    let low = Dtype::BF16
        .is_supported(client)
        .then(|| buffer(client, end, Dtype::BF16));
    let host: Vec<Vec<f32>> = sizes.iter().map(|&numel| vec![1.0; numel]).collect();
    let mut host_flat = vec![0f32; end];
    let mut host_flat_2 = vec![0f32; end];

    let (slots, tensors) = (&slots, &tensors);
    let copied = 8 * numel;
    let mut cases = vec![
        Case::new("memcpy, host, all threads", copied, || {
            let mut rest = &mut host_flat_2[..];
            let mut parts = Vec::new();
            for (from, slot) in host.iter().zip(slots) {
                let (part, tail) = rest.split_at_mut(slot.padded_numel);
                parts.push((from, part));
                rest = tail;
            }
            parts.into_par_iter().for_each(|(from, part)| {
                part[..from.len()].copy_from_slice(from);
            });
        }),
        Case::new("memcpy, host, 1 thread", copied, || {
            for (from, slot) in host.iter().zip(slots) {
                host_flat[slot.offset..slot.offset + from.len()].copy_from_slice(from);
            }
        }),
    ];
    let most = (client.properties().hardware.max_bindings as usize).saturating_sub(2);
    for strategy in [
        Strategy::PerTensor,
        Strategy::Batched(4),
        Strategy::Batched(8),
        Strategy::Batched(16),
        Strategy::Batched(64),
    ] {
        if matches!(strategy, Strategy::Batched(count) if count > most) {
            continue;
        }
        let (flat, low) = (&flat, &low);
        cases.push(Case::new(
            format!("pack, {strategy:?}"),
            copied,
            move || {
                cube::pack(client, tensors, flat, slots, 1.0, strategy)
                    .expect("it should be accepted");
                sync(client);
            },
        ));
        cases.push(Case::new(
            format!("unpack, {strategy:?}"),
            copied,
            move || {
                cube::unpack(client, flat, slots, tensors, 1.0, strategy)
                    .expect("it should be accepted");
                sync(client);
            },
        ));
        if let Some(low) = low {
            let name = format!("pack to bf16, scaled, {strategy:?}");
            cases.push(Case::new(name, 6 * numel, move || {
                cube::pack(client, tensors, low, slots, 0.5, strategy)
                    .expect("it should be accepted");
                sync(client);
            }));
        }
    }
    compare(title, cases);
}
