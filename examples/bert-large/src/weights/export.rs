//! Writes what Hugging Face's `from_pretrained` reads: `model.safetensors`, `config.json` and
//! `tokenizer.json` in one directory.

use std::path::{Path, PathBuf};

use burn_store::{BurnToPyTorchAdapter, KeyRemapper, ModuleSnapshot, SafetensorsStore};
use serde_json::json;

use super::SPELLINGS;
use crate::config::{BertConfig, PAD_ID};
use crate::error::Error;
use crate::model::BertForPreTraining;
use crate::paths;

/// The file of the parameters.
const MODEL: &str = "model.safetensors";
/// The files of an export.
pub const FILES: [&str; 3] = [MODEL, "config.json", "tokenizer.json"];

/// Writes parameters and sizes. What is there is replaced, each file at once. The output weights are not
/// written: they are the word embeddings.
///
/// # Errors
/// A file cannot be written.
pub fn export(model: &BertForPreTraining, config: &BertConfig, dir: &Path) -> Result<(), Error> {
    let path = dir.join(MODEL);
    let failed = |source: Box<dyn std::error::Error + Send + Sync>| Error::Export {
        path: path.clone(),
        source,
    };
    let mut names = KeyRemapper::new();
    for (theirs, ours) in SPELLINGS.into_iter().rev() {
        let pattern = ours.replace('.', r"\.");
        names = names
            .add_pattern(pattern, theirs)
            .map_err(|error| failed(error.into()))?;
    }
    let mut store = SafetensorsStore::from_file(path.clone())
        .with_to_adapter(BurnToPyTorchAdapter)
        .remap(names)
        // Older versions of transformers refuse a file that does not say whose layout it has.
        .metadata("format", "pt")
        .overwrite(true);
    model
        .save_into(&mut store)
        .map_err(|error| failed(error.into()))?;
    let text = serde_json::to_string_pretty(&description(config)).map_err(|e| failed(e.into()))?;
    write(dir.join("config.json"), text.as_bytes())
}

/// Writes a tokenizer beside the parameters.
///
/// # Errors
/// The file cannot be written.
pub fn export_tokenizer(json: &[u8], dir: &Path) -> Result<(), Error> {
    write(dir.join("tokenizer.json"), json)
}

fn write(path: PathBuf, bytes: &[u8]) -> Result<(), Error> {
    #[cfg_attr(not(unix), allow(unused_mut, reason = "only Unix has modes"))]
    let mut scratch = tempfile::Builder::new();
    // Whoever the user lets: scratch files are private otherwise.
    #[cfg(unix)]
    scratch.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    paths::replace(&path, bytes, &scratch).map_err(|source| Error::Write { path, source })
}

/// The sizes by Hugging Face's names. Its "gelu" is the exact one, as Burn's.
fn description(config: &BertConfig) -> serde_json::Value {
    let architecture = if config.next_sentence {
        "BertForPreTraining"
    } else {
        "BertForMaskedLM"
    };
    json!({
        "model_type": "bert",
        "architectures": [architecture],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "intermediate_size": config.intermediate,
        "hidden_act": "gelu",
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.dropout,
        "max_position_embeddings": config.max_positions,
        "type_vocab_size": config.token_types,
        "initializer_range": config.init_std,
        "layer_norm_eps": config.layer_norm_eps,
        "pad_token_id": PAD_ID,
        "tie_word_embeddings": true,
    })
}
