//! `--weights`: checkpoints as people have them, read or refused in one line.

#![allow(
    clippy::unwrap_used,
    reason = "a test fails by panicking, helpers included"
)]

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use bert_large::config::BertConfig;
use bert_large::model::BertForPreTraining;
use bert_large::weights;
use bert_large::weights::hugging_face_name;
use burn::module::{ModuleVisitor, Param};
use burn::prelude::*;
use safetensors::tensor::{Dtype, TensorView};
use tempfile::TempDir;

/// The model of the tests: small.
fn config() -> BertConfig {
    BertConfig {
        vocab_size: 40,
        hidden: 8,
        layers: 2,
        heads: 2,
        intermediate: 16,
        max_positions: 16,
        ..BertConfig::tiny()
    }
}

/// Names and shapes of the model's tensors as a checkpoint has them.
#[derive(Default)]
struct Shapes {
    path: Vec<String>,
    linear: Vec<bool>,
    found: BTreeMap<String, Vec<usize>>,
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
        let name = hugging_face_name(&self.path.join("."));
        self.found.insert(name, shape);
    }
}

/// A checkpoint that a test changes before it is written.
struct Checkpoint {
    directory: TempDir,
    dtype: Dtype,
    /// Shapes, and the number that every element is.
    tensors: BTreeMap<String, (Vec<usize>, f32)>,
}

const WORDS: &str = "bert.embeddings.word_embeddings.weight";
const DECODER: &str = "cls.predictions.decoder.weight";
const QUERY: &str = "bert.encoder.layer.1.attention.self.query.weight";

impl Checkpoint {
    fn new() -> Self {
        let mut shapes = Shapes::default();
        BertForPreTraining::new(&config(), &Device::flex()).visit(&mut shapes);
        Self {
            directory: tempfile::tempdir().unwrap(),
            dtype: Dtype::F32,
            tensors: shapes
                .found
                .into_iter()
                .map(|(name, shape)| (name, (shape, 0.25)))
                .collect(),
        }
    }

    fn path(&self) -> PathBuf {
        self.directory.path().join("model.safetensors")
    }

    fn rename(&mut self, rename: impl Fn(&str) -> String) {
        let tensors = std::mem::take(&mut self.tensors).into_iter();
        self.tensors = tensors
            .map(|(name, tensor)| (rename(&name), tensor))
            .collect();
    }

    fn write_some(&self, path: &Path, is_in: impl Fn(&str) -> bool) {
        let tensors = self.tensors.iter().filter(|(name, _)| is_in(name));
        let bytes: Vec<(&String, &Vec<usize>, Vec<u8>)> = tensors
            .map(|(name, (shape, value))| {
                let element = if self.dtype == Dtype::F32 {
                    value.to_le_bytes().to_vec()
                } else if self.dtype == Dtype::BF16 {
                    // The first half of a number of few bits.
                    value.to_le_bytes()[2..].to_vec()
                } else {
                    vec![1]
                };
                (name, shape, element.repeat(shape.iter().product()))
            })
            .collect();
        let views = bytes.iter().map(|(name, shape, bytes)| {
            let view = TensorView::new(self.dtype, (*shape).clone(), bytes);
            (*name, view.unwrap())
        });
        safetensors::serialize_to_file(views, None, path).unwrap();
    }

    fn write(&self) -> PathBuf {
        self.write_some(&self.path(), |_| true);
        self.path()
    }

    /// What it lacks; every parameter of the model has to be what the checkpoint says, or be lacking.
    fn loads(&self) -> Vec<&'static str> {
        loads(&self.write())
    }

    /// The message without the path.
    fn refused(&self) -> String {
        refused(&self.write())
    }
}

fn loads(path: &Path) -> Vec<&'static str> {
    struct AllAre(f32, usize);
    impl ModuleVisitor for AllAre {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let data = param.val().into_data();
            self.1 += usize::from(data.iter::<f32>().all(|value| value == self.0));
        }
    }
    let model = BertForPreTraining::new(&config(), &Device::flex());
    let lacking = weights::check(&model, path).unwrap();
    let model = weights::load(model, path).unwrap();
    let mut all = AllAre(0.25, 0);
    model.visit(&mut all);
    let mut shapes = Shapes::default();
    model.visit(&mut shapes);
    let drawn = |prefix: &str| {
        shapes
            .found
            .keys()
            .filter(|name| name.starts_with(prefix))
            .count()
    };
    let lacking_tensors: usize = lacking
        .iter()
        .map(|head| match *head {
            "pooler" => drawn("bert.pooler."),
            "next-sentence head" => drawn("cls.seq_relationship."),
            _ => drawn("cls.predictions."),
        })
        .sum();
    assert_eq!(all.1, shapes.found.len() - lacking_tensors);
    lacking
}

fn refused(path: &Path) -> String {
    let model = BertForPreTraining::new(&config(), &Device::flex());
    let error = weights::check(&model, path).unwrap_err().to_string();
    assert_eq!(error.lines().count(), 1, "{error}");
    let directory = path.parent().unwrap().to_str().unwrap();
    error.replace(&format!("{directory}/"), "")
}

#[test]
fn checkpoints_of_every_kind_of_bert_are_read() {
    assert_eq!(Checkpoint::new().loads(), [""; 0]);

    let mut half = Checkpoint::new();
    half.dtype = Dtype::BF16;
    assert_eq!(half.loads(), [""; 0]);

    // `BertForMaskedLM`, with the output weights beside what they are tied to.
    let mut masked_lm = Checkpoint::new();
    masked_lm
        .tensors
        .retain(|name, _| !name.contains("pooler") && !name.contains("seq_relationship"));
    let decoder = masked_lm.tensors[WORDS].clone();
    masked_lm.tensors.insert(DECODER.into(), decoder);
    let bias = masked_lm.tensors["cls.predictions.bias"].clone();
    masked_lm
        .tensors
        .insert("cls.predictions.decoder.bias".into(), bias);
    assert_eq!(masked_lm.loads(), ["pooler", "next-sentence head"]);
    // With the output weights only.
    masked_lm.tensors.remove(WORDS);
    masked_lm.tensors.remove("cls.predictions.bias");
    assert_eq!(masked_lm.loads(), ["pooler", "next-sentence head"]);

    // `BertModel`: no heads, no prefix.
    let mut bare = Checkpoint::new();
    bare.tensors.retain(|name, _| name.starts_with("bert."));
    bare.rename(|name| name.strip_prefix("bert.").unwrap().to_owned());
    assert_eq!(bare.loads(), ["next-sentence head", "masked-token head"]);

    // A wrapped model, and the names of the oldest checkpoints.
    let mut wrapped = Checkpoint::new();
    wrapped.rename(|name| {
        let name = name.replace("LayerNorm.weight", "LayerNorm.gamma");
        format!(
            "module.{}",
            name.replace("LayerNorm.bias", "LayerNorm.beta")
        )
    });
    assert_eq!(wrapped.loads(), [""; 0]);
}

#[test]
fn a_checkpoint_in_several_files_is_read_by_its_index() {
    let checkpoint = Checkpoint::new();
    let path = |name: &str| checkpoint.directory.path().join(name);
    let is_first = |name: &str| name < "bert.encoder.layer.1";
    let names = [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ];
    checkpoint.write_some(&path(names[0]), is_first);
    checkpoint.write_some(&path(names[1]), |name| !is_first(name));
    let map: Vec<String> = checkpoint
        .tensors
        .keys()
        .map(|name| format!("{name:?}: {:?}", names[usize::from(!is_first(name))]))
        .collect();
    let index = path("model.safetensors.index.json");
    fs::write(
        &index,
        format!("{{\"weight_map\": {{ {} }} }}", map.join(", ")),
    )
    .unwrap();
    assert_eq!(loads(&index), [""; 0]);

    fs::remove_file(path(names[1])).unwrap();
    let error = refused(&index);
    assert!(
        error.starts_with("cannot read model-00002-of-00002.safetensors: "),
        "{error}"
    );
}

#[test]
fn an_index_leads_to_no_file_that_is_not_beside_it() {
    let checkpoint = Checkpoint::new();
    let outside = checkpoint.write();
    let inside = checkpoint.directory.path().join("inside");
    fs::create_dir(&inside).unwrap();
    let index = inside.join("model.safetensors.index.json");
    for name in [
        "../model.safetensors",
        outside.to_str().unwrap(),
        "./model.safetensors",
        "..",
        "",
    ] {
        fs::write(
            &index,
            format!("{{\"weight_map\": {{ \"a\": {name:?} }} }}"),
        )
        .unwrap();
        let error = refused(&index);
        assert!(
            error.starts_with(
                "model.safetensors.index.json: an index of files that are not beside it, not a"
            ),
            "{error}"
        );
    }
}

#[test]
fn checkpoints_that_do_not_fit_name_the_tensor_and_both_shapes() {
    let mut other = Checkpoint::new();
    other.tensors.get_mut(QUERY).unwrap().0 = vec![4, 8];
    assert_eq!(
        other.refused(),
        format!("model.safetensors: tensor {QUERY} has shape [4, 8], the model needs [8, 8]")
    );
    // A part of a head is no head.
    let mut part = Checkpoint::new();
    part.tensors.remove("cls.seq_relationship.bias");
    assert_eq!(
        part.refused(),
        "model.safetensors: tensor cls.seq_relationship.bias [2] is missing"
    );
    let mut more = Checkpoint::new();
    let name = "bert.encoder.layer.9.output.LayerNorm.weight";
    more.tensors.insert(name.into(), (vec![8], 0.25));
    assert_eq!(
        more.refused(),
        format!("model.safetensors: the model has no tensor {name} [8]")
    );
    let mut roberta = Checkpoint::new();
    roberta.rename(|name| name.replace("bert.", "roberta."));
    assert!(
        roberta
            .refused()
            .starts_with("model.safetensors: not a checkpoint of BERT"),
        "{}",
        roberta.refused()
    );
    let mut quantized = Checkpoint::new();
    quantized.dtype = Dtype::I8;
    let error = quantized.refused();
    assert!(
        error.contains("not a float (is the checkpoint quantized?)"),
        "{error}"
    );
}

#[test]
fn output_weights_of_their_own_are_not_dropped_in_silence() {
    let mut untied = Checkpoint::new();
    let shape = untied.tensors[WORDS].0.clone();
    untied.tensors.insert(DECODER.into(), (shape, 0.5));
    let error = untied.refused();
    assert!(
        error.starts_with(&format!(
            "model.safetensors: tensor {DECODER} differs from {WORDS}"
        )),
        "{error}"
    );
}

#[test]
fn what_is_no_checkpoint_is_named_for_what_it_is() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("weights");
    for (bytes, what) in [
        (
            &b"PK\x03\x04 archive/data.pkl"[..],
            "a zip archive, as PyTorch writes them",
        ),
        (b"\x80\x02}q\x00", "a Python pickle, as PyTorch writes them"),
        (
            b"version https://git-lfs.github.com/spec/v1",
            "a Git LFS pointer, not the file itself (run git lfs pull)",
        ),
        (
            b"{\"architectures\": []}",
            "a JSON file without a weight_map",
        ),
        (b"", "an empty file"),
        (b"no tensors here", "a file of an unknown kind"),
    ] {
        fs::write(&path, bytes).unwrap();
        let error = refused(&path);
        let expected = format!("weights: {what}, not a safetensors checkpoint (give ");
        assert!(error.starts_with(&expected), "{error}");
    }
}

#[test]
fn weights_need_their_tokenizer() {
    let error = common::refused(&["--weights", "model.safetensors"]);
    assert!(error.starts_with("--weights needs --tokenizer"), "{error}");
}

#[test]
fn training_starts_from_the_checkpoint() {
    let mut shapes = Shapes::default();
    BertForPreTraining::new(&BertConfig::tiny(), &Device::flex()).visit(&mut shapes);
    let mut zeros = Checkpoint::new();
    let tensors = shapes.found.into_iter();
    zeros.tensors = tensors.map(|(name, shape)| (name, (shape, 0.0))).collect();
    let weights = zeros.write();

    let corpus = zeros.directory.path().join("corpus.jsonl");
    let tokenizer = zeros.directory.path().join("tokenizer.json");
    common::write_corpus(&corpus, 10);
    common::write_tokenizer(&tokenizer);
    let arguments = ["--corpus", "--weights", "--tokenizer"].into_iter();
    let paths = [&corpus, &weights, &tokenizer];
    let arguments = arguments
        .zip(paths)
        .flat_map(|(option, path)| [option, path.to_str().unwrap()]);
    let rest = ["--steps", "1", "--micro-batch", "1"];
    let arguments: Vec<&str> = arguments.chain(rest).collect();
    let output = common::bert_large(zeros.directory.path(), &arguments);
    let text = String::from_utf8(output.stdout).unwrap();
    // Nothing but zeros: all tokens, and both answers, are equally likely.
    let rows = BertConfig::tiny().vocab_size as f64;
    let uniform = format!(
        "masked tokens {:.3}, next sentence {:.3}",
        rows.ln(),
        2f64.ln()
    );
    assert!(text.contains(&uniform), "{text}");
}
