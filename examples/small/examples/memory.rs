//! What a rank holds of a model under each strategy, between backward and step: the formula of ZeRO beside what is
//! measured. With a path, a chart of it is written there: `cargo run --example memory docs/memory.svg`.
#![allow(clippy::print_stdout, reason = "an example shows what it computes")]

use std::fmt::Write;

use burn::module::{ModuleVisitor, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamConfig, GradientsParams};
use burn::prelude::*;
use burn_shard::{
    Error, MemoryKind, Oss, ProcessGroup, ShardedModule, ShardingStrategy, model_state_bytes,
};

pub(crate) const WORLD_SIZE: usize = 4;

#[derive(Module, Debug)]
struct Layers {
    layers: Vec<Linear>,
}

/// Bytes of one rank.
pub(crate) struct Held {
    pub(crate) strategy: ShardingStrategy,
    pub(crate) predicted: usize,
    /// Parameters, gradients, optimizer state.
    pub(crate) measured: [usize; 3],
}

/// Adds up the gradients of a backward. The ledger of `memory()` does not count those that an all-reduce has left in
/// tensors of Burn.
struct GradientBytes<'a> {
    gradients: &'a GradientsParams,
    bytes: usize,
}

impl ModuleVisitor for GradientBytes<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let gradient = self.gradients.get::<D>(param.id);
        self.bytes += gradient.map_or(0, |gradient| 4 * gradient.shape().num_elements());
    }
}

fn train(group: &ProcessGroup, strategy: ShardingStrategy) -> Result<Held, Error> {
    let device = Device::flex().autodiff();
    let layers = (0..8).map(|_| LinearConfig::new(512, 512).init(&device));
    let layers = Layers {
        layers: layers.collect(),
    };
    let mut model = ShardedModule::new(layers, strategy, group)?;
    let mut optimizer = Oss::new(AdamConfig::new(), group)?;
    let mut measured = [0; 3];
    for _ in 0..2 {
        let x = Tensor::<2>::ones([4, 512], &device);
        let output = model.layers.iter().fold(x, |x, layer| layer.forward(x));
        let gradients = GradientsParams::from_grads(output.square().mean().backward(), &model);
        let mut count = GradientBytes {
            gradients: &gradients,
            bytes: 0,
        };
        model.visit(&mut count);
        let live = |kind| model.memory().of(kind).live_bytes;
        measured = [
            live(MemoryKind::Parameters),
            count.bytes,
            live(MemoryKind::OptimizerState),
        ];
        model = optimizer.step(1e-3, model, gradients);
    }
    Ok(Held {
        strategy,
        predicted: model_state_bytes(strategy, model.num_params(), WORLD_SIZE, 4),
        measured,
    })
}

/// What rank 0 holds under each strategy.
pub(crate) fn measure() -> Result<Vec<Held>, Error> {
    let of =
        |strategy| ProcessGroup::spawn(WORLD_SIZE, |group| train(&group, strategy))?.swap_remove(0);
    ShardingStrategy::ALL.into_iter().map(of).collect()
}

/// Two bars for each strategy: predicted, and measured by kind.
pub(crate) fn chart(rows: &[Held]) -> String {
    const KINDS: [&str; 3] = ["parameters", "gradients", "optimizer state"];
    let most = rows.iter().map(|row| row.predicted).max().unwrap_or(1);
    let width = |bytes: usize| 480 * bytes / most;
    let mut svg = String::from(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 740 300\" font-family=\"sans-serif\" font-size=\"13\">\n\
         <style>text{fill:#24292f}.predicted{fill:none;stroke:#6e7781;stroke-width:1.5}.k0{fill:#1f77b4}.k1{fill:#e08214}\
         .k2{fill:#4d9221}@media(prefers-color-scheme:dark){text{fill:#e6edf3}.predicted{stroke:#9198a1}}</style>\n",
    );
    let mut line = |text: std::fmt::Arguments<'_>| {
        svg.write_fmt(text).expect("a string should take any text");
        svg.push('\n');
    };
    line(format_args!(
        "<text x=\"10\" y=\"22\" font-size=\"15\">Model state per rank between backward and step, Adam in f32, {WORLD_SIZE} ranks</text>"
    ));
    for (kind, name) in KINDS.iter().enumerate() {
        let x = 90 + 135 * kind;
        line(format_args!(
            "<rect class=\"k{kind}\" x=\"{x}\" y=\"36\" width=\"12\" height=\"12\"/>"
        ));
        line(format_args!(
            "<text x=\"{}\" y=\"47\">{name}</text>",
            x + 18
        ));
    }
    line(format_args!(
        "<rect class=\"predicted\" x=\"505\" y=\"36\" width=\"12\" height=\"12\"/>"
    ));
    line(format_args!(
        "<text x=\"523\" y=\"47\">predicted by the formula</text>"
    ));
    for (row, top) in rows.iter().zip((66..).step_by(58)) {
        line(format_args!(
            "<text x=\"10\" y=\"{}\">{}</text>",
            top + 25,
            row.strategy
        ));
        line(format_args!(
            "<rect class=\"predicted\" x=\"90\" y=\"{top}\" width=\"{}\" height=\"14\"/>",
            width(row.predicted)
        ));
        let mut x = 90;
        for (kind, &bytes) in row.measured.iter().enumerate() {
            line(format_args!(
                "<rect class=\"k{kind}\" x=\"{x}\" y=\"{}\" width=\"{}\" height=\"18\"/>",
                top + 18,
                width(bytes)
            ));
            x += width(bytes);
        }
        let mib = |bytes: usize| bytes as f64 / f64::from(1 << 20);
        let measured = row.measured.iter().sum();
        line(format_args!(
            "<text x=\"{}\" y=\"{}\">{:.2} MiB</text>",
            98 + width(row.predicted),
            top + 12,
            mib(row.predicted)
        ));
        line(format_args!(
            "<text x=\"{}\" y=\"{}\">{:.2} MiB measured</text>",
            x + 8,
            top + 32,
            mib(measured)
        ));
    }
    svg.push_str("</svg>\n");
    svg
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let rows = measure()?;
    for row in &rows {
        let [parameters, gradients, state] = row.measured;
        println!(
            "{:5}: {} B predicted; measured {} B: parameters {parameters}, gradients {gradients}, optimizer state {state}",
            row.strategy.to_string(),
            row.predicted,
            parameters + gradients + state
        );
    }
    if let Some(path) = std::env::args_os().nth(1) {
        std::fs::write(path, chart(&rows))?;
    }
    Ok(())
}
