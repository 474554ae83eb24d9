//! The program as a user runs it: one clear line and exit code 1 for each mistake, and a run from
//! text to a falling loss.

#![allow(
    clippy::unwrap_used,
    reason = "a test fails by panicking, helpers included"
)]

mod common;

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use bert_large::config::BertConfig;
use bert_large::model::BertForPreTraining;
use bert_large::weights::hugging_face_name;
use burn::module::{ModuleVisitor, Param};
use burn::prelude::*;
use common::write_corpus;
use safetensors::tensor::{Dtype, TensorView};

fn bert_large(cache: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_bert-large"))
        .args(arguments)
        .env("XDG_CACHE_HOME", cache)
        .output()
        .unwrap()
}

/// Runs what should be refused; returns the line it says.
fn refused(arguments: &[&str]) -> String {
    let cache = tempfile::tempdir().unwrap();
    let output = bert_large(cache.path(), arguments);
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert_eq!(text.lines().count(), 1, "{text}");
    text.trim().strip_prefix("error: ").unwrap().to_owned()
}

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
    let text = refused(&["--weights", &missing]);
    assert!(
        text.starts_with(&format!("cannot read {missing}")),
        "{text}"
    );

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
        "the corpus has 1 documents of some length, pairs need at least 2"
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
    let text = refused(&["--dropout", "1.5"]);
    assert_eq!(text, "--dropout is 1.5 (allowed: from 0 to below 1)");
    let text = refused(&["--dtype", "f16"]);
    assert!(
        text.starts_with("--dtype f16: Adam's moments need more range"),
        "{text}"
    );
}

/// Names and shapes of the tiny model's tensors as a checkpoint has them.
#[derive(Default)]
struct Shapes {
    path: Vec<String>,
    linear: Vec<bool>,
    found: Vec<(String, Vec<usize>)>,
}

impl ModuleVisitor for Shapes {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.path.push(name.to_owned());
        self.linear.push(container_type == "Struct:Linear");
    }
    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
        self.linear.pop();
    }
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let mut shape = param.lazy_shape().to_vec();
        if self.linear.contains(&true) {
            shape.reverse();
        }
        self.found
            .push((hugging_face_name(&self.path.join(".")), shape));
    }
}

#[test]
fn a_checkpoint_that_does_not_fit_names_the_tensor_and_both_shapes() {
    let mut shapes = Shapes::default();
    BertForPreTraining::new(&BertConfig::tiny(), &Device::flex()).visit(&mut shapes);
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("model.safetensors");
    let name = path.to_str().unwrap();
    let zeros = vec![0; 4 * 8192 * 128];
    let refused_with = |tensors: &[(String, Vec<usize>)]| {
        let views = tensors.iter().map(|(name, shape)| {
            let bytes = &zeros[..4 * shape.iter().product::<usize>()];
            (
                name,
                TensorView::new(Dtype::F32, shape.clone(), bytes).unwrap(),
            )
        });
        safetensors::serialize_to_file(views, None, &path).unwrap();
        refused(&["--weights", name])
    };

    let mut tensors = shapes.found.clone();
    let query = "bert.encoder.layer.1.attention.self.query.weight";
    let pooler = tensors.iter_mut().find(|(name, _)| name == query).unwrap();
    pooler.1 = vec![64, 128];
    assert_eq!(
        refused_with(&tensors),
        format!("{name}: tensor {query} has shape [64, 128], the model needs [128, 128]")
    );

    let mut tensors = shapes.found.clone();
    tensors.retain(|(name, _)| !name.starts_with("cls.seq_relationship"));
    assert_eq!(
        refused_with(&tensors),
        format!("{name}: tensor cls.seq_relationship.bias [2] is missing (and 1 more)")
    );

    let mut tensors = shapes.found;
    tensors.push((
        "bert.encoder.layer.9.output.LayerNorm.weight".into(),
        vec![128],
    ));
    assert_eq!(
        refused_with(&tensors),
        format!(
            "{name}: the model has no tensor bert.encoder.layer.9.output.LayerNorm.weight [128]"
        )
    );

    fs::write(&path, "no tensors here").unwrap();
    let text = refused(&["--weights", name]);
    assert!(
        text.starts_with(&format!("cannot read weights from {name}: ")),
        "{text}"
    );
}

#[test]
fn training_starts_from_the_checkpoint() {
    let root = tempfile::tempdir().unwrap();
    let corpus = root.path().join("corpus.jsonl");
    write_corpus(&corpus, 10);
    let mut shapes = Shapes::default();
    BertForPreTraining::new(&BertConfig::tiny(), &Device::flex()).visit(&mut shapes);
    // Half precision, and with the tied decoder that Hugging Face writes beside the embeddings.
    shapes
        .found
        .push(("cls.predictions.decoder.weight".into(), vec![8192, 128]));
    let zeros = vec![0; 2 * 8192 * 128];
    let views = shapes.found.iter().map(|(name, shape)| {
        let bytes = &zeros[..2 * shape.iter().product::<usize>()];
        (
            name,
            TensorView::new(Dtype::F16, shape.clone(), bytes).unwrap(),
        )
    });
    let weights = root.path().join("model.safetensors");
    safetensors::serialize_to_file(views, None, &weights).unwrap();

    let [corpus, weights] = [&corpus, &weights].map(|path| path.to_str().unwrap());
    let arguments = [
        "--corpus",
        corpus,
        "--weights",
        weights,
        "--steps",
        "1",
        "--micro-batch",
        "1",
    ];
    let output = bert_large(root.path(), &arguments);
    let text = String::from_utf8(output.stdout).unwrap();
    // Nothing but zeros: all tokens, and both answers, are equally likely.
    let uniform = format!(
        "masked tokens {:.3}, next sentence {:.3}",
        8192f64.ln(),
        2f64.ln()
    );
    assert!(text.contains(&uniform), "{text}");
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
        (first - 8192f64.ln() - 2f64.ln()).abs() < 0.5,
        "a new model should guess: {first}"
    );
    assert!(last < first - 2.0, "{losses:?}");
    assert_eq!(losses[0], losses[1], "without dropout a run should repeat");
}
