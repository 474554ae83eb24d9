//! Everything the program prints.

use std::fmt::Display;
use std::fs;
use std::io::{self, IsTerminal, Write};
use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use burn_shard::{MemoryKind, MemoryReport, ShardingStrategy};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::cli::Run;
use crate::error::Error;
use crate::ranks::Ranks;
use crate::train::{RankReport, StepLoss};

/// The weight of the newest step in what is shown while running.
const NEWEST: f64 = 0.1;
/// Lines printed in a run when there is no terminal to draw a bar on.
const LINES: usize = 30;
/// Steps that the last loss is averaged over.
const LAST_STEPS: usize = 20;
/// Ranks with a column of their own in the memory table.
const RANK_COLUMNS: usize = 4;

/// Prints a line. A reader that went away is no reason to stop training.
pub fn line(text: impl Display) {
    writeln!(io::stdout(), "{text}").ok();
}

/// A step, as the progress needs it.
#[derive(Clone, Debug)]
pub struct Step {
    /// The mean over ranks.
    pub loss: StepLoss,
    /// Of all ranks, without padding.
    pub tokens: f64,
    /// How long it took.
    pub seconds: f64,
    /// Of rank 0.
    pub memory: MemoryReport,
}

/// A bar on a terminal of its own, a line now and then elsewhere.
#[derive(Debug)]
pub struct Progress {
    bar: Option<ProgressBar>,
    steps: usize,
    start: Instant,
    state: Mutex<Shown>,
}

#[derive(Debug, Default)]
struct Shown {
    done: usize,
    loss: f64,
    tokens_per_second: f64,
}

impl Progress {
    /// Starts counting. No bar among processes: others print too, and mpirun calls a pipe a terminal.
    pub fn new(steps: usize, ranks: &Ranks) -> Self {
        let is_alone = matches!(ranks, Ranks::Threads(_));
        let bar = (is_alone && io::stdout().is_terminal()).then(|| {
            let bar = ProgressBar::with_draw_target(
                Some(steps as u64),
                ProgressDrawTarget::stdout_with_hz(5),
            );
            let style = ProgressStyle::with_template(
                "{bar:24} {pos}/{len}  {msg}  {elapsed_precise} elapsed, {eta} left",
            );
            bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
            bar
        });
        Self {
            bar,
            steps,
            start: Instant::now(),
            state: Mutex::default(),
        }
    }

    /// Shows a step.
    pub fn step(&self, step: &Step) {
        let Ok(mut shown) = self.state.lock() else {
            return;
        };
        let newest = if shown.done == 0 { 1.0 } else { NEWEST };
        let mix = |old: f64, new: f64| old + newest * (new - old);
        shown.loss = mix(shown.loss, step.loss.total());
        shown.tokens_per_second = mix(shown.tokens_per_second, step.tokens / step.seconds);
        shown.done += 1;

        let memory = step.memory.total();
        let text = format!(
            "loss {:.3}  {:.0} tokens/s  model state {} (peak {}) per rank",
            shown.loss,
            shown.tokens_per_second,
            mib(memory.live_bytes),
            mib(memory.peak_bytes),
        );
        if let Some(bar) = &self.bar {
            bar.set_message(text);
            bar.set_position(shown.done as u64);
            return;
        }
        let every = self.steps.div_ceil(LINES);
        if shown.done == 1 || shown.done == self.steps || shown.done.is_multiple_of(every) {
            let elapsed = self.start.elapsed();
            let left = elapsed.mul_f64((self.steps - shown.done) as f64 / shown.done as f64);
            line(format_args!(
                "step {:>5}/{}  {text}  {} elapsed, {} left",
                shown.done,
                self.steps,
                clock(elapsed),
                clock(left)
            ));
        }
    }

    /// Removes the bar.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish();
        }
    }
}

/// Writes losses as text, one step per line. Digits suffice to tell two numbers apart.
///
/// # Errors
/// The file cannot be written.
pub fn write_losses(path: &Path, losses: &[StepLoss]) -> Result<(), Error> {
    let mut text = String::from("step,masked_lm,next_sentence\n");
    for (step, loss) in losses.iter().enumerate() {
        text += &format!("{},{},{}\n", step + 1, loss.masked_lm, loss.next_sentence);
    }
    fs::write(path, text).map_err(|source| Error::Write {
        path: path.into(),
        source,
    })
}

/// Prints how a run went.
pub fn summary(run: &Run, numel: usize, ranks: &Ranks, reports: &[RankReport], time: Duration) {
    let Some(rank_0) = reports.first() else {
        return;
    };
    let losses = &rank_0.losses;
    let last = &losses[losses.len().saturating_sub(LAST_STEPS)..];
    let mean = |of: fn(&StepLoss) -> f64| last.iter().map(of).sum::<f64>() / last.len() as f64;
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
        time.as_secs_f64() * 1e3 / losses.len() as f64
    ));
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
    memory_table(run, numel, ranks, reports);
}

/// What was measured on each rank beside the ZeRO paper's formulas.
fn memory_table(run: &Run, numel: usize, ranks: &Ranks, reports: &[RankReport]) {
    let columns = reports.len().min(RANK_COLUMNS);
    line(format_args!(
        "model state per rank, peak MiB: measured ({}) beside the formulas for {} ranks and Adam",
        run.strategy, run.world_size
    ));
    let mut header = format!("{:<16}", "");
    for rank in 0..columns {
        header += &format!("{:>10}", format!("rank {rank}"));
    }
    if columns < reports.len() {
        header += &format!("{:>10}", "largest");
    }
    header += "  |";
    for strategy in ShardingStrategy::ALL {
        header += &format!("{:>10}", strategy.to_string());
    }
    line(header);

    let row = |name: &str, of: &dyn Fn(&RankReport) -> usize, formula: Option<[usize; 4]>| {
        let mut row = format!("{name:<16}");
        for report in &reports[..columns] {
            row += &cell(of(report));
        }
        if columns < reports.len() {
            row += &cell(reports.iter().map(of).max().unwrap_or(0));
        }
        row += "  |";
        for bytes in formula.into_iter().flatten() {
            row += &cell(bytes);
        }
        line(row);
    };
    let formulas = ShardingStrategy::ALL
        .map(|strategy| formula(strategy, numel * run.dtype.bytes(), run.world_size));
    for (place, kind) in MemoryKind::ALL.into_iter().enumerate() {
        let (name, index) = match kind {
            MemoryKind::Parameters => ("parameters", Some(0)),
            MemoryKind::Gradients => ("gradients", Some(1)),
            MemoryKind::OptimizerState => ("optimizer state", Some(2)),
            MemoryKind::Unsharded => ("unsharded", None),
            MemoryKind::Staging => ("staging", None),
        };
        let formula = index.map(|index: usize| formulas.map(|formula| formula[index]));
        row(name, &|report| report.peak_bytes[place], formula);
    }
    let totals = formulas.map(|formula| formula.iter().sum());
    row("together", &|report| report.total_peak_bytes, None);
    row("between steps", &|report| report.live_bytes, Some(totals));
    match ranks {
        Ranks::Threads(_) => {
            let peaks = reports.iter().map(|report| report.process_peak_bytes);
            line(format_args!(
                "peak of the whole process (all ranks, activations, text): {}",
                mib(peaks.max().unwrap_or(0))
            ));
        }
        Ranks::Process(_) => {
            row("its process", &|report| report.process_peak_bytes, None);
            line("(its process: all it allocated, activations and text included)");
        }
    }
}

/// Bytes of parameters, gradients and the two moments of Adam on a rank.
fn formula(strategy: ShardingStrategy, parameter_bytes: usize, world_size: usize) -> [usize; 3] {
    let part = parameter_bytes.div_ceil(world_size);
    let full = parameter_bytes;
    match strategy {
        ShardingStrategy::Replicated => [full, full, 2 * full],
        ShardingStrategy::OptimizerState => [full, full, 2 * part],
        ShardingStrategy::Gradients => [full, part, 2 * part],
        ShardingStrategy::Full => [part, part, 2 * part],
    }
}

const MIB: f64 = (1 << 20) as f64;

fn mib(bytes: usize) -> String {
    format!("{:.1} MiB", bytes as f64 / MIB)
}

fn cell(bytes: usize) -> String {
    format!("{:>10.1}", bytes as f64 / MIB)
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
    use burn_shard::model_state_bytes;

    use super::*;

    #[test]
    fn the_rows_of_a_formula_add_up() {
        for strategy in ShardingStrategy::ALL {
            let bytes: usize = formula(strategy, 4 * 1000, 4).iter().sum();
            assert_eq!(bytes, model_state_bytes(strategy, 1000, 4, 4));
        }
    }

    #[test]
    fn times_are_short() {
        let clocks = [59, 61, 3661].map(|seconds| clock(Duration::from_secs(seconds)));
        assert_eq!(clocks, ["59 s", "1 min 01 s", "1 h 01 min"]);
    }
}
