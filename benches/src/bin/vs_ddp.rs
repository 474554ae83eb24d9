//! Step time and memory of every strategy against plain DDP (ours), in interleaved rounds.

use std::io::Write as _;
use std::process::{Command, ExitCode};

use burn_shard::ShardingStrategy;
use burn_shard_alloc::HugePageAllocator;
use burn_shard_benches::child::{Measured, Workload, measure};
use burn_shard_benches::table::{Row, markdown};
use clap::Parser;

#[global_allocator]
static ALLOCATOR: HugePageAllocator = HugePageAllocator::new().with_cached_bytes(256 << 20);

/// Measures BERT training under each strategy and world size.
#[derive(Debug, Parser)]
struct Options {
    /// `large`, `base`, `tiny`, or `small` (4 layers, hidden 256).
    #[arg(long, default_value = "large")]
    model: String,
    #[arg(long, default_value_t = 32)]
    seq_len: usize,
    #[arg(long, default_value_t = 1)]
    micro_batch: usize,
    #[arg(long, default_value_t = 2)]
    warmup: usize,
    #[arg(long, default_value_t = 4)]
    steps: usize,
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Strategies to measure.
    #[arg(long, value_delimiter = ',', default_value = "ddp,zero1,zero2,zero3")]
    strategies: Vec<ShardingStrategy>,
    #[arg(long, value_delimiter = ',', default_value = "2")]
    world_sizes: Vec<usize>,
    /// Where to write the figures; the table goes beside it as Markdown.
    #[arg(long)]
    json: Option<std::path::PathBuf>,
    /// Measure once, in this process, and print JSON.
    #[arg(long, hide = true)]
    child: bool,
}

fn main() -> ExitCode {
    let options = Options::parse();
    if !cfg!(target_os = "linux") {
        eprintln!("error: memory and processor time are read from /proc, which only Linux has");
        return ExitCode::FAILURE;
    }
    match if options.child {
        child(&options)
    } else {
        parent(&options)
    } {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

type Failure = Box<dyn std::error::Error>;

fn workload(options: &Options) -> Workload {
    Workload {
        model: options.model.clone(),
        seq_len: options.seq_len,
        micro_batch: options.micro_batch,
        warmup: options.warmup,
        steps: options.steps,
    }
}

fn child(options: &Options) -> Result<(), Failure> {
    let (strategy, world_size) = (options.strategies[0], options.world_sizes[0]);
    let measured = measure(&workload(options), strategy, world_size, &ALLOCATOR)?;
    writeln!(std::io::stdout(), "{}", serde_json::to_string(&measured)?)?;
    Ok(())
}

fn parent(options: &Options) -> Result<(), Failure> {
    let mut configurations = Vec::new();
    for &world_size in &options.world_sizes {
        for &strategy in &options.strategies {
            configurations.push((world_size, strategy));
        }
    }
    let mut rows: Vec<Row> = configurations
        .iter()
        .map(|_| Row { rounds: Vec::new() })
        .collect();
    for round in 0..options.rounds {
        for ((world_size, strategy), row) in configurations.iter().zip(&mut rows) {
            let measured = run_child(options, *world_size, *strategy)?;
            let seconds = burn_shard_benches::table::median(measured.step_seconds.clone());
            eprintln!("round {round}: {strategy} on {world_size} ranks: {seconds:.3} s/step");
            row.rounds.push(measured);
        }
    }
    let workload = workload(options);
    let table = markdown(&workload, &rows);
    writeln!(std::io::stdout(), "{table}")?;
    if let Some(path) = &options.json {
        let rounds: Vec<_> = rows.iter().map(|row| &row.rounds).collect();
        let all = serde_json::json!({ "workload": workload, "configurations": rounds });
        std::fs::write(path, serde_json::to_string_pretty(&all)?)?;
        std::fs::write(path.with_extension("md"), table)?;
    }
    Ok(())
}

fn run_child(
    options: &Options,
    world_size: usize,
    strategy: ShardingStrategy,
) -> Result<Measured, Failure> {
    let number = |n: usize| n.to_string();
    let output = Command::new(std::env::current_exe()?)
        .args(["--child", "--model", &options.model])
        .args(["--seq-len", &number(options.seq_len)])
        .args(["--micro-batch", &number(options.micro_batch)])
        .args([
            "--warmup",
            &number(options.warmup),
            "--steps",
            &number(options.steps),
        ])
        .args([
            "--strategies",
            &strategy.to_string(),
            "--world-sizes",
            &number(world_size),
        ])
        .stderr(std::process::Stdio::inherit())
        .output()?;
    if !output.status.success() {
        return Err(format!("{strategy} on {world_size} ranks: {}", output.status).into());
    }
    Ok(serde_json::from_slice(&output.stdout)?)
}
