//! Trains a WordPiece vocabulary, the same each time for the same text.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::Mutex;

use tokenizers::decoders::wordpiece::WordPiece as WordPieceDecoder;
use tokenizers::models::wordpiece::{WordPiece, WordPieceTrainerBuilder};
use tokenizers::normalizers::BertNormalizer;
use tokenizers::pre_tokenizers::bert::BertPreTokenizer;
use tokenizers::{
    AddedToken, NormalizedString, Normalizer, OffsetReferential, OffsetType, PreTokenizedString,
    PreTokenizer, Tokenizer, Trainer,
};

use super::corpus::Document;
use super::tokenizer::SPECIAL;
use crate::error::Error;

/// Part of the name under which vocabularies are kept: to be raised when they become others.
pub(super) const VERSION: u32 = 2;

/// Rare characters are unknown: the alphabet ends once it covers this share of the text.
const COVERAGE: f64 = 0.9995;

/// Occurrences of a character.
#[derive(Clone, Copy, Debug, Default)]
struct Count {
    /// Anywhere.
    all: u64,
    /// Not at the start of a word. Chinese characters are words of their own and have none.
    continued: u64,
}

/// The characters of a vocabulary of `size` tokens: the most frequent, which take one token or two.
fn alphabet(counts: BTreeMap<char, Count>, size: usize) -> BTreeMap<char, Count> {
    let all: u64 = counts.values().map(|count| count.all).sum();
    let mut characters: Vec<(char, Count)> = counts.into_iter().collect();
    characters.sort_by_key(|&(character, count)| (Reverse(count.all), character));
    let (mut covered, mut tokens) = (0, 0);
    characters
        .into_iter()
        .take_while(|(_, count)| {
            let is_enough = covered as f64 >= COVERAGE * all as f64;
            covered += count.all;
            tokens += 1 + usize::from(count.continued > 0);
            // The other half is for words.
            !is_enough && tokens <= size / 2
        })
        .collect()
}

/// A `tokenizer.json` with a vocabulary trained on the documents.
///
/// The trainer numbers `##x` tokens in the order of a hash map with random keys and breaks ties
/// between merges by number. It is given the alphabet beforehand, as if it were special tokens.
pub(super) fn train(documents: &[Document], size: usize) -> Result<String, Error> {
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
            for word in &words {
                for (index, character) in word.chars().enumerate() {
                    let count: &mut Count = characters.entry(character).or_default();
                    count.all += 1;
                    count.continued += u64::from(index > 0);
                }
            }
        }
        Ok(words)
    };
    trainer
        .feed(sentences.map(String::as_str), count)
        .map_err(Error::Train)?;

    let alphabet = alphabet(characters.into_inner().unwrap_or_default(), size);
    let special = |text: String| AddedToken::from(text, true);
    let specials: Vec<_> = SPECIAL
        .iter()
        .map(|token| special((*token).to_owned()))
        .collect();
    let continued = alphabet
        .iter()
        .filter(|(_, count)| count.continued > 0)
        .map(|(character, _)| special(format!("##{character}")));
    trainer.set_special_tokens(specials.iter().cloned().chain(continued).collect());
    trainer.set_limit_alphabet(Some(alphabet.len()));
    trainer.set_initial_alphabet(alphabet.into_keys().collect());
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

    fn trained(sentences: Vec<String>, size: usize) -> String {
        train(&[Document { sentences }], size).unwrap()
    }

    #[test]
    fn training_is_reproducible() {
        let text = || {
            let words = (0..2000).map(|i| (i % 97, i % 89, i % 83));
            let text = words.map(|(a, b, c)| format!("word{a} other{b} third{c}"));
            text.collect()
        };
        assert_eq!(trained(text(), 150), trained(text(), 150));
    }

    #[test]
    fn a_text_of_many_characters_is_known() {
        // 3,000 of them, as in a Chinese newspaper; an alphabet of 500 would leave most unknown.
        let characters: Vec<char> = ('\u{4e00}'..).take(3000).collect();
        let text = characters.chunks(50).map(|part| part.iter().collect());
        let text: Vec<String> = text.collect();
        let tokenizer = Tokenizer::from_bytes(trained(text.clone(), 8192)).unwrap();
        let unknown = tokenizer.token_to_id("[UNK]").unwrap();
        let ids = text.into_iter().flat_map(|sentence| {
            tokenizer
                .encode(sentence, false)
                .unwrap()
                .get_ids()
                .to_vec()
        });
        let ids: Vec<u32> = ids.collect();
        assert_eq!(ids.len(), 3000);
        // The alphabet ends at its share of the text.
        let unknowns = ids.iter().filter(|&&id| id == unknown).count();
        assert!(unknowns <= 2, "{unknowns}");
    }

    #[test]
    fn characters_do_not_crowd_out_words() {
        let count = Count {
            all: 1,
            continued: 1,
        };
        let counts = ('\u{4e00}'..)
            .take(3000)
            .map(|character| (character, count));
        assert_eq!(alphabet(counts.collect(), 200).len(), 50);
    }
}
