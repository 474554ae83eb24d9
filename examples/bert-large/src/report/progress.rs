//! Steps as they come.

use std::io::{self, IsTerminal};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use burn_shard::MemoryReport;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::curve::sparkline;
use super::{clock, line, mib};
use crate::ranks::Ranks;
use crate::train::StepLoss;

/// The weight of the newest step in what is shown while running.
const NEWEST: f64 = 0.1;
/// Without a bar, a line comes after this time, and for the first and the last step.
const BETWEEN_LINES: Duration = Duration::from_secs(10);
/// Columns of the loss's course beside the bar.
const SPARKLINE: usize = 12;

/// A step, as the progress needs it.
#[derive(Clone, Debug)]
pub struct Step {
    /// The mean over ranks.
    pub loss: StepLoss,
    /// The tokens of all ranks, without padding.
    pub tokens: f64,
    /// How long it took.
    pub seconds: f64,
    /// The memory of rank 0.
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
    losses: Vec<f64>,
    loss: f64,
    tokens_per_second: f64,
    /// When a line was printed last.
    last_line: Option<Instant>,
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
                // The message is cut where the terminal ends.
                "{bar:12} {pos}/{len} {eta} left {wide_msg}",
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
        let newest = if shown.losses.is_empty() { 1.0 } else { NEWEST };
        let mix = |old: f64, new: f64| old + newest * (new - old);
        shown.loss = mix(shown.loss, step.loss.total());
        shown.tokens_per_second = mix(shown.tokens_per_second, step.tokens / step.seconds);
        shown.losses.push(step.loss.total());
        let done = shown.losses.len();

        let memory = step.memory.total();
        let state = format!(
            "model state {} (peak {}) per rank",
            mib(memory.live_bytes),
            mib(memory.peak_bytes)
        );
        let (loss, speed) = (shown.loss, shown.tokens_per_second);
        if let Some(bar) = &self.bar {
            // What matters most comes first.
            let course = sparkline(&shown.losses, SPARKLINE);
            bar.set_message(format!(
                "loss {loss:.3} {course} {speed:.0} tokens/s  {state}"
            ));
            bar.set_position(done as u64);
            return;
        }
        let is_due = shown
            .last_line
            .is_none_or(|last| last.elapsed() >= BETWEEN_LINES);
        if is_due || done == self.steps {
            shown.last_line = Some(Instant::now());
            let elapsed = self.start.elapsed();
            let left = elapsed.mul_f64((self.steps - done) as f64 / done as f64);
            line(format_args!(
                "step {done:>5}/{}  loss {loss:.3}  {speed:.0} tokens/s  {state}  {} elapsed, {} left",
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
