//! WordPiece, trained on the corpus or loaded from a `tokenizer.json`.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use serde::{Deserialize, Serialize};
use tokenizers::decoders::wordpiece::WordPiece as WordPieceDecoder;
use tokenizers::models::wordpiece::{WordPiece, WordPieceTrainerBuilder};
use tokenizers::normalizers::BertNormalizer;
use tokenizers::pre_tokenizers::bert::BertPreTokenizer;
use tokenizers::{
    AddedToken, NormalizedString, Normalizer, OffsetReferential, OffsetType, PreTokenizedString,
    PreTokenizer, Tokenizer, Trainer,
};

use super::corpus::{Corpus, Document};
use crate::config::PAD_ID;
use crate::error::Error;

/// In the order of their ids in a vocabulary trained here.
const SPECIAL: [&str; 5] = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"];

/// Characters beyond the most frequent this many are unknown.
const ALPHABET: usize = 500;

/// How many sentences are tokenized at a time.
const BATCH: usize = 16_384;

/// The ids that pre-training needs to know.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Vocabulary {
    /// Number of tokens, special ones included.
    pub size: u32,
    /// Starts every row.
    pub cls: u32,
    /// Ends each segment.
    pub sep: u32,
    /// Stands for a hidden token.
    pub mask: u32,
    /// The first id above all special tokens; random replacements come from there.
    pub words: Range<u32>,
}

/// Turns text into token ids.
#[derive(Debug)]
pub struct WordPieces {
    tokenizer: Tokenizer,
    vocabulary: Vocabulary,
}

impl WordPieces {
    /// Loads a tokenizer in Hugging Face's format.
    ///
    /// # Errors
    /// The file cannot be read, lacks one of BERT's special tokens, has `[PAD]` elsewhere than
    /// at 0, or has more than `most` tokens.
    pub fn load(path: &Path, most: usize) -> Result<Self, Error> {
        let bytes = fs::read(path).map_err(|source| Error::Read {
            path: path.into(),
            source,
        })?;
        let mut tokenizer = Tokenizer::from_bytes(bytes).map_err(|source| Error::Tokenizer {
            path: path.into(),
            source,
        })?;
        tokenizer.with_padding(None);
        tokenizer
            .with_truncation(None)
            .map_err(|source| Error::Tokenizer {
                path: path.into(),
                source,
            })?;

        let found = tokenizer.get_vocab_size(true);
        if found > most {
            return Err(Error::VocabularyTooLarge {
                path: path.into(),
                found,
                most,
            });
        }
        let mut ids = [0; SPECIAL.len()];
        for (id, token) in ids.iter_mut().zip(SPECIAL) {
            *id = tokenizer.token_to_id(token).ok_or(Error::NoSpecialToken {
                path: path.into(),
                token,
            })?;
        }
        let [pad, _, cls, sep, mask] = ids;
        if pad != PAD_ID {
            return Err(Error::PadNotFirst {
                path: path.into(),
                found: pad,
            });
        }
        let size = u32::try_from(found).unwrap_or(u32::MAX);
        let words = ids.iter().max().map_or(0, |id| id + 1)..size;
        if words.is_empty() {
            return Err(Error::NoWords { path: path.into() });
        }
        Ok(Self {
            tokenizer,
            vocabulary: Vocabulary {
                size,
                cls,
                sep,
                mask,
                words,
            },
        })
    }

    /// Trains a vocabulary of at most `size` tokens, or loads the one trained on the same text
    /// before. Also returns where it is kept, or `None` if it could not be.
    ///
    /// # Errors
    /// Training failed, or what is in the cache cannot be read.
    pub fn train_or_load(corpus: &Corpus, size: usize) -> Result<(Self, Cached), Error> {
        let name = format!("wordpiece-{size}-{:016x}.json", corpus.fingerprint());
        let directory = cache_directory();
        let path = directory.join(&name);
        if path.is_file() {
            return Ok((Self::load(&path, size)?, Cached::Found(path)));
        }
        let text = train(&corpus.documents, size)?;
        fs::create_dir_all(&directory).map_err(|source| Error::Write {
            path: directory.clone(),
            source,
        })?;
        // Two runs may train at once: each renames a complete file into place.
        let scratch = directory.join(format!("{name}.{}", std::process::id()));
        fs::write(&scratch, text)
            .and_then(|()| fs::rename(&scratch, &path))
            .map_err(|source| Error::Write {
                path: path.clone(),
                source,
            })?;
        Ok((Self::load(&path, size)?, Cached::Trained(path)))
    }

    /// The ids that matter.
    pub fn vocabulary(&self) -> &Vocabulary {
        &self.vocabulary
    }

    /// Tokenizes texts, without special tokens, on all cores.
    ///
    /// # Errors
    /// The tokenizer of a file cannot encode them.
    pub fn encode<'a>(
        &self,
        texts: impl IntoIterator<Item = &'a str>,
        mut each: impl FnMut(&[u32]),
    ) -> Result<(), Error> {
        let mut texts = texts.into_iter();
        loop {
            let batch: Vec<&str> = texts.by_ref().take(BATCH).collect();
            if batch.is_empty() {
                return Ok(());
            }
            let encoded = self.tokenizer.encode_batch_fast(batch, false);
            for encoding in encoded.map_err(Error::Encode)? {
                each(encoding.get_ids());
            }
        }
    }

    /// The text of token ids, special tokens included.
    ///
    /// # Errors
    /// The tokenizer of a file cannot decode them.
    pub fn decode(&self, ids: &[u32]) -> Result<String, Error> {
        self.tokenizer.decode(ids, false).map_err(Error::Encode)
    }
}

/// Where a vocabulary is from.
#[derive(Clone, Debug)]
pub enum Cached {
    /// An earlier run left it here.
    Found(PathBuf),
    /// This run trained it and left it here.
    Trained(PathBuf),
}

/// `$XDG_CACHE_HOME/burn-shard/bert-large`, by default under `~/.cache`.
fn cache_directory() -> PathBuf {
    let set = std::env::var_os("XDG_CACHE_HOME").filter(|path| !path.is_empty());
    let cache = set.map(PathBuf::from);
    let cache = cache.or_else(|| std::env::home_dir().map(|home| home.join(".cache")));
    cache
        .unwrap_or_else(std::env::temp_dir)
        .join("burn-shard")
        .join("bert-large")
}

/// A `tokenizer.json` with a vocabulary trained on the documents, the same each time.
///
/// The trainer numbers `##x` tokens in the order of a hash map with random keys and breaks ties
/// between merges by number. It is given the alphabet beforehand, as if it were special tokens.
fn train(documents: &[Document], size: usize) -> Result<String, Error> {
    let mut trainer = WordPieceTrainerBuilder::new()
        .vocab_size(size)
        .min_frequency(2)
        .show_progress(false)
        .build();
    let characters = Mutex::new(BTreeMap::new());
    let sentences = documents.iter().flat_map(|document| &document.sentences);
    let count = |sentence: &str| {
        let words = words(sentence)?;
        if let Ok(mut characters) = characters.lock() {
            for character in words.iter().flat_map(|word| word.chars()) {
                *characters.entry(character).or_insert(0_u64) += 1;
            }
        }
        Ok(words)
    };
    trainer
        .feed(sentences.map(String::as_str), count)
        .map_err(Error::Train)?;

    let mut alphabet: Vec<(char, u64)> = characters
        .into_inner()
        .unwrap_or_default()
        .into_iter()
        .collect();
    alphabet.sort_by_key(|&(character, count)| (Reverse(count), character));
    alphabet.truncate(ALPHABET);
    let alphabet: BTreeSet<char> = alphabet
        .into_iter()
        .map(|(character, _)| character)
        .collect();
    let special = |text: String| AddedToken::from(text, true);
    let specials: Vec<_> = SPECIAL
        .iter()
        .map(|token| special((*token).to_owned()))
        .collect();
    let continued = alphabet
        .iter()
        .map(|character| special(format!("##{character}")));
    trainer.set_special_tokens(specials.iter().cloned().chain(continued).collect());
    trainer.set_limit_alphabet(Some(alphabet.len()));
    trainer.set_initial_alphabet(alphabet.into_iter().collect());
    let mut model = WordPiece::default();
    trainer.train(&mut model).map_err(Error::Train)?;

    let mut tokenizer = Tokenizer::new(model);
    tokenizer
        .with_normalizer(Some(BertNormalizer::default()))
        .map_err(Error::Train)?
        .with_pre_tokenizer(Some(BertPreTokenizer))
        .with_decoder(Some(WordPieceDecoder::default()));
    tokenizer
        .add_special_tokens(specials)
        .map_err(Error::Train)?;
    tokenizer.to_string(false).map_err(Error::Train)
}

/// Words as BERT's uncased tokenizer sees them.
fn words(sentence: &str) -> tokenizers::Result<Vec<String>> {
    let mut normalized = NormalizedString::from(sentence);
    BertNormalizer::default().normalize(&mut normalized)?;
    let mut words = PreTokenizedString::from(normalized);
    BertPreTokenizer.pre_tokenize(&mut words)?;
    let words = words.get_splits(OffsetReferential::Original, OffsetType::None);
    Ok(words
        .into_iter()
        .map(|(word, _, _)| word.to_owned())
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trained(text: &[&str], size: usize) -> String {
        let sentences = text.iter().map(|text| (*text).to_owned()).collect();
        train(&[Document { sentences }], size).unwrap()
    }

    fn load(json: &str, most: usize) -> Result<WordPieces, Error> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("tokenizer.json");
        fs::write(&path, json).unwrap();
        WordPieces::load(&path, most)
    }

    const TEXT: [&str; 3] = [
        "The gradients are sharded.",
        "Sharded gradients again.",
        "The ranks and the gradients",
    ];

    #[test]
    fn known_words_survive_the_round_trip() {
        let pieces = load(&trained(&TEXT, 200), 200).unwrap();
        let mut ids = Vec::new();
        pieces
            .encode(["The RANKS are sharded again."], |found| ids.extend(found))
            .unwrap();
        assert_eq!(pieces.decode(&ids).unwrap(), "the ranks are sharded again.");
        assert!(ids.iter().all(|id| pieces.vocabulary().words.contains(id)));
        let vocabulary = pieces.vocabulary();
        assert_eq!((vocabulary.cls, vocabulary.sep, vocabulary.mask), (2, 3, 4));
    }

    #[test]
    fn training_is_reproducible() {
        let text: Vec<String> = (0..2000)
            .map(|i| format!("word{} other{} third{}", i % 97, i % 89, i % 83))
            .collect();
        let text: Vec<&str> = text.iter().map(String::as_str).collect();
        assert_eq!(trained(&text, 150), trained(&text, 150));
    }

    #[test]
    fn a_vocabulary_larger_than_the_model_is_refused() {
        let json = trained(&TEXT, 100);
        let error = load(&json, 20).unwrap_err();
        assert!(
            matches!(error, Error::VocabularyTooLarge { most: 20, .. }),
            "{error}"
        );
        let error = load(&json.replace("[MASK]", "[HIDE]"), 100).unwrap_err();
        assert!(
            matches!(
                error,
                Error::NoSpecialToken {
                    token: "[MASK]",
                    ..
                }
            ),
            "{error}"
        );
    }
}
