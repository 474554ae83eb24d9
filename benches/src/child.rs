//! One measurement: some training steps of BERT under one strategy and world size.

use std::fs;
use std::time::Instant;

use bert_large::config::BertConfig;
use bert_large::model::{BertForPreTraining, Input, Targets};
use burn::optim::{AdamConfig, GradientsParams};
use burn::prelude::*;
use burn_shard::{
    Collective, Error, Local, MemoryKind, Oss, ProcessGroup, ReduceOp, ShardedModule,
    ShardingStrategy,
};
use burn_shard_alloc::HugePageAllocator;
use serde::{Deserialize, Serialize};

/// What to train.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Workload {
    /// Name of the model: `large`, `base`, `tiny` or `small` (4 layers, hidden 256).
    pub model: String,
    /// Tokens per row.
    pub seq_len: usize,
    /// Rows per rank.
    pub micro_batch: usize,
    /// Steps before measuring.
    pub warmup: usize,
    /// Steps measured.
    pub steps: usize,
}

/// Seconds of the parts of a step, summed over the measured steps, on rank 0.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Phases {
    /// Forward, until the loss is known.
    pub forward: f64,
    /// Backward, with the reductions in it.
    pub backward: f64,
    /// Optimizer step, with its all-gathers.
    pub step: f64,
}

/// One measurement.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Measured {
    /// Strategy, by its short name.
    pub strategy: String,
    /// Number of ranks.
    pub world_size: usize,
    /// Parameters of the model.
    pub numel: usize,
    /// Seconds of each measured step: from barrier to barrier.
    pub step_seconds: Vec<f64>,
    /// Where the time went.
    pub phases: Phases,
    /// CPU seconds of the process during the measured steps.
    pub cpu_seconds: f64,
    /// Peak resident set during the measured steps, less what the process had before the model,
    /// divided by the number of ranks.
    pub resident_peak_bytes_per_rank: u64,
    /// Peak of what the process had allocated during the measured steps, by rank.
    pub allocated_peak_bytes_per_rank: usize,
    /// Model state alive between steps on rank 0, gradients included at their peak.
    pub state_bytes: usize,
    /// Peak of what the library holds on rank 0.
    pub ledger_peak_bytes: usize,
    /// Of those, parameters gathered for use.
    pub unsharded_peak_bytes: usize,
    /// Bytes received by rank 0 per step.
    pub wire_bytes_per_step: u64,
    /// Of those, by collective: name, calls and bytes per step.
    pub wire: Vec<(String, u64, u64)>,
    /// The last loss of rank 0.
    pub loss: f64,
}

/// Runs one measurement.
///
/// # Errors
///
/// If the library or a collective fails.
///
/// # Panics
///
/// If `world_size` is 0.
pub fn measure(
    workload: &Workload,
    strategy: ShardingStrategy,
    world_size: usize,
    allocator: &'static HugePageAllocator,
) -> Result<Measured, Error> {
    let before = status_kib("VmRSS:") * 1024;
    let results = Local::new(world_size).spawn(|group| {
        rank(workload, strategy, &group, allocator).map(|mut measured| {
            let peak = status_kib("VmHWM:") * 1024;
            let own = peak.saturating_sub(before);
            measured.resident_peak_bytes_per_rank = own / world_size as u64;
            measured.allocated_peak_bytes_per_rank = allocator.peak_bytes() / world_size;
            measured
        })
    })?;
    results
        .into_iter()
        .next()
        .expect("there should be a rank 0")
}

fn rank(
    workload: &Workload,
    strategy: ShardingStrategy,
    group: &ProcessGroup,
    allocator: &'static HugePageAllocator,
) -> Result<Measured, Error> {
    let device = Device::flex().autodiff();
    // Without it Burn's tape keeps views of gathered parameters.
    let device = if strategy == ShardingStrategy::Full {
        device.gradient_checkpointing()
    } else {
        device
    };
    let config = config(&workload.model);
    let mut model = ShardedModule::new(BertForPreTraining::new(&config, &device), strategy, group)?;
    let numel = model.num_params();
    let mut optimizer = Oss::new(AdamConfig::new().with_epsilon(1e-8), group)?;
    let (input, targets) = batch(workload, config.vocab_size, group.rank(), &device);

    let mut step_seconds = Vec::new();
    let mut phases = Phases::default();
    let (mut cpu, mut traffic) = (0.0, group.traffic());
    let mut state_bytes = 0;
    let mut loss = 0.0;
    for step in 0..workload.warmup + workload.steps {
        group.barrier()?;
        if step == workload.warmup {
            if group.rank() == 0 {
                allocator.reset_peak();
                reset_peak();
            }
            group.barrier()?;
            model.reset_memory_peak();
            phases = Phases::default();
            (cpu, traffic) = (cpu_seconds(), group.traffic());
        }
        let start = Instant::now();
        let found = model.forward(&input, &targets).total();
        loss = found.clone().into_scalar::<f32>().into();
        let forward = start.elapsed().as_secs_f64();
        let gradients = GradientsParams::from_grads(found.backward(), &model);
        drop(found);
        let backward = start.elapsed().as_secs_f64();
        let held = model.memory();
        model = optimizer.step(1e-4, model, gradients);
        let memory = model.memory();
        state_bytes = held.of(MemoryKind::Gradients).live_bytes
            + memory.of(MemoryKind::Parameters).live_bytes
            + memory.of(MemoryKind::OptimizerState).live_bytes;
        phases.forward += forward;
        phases.backward += backward - forward;
        phases.step += start.elapsed().as_secs_f64() - backward;
        group.barrier()?;
        if step >= workload.warmup {
            step_seconds.push(start.elapsed().as_secs_f64());
        }
    }
    let mut total_cpu = [cpu_seconds() - cpu];
    group.all_reduce(&mut total_cpu, ReduceOp::Max)?;
    let memory = model.memory();
    let received = group.traffic() - traffic;
    let steps = workload.steps.max(1) as u64;
    let wire = Collective::ALL
        .map(|kind| {
            let count = received.get(kind);
            (kind.to_string(), count.calls / steps, count.bytes / steps)
        })
        .to_vec();
    Ok(Measured {
        strategy: strategy.to_string(),
        world_size: group.world_size(),
        numel,
        step_seconds,
        phases,
        cpu_seconds: total_cpu[0],
        resident_peak_bytes_per_rank: 0,
        allocated_peak_bytes_per_rank: 0,
        state_bytes,
        ledger_peak_bytes: memory.total().peak_bytes,
        unsharded_peak_bytes: memory.of(MemoryKind::Unsharded).peak_bytes,
        wire_bytes_per_step: received.total_bytes() / steps,
        wire,
        loss,
    })
}

/// The model of a workload: masked tokens only, as the peers measure it, and no dropout.
fn config(name: &str) -> BertConfig {
    let config = match name {
        "large" => BertConfig::large(),
        "base" => BertConfig::base(),
        "tiny" => BertConfig::tiny(),
        _ => BertConfig {
            layers: 4,
            hidden: 256,
            heads: 4,
            intermediate: 1024,
            ..BertConfig::large()
        },
    };
    BertConfig {
        dropout: 0.0,
        next_sentence: false,
        ..config
    }
}

/// A fixed batch that scores every position, as PyTorch's model does.
fn batch(workload: &Workload, vocab: usize, rank: usize, device: &Device) -> (Input, Targets) {
    let (rows, length) = (workload.micro_batch, workload.seq_len);
    let positions = rows * length;
    let id = |i: usize| i64::try_from(10 + (i * 7919 + rank * 104_729) % (vocab - 10));
    let ids: Vec<i64> = (0..positions)
        .map(id)
        .collect::<Result<_, _>>()
        .expect("ids should fit");
    let ids = Tensor::<1, Int>::from_data(TensorData::new(ids, [positions]), device);
    let input = Input {
        ids: ids.clone().reshape([rows, length]),
        token_types: Tensor::zeros([rows, length], device),
        padding: Tensor::<2, Int>::zeros([rows, length], device).bool(),
    };
    let end = i64::try_from(positions).expect("positions should fit");
    let targets = Targets {
        positions: Tensor::arange(0..end, device),
        labels: ids,
        masked: positions,
        next_sentence: Tensor::zeros([rows], device),
    };
    (input, targets)
}

fn status_kib(key: &str) -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status
        .lines()
        .find(|line| line.starts_with(key))
        .unwrap_or_default();
    line.split_whitespace()
        .nth(1)
        .and_then(|kib| kib.parse().ok())
        .unwrap_or(0)
}

/// Starts the kernel's peak of the resident set anew.
fn reset_peak() {
    if let Err(error) = fs::write("/proc/self/clear_refs", "5") {
        eprintln!("the peak of the resident set includes warm-up: {error}");
    }
}

fn cpu_seconds() -> f64 {
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let after_name = stat.rsplit(") ").next().unwrap_or_default();
    let ticks: Vec<f64> = after_name
        .split_whitespace()
        .skip(11)
        .take(2)
        .flat_map(str::parse)
        .collect();
    // 100 ticks a second on every Linux that Rust runs on.
    ticks.iter().sum::<f64>() / 100.0
}
