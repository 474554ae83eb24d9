//! Text for the program, shared by the test files.

use std::fs;
use std::path::Path;

/// Documents about the same few things, so that there is something to learn.
pub(crate) fn write_corpus(path: &Path, documents: usize) {
    let subjects = [
        "the rank",
        "the group",
        "the model",
        "the optimizer",
        "a shard",
        "a gradient",
    ];
    let verbs = [
        "gathers",
        "scatters",
        "reduces",
        "broadcasts",
        "holds",
        "drops",
    ];
    let objects = [
        "all parameters",
        "its gradients",
        "the moments",
        "each buffer",
        "every token",
    ];
    let mut lines = String::new();
    for document in 0..documents {
        let sentences = (0..12).map(|sentence| {
            let pick = |words: &[&'static str], step: usize| words[(document + step) % words.len()];
            let (subject, verb) = (pick(&subjects, sentence), pick(&verbs, sentence / 2));
            format!(
                "Now {subject} {verb} {}.",
                pick(&objects, sentence * document)
            )
        });
        let text: Vec<String> = sentences.collect();
        lines += &format!("{{\"text\": \"{}\"}}\n", text.join(" "));
    }
    fs::write(path, lines).expect("the corpus should be written");
}
