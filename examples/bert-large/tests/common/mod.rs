//! The program and text for it, shared by the test files.

#![allow(dead_code, reason = "each test file uses some of it")]

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

/// The program, with a cache directory of its own.
pub(crate) fn program(cache: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_bert-large"));
    command.env("XDG_CACHE_HOME", cache);
    for variable in ["RUST_BACKTRACE", "RUST_LOG"] {
        command.env_remove(variable);
    }
    command
}

/// Runs it.
pub(crate) fn bert_large(cache: &Path, arguments: &[&str]) -> Output {
    let output = program(cache).args(arguments).output();
    output.expect("the program should start")
}

/// Runs what should be refused; returns the line it says.
pub(crate) fn refused(arguments: &[&str]) -> String {
    let cache = tempfile::tempdir().expect("a directory should be made");
    let output = bert_large(cache.path(), arguments);
    let text = String::from_utf8(output.stderr).expect("messages are text");
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert_eq!(text.lines().count(), 1, "{text}");
    let error = text.trim().strip_prefix("error: ");
    error.expect("it should say error").to_owned()
}

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

/// A vocabulary of letters, in Hugging Face's format: nothing is trained, nothing cached.
pub(crate) fn write_tokenizer(path: &Path) {
    let special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "."].map(String::from);
    let letters = ('a'..='z').chain(['N']);
    let pieces = letters.flat_map(|letter| [letter.to_string(), format!("##{letter}")]);
    let entries = special.into_iter().chain(pieces).enumerate();
    let vocab: Vec<String> = entries
        .map(|(id, piece)| format!("{piece:?}: {id}"))
        .collect();
    let model = format!(
        r###"{{"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100, "vocab": {{ {} }} }}"###,
        vocab.join(", ")
    );
    let tokenizer = format!(
        r#"{{"version": "1.0", "added_tokens": [], "pre_tokenizer": {{"type": "BertPreTokenizer"}},
            "model": {model} }}"#
    );
    fs::write(path, tokenizer).expect("the tokenizer should be written");
}
