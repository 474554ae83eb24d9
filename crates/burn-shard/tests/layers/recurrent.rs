//! Recurrent layers.

use burn::nn::{
    BiGruConfig, BiLstmConfig, BiRnnConfig, GateController, GruConfig, Initializer, LstmConfig,
    LstmState, RnnConfig, RnnState,
};
use burn::prelude::*;

use crate::harness::{Draw, Row, flat, row};

/// Sizes of the recurrent layers.
const D_INPUT: usize = 128;
const D_HIDDEN: usize = 131;

pub(crate) fn recurrent() -> Vec<Row> {
    let x = |draw: &Draw| draw.x([2, 5, D_INPUT]);
    let both = |a: Tensor<1>, b: Tensor<1>| Tensor::cat(vec![a, b], 0);
    vec![
        row(
            "Rnn",
            |device| RnnConfig::new(D_INPUT, D_HIDDEN, true).init(device),
            move |layer, draw| {
                let (output, state) = layer.forward(x(draw), None);
                both(flat(output), flat(state.hidden))
            },
        ),
        row(
            "Rnn, reverse, without bias, from a state",
            |device| {
                let config = RnnConfig::new(D_INPUT, D_HIDDEN, false);
                config.with_reverse(true).init(device)
            },
            move |layer, draw| {
                let state = RnnState::new(draw.x([2, D_HIDDEN]));
                flat(layer.forward(x(draw), Some(state)).0)
            },
        ),
        row(
            "BiRnn",
            |device| BiRnnConfig::new(D_INPUT, D_HIDDEN, true).init(device),
            move |layer, draw| flat(layer.forward(x(draw), None).0),
        ),
        row(
            "GateController",
            |device| {
                let initializer = Initializer::XavierNormal { gain: 1.0 };
                GateController::new(D_INPUT, D_HIDDEN, true, initializer, device)
            },
            |layer, draw| flat(layer.gate_product(draw.x([3, D_INPUT]), draw.x([3, D_HIDDEN]))),
        ),
        row(
            "Gru",
            |device| GruConfig::new(D_INPUT, D_HIDDEN, true).init(device),
            move |layer, draw| flat(layer.forward(x(draw), None)),
        ),
        row(
            "Gru, reset before, from a state",
            |device| {
                let config = GruConfig::new(D_INPUT, D_HIDDEN, true);
                config.with_reset_after(false).init(device)
            },
            move |layer, draw| flat(layer.forward(x(draw), Some(draw.x([2, D_HIDDEN])))),
        ),
        row(
            "BiGru",
            |device| BiGruConfig::new(D_INPUT, D_HIDDEN, true).init(device),
            move |layer, draw| {
                let (output, state) = layer.forward(x(draw), None);
                both(flat(output), flat(state))
            },
        ),
        row(
            "Lstm",
            |device| LstmConfig::new(D_INPUT, D_HIDDEN, true).init(device),
            move |layer, draw| {
                let (output, state) = layer.forward(x(draw), None);
                both(flat(output), flat(state.cell))
            },
        ),
        row(
            "Lstm, reverse, input and forget gate in one, from a state",
            |device| {
                let config = LstmConfig::new(D_INPUT, D_HIDDEN, false).with_reverse(true);
                config.with_input_forget(true).init(device)
            },
            move |layer, draw| {
                let state = || draw.x([2, D_HIDDEN]);
                flat(
                    layer
                        .forward(x(draw), Some(LstmState::new(state(), state())))
                        .0,
                )
            },
        ),
        row(
            "BiLstm",
            |device| BiLstmConfig::new(D_INPUT, D_HIDDEN, true).init(device),
            move |layer, draw| {
                let (output, state) = layer.forward(x(draw), None);
                both(flat(output), flat(state.hidden))
            },
        ),
    ]
}
