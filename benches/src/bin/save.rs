//! What a checkpoint costs: a save that training waits for and one that it does not, beside a plain write of as many
//! bytes to the same disk.

use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::time::Instant;

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamConfig, GradientsParams};
use burn::prelude::*;
use burn_shard::checkpoint::{Checkpoints, Keep};
use burn_shard::{Oss, ProcessGroup, ShardConfig, ShardedModule, ShardingStrategy};
use burn_shard_benches::table::median;
use clap::Parser;
use serde_json::json;

/// Measures saves by strategy.
#[derive(Clone, Debug, Parser)]
struct Options {
    /// An empty directory on the disk to measure.
    directory: PathBuf,
    #[arg(long, default_value_t = 2)]
    ranks: usize,
    /// Square layers, whose weights and two moments are saved.
    #[arg(long, default_value_t = 24)]
    layers: usize,
    #[arg(long, default_value_t = 2048)]
    width: usize,
    /// Saves of each kind, of which the median counts.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
}

#[derive(Module, Debug)]
struct Stack {
    layers: Vec<Linear>,
}

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Seconds of one round, as rank 0 saw it.
#[derive(Clone, Copy)]
struct Round {
    /// This rank's bytes, written and synced.
    plain: f64,
    save: f64,
    /// What training waits for at the start of a save in the background.
    begin: f64,
    /// From there until it is published.
    published: f64,
}

fn main() -> Result<(), Failure> {
    let options = Options::parse();
    fs::create_dir_all(&options.directory)?;
    let mut out = io::stdout().lock();
    writeln!(
        out,
        "| strategy | MiB per rank | plain write s | MiB/s of all ranks | save s | save / plain | begin_save s | \
         published after s |\n|---|---|---|---|---|---|---|---|"
    )?;
    for strategy in ShardingStrategy::ALL {
        let ranks =
            ProcessGroup::spawn(options.ranks, |group| measure(&options, strategy, &group))?;
        let (bytes, rounds) = ranks.into_iter().next().expect("there is a rank 0")?;
        let middle = |of: fn(&Round) -> f64| median(rounds.iter().map(of).collect());
        let ratio = middle(|round| round.save / round.plain);
        let mib = bytes as f64 / f64::from(1 << 20);
        let plain = middle(|round| round.plain);
        writeln!(
            out,
            "| `{strategy}` | {mib:.0} | {plain:.2} | {:.0} | {:.2} | {ratio:.2} | {:.3} | {:.2} |",
            mib * options.ranks as f64 / plain,
            middle(|round| round.save),
            middle(|round| round.begin),
            middle(|round| round.published),
        )?;
    }
    Ok(())
}

/// The bytes of this rank's file, and its rounds.
fn measure(
    options: &Options,
    strategy: ShardingStrategy,
    group: &ProcessGroup,
) -> Result<(u64, Vec<Round>), Failure> {
    let device = Device::flex().autodiff();
    let linear = |_| LinearConfig::new(options.width, options.width).init(&device);
    let stack = Stack {
        layers: (0..options.layers).map(linear).collect(),
    };
    let model = ShardedModule::new(stack, ShardConfig::new(strategy), group)?;
    let mut optimizer = Oss::new(AdamConfig::new(), group)?;
    let x = Tensor::<2>::ones([1, options.width], &device);
    let y = model.layers.iter().fold(x, |x, layer| layer.forward(x));
    let gradients = GradientsParams::from_grads(y.mean().backward(), &model);
    let model = optimizer.step(1e-4, model, gradients);

    let directory = options.directory.join(strategy.to_string());
    let keep = Keep::last(NonZeroUsize::MIN);
    let checkpoints = Checkpoints::new(&directory, group).with_keep(keep);
    let save = |step| checkpoints.save(step, &model, &optimizer, &json!({}));
    let first = save(0)?
        .path
        .join(format!("rank-{:05}.safetensors", group.rank()));
    let own = fs::metadata(first)?.len();
    let mut rounds = Vec::new();
    for round in 0..options.rounds as u64 {
        let plain = timed(group, || {
            let path = directory.join(format!("plain-{}", group.rank()));
            Ok(write_plainly(&path, own)?)
        })?;
        let saved = timed(group, || Ok(save(2 * round + 1).map(drop)?))?;
        group.barrier()?;
        let start = Instant::now();
        let pending = checkpoints.begin_save(2 * round + 2, &model, &optimizer, &json!({}))?;
        let begin = start.elapsed().as_secs_f64();
        pending.finish()?;
        rounds.push(Round {
            plain,
            save: saved,
            begin,
            published: start.elapsed().as_secs_f64(),
        });
    }
    group.barrier()?;
    if group.rank() == 0 {
        fs::remove_dir_all(directory)?;
    }
    Ok((own, rounds))
}

/// Seconds until all ranks are done.
fn timed(group: &ProcessGroup, work: impl FnOnce() -> Result<(), Failure>) -> Result<f64, Failure> {
    group.barrier()?;
    let start = Instant::now();
    work()?;
    group.barrier()?;
    Ok(start.elapsed().as_secs_f64())
}

/// Writes so many bytes that no disk can compress, and syncs them.
fn write_plainly(path: &Path, bytes: u64) -> io::Result<()> {
    const CHUNK: usize = 1 << 20;
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    let chunk: Vec<u8> = std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    })
    .take(CHUNK / 8)
    .flatten()
    .collect();
    let mut file = File::create(path)?;
    for _ in 0..bytes / CHUNK as u64 {
        file.write_all(&chunk)?;
    }
    io::copy(&mut chunk.as_slice().take(bytes % CHUNK as u64), &mut file)?;
    file.sync_all()?;
    fs::remove_file(path)
}
