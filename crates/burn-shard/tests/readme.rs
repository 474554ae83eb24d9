//! The README shows what compiles.

#![allow(clippy::unwrap_used, reason = "a test ends at the first error")]

use std::path::Path;

use burn_shard::ProcessGroup;

#[allow(dead_code, reason = "the test does not call its main")]
#[path = "../examples/minimal.rs"]
mod minimal;

const ALLOW: &str =
    "#![allow(clippy::print_stdout, reason = \"an example shows what it computes\")]\n";

#[test]
fn the_program_of_the_readme_is_the_example() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let readme = std::fs::read_to_string(here.join("../../README.md")).unwrap();
    let example = std::fs::read_to_string(here.join("examples/minimal.rs")).unwrap();
    // A newcomer needs neither what Clippy asks for nor what the test below does.
    let example = example
        .replacen(ALLOW, "", 1)
        .replacen("pub(crate) fn train", "fn train", 1);
    assert!(readme.contains(&format!("```rust\n{example}```\n")));
}

#[test]
fn the_program_of_the_readme_learns() {
    for losses in ProcessGroup::spawn(4, |group| minimal::train(&group)).unwrap() {
        let losses = losses.unwrap();
        assert!(losses[99] < losses[0] / 4.0, "{losses:?}");
    }
}
