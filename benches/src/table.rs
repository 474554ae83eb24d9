//! Rounds of measurements, and what is printed of them.

use std::fmt::Write as _;

use crate::child::{Measured, Workload};

/// All measurements of one configuration, one per round.
#[derive(Clone, Debug)]
pub struct Row {
    /// In the order of the rounds.
    pub rounds: Vec<Measured>,
}

impl Row {
    fn first(&self) -> &Measured {
        &self.rounds[0]
    }

    /// Median seconds per step of one round.
    fn step_seconds(&self, round: usize) -> f64 {
        median(self.rounds[round].step_seconds.clone())
    }
}

/// The middle of some figures; of an even number, the mean of the two in the middle.
#[must_use]
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => values[middle],
        _ => f64::midpoint(values[middle - 1], values[middle]),
    }
}

/// A Markdown table: every row against the `ddp` row of the same world size and round.
///
/// # Panics
///
/// If a row has no round.
#[must_use]
pub fn markdown(workload: &Workload, rows: &[Row]) -> String {
    let gib = |bytes: f64| bytes / f64::from(1 << 30);
    let mut out = format!(
        "BERT-{}, sequence {}, micro-batch {}, f32, Adam; {} measured steps a round.\n\n",
        workload.model, workload.seq_len, workload.micro_batch, workload.steps
    );
    out.push_str(
        "| ranks | strategy | s/step | speed / ddp | forward / backward / step s | CPU s/step | \
         resident peak GiB/rank | model state GiB/rank | by formula | unsharded peak MiB | \
         wire MiB/step |\n|---|---|---|---|---|---|---|---|---|---|---|\n",
    );
    for row in rows {
        let m = row.first();
        let base = rows.iter().find(|other| {
            other.first().world_size == m.world_size && other.first().strategy == "ddp"
        });
        let rounds = 0..row.rounds.len();
        let seconds = median(rounds.clone().map(|r| row.step_seconds(r)).collect());
        let ratio = base.map_or(f64::NAN, |base| {
            median(
                rounds
                    .map(|r| base.step_seconds(r) / row.step_seconds(r))
                    .collect(),
            )
        });
        let steps = workload.steps as f64;
        let over_rounds = |of: fn(&Measured) -> f64| median(row.rounds.iter().map(of).collect());
        let strategy = m.strategy.parse().expect("the name came from a strategy");
        let formula = burn_shard::model_state_bytes(strategy, m.numel, m.world_size, 4);
        writeln!(
            out,
            "| {} | {} | {seconds:.3} | {ratio:.2} | {:.2} / {:.2} / {:.2} | {:.2} | {:.2} | {:.2} | \
             {:.2} | {:.0} | {:.0} |",
            m.world_size,
            m.strategy,
            over_rounds(|m| m.phases.forward) / steps,
            over_rounds(|m| m.phases.backward) / steps,
            over_rounds(|m| m.phases.step) / steps,
            over_rounds(|m| m.cpu_seconds) / steps,
            gib(over_rounds(|m| m.resident_peak_bytes_per_rank as f64)),
            gib(m.state_bytes as f64),
            gib(formula as f64),
            m.unsharded_peak_bytes as f64 / f64::from(1 << 20),
            m.wire_bytes_per_step as f64 / f64::from(1 << 20),
        )
        .expect("writing to a string should succeed");
    }
    out
}
