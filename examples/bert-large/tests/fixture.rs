//! Replays 20 training steps that PyTorch recorded (`tests/fixture/`, made with transformers'
//! `BertForMaskedLM`), on the same weights and the same data.

mod recording;

use burn::optim::{AdamConfig, GradientsParams, ModuleOptimizer};
use burn::prelude::*;

use recording::{Recording, STEPS};

/// Two implementations of the same f32 arithmetic differ in the order of sums. PyTorch's own
/// spread over these steps (f32 against f64, one rank against four) is 1.2e-6.
const LOSS_TOLERANCE: f64 = 1e-5;
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
    let (input, targets) = recording.batch("", 0, 0..8, &device);

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
    let mut adam: ModuleOptimizer = AdamConfig::new().with_epsilon(1e-8).init().into();

    for (step, expected) in recording.losses("single").into_iter().enumerate() {
        let (input, targets) = recording.batch("", step, 0..8, &device);
        let loss = model.forward(&input, &targets).total();
        let found = f64::from(loss.clone().into_scalar::<f32>());
        assert!(
            (found - expected).abs() < LOSS_TOLERANCE,
            "step {step}: loss {found}, PyTorch {expected}"
        );
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = adam.step(1e-3, model, gradients);
    }
    assert_eq!(recording.losses("single").len(), STEPS);

    let expected = Recording::tensors("final_single");
    for (name, weight) in recording::weights(&model) {
        recording::assert_close(&name, &weight, &expected[&name], WEIGHT_TOLERANCE);
    }
}
