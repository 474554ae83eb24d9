//! Replays 20 training steps that PyTorch recorded (`tests/fixture/`, made with transformers'
//! `BertForMaskedLM`), on the same weights and the same data.

#![allow(
    clippy::unwrap_used,
    reason = "a test fails by panicking, helpers included"
)]

mod recording;

use std::collections::BTreeMap;

use burn::optim::{AdamConfig, GradientsParams};
use burn::prelude::*;
use burn_shard::{Oss, ProcessGroup, ReduceOp, ShardedModule, ShardingStrategy};

use recording::{ROWS, Recording, STEPS};

/// Two implementations of the same f32 arithmetic differ in the order of sums. PyTorch's own
/// spread over these steps (f32 against f64, one rank against four) is 1.2e-6.
const LOSS_TOLERANCE: f64 = 5e-6;
/// On states of magnitude 4.
const STATE_TOLERANCE: f32 = 2e-6;
/// On gradients of magnitude 0.3.
const GRADIENT_TOLERANCE: f32 = 1e-6;
/// Adam divides rounding noise by itself where the true gradient is zero (key biases); PyTorch
/// against a replay of it differs by 5.8e-6.
const WEIGHT_TOLERANCE: f32 = 2e-5;

#[test]
fn hidden_states_and_gradients_of_the_first_step_are_pytorchs() {
    let recording = Recording::open();
    let device = Device::flex().autodiff();
    let model = recording.initial_model(&device);
    let (input, targets) = recording.batch("", 0, 0..ROWS, &device);

    let expected = Recording::tensors("activations_step0");
    for (index, state) in model.hidden_states(&input).into_iter().enumerate() {
        let name = format!("hidden_states.{index}");
        recording::assert_close(&name, &state.into_data(), &expected[&name], STATE_TOLERANCE);
    }

    let loss = model.forward(&input, &targets).total();
    let gradients = recording::gradients(&model, &loss.backward());
    let expected = Recording::tensors("grad_step0_single");
    assert_eq!(gradients.len(), expected.len());
    for (name, gradient) in gradients {
        recording::assert_close(&name, &gradient, &expected[&name], GRADIENT_TOLERANCE);
    }
}

#[test]
fn twenty_steps_of_stock_adam_are_pytorchs() {
    let recording = Recording::open();
    let device = Device::flex().autodiff();
    let mut model = recording.initial_model(&device);
    let mut adam = AdamConfig::new().with_epsilon(1e-8).init();

    let mut losses = Vec::new();
    for step in 0..STEPS {
        let (input, targets) = recording.batch("", step, 0..ROWS, &device);
        let loss = model.forward(&input, &targets).total();
        losses.push(f64::from(loss.clone().into_scalar::<f32>()));
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = adam.step(1e-3, model, gradients);
    }
    assert_losses("stock Burn", &losses, &recording.losses("single"));

    let expected = Recording::tensors("final_single");
    for (name, weight) in recording::weights(&model) {
        recording::assert_close(&name, &weight, &expected[&name], WEIGHT_TOLERANCE);
    }
}

/// Trains on `world_size` ranks; returns each step's mean loss and the final weights.
fn train_sharded(
    recording: &Recording,
    prefix: &str,
    strategy: ShardingStrategy,
    world_size: usize,
) -> (Vec<f64>, BTreeMap<String, TensorData>) {
    let device = Device::flex().autodiff();
    let train = |group: ProcessGroup| {
        let model = recording.initial_model(&device);
        let mut model = ShardedModule::new(model, strategy, &group).unwrap();
        let mut optim = Oss::new(AdamConfig::new().with_epsilon(1e-8), &group).unwrap();
        let count = ROWS / world_size;
        let rows = group.rank() * count..(group.rank() + 1) * count;
        let mut losses = Vec::new();
        for step in 0..STEPS {
            let (input, targets) = recording.batch(prefix, step, rows.clone(), &device);
            let loss = model.forward(&input, &targets).total();
            let mut mean = [f64::from(loss.clone().into_scalar::<f32>())];
            group.all_reduce(&mut mean, ReduceOp::Mean).unwrap();
            losses.extend(mean);
            let gradients = GradientsParams::from_grads(loss.backward(), &model);
            model = optim.step(1e-3, model, gradients);
        }
        (losses, recording::weights(&model.unsharded()))
    };
    ProcessGroup::spawn(world_size, train).unwrap().remove(0)
}

#[test]
fn every_strategy_trains_as_pytorchs_ddp() {
    let recording = Recording::open();
    for (world_size, run, last) in [
        (1, "single", Some("final_single")),
        (2, "ddp_w2", Some("final_ddp_w2")),
        (4, "ddp_w4", None),
    ] {
        for strategy in ShardingStrategy::ALL {
            let (found, weights) = train_sharded(&recording, "", strategy, world_size);
            assert_losses(
                &format!("{strategy} on {world_size}"),
                &found,
                &recording.losses(run),
            );
            let expected = last.map(Recording::tensors).unwrap_or_default();
            for (name, expected) in expected {
                recording::assert_close(&name, &weights[&name], &expected, WEIGHT_TOLERANCE);
            }
        }
    }
}

#[test]
fn ranks_with_unequal_numbers_of_masked_tokens_weigh_the_same() {
    let recording = Recording::open();
    for (world_size, run) in [
        (1, "uneven_single"),
        (2, "uneven_ddp_w2"),
        (4, "uneven_ddp_w4"),
    ] {
        for strategy in ShardingStrategy::ALL {
            let (found, _) = train_sharded(&recording, "uneven.", strategy, world_size);
            assert_losses(
                &format!("{strategy} on {world_size}"),
                &found,
                &recording.losses(run),
            );
        }
    }
}

fn assert_losses(what: &str, found: &[f64], expected: &[f64]) {
    assert_eq!(found.len(), STEPS);
    for (step, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert!(
            (found - expected).abs() < LOSS_TOLERANCE,
            "{what}, step {step}: loss {found}, PyTorch {expected}"
        );
    }
}
