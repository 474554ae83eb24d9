//! Norms on a device against `f64`.

#![allow(clippy::unwrap_used, reason = "a test ends at the first error")]
#![allow(
    clippy::cast_possible_truncation,
    reason = "f64 results are compared as f32"
)]

use burn_shard_kernel_checks::{Rng, download, dtypes, on_every_runtime, only_on, rounded, upload};
use burn_shard_kernels::cube::{Dtype, FlatBuffer, NormBuffers, clip_coefficient, norms};
use cubecl::client::Client;

on_every_runtime!(
    norms_are_those_of_f64_at_every_length,
    several_buffers_count_as_one,
    the_bits_are_the_same_from_run_to_run,
    one_value_that_is_not_finite_is_found_wherever_it_is,
    the_clip_coefficient_is_that_of_the_unscaled_norm,
);
// WGSL compilers may undo the compensation.
only_on!(cpu: small_terms_beside_large_ones_are_not_lost);
only_on!(cuda: small_terms_beside_large_ones_are_not_lost);

fn scalar(client: &Client) -> FlatBuffer {
    upload(client, &[9.0], Dtype::F32)
}

/// Sum of squares, largest magnitude, whether something was not finite.
fn run(client: &Client, buffers: &[&FlatBuffer]) -> [f32; 3] {
    let out = [scalar(client), scalar(client), scalar(client)];
    let named = NormBuffers {
        sum_of_squares: &out[0],
        max_abs: &out[1],
        found_inf: &out[2],
    };
    norms(client, buffers, &named).unwrap();
    std::array::from_fn(|i| download(client, &out[i])[0])
}

fn expected(values: &[f32]) -> (f64, f32) {
    let sum = values.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
    (sum, values.iter().fold(0f32, |most, x| most.max(x.abs())))
}

/// 2^-22, or what reassociation may lose over the longest run here.
fn tolerance(client: &Client) -> f64 {
    if client.name().contains("wgpu") {
        2f64.powi(-24) * 400.0
    } else {
        2f64.powi(-22)
    }
}

#[track_caller]
fn check(client: &Client, what: &str, values: &[f32], got: [f32; 3]) {
    let (sum, most) = expected(values);
    let off = (f64::from(got[0]) - sum).abs();
    assert!(
        off <= tolerance(client) * sum,
        "{what}: {} for {sum}",
        got[0]
    );
    assert_eq!((got[1], got[2]), (most, 0.0), "{what}");
}

fn norms_are_those_of_f64_at_every_length(client: &Client) {
    for dtype in dtypes(client) {
        for numel in [
            0,
            1,
            2,
            3,
            15,
            16,
            17,
            31,
            33,
            255,
            4099,
            65_536,
            300_007,
            1 << 20,
        ] {
            let values = rounded(&Rng(numel as u64 + 1).values(numel), dtype);
            let got = run(client, &[&upload(client, &values, dtype)]);
            check(client, &format!("{dtype:?} numel {numel}"), &values, got);
        }
    }
}

fn several_buffers_count_as_one(client: &Client) {
    let mut rng = Rng(5);
    let parts: Vec<_> = [70_000, 0, 1, 5000]
        .iter()
        .map(|&numel| rng.values(numel))
        .collect();
    let buffers: Vec<_> = parts
        .iter()
        .map(|part| upload(client, part, Dtype::F32))
        .collect();
    let got = run(client, &buffers.iter().collect::<Vec<_>>());
    check(client, "parts", &parts.concat(), got);
    assert_eq!(run(client, &[]), [0.0; 3]);
}

/// 16 large squares, then 496 of ones that are each less than half an ulp of the sum, and so on: plain
/// `f32` loses all ones, four times what is allowed. A CPU adds them in the first pass, where a unit's
/// vectors are neighbours, a GPU in the second.
#[cfg(any(feature = "cpu", feature = "cuda"))]
fn small_terms_beside_large_ones_are_not_lost(client: &Client) {
    let mut values = vec![1.0; 1 << 23];
    for values in values.chunks_mut(32 * 16) {
        values[..16].fill(5793.0);
    }
    let got = run(client, &[&upload(client, &values, Dtype::F32)]);
    check(client, "large and small", &values, got);
}

fn the_bits_are_the_same_from_run_to_run(client: &Client) {
    let buffer = upload(client, &Rng(9).values(1_000_003), Dtype::F32);
    let first = run(client, &[&buffer]).map(f32::to_bits);
    for _ in 0..10 {
        assert_eq!(run(client, &[&buffer]).map(f32::to_bits), first);
    }
}

fn one_value_that_is_not_finite_is_found_wherever_it_is(client: &Client) {
    for dtype in dtypes(client) {
        for numel in [1, 33, 4099, 70_016] {
            for at in [0, numel / 2, numel - 1] {
                for value in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
                    let mut values = vec![0.5; numel];
                    values[at] = value;
                    let got = run(client, &[&upload(client, &values, dtype)]);
                    let what = format!("{dtype:?} {value} at {at} of {numel}");
                    assert!(!got[0].is_finite(), "{what}: sum {}", got[0]);
                    let most = if numel == 1 { 0.0 } else { 0.5 };
                    assert_eq!((got[1], got[2]), (most, 1.0), "{what}");
                }
            }
        }
    }
    // Squares may overflow where no element does.
    let got = run(client, &[&upload(client, &[1e20, 1.0], Dtype::F32)]);
    assert_eq!(got, [f32::INFINITY, 1e20, 0.0]);
}

fn the_clip_coefficient_is_that_of_the_unscaled_norm(client: &Client) {
    let coefficient = |sum: f32, scale: Option<f32>, max_norm| {
        let upload = |value: f32| upload(client, &[value], Dtype::F32);
        let out = scalar(client);
        let scale = scale.map(upload);
        clip_coefficient(client, &upload(sum), scale.as_ref(), max_norm, &out).unwrap();
        download(client, &out)[0]
    };
    let close = |got: f32, expected: f32| (got - expected).abs() <= 1e-6 * expected;
    assert!(close(coefficient(100.0, None, 2.0), 2.0 / (10.0 + 1e-6)));
    assert!(close(
        coefficient(100.0, Some(4.0), 1.0),
        1.0 / (2.5 + 1e-6)
    ));
    assert_eq!(coefficient(100.0, Some(8.0), 2.0), 1.0);
    assert_eq!(coefficient(0.0, None, 2.0), 1.0);
    assert_eq!(coefficient(f32::INFINITY, None, 2.0), 0.0);
    assert!(coefficient(f32::NAN, None, 2.0).is_nan());
}
