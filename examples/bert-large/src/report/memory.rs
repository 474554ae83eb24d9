//! Model state: what was measured on each rank beside the ZeRO paper's formulas.

use burn_shard::{MemoryKind, ShardingStrategy};
use console::style;

use super::curve::bar;
use super::{MIB, line, mib, width};
use crate::ranks::Ranks;
use crate::run::Run;
use crate::train::RankReport;

/// Ranks with a column and a bar of their own.
const RANKS: usize = 4;
/// The widest bar.
const BAR: usize = 40;
/// What is written beside a bar.
const BESIDE: usize = 38;

/// Prints measured memory beside the formulas, in as many columns as fit, and bars of what stays between
/// steps.
pub(super) fn table(run: &Run, numel: usize, ranks: &Ranks, reports: &[RankReport]) {
    let sizes = Sizes {
        stored: numel * run.dtype.bytes(),
        computed: run.mixed_precision.map(|_| numel * run.precision.bytes()),
    };
    let formula = |strategy| formula(strategy, sizes, run.world_size);
    // On a narrow terminal: the largest of all ranks, this strategy, and none.
    let measured = reports.len().min(RANKS + 1);
    let is_wide = 19 + 10 * (measured + ShardingStrategy::ALL.len()) <= width();
    let columns = if is_wide { reports.len().min(RANKS) } else { 0 };
    let strategies = match is_wide {
        true => ShardingStrategy::ALL.to_vec(),
        false => vec![run.strategy, ShardingStrategy::Replicated],
    };
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
    for strategy in &strategies {
        header += &format!("{:>10}", strategy.to_string());
    }
    line(header);

    let row = |name: &str, of: &dyn Fn(&RankReport) -> usize, parts: &[usize]| {
        let mut row = format!("{name:<16}");
        for report in &reports[..columns] {
            row += &cell(of(report));
        }
        if columns < reports.len() {
            row += &cell(reports.iter().map(of).max().unwrap_or(0));
        }
        row += "  |";
        for &strategy in strategies.iter().filter(|_| !parts.is_empty()) {
            row += &cell(parts.iter().map(|&part| formula(strategy)[part]).sum());
        }
        line(row);
    };
    for (place, kind) in MemoryKind::ALL.into_iter().enumerate() {
        let (name, parts): (_, &[usize]) = match kind {
            MemoryKind::Parameters => ("parameters", &[PARAMETERS]),
            MemoryKind::Gradients => ("gradients", &[GRADIENTS]),
            MemoryKind::OptimizerState => ("optimizer state", &[OPTIMIZER]),
            MemoryKind::Unsharded if sizes.computed.is_some() => ("unsharded", &[UNSHARDED]),
            MemoryKind::Unsharded => ("unsharded", &[]),
            MemoryKind::Staging => ("staging", &[]),
        };
        row(name, &|report| report.peak_bytes[place], parts);
    }
    row(
        "together",
        &|report| report.total_peak_bytes,
        &[PARAMETERS, GRADIENTS, OPTIMIZER, UNSHARDED],
    );
    // Steps consume gradients.
    row("between steps", &RankReport::state_bytes, &BETWEEN_STEPS);
    let buffers =
        |report: &RankReport| report.live_bytes.iter().sum::<usize>() - report.state_bytes();
    row("and buffers", &buffers, &[]);
    match ranks {
        Ranks::Threads(_) => {
            let peaks = reports.iter().map(|report| report.process_peak_bytes);
            line(format_args!(
                "peak of the whole process (all ranks, activations, text): {}",
                mib(peaks.max().unwrap_or(0))
            ));
        }
        Ranks::Process(_) => {
            row("its process", &|report| report.process_peak_bytes, &[]);
            line("(its process: all it allocated, activations and text included)");
        }
    }
    line("");
    bars(run, reports, &formula);
}

/// The last two bars are formulas: of this strategy, and of plain data parallel.
fn bars(run: &Run, reports: &[RankReport], formula: &dyn Fn(ShardingStrategy) -> [usize; 4]) {
    let between_steps = |strategy| {
        BETWEEN_STEPS
            .map(|part| formula(strategy)[part])
            .iter()
            .sum()
    };
    let without: usize = between_steps(ShardingStrategy::Replicated);
    let columns = width().saturating_sub(BESIDE).min(BAR);
    let draw = |name: &str, bytes: usize, is_measured: Measured| {
        let bar = bar(bytes as f64 / without.max(1) as f64, columns);
        let bar = format!("{bar:<columns$}");
        let bar = match is_measured {
            Measured::Yes => style(bar).green(),
            Measured::No => style(bar).dim(),
        };
        line(format_args!("{name:<22} {bar} {:>12}", mib(bytes)));
    };
    for (rank, report) in reports.iter().take(RANKS).enumerate() {
        let name = format!("rank {rank}, between steps");
        draw(&name, report.state_bytes(), Measured::Yes);
    }
    if reports.len() > RANKS {
        let largest = reports.iter().map(RankReport::state_bytes).max();
        draw("largest of all", largest.unwrap_or(0), Measured::Yes);
    }
    let name = format!("formula for {}", run.strategy);
    draw(&name, between_steps(run.strategy), Measured::No);
    if run.strategy != ShardingStrategy::Replicated {
        draw("formula for ddp", without, Measured::No);
    }
}

/// Whose bar it is.
#[derive(Clone, Copy)]
enum Measured {
    Yes,
    No,
}

const PARAMETERS: usize = 0;
const GRADIENTS: usize = 1;
const OPTIMIZER: usize = 2;
const UNSHARDED: usize = 3;
const BETWEEN_STEPS: [usize; 2] = [PARAMETERS, OPTIMIZER];

/// Bytes of all parameters.
#[derive(Clone, Copy)]
struct Sizes {
    /// In the type in which they are stored.
    stored: usize,
    /// In the type in which the model computes, if that is another.
    computed: Option<usize>,
}

/// Bytes of parameters, gradients and the two moments of Adam on a rank, and of parameters in the type of
/// computation. What ZeRO-3 gathers for a moment is not counted.
fn formula(strategy: ShardingStrategy, sizes: Sizes, world_size: usize) -> [usize; 4] {
    let full = sizes.stored;
    let part = full.div_ceil(world_size);
    let computed = sizes.computed.unwrap_or(0);
    // Master weights are sharded.
    let stored = if sizes.computed.is_some() { part } else { full };
    match strategy {
        ShardingStrategy::Replicated => [full, full, 2 * full, computed],
        ShardingStrategy::OptimizerState => [stored, full, 2 * part, computed],
        ShardingStrategy::Gradients => [stored, part, 2 * part, computed],
        ShardingStrategy::Full => [part, part, 2 * part, 0],
    }
}

fn cell(bytes: usize) -> String {
    format!("{:>10.1}", bytes as f64 / MIB)
}

#[cfg(test)]
mod tests {
    use burn_shard::model_state_bytes;

    use super::*;

    #[test]
    fn the_rows_of_a_formula_add_up() {
        for strategy in ShardingStrategy::ALL {
            let sizes = Sizes {
                stored: 4 * 1000,
                computed: None,
            };
            let bytes: usize = formula(strategy, sizes, 4).iter().sum();
            assert_eq!(bytes, model_state_bytes(strategy, 1000, 4, 4));
        }
    }
}
