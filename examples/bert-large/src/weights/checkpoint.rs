//! The files of a checkpoint, and what differs between those that people have: how many files, what
//! names start with, and whether the output weights are written down beside the word embeddings.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use burn::tensor::DType;
use burn_store::burn_pack::Tensor;
use burn_store::{ModuleStore, SafetensorsStore};
use serde::Deserialize;

use super::{hugging_face_name, model_name};
use crate::error::Error;
use crate::input;

/// Ends the name of the tensor that shows how names start.
const WORDS: &str = "embeddings.word_embeddings.weight";
/// The output weights and their bias, and what they are tied to.
const TIED: [(&str, &str); 2] = [
    (
        "cls.predictions.decoder.weight",
        "bert.embeddings.word_embeddings.weight",
    ),
    ("cls.predictions.decoder.bias", "cls.predictions.bias"),
];

/// The tensors of a checkpoint by their names in `BertForPreTraining`, each once.
///
/// # Errors
/// A file cannot be read or is no checkpoint of BERT, or the output weights are matrices of their own.
pub(super) fn read(path: &Path) -> Result<BTreeMap<String, Tensor>, Error> {
    let mut tensors = BTreeMap::new();
    for (file, kind) in files(path)? {
        if kind != Some("a safetensors file") {
            let what = kind.unwrap_or("a file of an unknown kind");
            return Err(Error::NotSafetensors { path: file, what });
        }
        let mut store = SafetensorsStore::from_file(file.clone());
        let found = store
            .get_all_tensors()
            .map_err(|source| Error::Safetensors {
                path: file,
                source: Box::new(source),
            })?;
        tensors.extend(
            found
                .iter()
                .map(|(name, tensor)| (name.clone(), tensor.clone())),
        );
    }
    let mut tensors = named_as_here(path, tensors)?;
    untie(path, &mut tensors)?;
    for (name, tensor) in &tensors {
        if !matches!(
            tensor.dtype,
            DType::F64 | DType::F32 | DType::F16 | DType::BF16
        ) {
            return Err(Error::TensorType {
                path: path.into(),
                tensor: name.clone(),
                found: format!("{:?}", tensor.dtype),
            });
        }
    }
    Ok(tensors)
}

/// The file itself, or those beside it that an index names, and what each is.
fn files(path: &Path) -> Result<Vec<(PathBuf, Option<&'static str>)>, Error> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let kind = input::kind_of(&input::head(path)?);
    if kind != Some("a JSON file") {
        return Ok(vec![(path.into(), kind)]);
    }
    let refused = |what| Error::NotSafetensors {
        path: path.into(),
        what,
    };
    let index: Index = serde_json::from_slice(&input::read(path)?)
        .map_err(|_| refused("a JSON file without a weight_map"))?;
    let names: BTreeSet<String> = index.weight_map.into_values().collect();
    // Before any is opened: an index may be anybody's.
    let is_beside = |name: &String| Path::new(name).file_name() == Some(name.as_ref());
    if !names.iter().all(is_beside) {
        return Err(refused("an index of files that are not beside it"));
    }
    names
        .into_iter()
        .map(|name| {
            let file = path.with_file_name(name);
            let kind = input::kind_of(&input::head(&file)?);
            Ok((file, kind))
        })
        .collect()
}

/// Renames `PREFIX.embeddings..` to `bert.embeddings..`: checkpoints of `BertModel` have no prefix,
/// those of wrapped models have two. Position ids are no parameters: they count from zero.
fn named_as_here(
    path: &Path,
    tensors: BTreeMap<String, Tensor>,
) -> Result<BTreeMap<String, Tensor>, Error> {
    let not_bert = || Error::NotBert {
        path: path.into(),
        example: tensors.keys().next().cloned().unwrap_or_default(),
    };
    // A checkpoint may name the word embeddings by the output weights only.
    let prefix = tensors
        .keys()
        .find_map(|name| name.strip_suffix(WORDS))
        .or_else(|| {
            let position = "embeddings.position_embeddings.weight";
            tensors.keys().find_map(|name| name.strip_suffix(position))
        })
        .ok_or_else(not_bert)?
        .to_owned();
    let outer = match prefix.strip_suffix("bert.") {
        Some(outer) if outer.is_empty() || outer.ends_with('.') => outer.to_owned(),
        None if prefix.is_empty() => String::new(),
        _ => return Err(not_bert()),
    };
    let rename = |name: String| match name.strip_prefix(&prefix) {
        // Without a prefix, heads are told from the model by their own.
        Some(rest) if !(prefix.is_empty() && rest.starts_with("cls.")) => format!("bert.{rest}"),
        _ => name.strip_prefix(&outer).unwrap_or(&name).to_owned(),
    };
    Ok(tensors
        .into_iter()
        .filter(|(name, _)| !name.ends_with("position_ids"))
        // `LayerNorm.gamma`, in the oldest, is `LayerNorm.weight`.
        .map(|(name, tensor)| (hugging_face_name(&model_name(&rename(name))), tensor))
        .collect())
}

/// Takes out the output weights, which this model reads from the word embeddings.
fn untie(path: &Path, tensors: &mut BTreeMap<String, Tensor>) -> Result<(), Error> {
    for (copy, original) in TIED {
        let Some(own) = tensors.remove(copy) else {
            continue;
        };
        let Some(other) = tensors.get(original) else {
            tensors.insert(original.into(), own);
            continue;
        };
        let bytes = |tensor: &Tensor| {
            tensor.to_bytes().map_err(|error| Error::Weights {
                path: path.into(),
                reason: error.to_string(),
            })
        };
        let is_equal = own.dtype == other.dtype
            && own.shape == other.shape
            && bytes(&own)?[..] == bytes(other)?[..];
        if !is_equal {
            return Err(Error::NotTied {
                path: path.into(),
                copy,
                original,
            });
        }
    }
    Ok(())
}
