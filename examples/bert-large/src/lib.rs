//! BERT pre-training on sharded model state: the library behind the program, for its tests.
//!
//! Read [`train`] first: what sharding adds to a Burn training loop is there. [`model`] is BERT
//! written with `burn::nn` and knows nothing of ranks; [`data`] makes each rank's batches.

pub mod cli;
pub mod config;
pub mod data;
pub mod error;
pub mod input;
pub mod launch;
pub mod logging;
pub mod model;
pub mod paths;
pub mod ranks;
pub mod report;
pub mod run;
pub mod sample;
pub mod stop;
pub mod train;
pub mod weights;

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use burn::prelude::*;

use cli::Options;
use data::corpus::Corpus;
use data::dataset::Dataset;
use data::tokenizer::{Cached, WordPieces};
use error::Error;
use model::BertForPreTraining;
use ranks::Ranks;
use report::{LossLog, Progress, line};
use run::Run;
use stop::Stop;
use train::Job;

/// The default corpus stops at about this much text.
const REGISTRY_BYTES: usize = 16 << 20;

/// Checks everything, trains, and reports. `peak_bytes` says what this process took at most.
///
/// Returns the signal that ended training early, if one did.
///
/// # Errors
/// Everything that can be known before training is refused before a rank trains.
pub fn run(options: &Options, peak_bytes: fn() -> usize) -> Result<Option<u8>, Error> {
    let run = options.run()?;
    let device = run.device()?;
    let ranks = Ranks::join(options, &run)?;
    run_on(&ranks, options, run, &device, peak_bytes)
}

/// [`run()`] on ranks that have met already.
///
/// # Errors
/// The errors of [`run()`].
pub fn run_on(
    ranks: &Ranks,
    options: &Options,
    mut run: Run,
    device: &Device,
    peak_bytes: fn() -> usize,
) -> Result<Option<u8>, Error> {
    run.world_size = ranks.world_size();
    if let Ranks::Threads(2..) = ranks
        && run.config.activation_checkpointing
        && run.config.dropout > 0.0
    {
        // Threads draw from one generator, so that no layer could draw its numbers again.
        return Err(Error::Option {
            option: "dropout",
            value: run.config.dropout.to_string(),
            allowed: "0 with --activation-checkpointing, unless --launch makes ranks processes"
                .into(),
        });
    }
    ranks.together(|| train_and_report(options, &run, device, ranks, peak_bytes))
}

fn train_and_report(
    options: &Options,
    run: &Run,
    device: &Device,
    ranks: &Ranks,
    peak_bytes: fn() -> usize,
) -> Result<Option<u8>, Error> {
    let numel = BertForPreTraining::new(&run.config, device).num_params();
    let (own_options, own_run) = (options.clone(), run.clone());
    let dataset = Arc::new(ranks.from_first(move || {
        paths::check(&own_options)?;
        if let Some(path) = &own_run.weights {
            check_weights(&own_run, path)?;
        }
        let dataset = dataset(&own_options, own_run.config.vocab_size, own_run.seq_len)?;
        dataset.check_for(own_run.world_size, own_run.micro_batch)?;
        Ok(dataset)
    })?);
    if ranks.has_first() {
        report::data(&dataset, run);
        line(format_args!(
            "model: {:?}, {:.1} M parameters in {}{}; strategy {} on {} ranks ({})",
            options.model,
            numel as f64 / 1e6,
            run.dtype,
            run.mixed_precision.map_or(String::new(), |mixed| format!(
                ", computed in {}, gradients reduced in {}",
                mixed.param, mixed.reduce
            )),
            run.strategy,
            run.world_size,
            match ranks {
                Ranks::Threads(_) => "threads",
                Ranks::Process(_) => "processes",
            }
        ));
    }

    // Until here Ctrl-C ends the program at once: there is nothing to keep.
    let stop = Stop::listen();
    let progress = ranks.has_first().then(|| Progress::new(run.steps, ranks));
    let path = options.losses.as_deref().filter(|_| ranks.has_first());
    let losses = path.map(LossLog::create).transpose()?;
    let start = Instant::now();
    let job = Job {
        run,
        dataset,
        device,
        progress: progress.as_ref(),
        losses: losses.as_ref(),
        stop: &stop,
        peak_bytes,
    };
    let reports = train::train_all(&job, ranks);
    if let Some(progress) = &progress {
        progress.finish();
    }
    let reports = reports?;
    if let (true, Some(first)) = (ranks.has_first(), reports.first()) {
        report::summary(run, numel, ranks, &reports, start.elapsed());
        let held_out = run.held_out(&job.dataset);
        if let (Some(guesses), Some(batch), Some(pieces)) =
            (&first.guesses, held_out, job.dataset.pieces())
        {
            line("");
            sample::show(guesses, &batch, pieces);
        }
    }
    if let (true, Some(dir)) = (ranks.has_first(), &run.export) {
        export_tokenizer(options, &job.dataset, dir)?;
        line(format_args!("exported: {}", dir.display()));
    }
    let stopped = reports.first().is_some_and(|first| first.steps < run.steps);
    losses.map(LossLog::finish).transpose()?;
    if let (true, Some(plan)) = (stopped && ranks.has_first(), &run.checkpoints) {
        // Nothing is lost, so that the program ends as it would at its end.
        let dir = plan.dir.display();
        line(format_args!(
            "stopped and saved; goes on with --checkpoint-dir {dir} --resume"
        ));
    }
    let is_lost = stopped && run.checkpoints.is_none();
    Ok(stop.signal().filter(|_| is_lost))
}

/// Checks a checkpoint, and says what it lacks.
fn check_weights(run: &Run, path: &Path) -> Result<(), Error> {
    let shapes = BertForPreTraining::new(&run.config, &Device::flex());
    let lacking = weights::check(&shapes, path)?;
    let lacking = match lacking.is_empty() {
        true => String::new(),
        false => format!("; it has no {}: drawn at random", lacking.join(", no ")),
    };
    line(format_args!("weights: {}{lacking}", path.display()));
    Ok(())
}

/// Puts the tokenizer beside the model: the given file, or the one that was trained.
fn export_tokenizer(options: &Options, dataset: &Dataset, dir: &Path) -> Result<(), Error> {
    let json = match (&options.tokenizer, dataset.pieces()) {
        (Some(path), _) => input::read(path)?,
        (None, Some(pieces)) => pieces.to_json()?.into_bytes(),
        (None, None) => return Ok(()),
    };
    weights::export_tokenizer(&json, dir)
}

/// Reads the text and tokenizes it, once for all ranks: vocabularies of two hosts would differ as their
/// texts do, and processes of one would train the same one at once.
fn dataset(options: &Options, vocab_size: usize, seq_len: usize) -> Result<Dataset, Error> {
    let given = options
        .tokenizer
        .as_deref()
        .map(|path| WordPieces::load(path, vocab_size));
    let given = given.transpose()?;
    let corpus = match options.corpus.is_empty() {
        true => Corpus::of_cargo_registry(REGISTRY_BYTES)?,
        false => Corpus::read(&options.corpus)?,
    };
    line(format_args!(
        "corpus: {:.1} MiB in {} documents ({})",
        corpus.bytes() as f64 / (1 << 20) as f64,
        corpus.documents.len(),
        corpus.source
    ));
    if !corpus.left_out.is_empty() {
        line(format_args!("left out: {}", corpus.left_out));
    }
    let pieces = match given {
        Some(pieces) => pieces,
        None => {
            let (pieces, cached) = WordPieces::train_or_load(&corpus, vocab_size)?;
            let size = pieces.vocabulary().size;
            line(match cached {
                Cached::Found(path) => {
                    format!(
                        "tokenizer: {size} WordPieces, trained before ({})",
                        path.display()
                    )
                }
                Cached::Trained(path) => {
                    format!(
                        "tokenizer: {size} WordPieces, trained now ({})",
                        path.display()
                    )
                }
                Cached::NotKept(why) => {
                    format!("tokenizer: {size} WordPieces, trained now, not kept ({why})")
                }
            });
            pieces
        }
    };
    Dataset::new(&corpus, pieces, seq_len)
}
