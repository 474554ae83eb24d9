//! BERT pre-training on sharded model state: the library behind the program, for its tests.
//!
//! Read [`train`] first: what sharding adds to a Burn training loop is there. [`model`] is BERT
//! written with `burn::nn` and knows nothing of ranks; [`data`] makes each rank's batches.

pub mod cli;
pub mod config;
pub mod data;
pub mod error;
pub mod launch;
pub mod model;
pub mod ranks;
pub mod report;
pub mod train;
pub mod weights;

use std::sync::Arc;
use std::time::Instant;

use burn::prelude::*;

use cli::{Options, Run};
use data::batches::Dataset;
use data::corpus::Corpus;
use data::tokenizer::{Cached, WordPieces};
use error::Error;
use model::BertForPreTraining;
use ranks::Ranks;
use report::{Progress, line};
use train::Job;

/// The default corpus stops at about this much text.
const REGISTRY_BYTES: usize = 16 << 20;

/// Checks everything, trains, and reports. `peak_bytes` says what this process took at most.
///
/// # Errors
/// Everything that can be known before training is refused before a rank trains.
pub fn run(options: &Options, peak_bytes: fn() -> usize) -> Result<(), Error> {
    let run = options.run()?;
    let device = run.device()?;
    let ranks = Ranks::join(options, &run)?;
    run_on(&ranks, options, run, &device, peak_bytes)
}

/// [`run`] on ranks that have met already.
///
/// # Errors
/// As [`run`].
pub fn run_on(
    ranks: &Ranks,
    options: &Options,
    mut run: Run,
    device: &Device,
    peak_bytes: fn() -> usize,
) -> Result<(), Error> {
    run.world_size = ranks.world_size();
    ranks.together(|| train_and_report(options, &run, device, ranks, peak_bytes))
}

fn train_and_report(
    options: &Options,
    run: &Run,
    device: &Device,
    ranks: &Ranks,
    peak_bytes: fn() -> usize,
) -> Result<(), Error> {
    let model = BertForPreTraining::new(&run.config, device);
    let numel = model.num_params();
    let dataset = Arc::new(ranks.from_first(|| {
        if let Some(path) = &run.weights {
            weights::check(&model, path)?;
        }
        let dataset = dataset(options, run.config.vocab_size, run.seq_len)?;
        dataset.check_for(run.world_size, run.micro_batch)?;
        if let Some(path) = &options.losses {
            report::write_losses(path, &[])?;
        }
        Ok(dataset)
    })?);
    drop(model);
    if ranks.has_first() {
        line(format_args!(
            "data: {} tokens, {} examples of {} tokens; a step reads {}",
            dataset.tokens(),
            dataset.examples(),
            run.seq_len,
            run.world_size * run.micro_batch
        ));
        line(format_args!(
            "model: {:?}, {:.1} M parameters in {}; strategy {} on {} ranks ({})",
            options.model,
            numel as f64 / 1e6,
            run.dtype,
            run.strategy,
            run.world_size,
            match ranks {
                Ranks::Threads(_) => "threads",
                Ranks::Process(_) => "processes",
            }
        ));
    }

    let progress = ranks.has_first().then(|| Progress::new(run.steps, ranks));
    let start = Instant::now();
    let job = Job {
        run,
        dataset,
        device,
        progress: progress.as_ref(),
        peak_bytes,
    };
    let reports = train::train_all(&job, ranks);
    if let Some(progress) = &progress {
        progress.finish();
    }
    let reports = reports?;
    if let (true, Some(first)) = (ranks.has_first(), reports.first()) {
        report::summary(run, numel, ranks, &reports, start.elapsed());
        if let Some(path) = &options.losses {
            report::write_losses(path, &first.losses)?;
        }
    }
    Ok(())
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
    let pieces = match given {
        Some(pieces) => pieces,
        None => {
            let (pieces, cached) = WordPieces::train_or_load(&corpus, vocab_size)?;
            let (how, path) = match &cached {
                Cached::Found(path) => ("trained before", path),
                Cached::Trained(path) => ("trained now", path),
            };
            let size = pieces.vocabulary().size;
            line(format_args!(
                "tokenizer: {size} WordPieces, {how} ({})",
                path.display()
            ));
            pieces
        }
    };
    Dataset::new(&corpus, &pieces, seq_len)
}
