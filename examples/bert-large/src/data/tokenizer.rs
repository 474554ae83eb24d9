//! WordPiece, trained on the corpus or loaded from a `tokenizer.json`.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tokenizers::Tokenizer;

use super::cache::Cache;
use super::corpus::Corpus;
use super::training;
use crate::config::PAD_ID;
use crate::error::{Error, TokenizerFault};
use crate::input;

/// In the order of their ids in a vocabulary trained here.
pub(super) const SPECIAL: [&str; 5] = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"];

/// How many sentences are tokenized at a time.
const BATCH: usize = 16_384;

/// The ids that pre-training needs to know.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Vocabulary {
    /// Number of tokens, special ones included.
    pub size: usize,
    /// Stands for what has no token.
    pub unknown: u32,
    /// Starts every row.
    pub cls: u32,
    /// Ends each segment.
    pub sep: u32,
    /// Stands for a hidden token.
    pub mask: u32,
    /// The ids of all tokens that stand for text, sorted; random replacements come from there.
    pub words: Vec<u32>,
}

/// Turns text into token ids.
#[derive(Debug)]
pub struct WordPieces {
    tokenizer: Tokenizer,
    vocabulary: Vocabulary,
}

impl WordPieces {
    /// Loads a tokenizer in Hugging Face's format, for a model with `rows` word embeddings.
    ///
    /// # Errors
    /// The file cannot be read or is another one, lacks one of BERT's special tokens, has `[PAD]`
    /// elsewhere than at 0, or has an id that no row is for.
    pub fn load(path: &Path, rows: usize) -> Result<Self, Error> {
        let bytes = input::read(path)?;
        Self::from_bytes(&bytes, rows).map_err(|fault| Error::Tokenizer {
            path: path.into(),
            fault,
        })
    }

    fn from_bytes(bytes: &[u8], rows: usize) -> Result<Self, TokenizerFault> {
        let mut tokenizer = Tokenizer::from_bytes(bytes).map_err(|source| {
            let head = &bytes[..bytes.len().min(512)];
            match input::kind_of(head) {
                Some("a JSON file") => TokenizerFault::Unreadable(source),
                Some(what) => TokenizerFault::Other(what),
                None => TokenizerFault::Unreadable(source),
            }
        })?;
        tokenizer.with_padding(None);
        tokenizer
            .with_truncation(None)
            .map_err(TokenizerFault::Unreadable)?;

        let tokens = tokenizer.get_vocab(true);
        // By id, for the same message every time.
        let largest = tokens.iter().max_by_key(|&(token, &id)| (id, token));
        if let Some((token, &id)) = largest.filter(|&(_, &id)| id as usize >= rows) {
            return Err(TokenizerFault::BeyondRows {
                token: token.clone(),
                id,
                rows,
            });
        }
        let mut ids = [0; SPECIAL.len()];
        for (index, token) in SPECIAL.into_iter().enumerate() {
            let id = tokenizer.token_to_id(token);
            ids[index] = id.ok_or(TokenizerFault::NoSpecialToken { token })?;
            if let Some(other) = ids[..index].iter().position(|&other| other == ids[index]) {
                return Err(TokenizerFault::SameId {
                    tokens: [SPECIAL[other], token],
                    id: ids[index],
                });
            }
        }
        let [pad, unknown, cls, sep, mask] = ids;
        if pad != PAD_ID {
            return Err(TokenizerFault::PadNotFirst { found: pad });
        }
        let added = tokenizer.get_added_tokens_decoder();
        let is_word = |token: &str, id: u32| {
            !ids.contains(&id)
                && !token.starts_with("[unused")
                && added.get(&id).is_none_or(|added| !added.special)
        };
        let words = tokens.iter().filter(|&(token, &id)| is_word(token, id));
        let mut words: Vec<u32> = words.map(|(_, &id)| id).collect();
        words.sort_unstable();
        words.dedup();
        if words.is_empty() {
            return Err(TokenizerFault::NoWords);
        }
        Ok(Self {
            vocabulary: Vocabulary {
                size: tokens.len(),
                unknown,
                cls,
                sep,
                mask,
                words,
            },
            tokenizer,
        })
    }

    /// Trains a vocabulary of at most `size` tokens.
    ///
    /// # Errors
    /// Training failed.
    pub fn trained_on(corpus: &Corpus, size: usize) -> Result<Self, Error> {
        Self::train(corpus, size).map(|(pieces, _)| pieces)
    }

    /// Trains a vocabulary. Returns its `tokenizer.json`, too.
    fn train(corpus: &Corpus, size: usize) -> Result<(Self, String), Error> {
        let text = training::train(&corpus.documents, size)?;
        let pieces = Self::from_bytes(text.as_bytes(), size).map_err(Error::Trained)?;
        Ok((pieces, text))
    }

    /// Trains a vocabulary of at most `size` tokens, or loads the one trained on the same text
    /// before. A cache that cannot be used costs time, not the run.
    ///
    /// # Errors
    /// Training failed.
    pub fn train_or_load(corpus: &Corpus, size: usize) -> Result<(Self, Cached), Error> {
        Self::train_or_load_in(Cache::open(), corpus, size)
    }

    fn train_or_load_in(
        cache: std::io::Result<Cache>,
        corpus: &Corpus,
        size: usize,
    ) -> Result<(Self, Cached), Error> {
        let name = format!(
            "wordpiece-{}-{size}-{:016x}.json",
            training::VERSION,
            corpus.fingerprint()
        );
        let mut unusable = None;
        if let Ok(cache) = &cache {
            match cache
                .read(&name)
                .map(|bytes| Self::from_bytes(&bytes, size))
            {
                Ok(Ok(pieces)) => return Ok((pieces, Cached::Found(cache.path(&name)))),
                Ok(Err(fault)) => unusable = Some(fault.to_string()),
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                Err(error) => unusable = Some(error.to_string()),
            }
        }
        if let Some(why) = unusable {
            log::warn!("the vocabulary kept as {name} is made anew: {why}");
        }
        let (pieces, text) = Self::train(corpus, size)?;
        let kept = cache.and_then(|cache| {
            cache.write(&name, text.as_bytes())?;
            Ok(cache.path(&name))
        });
        Ok((
            pieces,
            match kept {
                Ok(path) => Cached::Trained(path),
                Err(error) => Cached::NotKept(error.to_string()),
            },
        ))
    }

    /// The text of a `tokenizer.json`.
    ///
    /// # Errors
    /// The tokenizer cannot be written down.
    pub fn to_json(&self) -> Result<String, Error> {
        self.tokenizer.to_string(true).map_err(Error::Describe)
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

    /// The text of one token, `##` and all; `?` for an id that has none.
    pub fn piece(&self, id: u32) -> String {
        self.tokenizer.id_to_token(id).unwrap_or_else(|| "?".into())
    }
}

/// Where a vocabulary is from.
#[derive(Clone, Debug)]
pub enum Cached {
    /// An earlier run left it here.
    Found(PathBuf),
    /// This run trained it and left it here.
    Trained(PathBuf),
    /// This run trained it, and could not leave it anywhere.
    NotKept(String),
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::corpus::Document;

    const TEXT: [&str; 3] = [
        "The gradients are sharded.",
        "Sharded gradients again.",
        "The ranks and the gradients",
    ];

    fn corpus() -> Corpus {
        Corpus {
            documents: vec![Document {
                sentences: TEXT.map(str::to_owned).into(),
            }],
            ..Corpus::default()
        }
    }

    fn trained() -> String {
        training::train(&corpus().documents, 200).unwrap()
    }

    /// A WordPiece tokenizer of these tokens and ids.
    fn with_vocab(vocab: &[(&str, u32)]) -> String {
        let vocab: Vec<String> = vocab
            .iter()
            .map(|(token, id)| format!("{token:?}: {id}"))
            .collect();
        format!(
            r###"{{"version": "1.0", "added_tokens": [],
                "pre_tokenizer": {{"type": "BertPreTokenizer"}},
                "model": {{"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                "max_input_chars_per_word": 100, "vocab": {{ {} }} }} }}"###,
            vocab.join(", ")
        )
    }

    const SPECIAL_IDS: [(&str, u32); 5] = [
        ("[PAD]", 0),
        ("[UNK]", 1),
        ("[CLS]", 2),
        ("[SEP]", 3),
        ("[MASK]", 4),
    ];

    fn fault(text: &str, rows: usize) -> String {
        WordPieces::from_bytes(text.as_bytes(), rows)
            .unwrap_err()
            .to_string()
    }

    #[test]
    fn known_words_survive_the_round_trip() {
        let pieces = WordPieces::from_bytes(trained().as_bytes(), 200).unwrap();
        let mut ids = Vec::new();
        pieces
            .encode(["The RANKS are sharded again."], |found| ids.extend(found))
            .unwrap();
        let text: Vec<String> = ids.iter().map(|&id| pieces.piece(id)).collect();
        assert_eq!(
            text.join(" ").replace(" ##", ""),
            "the ranks are sharded again ."
        );
        assert!(ids.iter().all(|id| pieces.vocabulary().words.contains(id)));
        let vocabulary = pieces.vocabulary();
        assert_eq!((vocabulary.cls, vocabulary.sep, vocabulary.mask), (2, 3, 4));
    }

    #[test]
    fn random_words_have_tokens_and_no_other_meaning() {
        let holes = [("[unused0]", 5), ("a", 7), ("b", 90), ("##c", 91)];
        let json = with_vocab(&[&SPECIAL_IDS[..], &holes].concat());
        let pieces = WordPieces::from_bytes(json.as_bytes(), 92).unwrap();
        assert_eq!(pieces.vocabulary().words, [7, 90, 91]);
        assert_eq!(pieces.vocabulary().size, 9);
        // Words may lie below the special tokens, too.
        let last = [
            ("[PAD]", 0),
            ("a", 1),
            ("[UNK]", 6),
            ("[CLS]", 7),
            ("[SEP]", 8),
            ("[MASK]", 9),
        ];
        let pieces = WordPieces::from_bytes(with_vocab(&last).as_bytes(), 10).unwrap();
        assert_eq!(pieces.vocabulary().words, [1]);
    }

    #[test]
    fn tokenizers_that_do_not_fit_are_refused_for_what_is_wrong() {
        let json = with_vocab(&[&SPECIAL_IDS[..], &[("a", 5), ("b", 9000)]].concat());
        assert_eq!(
            fault(&json, 8192),
            "token \"b\" has id 9000, the model has rows for ids below 8192 (use a larger --model)"
        );
        assert!(WordPieces::from_bytes(json.as_bytes(), 9001).is_ok());
        let json = trained().replace("[MASK]", "[HIDE]");
        assert_eq!(
            fault(&json, 200),
            "no token [MASK] (is it a BERT tokenizer?)"
        );
        let json = with_vocab(&[
            ("[PAD]", 1),
            ("[UNK]", 0),
            ("[CLS]", 2),
            ("[SEP]", 3),
            ("[MASK]", 4),
        ]);
        assert_eq!(fault(&json, 9), "[PAD] has id 1, the model needs 0");
        let json = with_vocab(&SPECIAL_IDS);
        assert_eq!(fault(&json, 9), "no tokens but special ones");
        let json = with_vocab(&[
            ("[PAD]", 0),
            ("[UNK]", 1),
            ("[CLS]", 2),
            ("[SEP]", 2),
            ("[MASK]", 4),
        ]);
        assert_eq!(fault(&json, 9), "[CLS] and [SEP] have the same id 2");
    }

    #[test]
    fn other_files_are_named_for_what_they_are() {
        for (text, what) in [
            ("[PAD]\n[unused0]\n", "a vocab.txt, not a tokenizer.json"),
            ("", "an empty file, not a tokenizer.json"),
            (
                "version https://git-lfs.github.com/spec/v1",
                "a Git LFS pointer, not the file itself (run git lfs pull), not a tokenizer.json",
            ),
        ] {
            assert_eq!(fault(text, 9), what);
        }
        assert!(fault("{}", 9).starts_with("no tokenizer: "));
    }

    #[test]
    fn a_damaged_vocabulary_is_made_anew_and_none_is_fatal() {
        let root = tempfile::tempdir().unwrap();
        let load = || WordPieces::train_or_load_in(Cache::below(root.path()), &corpus(), 200);
        let (first, Cached::Trained(path)) = load().unwrap() else {
            panic!("nothing was there")
        };
        for damage in ["", "{", "{}"] {
            std::fs::write(&path, damage).unwrap();
            let (pieces, cached) = load().unwrap();
            assert!(
                matches!(cached, Cached::Trained(_)),
                "{damage:?}: {cached:?}"
            );
            assert_eq!(pieces.vocabulary(), first.vocabulary());
            assert!(matches!(load().unwrap().1, Cached::Found(_)));
        }
        let closed = Err(std::io::Error::other("closed"));
        let (_, cached) = WordPieces::train_or_load_in(closed, &corpus(), 200).unwrap();
        assert!(matches!(cached, Cached::NotKept(why) if why == "closed"));
    }
}
