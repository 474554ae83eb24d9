//! Fused SGD on a device against the scalar loop.

#![allow(clippy::unwrap_used, reason = "a test ends at the first error")]

use burn_shard_kernel_checks::{
    Rng, assert_same_bits, download, dtypes, is_exact, on_every_runtime, rounded, upload,
};
use burn_shard_kernels::cube::{Dtype, SgdBuffers, StepControl, sgd_step};
use burn_shard_kernels::{MomentumHyper, SgdHyper, reference};
use cubecl::client::Client;

on_every_runtime!(
    every_variant_steps_like_the_scalar_loop,
    half_precision_and_scales_step_like_the_scalar_loop,
    an_overflow_leaves_everything_as_it_was,
);

fn hypers() -> Vec<SgdHyper> {
    let mut hypers = Vec::new();
    for weight_decay in [None, Some(0.013)] {
        for momentum in [None, Some(false), Some(true)] {
            hypers.push(SgdHyper {
                weight_decay,
                // Not the defaults: there, momentum is 1 - dampening.
                momentum: momentum.map(|nesterov| MomentumHyper {
                    momentum: 0.8,
                    dampening: 0.3,
                    nesterov,
                }),
            });
        }
    }
    hypers
}

/// Per operation half an ulp of its terms, all of them below 64: 100 steps of at most 6 operations
/// cannot pass this, on runtimes that contract.
#[track_caller]
fn check(client: &Client, what: &str, expected: &[f32], got: &[f32]) {
    if is_exact(client) {
        assert_same_bits(what, expected, got);
    } else {
        for (i, (e, g)) in expected.iter().zip(got).enumerate() {
            assert!(
                (e - g).abs() <= 64.0 * 600.0 / 16_777_216.0,
                "{what}[{i}]: {e:e}, {g:e}"
            );
        }
    }
}

fn every_variant_steps_like_the_scalar_loop(client: &Client) {
    for hyper in hypers() {
        for numel in [0, 1, 15, 16, 17, 33, 4099, 70_016] {
            let mut rng = Rng(numel as u64);
            let (mut param, mut velocity) = (rng.values(numel), vec![5.0; numel]);
            let on_device = upload(client, &param, Dtype::F32);
            let velocity_on_device = upload(client, &velocity, Dtype::F32);
            for time in 1..=if numel == 4099 { 100 } else { 3 } {
                let grad = rng.values(numel);
                let buffers = SgdBuffers {
                    param: &on_device,
                    grad: &upload(client, &grad, Dtype::F32),
                    velocity: hyper.momentum.is_some().then_some(&velocity_on_device),
                    copy: None,
                };
                let control = StepControl::default();
                sgd_step(
                    client,
                    &buffers,
                    &control,
                    &[0..numel / 3, numel / 3..numel],
                    time,
                    0.013,
                    &hyper,
                )
                .unwrap();
                let velocity = hyper.momentum.is_some().then_some(&mut velocity[..]);
                reference::sgd_step(&mut param, &grad, velocity, time, 0.013, &hyper);
            }
            let what = format!("{hyper:?} numel {numel}");
            check(client, &what, &param, &download(client, &on_device));
            check(
                client,
                &what,
                &velocity,
                &download(client, &velocity_on_device),
            );
        }
    }
}

fn half_precision_and_scales_step_like_the_scalar_loop(client: &Client) {
    let hyper = hypers()[5];
    let (clip, scale) = (
        upload(client, &[0.7], Dtype::F32),
        upload(client, &[3.0], Dtype::F32),
    );
    for dtype in dtypes(client) {
        let numel = 4099;
        let mut rng = Rng(3);
        let (mut param, mut velocity) = (rng.values(numel), vec![0.0; numel]);
        let on_device = upload(client, &param, Dtype::F32);
        let velocity_on_device = upload(client, &velocity, Dtype::F32);
        let copy = upload(client, &param, dtype);
        for time in 1..=3 {
            let grad = rounded(&rng.values(numel), dtype);
            let buffers = SgdBuffers {
                param: &on_device,
                grad: &upload(client, &grad, dtype),
                velocity: Some(&velocity_on_device),
                copy: Some(&copy),
            };
            let control = StepControl {
                clip: Some(&clip),
                loss_scale: Some(&scale),
                found_inf: None,
            };
            sgd_step(
                client,
                &buffers,
                &control,
                &[0..numel / 3, numel / 3..numel],
                time,
                0.1,
                &hyper,
            )
            .unwrap();
            let scaled: Vec<f32> = grad.iter().map(|g| g * (0.7 / 3.0)).collect();
            reference::sgd_step(&mut param, &scaled, Some(&mut velocity), time, 0.1, &hyper);
        }
        let got = download(client, &on_device);
        check(client, &format!("{dtype:?}"), &param, &got);
        assert_same_bits("copy", &rounded(&got, dtype), &download(client, &copy));
    }
}

fn an_overflow_leaves_everything_as_it_was(client: &Client) {
    let values = Rng(3).values(100);
    let param = upload(client, &values, Dtype::F32);
    let buffers = SgdBuffers {
        param: &param,
        grad: &upload(client, &[f32::INFINITY; 100], Dtype::F32),
        velocity: None,
        copy: None,
    };
    let control = StepControl {
        found_inf: Some(&upload(client, &[1.0], Dtype::F32)),
        ..StepControl::default()
    };
    sgd_step(
        client,
        &buffers,
        &control,
        &[0..50, 50..100],
        1,
        0.1,
        &SgdHyper::default(),
    )
    .unwrap();
    assert_same_bits("param", &values, &download(client, &param));
}
