//! The examples train, and their ranks hold what the examples say.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test ends at the first error"
)]

use burn_shard::{MemoryKind, ProcessGroup, ShardingStrategy};

#[allow(dead_code, reason = "the test does not call its main")]
#[path = "../examples/conv.rs"]
mod conv;
#[allow(dead_code, reason = "the test does not call its main")]
#[path = "../examples/memory.rs"]
mod memory;
#[allow(dead_code, reason = "the test does not call its main")]
#[path = "../examples/text.rs"]
mod text;

#[test]
fn the_convolutional_network_learns_and_ranks_agree_on_what_they_measured() {
    let runs = ProcessGroup::spawn(2, |group| conv::train(&group, 3).unwrap()).unwrap();
    for run in &runs {
        assert!(run.losses[2] < 0.5 * run.losses[0], "{:?}", run.losses);
        assert!(run.accuracy > 0.9, "{}", run.accuracy);
        assert_eq!(run.losses, runs[0].losses);
        assert_eq!(run.accuracy.to_bits(), runs[0].accuracy.to_bits());
        // ZeRO-2: parameters are whole, and SGD has one velocity per parameter, of which each rank keeps half.
        let bytes = |kind| run.memory.of(kind).live_bytes;
        let (parameters, state) = (
            bytes(MemoryKind::Parameters),
            bytes(MemoryKind::OptimizerState),
        );
        assert!(
            2 * state >= parameters && state < parameters * 6 / 10,
            "{state} of {parameters}"
        );
    }
    assert_ne!(runs[0].running_mean, runs[1].running_mean);
}

#[test]
fn the_text_classifier_learns_and_each_rank_holds_half_of_it() {
    let steps = 4 * text::EVERY;
    let train = |group| text::train(&group, ShardingStrategy::Full, steps).unwrap();
    let runs = ProcessGroup::spawn(2, train).unwrap();
    for run in &runs {
        assert!(run.losses[3] < 0.8 * run.losses[0], "{:?}", run.losses);
        assert_eq!(run.losses, runs[0].losses);
        let held = run.memory.of(MemoryKind::Parameters).live_bytes;
        assert!(
            held < run.full_bytes * 55 / 100,
            "{held} of {}",
            run.full_bytes
        );
    }
}

#[test]
fn the_chart_of_the_readme_shows_what_is_measured_and_that_is_what_was_predicted() {
    let rows = memory::measure().unwrap();
    for row in &rows {
        let measured: usize = row.measured.iter().sum();
        // Padding and parameters that stay whole.
        assert!(measured >= row.predicted, "{measured} of {}", row.predicted);
        assert!(
            measured - row.predicted < row.predicted / 100,
            "{measured} of {}",
            row.predicted
        );
    }
    let chart = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/memory.svg");
    assert_eq!(
        std::fs::read_to_string(chart).unwrap(),
        memory::chart(&rows)
    );
}
