//! `--export`: what Hugging Face's `from_pretrained` reads, and `--weights` too.

#![allow(
    clippy::unwrap_used,
    reason = "a test fails by panicking, helpers included"
)]

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use bert_large::config::BertConfig;
use bert_large::model::BertForPreTraining;
use bert_large::weights;
use burn::module::{ModuleVisitor, Param};
use burn::prelude::*;
use safetensors::SafeTensors;

use common::{bert_large, write_corpus};

/// The tensors of a `BertForPreTraining` of one layer as transformers saves them, with their shapes.
const TENSORS: [(&str, &[usize]); 30] = [
    ("bert.embeddings.LayerNorm.bias", &[8]),
    ("bert.embeddings.LayerNorm.weight", &[8]),
    ("bert.embeddings.position_embeddings.weight", &[16, 8]),
    ("bert.embeddings.token_type_embeddings.weight", &[2, 8]),
    ("bert.embeddings.word_embeddings.weight", &[40, 8]),
    ("bert.encoder.layer.0.attention.output.LayerNorm.bias", &[8]),
    (
        "bert.encoder.layer.0.attention.output.LayerNorm.weight",
        &[8],
    ),
    ("bert.encoder.layer.0.attention.output.dense.bias", &[8]),
    (
        "bert.encoder.layer.0.attention.output.dense.weight",
        &[8, 8],
    ),
    ("bert.encoder.layer.0.attention.self.key.bias", &[8]),
    ("bert.encoder.layer.0.attention.self.key.weight", &[8, 8]),
    ("bert.encoder.layer.0.attention.self.query.bias", &[8]),
    ("bert.encoder.layer.0.attention.self.query.weight", &[8, 8]),
    ("bert.encoder.layer.0.attention.self.value.bias", &[8]),
    ("bert.encoder.layer.0.attention.self.value.weight", &[8, 8]),
    ("bert.encoder.layer.0.intermediate.dense.bias", &[12]),
    ("bert.encoder.layer.0.intermediate.dense.weight", &[12, 8]),
    ("bert.encoder.layer.0.output.LayerNorm.bias", &[8]),
    ("bert.encoder.layer.0.output.LayerNorm.weight", &[8]),
    ("bert.encoder.layer.0.output.dense.bias", &[8]),
    ("bert.encoder.layer.0.output.dense.weight", &[8, 12]),
    ("bert.pooler.dense.bias", &[8]),
    ("bert.pooler.dense.weight", &[8, 8]),
    ("cls.predictions.bias", &[40]),
    ("cls.predictions.transform.LayerNorm.bias", &[8]),
    ("cls.predictions.transform.LayerNorm.weight", &[8]),
    ("cls.predictions.transform.dense.bias", &[8]),
    ("cls.predictions.transform.dense.weight", &[8, 8]),
    ("cls.seq_relationship.bias", &[2]),
    ("cls.seq_relationship.weight", &[2, 8]),
];

/// Every parameter by its path in the model.
fn parameters(model: &BertForPreTraining) -> BTreeMap<String, Vec<f32>> {
    #[derive(Default)]
    struct Collect {
        path: Vec<String>,
        found: BTreeMap<String, Vec<f32>>,
    }
    impl ModuleVisitor for Collect {
        fn enter_module(&mut self, name: &str, _container_type: &str) {
            self.path.push(name.to_owned());
        }
        fn exit_module(&mut self, _: &str, _: &str) {
            self.path.pop();
        }
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let values = param.val().into_data().iter::<f32>().collect();
            self.found.insert(self.path.join("."), values);
        }
    }
    let mut collect = Collect::default();
    model.visit(&mut collect);
    collect.found
}

#[test]
fn an_export_has_the_tensors_of_transformers_and_loads_again() {
    let config = BertConfig {
        vocab_size: 40,
        hidden: 8,
        layers: 1,
        heads: 2,
        intermediate: 12,
        max_positions: 16,
        ..BertConfig::tiny()
    };
    let model = BertForPreTraining::new(&config, &Device::flex());
    let expected = parameters(&model);
    let root = tempfile::tempdir().unwrap();
    weights::export(&model, &config, root.path()).unwrap();

    let path = root.path().join("model.safetensors");
    let bytes = fs::read(&path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut found: Vec<(&str, Vec<usize>)> = file
        .iter()
        .map(|(name, tensor)| (name, tensor.shape().to_vec()))
        .collect();
    found.sort_unstable();
    assert_eq!(found, TENSORS.map(|(name, shape)| (name, shape.to_vec())));
    // Of a dense layer the rows are outputs there.
    let theirs = file.tensor("bert.encoder.layer.0.intermediate.dense.weight");
    let ours = &expected["bert.encoder.layer.0.intermediate.dense.weight"];
    let second = f32::from_le_bytes(theirs.unwrap().data()[4..8].try_into().unwrap());
    assert_eq!(second, ours[config.intermediate]);

    let json = fs::read(root.path().join("config.json")).unwrap();
    let json: serde_json::Value = serde_json::from_slice(&json).unwrap();
    assert_eq!(json["hidden_size"], 8);
    assert_eq!(json["intermediate_size"], 12);
    assert_eq!(json["architectures"][0], "BertForPreTraining");

    let other = BertForPreTraining::new(&config, &Device::flex());
    let loaded = weights::load(other, &path).unwrap();
    assert_eq!(parameters(&loaded), expected);
}

/// Trains four steps on two ranks; returns the exported parameters. The file's header has no fixed order.
fn exported(root: &Path, strategy: &str, more: &[&str]) -> BTreeMap<String, Vec<u8>> {
    let (corpus, dir) = (root.join("corpus.jsonl"), root.join(strategy));
    write_corpus(&corpus, 60);
    let mut all = vec!["--corpus", corpus.to_str().unwrap()];
    all.extend(["--export", dir.to_str().unwrap(), "--strategy", strategy]);
    all.extend(["--steps", "4", "--micro-batch", "2", "--seq-len", "16"]);
    all.extend(more);
    let output = bert_large(root, &all);
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
    let bytes = fs::read(dir.join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let tensors = file.iter();
    tensors
        .map(|(name, tensor)| (name.to_owned(), tensor.data().to_vec()))
        .collect()
}

#[test]
fn every_strategy_exports_the_same_and_training_starts_from_it() {
    let root = tempfile::tempdir().unwrap();
    let plain = exported(root.path(), "ddp", &[]);
    for strategy in ["zero1", "zero2", "zero3"] {
        assert!(exported(root.path(), strategy, &[]) == plain, "{strategy}");
    }
    let given = |file: &str| root.path().join("ddp").join(file);
    let (weights, tokenizer) = (given("model.safetensors"), given("tokenizer.json"));
    let start = [
        "--weights",
        weights.to_str().unwrap(),
        "--tokenizer",
        tokenizer.to_str().unwrap(),
    ];
    assert!(exported(root.path(), "zero3", &start) != plain);
    let copy = root.path().join("zero3").join("tokenizer.json");
    assert!(fs::read(copy).unwrap() == fs::read(tokenizer).unwrap());
}
