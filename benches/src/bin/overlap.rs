//! How much of the communication hides behind computation: a stack of linear layers whose collectives take
//! as long over a simulated link as the computation of a step does.
//!
//! If nothing overlapped, a step would take twice as long as its computation; if everything did, no longer.

use std::io::Write as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamConfig, GradientsParams};
use burn::prelude::*;
use burn::tensor::activation::gelu;
use burn_shard::{
    Local, Oss, ProcessGroup, Recording, ShardConfig, ShardedModule, ShardingStrategy,
};
use burn_shard_benches::table::median;
use clap::Parser;

/// Measures overlap by strategy and prefetch.
#[derive(Clone, Debug, Parser)]
struct Options {
    #[arg(long, default_value_t = 2)]
    ranks: usize,
    #[arg(long, default_value_t = 12)]
    layers: usize,
    #[arg(long, default_value_t = 512)]
    width: usize,
    /// Rows of a batch, on each rank.
    #[arg(long, default_value_t = 512)]
    rows: usize,
    /// Steps measured, after two that are not.
    #[arg(long, default_value_t = 7)]
    steps: usize,
    /// What each collective takes beside its bytes, in microseconds.
    #[arg(long, default_value_t = 100)]
    latency: u64,
}

#[derive(Module, Debug)]
struct Stack {
    layers: Vec<Linear>,
}

impl Stack {
    fn loss(&self, mut x: Tensor<2>) -> Tensor<1> {
        for layer in &self.layers {
            x = gelu(layer.forward(x));
        }
        x.square().mean()
    }
}

/// What one rank saw of one step.
#[derive(Clone, Copy)]
struct Step {
    seconds: f64,
    bytes: u64,
    calls: u64,
}

/// The median step of the slowest rank. Over a link of so many bytes per second, if there is one.
fn measure(
    options: &Options,
    strategy: ShardingStrategy,
    prefetch: usize,
    link: Option<f64>,
) -> Result<Step, burn_shard::CommError> {
    let steps = Local::new(options.ranks).spawn(|group| {
        let mut recording = Recording::new(Arc::clone(group.communicator()));
        if let Some(bytes_per_second) = link {
            recording =
                recording.with_link(Duration::from_micros(options.latency), bytes_per_second);
        }
        train(
            options,
            &ProcessGroup::new(Arc::new(recording)),
            strategy,
            prefetch,
        )
    })?;
    let slowest = |a: Step, b: Step| if a.seconds > b.seconds { a } else { b };
    Ok(steps.into_iter().reduce(slowest).expect("there are ranks"))
}

fn train(
    options: &Options,
    group: &ProcessGroup,
    strategy: ShardingStrategy,
    prefetch: usize,
) -> Step {
    let &Options { width, layers, .. } = options;
    let device = Device::flex().autodiff();
    let linear = |_| LinearConfig::new(width, width).init(&device);
    let stack = Stack {
        layers: (0..layers).map(linear).collect(),
    };
    let config = ShardConfig::new(strategy)
        .with_group_cap_bytes(4 * width * (width + 1))
        .with_prefetch(prefetch);
    let mut model = ShardedModule::new(stack, config, group).expect("the same on all ranks");
    let mut optimizer = Oss::new(AdamConfig::new(), group).expect("no clipping");
    let mut all = Vec::new();
    for step in 0..options.steps + 2 {
        let x = Tensor::<2>::ones([options.rows, width], &device).require_grad();
        group.barrier().expect("no rank fails");
        let (start, before) = (Instant::now(), group.traffic());
        let grads = GradientsParams::from_grads(model.loss(x).backward(), &model);
        model = optimizer.step(1e-4, model, grads);
        let traffic = group.traffic() - before;
        if step >= 2 {
            all.push((start.elapsed().as_secs_f64(), traffic));
        }
    }
    let traffic = all[0].1;
    Step {
        seconds: median(all.into_iter().map(|(seconds, _)| seconds).collect()),
        bytes: traffic.total_bytes(),
        calls: traffic.total_calls(),
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let options = Options::parse();
    let mut out = std::io::stdout();
    writeln!(out, "{options:?}\n")?;
    writeln!(
        out,
        "| strategy | prefetch | computation ms | link ms | step ms | of the link hidden |"
    )?;
    writeln!(out, "|---|---|---|---|---|---|")?;
    for strategy in ShardingStrategy::ALL {
        let prefetches: &[usize] = match strategy {
            ShardingStrategy::Full => &[0, 1, 2],
            _ => &[0],
        };
        for &prefetch in prefetches {
            let alone = measure(&options, strategy, prefetch, None)?;
            let bytes_per_second = alone.bytes as f64 / alone.seconds;
            let step = measure(&options, strategy, prefetch, Some(bytes_per_second))?;
            let latency = Duration::from_micros(options.latency * step.calls);
            let link = step.bytes as f64 / bytes_per_second + latency.as_secs_f64();
            let hidden = (alone.seconds + link - step.seconds) / alone.seconds.min(link);
            writeln!(
                out,
                "| {strategy} | {prefetch} | {:.1} | {:.1} | {:.1} | {:.0} % |",
                alone.seconds * 1e3,
                link * 1e3,
                step.seconds * 1e3,
                hidden * 100.0,
            )?;
        }
    }
    Ok(())
}
