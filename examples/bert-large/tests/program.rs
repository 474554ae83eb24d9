//! The program as a user runs it: one clear line and exit code 1 for each mistake, and a run from
//! text to a falling loss.

#![allow(
    clippy::unwrap_used,
    reason = "a test fails by panicking, helpers included"
)]

mod common;

use std::fs;

use common::{bert_large, refused, write_corpus};

#[test]
fn wrong_paths_and_empty_corpora_are_named() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path().to_str().unwrap();
    let missing = format!("{root}/nowhere.txt");
    let text = refused(&["--corpus", &missing]);
    assert!(
        text.starts_with(&format!("cannot read {missing}: No such file")),
        "{text}"
    );

    let text = refused(&["--corpus", root]);
    assert_eq!(
        text,
        format!("no text in {root} (looked for .txt, .md, .jsonl and .parquet)")
    );

    let text = refused(&["--tokenizer", &missing]);
    assert!(
        text.starts_with(&format!("cannot read {missing}")),
        "{text}"
    );
    // Both are looked at before either is read.
    let text = refused(&["--tokenizer", "/dev/null", "--weights", &missing]);
    assert_eq!(text, "/dev/null: a pipe, a socket or a device, not a file");

    let code = format!("{root}/code.rs");
    fs::write(&code, "fn main() {}").unwrap();
    let text = refused(&["--corpus", &code]);
    assert_eq!(
        text,
        format!("{code}: not a corpus file (use .txt, .md, .jsonl or .parquet)")
    );
}

#[test]
fn too_little_text_is_refused_before_ranks_start() {
    let root = tempfile::tempdir().unwrap();
    let corpus = root.path().join("corpus.jsonl");
    let corpus_name = corpus.to_str().unwrap();
    write_corpus(&corpus, 1);
    let text = refused(&["--corpus", corpus_name]);
    assert_eq!(
        text,
        "1 of 1 documents has the 8 tokens of an example, pairs need at least 2 of them"
    );

    write_corpus(&corpus, 8);
    let text = refused(&[
        "--corpus",
        corpus_name,
        "--world-size",
        "4",
        "--micro-batch",
        "64",
    ]);
    assert!(text.starts_with("the corpus gives "), "{text}");
    assert!(
        text.contains("one step of 4 ranks with 64 rows each needs 256"),
        "{text}"
    );
}

#[test]
fn options_out_of_range_are_named() {
    let text = refused(&["--seq-len", "4096"]);
    assert_eq!(
        text,
        "--seq-len is 4096 (allowed: 16 to 128 for this model)"
    );
    // A product that would wrap.
    let root = tempfile::tempdir().unwrap();
    let corpus = root.path().join("corpus.jsonl");
    write_corpus(&corpus, 8);
    let corpus = corpus.to_str().unwrap();
    let rows = (1_usize << 63).to_string();
    let text = refused(&["--corpus", corpus, "--micro-batch", &rows]);
    assert!(text.starts_with("the corpus gives "), "{text}");
    let text = refused(&["--lr", "-1"]);
    assert_eq!(text, "--lr is -1 (allowed: a positive number)");
    let text = refused(&["--dropout", "1.5"]);
    assert_eq!(text, "--dropout is 1.5 (allowed: from 0 to below 1)");
    let text = refused(&["--dtype", "f16"]);
    assert!(
        text.starts_with("--dtype f16: Adam's moments need more range"),
        "{text}"
    );
}

#[test]
fn the_loss_falls_and_the_vocabulary_is_kept() {
    let root = tempfile::tempdir().unwrap();
    let corpus = root.path().join("corpus.jsonl");
    write_corpus(&corpus, 60);
    let corpus = corpus.to_str().unwrap();
    let arguments = [
        "--corpus",
        corpus,
        "--steps",
        "20",
        "--micro-batch",
        "4",
        "--seq-len",
        "32",
        "--lr",
        "3e-3",
        "--warmup",
        "3",
        "--dropout",
        "0",
    ];
    let outputs = [(); 2].map(|()| {
        let output = bert_large(root.path(), &arguments);
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        String::from_utf8(output.stdout).unwrap()
    });
    assert!(outputs[0].contains("trained now"), "{}", outputs[0]);
    assert!(
        outputs[0].contains("data: 60 of 60 documents and "),
        "{}",
        outputs[0]
    );
    // Without a terminal there is no colour, and no line is wider than a page.
    assert!(!outputs[0].contains('\u{1b}'), "{}", outputs[0]);
    let longest = outputs[0].lines().map(|line| line.chars().count()).max();
    assert!(longest <= Some(140), "{}", outputs[0]);
    assert!(
        outputs[0].contains("rows that were not trained on: "),
        "{}",
        outputs[0]
    );
    assert!(outputs[1].contains("trained before"), "{}", outputs[1]);

    let losses = outputs.map(|text| -> Vec<f64> {
        let lines = text.lines().filter_map(|line| line.strip_prefix("loss "));
        lines
            .map(|line| line.split_once(' ').unwrap().0.parse().unwrap())
            .collect()
    });
    let [first, last] = losses[0][..] else {
        panic!("{losses:?}")
    };
    assert!(
        (first - 2048f64.ln() - 2f64.ln()).abs() < 0.5,
        "a new model should guess: {first}"
    );
    assert!(last < first - 2.0, "{losses:?}");
    assert_eq!(losses[0], losses[1], "without dropout a run should repeat");
}

#[test]
fn a_corpus_keeps_what_it_is_even_as_an_output() {
    let root = tempfile::tempdir().unwrap();
    let corpus = root.path().join("corpus.jsonl");
    write_corpus(&corpus, 10);
    let before = fs::read(&corpus).unwrap();
    let corpus_name = corpus.to_str().unwrap();
    let text = refused(&["--corpus", corpus_name, "--losses", corpus_name]);
    assert!(text.contains("is also read, as part of --corpus"), "{text}");
    assert_eq!(fs::read(&corpus).unwrap(), before);
}

#[test]
fn a_cache_that_cannot_be_written_costs_no_run() {
    let root = tempfile::tempdir().unwrap();
    let corpus = root.path().join("corpus.jsonl");
    write_corpus(&corpus, 20);
    // A file where directories should be.
    let cache = root.path().join("cache");
    fs::write(&cache, "").unwrap();
    let arguments = [
        "--steps",
        "1",
        "--micro-batch",
        "1",
        "--seq-len",
        "32",
        "--corpus",
    ];
    let output = bert_large(
        &cache,
        &[&arguments[..], &[corpus.to_str().unwrap()]].concat(),
    );
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}");
    assert!(text.contains("trained now, not kept ("), "{text}");
}

#[cfg(unix)]
#[test]
fn a_signal_ends_the_run_after_its_step_with_a_summary() {
    use std::io::{BufRead, BufReader};
    use std::process::Stdio;

    for (signal, code) in [("INT", 130), ("TERM", 143)] {
        let root = tempfile::tempdir().unwrap();
        let [corpus, losses] = ["corpus.jsonl", "losses.csv"].map(|name| root.path().join(name));
        write_corpus(&corpus, 60);
        let mut child = common::program(root.path())
            .args(["--steps", "100000", "--micro-batch", "1", "--seq-len", "32"])
            .arg("--corpus")
            .arg(&corpus)
            .arg("--losses")
            .arg(&losses)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(lines.any(|line| line.unwrap().contains("tokens/s")));
        let kill = std::process::Command::new("kill")
            .args([format!("-{signal}"), child.id().to_string()])
            .status();
        assert!(kill.unwrap().success());
        let rest: Vec<String> = lines.map(Result::unwrap).collect();
        let rest = rest.join("\n");
        assert_eq!(child.wait().unwrap().code(), Some(code), "{rest}");
        assert!(rest.contains("\nstopped by a signal after "), "{rest}");
        assert!(rest.contains("between steps"), "{rest}");
        let losses = fs::read_to_string(losses).unwrap();
        let steps = losses.lines().count() - 1;
        assert!(steps >= 1, "{losses}");
        assert!(
            rest.contains(&format!("after {steps} of 100000 steps")),
            "{rest}"
        );
    }
}

#[test]
fn measured_state_between_steps_is_that_of_the_formula() {
    let root = tempfile::tempdir().unwrap();
    let corpus = root.path().join("corpus.jsonl");
    write_corpus(&corpus, 20);
    let arguments = ["--steps", "2", "--micro-batch", "1", "--seq-len", "16"];
    for (place, strategy) in ["ddp", "zero1", "zero2", "zero3"].into_iter().enumerate() {
        let output = common::program(root.path())
            .args(arguments)
            .args(["--strategy", strategy, "--corpus"])
            .arg(&corpus)
            .output()
            .unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let row = text.lines().find(|line| line.starts_with("between steps"));
        let (measured, formulas) = row.unwrap().split_once('|').unwrap();
        let numbers = |text: &str| -> Vec<f64> {
            text.split_whitespace()
                .filter_map(|cell| cell.parse().ok())
                .collect()
        };
        let formula = numbers(formulas)[place];
        let measured = numbers(measured);
        assert_eq!(measured.len(), 2, "{text}");
        for measured in measured {
            // Gradients, a quarter of it or more, are not in it; padding is.
            assert!(
                (measured / formula - 1.0).abs() < 0.03,
                "{strategy}: {text}"
            );
        }
    }
}
