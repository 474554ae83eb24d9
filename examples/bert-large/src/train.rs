//! The training loop of one rank, and the ranks.
//!
//! What sharding adds to an ordinary Burn loop is in `train`: the model is wrapped in a
//! `ShardedModule`, the optimizer is an `Oss`. The rest is as it would be on one rank.

use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use burn::module::{ModuleVisitor, Param};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::prelude::*;
use burn_shard::checkpoint::{Checkpoints, Keep, PendingSave};
use burn_shard::{
    GradScaler, GradScalerConfig, GradientNormClipping, MemoryKind, Oss, Precision, ProcessGroup,
    ReduceOp, ShardConfig, ShardedModule,
};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::data::batches::{Batch, Batches, Shard};
use crate::data::dataset::Dataset;
use crate::error::Error;
use crate::model::BertForPreTraining;
use crate::ranks::{Ranks, all_of};
use crate::report::{LossLog, Progress, Step, line};
use crate::run::{CheckpointPlan, Run, Start};
use crate::sample::Guesses;
use crate::stop::Stop;
use crate::weights;

/// Older checkpoints are removed.
const KEPT_CHECKPOINTS: NonZeroUsize = NonZeroUsize::new(2).expect("2 is not 0");

/// What ranks need to train.
#[derive(Clone, Debug)]
pub struct Job<'a> {
    /// What was asked for.
    pub run: &'a Run,
    /// The text.
    pub dataset: Arc<Dataset>,
    /// Where to compute.
    pub device: &'a Device,
    /// Shows steps; where rank 0 is.
    pub progress: Option<&'a Progress>,
    /// Keeps the losses; where rank 0 is, if somebody wants them.
    pub losses: Option<&'a LossLog>,
    /// Says when to stop early.
    pub stop: &'a Stop,
    /// What this process took at most.
    pub peak_bytes: fn() -> usize,
}

/// What a rank has to say at the end.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RankReport {
    /// The mean over ranks of each step's losses; the same on every rank.
    pub losses: Vec<StepLoss>,
    /// Steps that have been made, those before a checkpoint included.
    pub steps: usize,
    /// Model-state bytes of this rank at most, in the order of [`MemoryKind::ALL`].
    pub peak_bytes: [usize; MemoryKind::ALL.len()],
    /// All kinds together at most.
    pub total_peak_bytes: usize,
    /// Between steps, in the same order.
    pub live_bytes: [usize; MemoryKind::ALL.len()],
    /// What this rank's process took at most: all ranks if they are threads, activations, text.
    pub process_peak_bytes: usize,
    /// What this rank received in all steps after the first.
    pub received_bytes: u64,
    /// For [`Run::held_out`], if there is text for that and training was not stopped.
    pub guesses: Option<Guesses>,
}

impl RankReport {
    /// Model state between steps, without buffers that are kept for the next one.
    pub fn state_bytes(&self) -> usize {
        let kinds = MemoryKind::ALL.into_iter().zip(self.live_bytes);
        let state = kinds.filter(|(kind, _)| *kind != MemoryKind::Staging);
        state.map(|(_, bytes)| bytes).sum()
    }
}

/// The losses of a step, before its update.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepLoss {
    /// The loss of the masked tokens.
    pub masked_lm: f64,
    /// The loss of the next sentences; 0 without that head.
    pub next_sentence: f64,
}

impl StepLoss {
    /// What training minimizes.
    pub fn total(&self) -> f64 {
        self.masked_lm + self.next_sentence
    }
}

/// Trains on all ranks. Returns their reports in rank order, in every process.
///
/// # Errors
/// Sharding refused the model, a collective failed, or the loss is no number any more.
pub fn train_all(job: &Job<'_>, ranks: &Ranks) -> Result<Vec<RankReport>, Error> {
    match ranks {
        // Only rank 0 fails alone (it reads the checkpoint), so the first error is the cause.
        Ranks::Threads(world_size) => {
            let results = ProcessGroup::spawn(*world_size, |group| train(job, &group));
            results?.into_iter().collect()
        }
        Ranks::Process(group) => {
            // Dropout differs between ranks, and repeats: this process has its own generator.
            job.device
                .seed(job.run.seed.wrapping_add(group.rank() as u64));
            // In tests it has not: nobody may seed it while rank 0 draws its parameters.
            group.barrier()?;
            all_of(group, &train(job, group)?)
        }
    }
}

fn train(job: &Job<'_>, group: &ProcessGroup) -> Result<RankReport, Error> {
    let Job { run, device, .. } = *job;
    // Each rank builds its own model: ranks must not share parameters.
    let model = BertForPreTraining::new(&run.config, device);
    let model = initialize(model, run.weights.as_deref(), run.seed, device, group)?;
    // The default of 25 MiB would make one group of a small model.
    let bytes = model.num_params() * run.dtype.bytes();
    let group_cap_bytes = (bytes / 16).clamp(64 << 10, 25 << 20);
    let config = ShardConfig::new(run.strategy)
        .with_group_cap_bytes(group_cap_bytes)
        .with_prefetch(run.prefetch)
        .with_mixed_precision(run.mixed_precision)
        .with_shard_ranks(run.shard_ranks);
    let mut model = ShardedModule::new(model, config, group)?;
    if group.rank() == 0 && !model.collectives_in_place() {
        line("collectives: through host memory (--comm nccl works on that of GPUs)");
    }
    let adam_w = AdamWConfig::new()
        .with_epsilon(1e-6)
        .with_weight_decay(0.01);
    let mut optim = Oss::new(adam_w, group)?;
    if let Some(max_norm) = run.clip_norm {
        optim = optim.with_norm_clipping(GradientNormClipping::new(max_norm));
    }
    let checkpoints = run.checkpoints.as_ref().map(|plan| {
        let keep = Keep::last(KEPT_CHECKPOINTS);
        (plan, Checkpoints::new(&plan.dir, group).with_keep(keep))
    });
    // Half of all gradients would be 0 in f16.
    let is_f16 = run
        .mixed_precision
        .is_some_and(|mixed| [mixed.param, mixed.reduce].contains(&Precision::F16));
    let mut scaler = is_f16.then(|| GradScaler::new(GradScalerConfig::new()));
    let mut first_step = 0;
    if let Some((plan, checkpoints)) = &checkpoints
        && plan.start == Start::Resumed
    {
        let loaded = checkpoints.load(model, &mut optim)?;
        model = loaded.model;
        scaler =
            scaler.map(|new| serde_json::from_value(loaded.user["scaler"].clone()).unwrap_or(new));
        first_step = usize::try_from(loaded.step)
            .unwrap_or(run.steps)
            .min(run.steps);
        if group.rank() == 0 {
            line(format_args!("resumed: step {first_step} of {}", run.steps));
        }
    }

    let shard = Shard {
        rank: group.rank(),
        world_size: group.world_size(),
    };
    let mut batches = Batches::new(Arc::clone(&job.dataset), shard, run.micro_batch, run.seed);
    // What has been trained on before the checkpoint is not trained on again.
    batches.skip(first_step * run.accumulate);
    let mut pending: Option<PendingSave> = None;
    let mut losses = Vec::new();
    let mut traffic = group.traffic();
    for step in first_step..run.steps {
        let start = Instant::now();
        let mut sums = [0.0; 3];
        let micro_batches = run.accumulate as f64;
        let mut backward = |model: &BertForPreTraining| {
            let batch = batches.next_batch();
            let (input, targets) = batch.to_device(device);
            let found = model.forward(&input, &targets);
            let loss = found.total() / micro_batches;
            let gradients = match &scaler {
                Some(scaler) => scaler.scale(loss).backward(),
                None => loss.backward(),
            };
            sums[0] += scalar(found.masked_lm) / micro_batches;
            sums[1] += found.next_sentence.map_or(0.0, scalar) / micro_batches;
            sums[2] += batch.tokens() as f64;
            gradients
        };
        if run.accumulate > 1 {
            let _no_sync = model.no_sync();
            for _ in 1..run.accumulate {
                backward(&model);
            }
        }
        let gradients = GradientsParams::from_grads(backward(&model), &model);
        let lr = run.lr_at(step);
        model = match &mut scaler {
            Some(scaler) => scaler
                .step(&mut optim, lr, model, gradients)
                .map_err(|failed| failed.error)?,
            None => optim.step(lr, model, gradients),
        };

        let [masked_lm, next_sentence, tokens] = sums;
        let stopping = f64::from(u8::from(job.stop.signal().is_some()));
        let means = mean_over_ranks(group, [masked_lm, next_sentence, tokens, stopping])?;
        let [masked_lm, next_sentence, tokens, stopping] = means;
        let loss = StepLoss {
            masked_lm,
            next_sentence,
        };
        // The mean is the same on all ranks, so all of them stop.
        if !loss.total().is_finite() {
            // What was saved before this step is good.
            publish(&mut pending)?;
            return Err(Error::Diverged {
                step: step + 1,
                loss: loss.total(),
            });
        }
        losses.push(loss);
        if step == first_step {
            traffic = group.traffic();
        }
        if let (0, Some(log)) = (group.rank(), job.losses) {
            log.add(step + 1, &loss);
        }
        if let (0, Some(progress)) = (group.rank(), job.progress) {
            progress.step(&Step {
                loss,
                tokens: tokens * group.world_size() as f64,
                seconds: start.elapsed().as_secs_f64(),
                memory: model.memory(),
            });
        }
        let made = step + 1;
        if let Some((plan, checkpoints)) = &checkpoints {
            // Files are written while training goes on, and published by the step that finds them written.
            if let Some(save) = &mut pending
                && save.is_ready()?
            {
                publish(&mut pending)?;
            }
            let CheckpointPlan { every, .. } = plan;
            let is_due = every.is_some_and(|every| made.is_multiple_of(every));
            if is_due || made == run.steps || stopping > 0.0 {
                publish(&mut pending)?;
                let data = json!({
                    "seed": run.seed,
                    "micro_batch": run.micro_batch,
                    "scaler": scaler,
                });
                pending = Some(checkpoints.begin_save(made as u64, &model, &optim, &data)?);
            }
        }
        // One rank that is told to stop is enough, and all stop after the same step.
        if stopping > 0.0 {
            break;
        }
    }
    publish(&mut pending)?;
    if let (0, Some(scaler)) = (group.rank(), &scaler) {
        line(format_args!(
            "loss scale {}, {} steps left out because a gradient was not finite",
            scaler.loss_scale(),
            scaler.skipped_steps()
        ));
    }
    let steps = first_step + losses.len();
    let memory = model.memory();
    let received_bytes = (group.traffic() - traffic).total_bytes();
    let process_peak_bytes = (job.peak_bytes)();
    // Parameters may be gathered for it, so all ranks take part.
    let held_out = match steps < run.steps {
        true => None,
        false => run.held_out(&job.dataset),
    };
    let guesses = held_out.map(|batch| guess(&model.valid(), &batch, device));
    if let Some(dir) = &run.export {
        let plain = model.unsharded();
        if group.rank() == 0 {
            weights::export(&plain, &run.config, dir)?;
        }
    }
    Ok(RankReport {
        guesses,
        losses,
        steps,
        peak_bytes: MemoryKind::ALL.map(|kind| memory.of(kind).peak_bytes),
        total_peak_bytes: memory.total().peak_bytes,
        live_bytes: MemoryKind::ALL.map(|kind| memory.of(kind).live_bytes),
        process_peak_bytes,
        received_bytes,
    })
}

/// Waits for the save that is under way, if one is.
fn publish(pending: &mut Option<PendingSave>) -> Result<(), Error> {
    if let Some(save) = pending.take() {
        save.finish()?;
    }
    Ok(())
}

/// Gives rank 0 its parameters before any other rank draws some. Every rank ends with rank 0's
/// when the model is wrapped, but Burn's CPU backend has one random generator for all threads:
/// drawn at once, they would be others in every run.
fn initialize(
    mut model: BertForPreTraining,
    weights: Option<&Path>,
    seed: u64,
    device: &Device,
    group: &ProcessGroup,
) -> Result<BertForPreTraining, Error> {
    struct Draw;
    impl ModuleVisitor for Draw {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            param.base();
        }
    }
    if group.rank() == 0 {
        if let Some(path) = weights {
            model = weights::load(model, path)?;
        }
        device.seed(seed);
        model.visit(&mut Draw);
    }
    group.barrier()?;
    Ok(model)
}

/// What the model takes the hidden tokens for.
fn guess(model: &BertForPreTraining, batch: &Batch, device: &Device) -> Guesses {
    let (input, targets) = batch.to_device(&device.clone().inner());
    let found = model.guesses(&input, targets.positions).into_data();
    let tokens = found.iter::<i64>().take(targets.masked);
    Guesses {
        tokens: tokens.map(|id| u32::try_from(id).unwrap_or(0)).collect(),
    }
}

fn scalar(tensor: Tensor<1>) -> f64 {
    tensor.into_scalar::<f32>().into()
}

fn mean_over_ranks<const N: usize>(
    group: &ProcessGroup,
    mut values: [f64; N],
) -> Result<[f64; N], Error> {
    group.all_reduce(&mut values, ReduceOp::Mean)?;
    Ok(values)
}
