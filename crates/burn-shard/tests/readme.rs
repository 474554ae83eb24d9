//! The README shows what compiles.

#![allow(clippy::unwrap_used, reason = "a test ends at the first error")]

use std::path::Path;

const ALLOW: &str =
    "#![allow(clippy::print_stdout, reason = \"an example shows what it computes\")]\n";

#[test]
fn the_program_of_the_readme_is_the_example() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let readme = std::fs::read_to_string(here.join("../../README.md")).unwrap();
    let example = std::fs::read_to_string(here.join("examples/minimal.rs")).unwrap();
    // Clippy's ways are not a newcomer's.
    let example = example.replacen(ALLOW, "", 1);
    assert!(readme.contains(&format!("```rust\n{example}```\n")));
}
