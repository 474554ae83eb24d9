//! Everything the program prints.
//!
//! Lines go to stdout as they are; on a terminal of this process alone there is a bar, and colour unless
//! `NO_COLOR` is set. Nothing is wider than the terminal.

mod curve;
mod losses;
mod memory;
mod progress;

pub use curve::curve;
pub use losses::LossLog;
pub use progress::{Progress, Step};

use std::fmt::Display;
use std::io::{self, Write};
use std::time::Duration;

use console::Term;

use crate::data::dataset::Dataset;
use crate::ranks::Ranks;
use crate::run::Run;
use crate::train::{RankReport, StepLoss};

/// Steps that the last loss is averaged over.
const LAST_STEPS: usize = 20;
/// A share of unknown tokens that is worth a warning.
const MANY_UNKNOWN: f64 = 0.05;
/// Columns where there is no terminal.
const WIDTH: usize = 100;
/// Lines of the curve of the loss.
const CURVE_HEIGHT: usize = 5;

/// Prints a line. A reader that went away is no reason to stop training.
pub fn line(text: impl Display) {
    writeln!(io::stdout(), "{text}").ok();
}

/// Columns of the terminal.
pub(crate) fn width() -> usize {
    Term::stdout()
        .size_checked()
        .map_or(WIDTH, |(_, columns)| columns.into())
}

/// Says how much of the corpus is used.
pub fn data(dataset: &Dataset, run: &Run) {
    let census = dataset.census();
    line(format_args!(
        "data: {} of {} documents and {} of {} tokens used, {} examples of {} tokens; a step reads {}",
        census.used_documents,
        census.documents,
        census.used_tokens,
        census.tokens,
        dataset.examples(),
        run.seq_len,
        run.world_size
            .saturating_mul(run.micro_batch)
            .saturating_mul(run.accumulate)
    ));
    line(format_args!(
        "the frequencies of tokens alone give a masked-token loss of {:.3}",
        dataset.entropy_of_frequencies()
    ));
    let unknown = census.unknown_tokens as f64 / census.tokens as f64;
    if unknown > MANY_UNKNOWN {
        line(format_args!(
            "warning: {:.0} % of the tokens are unknown to the tokenizer (is it for another language?)",
            100.0 * unknown
        ));
    }
}

/// Prints how a run went.
pub fn summary(run: &Run, numel: usize, ranks: &Ranks, reports: &[RankReport], time: Duration) {
    let Some(rank_0) = reports.first() else {
        return;
    };
    let losses = &rank_0.losses;
    let last = &losses[losses.len().saturating_sub(LAST_STEPS)..];
    let mean = |of: fn(&StepLoss) -> f64| last.iter().map(of).sum::<f64>() / last.len() as f64;
    let totals: Vec<f64> = losses.iter().map(StepLoss::total).collect();
    for row in curve(&totals, width(), CURVE_HEIGHT) {
        line(row);
    }
    if let Some(first) = losses.first() {
        line(format_args!(
            "loss {:.3} at the first step (masked tokens {:.3}, next sentence {:.3})",
            first.total(),
            first.masked_lm,
            first.next_sentence
        ));
        line(format_args!(
            "loss {:.3} over the last {} (masked tokens {:.3}, next sentence {:.3})",
            mean(StepLoss::total),
            last.len(),
            mean(|loss| loss.masked_lm),
            mean(|loss| loss.next_sentence)
        ));
    }
    line(format_args!(
        "{} steps in {}, {:.0} ms each",
        losses.len(),
        clock(time),
        time.as_secs_f64() * 1e3 / losses.len().max(1) as f64
    ));
    if rank_0.steps < run.steps {
        line(format_args!(
            "stopped by a signal after {} of {} steps",
            rank_0.steps, run.steps
        ));
    }
    if losses.len() > 1 {
        let received = rank_0.received_bytes as f64 / (losses.len() - 1) as f64;
        let parameters = (numel * run.dtype.bytes()) as f64;
        line(format_args!(
            "received per rank and step: {:.1} MiB, {:.2} times the parameters",
            received / MIB,
            received / parameters
        ));
    }
    line("");
    memory::table(run, numel, ranks, reports);
}

const MIB: f64 = (1 << 20) as f64;

fn mib(bytes: usize) -> String {
    format!("{:.1} MiB", bytes as f64 / MIB)
}

/// Hours, minutes and seconds, without leading zeros.
fn clock(time: Duration) -> String {
    match time.as_secs() {
        seconds @ 0..60 => format!("{seconds} s"),
        seconds @ 60..3600 => format!("{} min {:02} s", seconds / 60, seconds % 60),
        seconds => format!("{} h {:02} min", seconds / 3600, seconds / 60 % 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_short() {
        let clocks = [59, 61, 3661].map(|seconds| clock(Duration::from_secs(seconds)));
        assert_eq!(clocks, ["59 s", "1 min 01 s", "1 h 01 min"]);
    }
}
