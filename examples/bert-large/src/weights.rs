//! Reads a Hugging Face checkpoint (`model.safetensors`) into the model.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use burn::module::{ModuleVisitor, Param};
use burn::prelude::*;
use burn_store::{
    FloatCastAdapter, ModuleAdapter, ModuleStore, PyTorchToBurnAdapter, SafetensorsStore,
    SafetensorsStoreError,
};

use crate::error::Error;
use crate::model::BertForPreTraining;

/// Hugging Face's spelling of a part of a name, and the model's. Applied in order.
const SPELLINGS: [(&str, &str); 4] = [
    (".attention.self.", ".attention.self_attention."),
    (".LayerNorm.", ".layer_norm."),
    (".layer_norm.weight", ".layer_norm.gamma"),
    (".layer_norm.bias", ".layer_norm.beta"),
];

/// Tensors some checkpoints carry that are no parameters: the decoder is the word embedding
/// (and its bias the head's), and position ids count from zero.
const NOT_PARAMETERS: [&str; 3] = [
    "cls.predictions.decoder.weight",
    "cls.predictions.decoder.bias",
    "position_ids",
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

/// Checks that a file holds each parameter of the model, in its shape, and nothing else. Reads
/// names and shapes only, and allocates no parameter.
///
/// # Errors
/// The file cannot be read, or a tensor is missing, unknown or of another shape.
pub fn check(model: &BertForPreTraining, path: &Path) -> Result<(), Error> {
    let mut store = open(path)?;
    let tensors = store
        .get_all_tensors()
        .map_err(|source| unreadable(path, source))?;
    let found: BTreeMap<&str, Vec<usize>> = tensors
        .iter()
        .filter(|(name, _)| !NOT_PARAMETERS.iter().any(|other| name.ends_with(other)))
        .map(|(name, tensor)| (name.as_str(), tensor.shape.to_vec()))
        .collect();
    let expected = shapes(model);

    let first = |mut names: Vec<String>| {
        let others = names.len().saturating_sub(1);
        names
            .drain(..)
            .next()
            .map(|name| (hugging_face_name(&name), name, others))
    };
    for (name, expected) in &expected {
        if let Some(found) = found.get(name.as_str()).filter(|found| *found != expected) {
            let (path, tensor) = (path.into(), hugging_face_name(name));
            let (found, expected) = (found.clone(), expected.clone());
            return Err(Error::TensorShape {
                path,
                tensor,
                found,
                expected,
            });
        }
    }
    let missing = expected
        .keys()
        .filter(|name| !found.contains_key(name.as_str()))
        .cloned();
    if let Some((tensor, name, others)) = first(missing.collect()) {
        let expected = expected[&name].clone();
        return Err(Error::TensorMissing {
            path: path.into(),
            tensor,
            expected,
            others,
        });
    }
    let unknown = found.keys().filter(|name| !expected.contains_key(**name));
    if let Some((tensor, name, others)) = first(unknown.map(|name| name.to_string()).collect()) {
        let found = found[name.as_str()].clone();
        return Err(Error::TensorUnknown {
            path: path.into(),
            tensor,
            found,
            others,
        });
    }
    Ok(())
}

/// Loads a file that [`check`] accepts; half-precision weights are widened or narrowed to the
/// device's float type.
///
/// # Errors
/// As [`check`], or the file changed in between.
pub fn load(mut model: BertForPreTraining, path: &Path) -> Result<BertForPreTraining, Error> {
    check(&model, path)?;
    let device = model
        .devices()
        .first()
        .cloned()
        .unwrap_or_else(Device::flex);
    let dtype = device.settings().float_dtype.into();
    let adapter = PyTorchToBurnAdapter.chain(FloatCastAdapter::to(dtype));
    open(path)?
        .with_from_adapter(adapter)
        .apply_to(&mut model)
        .map_err(|source| unreadable(path, source))?;
    Ok(model)
}

fn open(path: &Path) -> Result<SafetensorsStore, Error> {
    // Asked first, for a plainer message than the store's.
    std::fs::File::open(path).map_err(|source| Error::Read {
        path: path.into(),
        source,
    })?;
    Ok(SPELLINGS.iter().fold(
        SafetensorsStore::from_file(PathBuf::from(path)),
        |store, (from, to)| store.with_key_remapping(from.replace('.', r"\."), *to),
    ))
}

fn unreadable(path: &Path, source: SafetensorsStoreError) -> Error {
    Error::Safetensors {
        path: path.into(),
        source: Box::new(source),
    }
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
