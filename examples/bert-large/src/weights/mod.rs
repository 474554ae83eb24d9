//! Reads a Hugging Face checkpoint into the model (`model.safetensors`, or the
//! `model.safetensors.index.json` of one in several files), and writes one.
//!
//! `checkpoint` reads files and undoes what differs between them; here their tensors meet the
//! model's. The encoder and the embeddings have to be there. Heads that a checkpoint lacks are drawn,
//! as Hugging Face does it, and said.

mod checkpoint;
mod export;

pub use export::{FILES, export, export_tokenizer};

use std::collections::BTreeMap;
use std::path::Path;

use burn::module::{ModuleVisitor, Param};
use burn::prelude::*;
use burn_store::burn_pack;
use burn_store::{FloatCastAdapter, ModuleAdapter, ModuleSnapshot, PyTorchToBurnAdapter};

use crate::error::Error;
use crate::model::BertForPreTraining;

/// Hugging Face's spelling of a part of a name, and the model's. Applied in order.
const SPELLINGS: [(&str, &str); 4] = [
    (".attention.self.", ".attention.self_attention."),
    (".LayerNorm.", ".layer_norm."),
    (".layer_norm.weight", ".layer_norm.gamma"),
    (".layer_norm.bias", ".layer_norm.beta"),
];

/// What a checkpoint may lack as a whole, and how its tensors' names start.
const HEADS: [(&str, &str); 3] = [
    ("pooler", "bert.pooler."),
    ("next-sentence head", "cls.seq_relationship."),
    ("masked-token head", "cls.predictions."),
];

/// A parameter's name in the model, for the spelling of a checkpoint.
pub fn model_name(hugging_face: &str) -> String {
    SPELLINGS
        .iter()
        .fold(hugging_face.to_owned(), |name, (from, to)| {
            name.replace(from, to)
        })
}

/// A parameter's name in a checkpoint, for its path in the model.
pub fn hugging_face_name(path: &str) -> String {
    SPELLINGS
        .iter()
        .rev()
        .fold(path.to_owned(), |name, (to, from)| name.replace(from, to))
}

/// Checks that a checkpoint holds each parameter of the model, in its shape, and nothing else.
/// Allocates no parameter. Returns which heads it lacks.
///
/// # Errors
/// The file cannot be read or is another one, a tensor is missing, unknown or of another shape, or
/// the output weights are not the word embeddings.
pub fn check(model: &BertForPreTraining, path: &Path) -> Result<Vec<&'static str>, Error> {
    fitting(model, path).map(|(_, lacking)| lacking)
}

/// The tensors of a checkpoint by their names in the model, and the heads that it lacks.
fn fitting(
    model: &BertForPreTraining,
    path: &Path,
) -> Result<(Vec<burn_pack::Tensor>, Vec<&'static str>), Error> {
    let found = checkpoint::read(path)?;
    let mut expected: BTreeMap<String, Vec<usize>> = shapes(model)
        .into_iter()
        .map(|(name, shape)| (hugging_face_name(&name), shape))
        .collect();
    let mut lacking = Vec::new();
    for (head, prefix) in HEADS {
        let is_there = found.keys().any(|name| name.starts_with(prefix));
        let is_expected = expected.keys().any(|name| name.starts_with(prefix));
        if is_expected && !is_there {
            expected.retain(|name, _| !name.starts_with(prefix));
            lacking.push(head);
        }
    }
    for (name, expected) in &expected {
        let shape = found.get(name).map(|tensor| tensor.shape.to_vec());
        if let Some(found) = shape.filter(|found| found != expected) {
            return Err(Error::TensorShape {
                path: path.into(),
                tensor: name.clone(),
                found,
                expected: expected.clone(),
            });
        }
    }
    if let Some((name, shape, others)) = lacking_in(&found, &expected) {
        return Err(Error::TensorMissing {
            path: path.into(),
            tensor: name.clone(),
            expected: shape.clone(),
            others,
        });
    }
    if let Some((name, tensor, others)) = lacking_in(&expected, &found) {
        return Err(Error::TensorUnknown {
            path: path.into(),
            tensor: name.clone(),
            found: tensor.shape.to_vec(),
            others,
        });
    }
    let tensors = found.into_iter().map(|(name, mut tensor)| {
        tensor.name = model_name(&name);
        tensor
    });
    Ok((tensors.collect(), lacking))
}

/// The first of `all` whose name is not among `some`, and how many more there are.
fn lacking_in<'a, T, U>(
    some: &BTreeMap<String, U>,
    all: &'a BTreeMap<String, T>,
) -> Option<(&'a String, &'a T, usize)> {
    let mut lacking = all.iter().filter(|(name, _)| !some.contains_key(*name));
    let (name, value) = lacking.next()?;
    Some((name, value, lacking.count()))
}

/// Loads a file that [`check`] accepts; half-precision weights are widened or narrowed to the
/// device's float type.
///
/// # Errors
/// The errors of [`check`], and one if the file changed in between.
pub fn load(mut model: BertForPreTraining, path: &Path) -> Result<BertForPreTraining, Error> {
    let (tensors, _) = fitting(&model, path)?;
    let device = model
        .devices()
        .first()
        .cloned()
        .unwrap_or_else(Device::flex);
    let dtype = device.settings().float_dtype.into();
    let adapter = PyTorchToBurnAdapter.chain(FloatCastAdapter::to(dtype));
    let given = tensors.len();
    let result = model.apply(tensors, None, Some(Box::new(adapter)), false);
    if let Some(error) = result.errors.first() {
        return Err(Error::Weights {
            path: path.into(),
            reason: error.to_string(),
        });
    }
    // Whatever is not applied would be drawn, without a word.
    if result.applied.len() != given {
        return Err(Error::Weights {
            path: path.into(),
            reason: format!("{} of {given} tensors were taken", result.applied.len()),
        });
    }
    Ok(model)
}

/// Every parameter's path in the model and its shape in a checkpoint: a dense layer's weight is
/// `[out, in]` there and `[in, out]` here.
fn shapes(model: &BertForPreTraining) -> BTreeMap<String, Vec<usize>> {
    #[derive(Default)]
    struct Shapes {
        path: Vec<String>,
        containers: Vec<String>,
        shapes: BTreeMap<String, Vec<usize>>,
    }
    impl ModuleVisitor for Shapes {
        fn enter_module(&mut self, name: &str, container_type: &str) {
            self.path.push(name.to_owned());
            self.containers.push(container_type.to_owned());
        }
        fn exit_module(&mut self, _: &str, _: &str) {
            self.path.pop();
            self.containers.pop();
        }
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let mut shape = param.lazy_shape().to_vec();
            if self
                .containers
                .iter()
                .rev()
                .any(|container| container == "Struct:Linear")
            {
                shape.reverse();
            }
            self.shapes.insert(self.path.join("."), shape);
        }
    }
    let mut visitor = Shapes::default();
    model.visit(&mut visitor);
    visitor.shapes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::BertConfig;

    #[test]
    fn names_translate_both_ways() {
        let model = BertForPreTraining::new(&BertConfig::large(), &Device::flex());
        let paths = shapes(&model);
        assert_eq!(paths.len(), 398);
        let name = "bert.encoder.layer.23.attention.output.LayerNorm.weight";
        assert!(paths.contains_key(&model_name(name)));
        let name = "bert.encoder.layer.0.intermediate.dense.weight";
        assert_eq!(paths[&model_name(name)], [4096, 1024]);
        for path in paths.keys() {
            assert_eq!(model_name(&hugging_face_name(path)), *path);
        }
    }
}
