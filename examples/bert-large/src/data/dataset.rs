//! The tokenized corpus, and the examples that are made of it: sentence pairs that fill a row.
//!
//! A document is cut into runs of tokens of about equal length, none longer than a row, wherever its
//! sentences end: text without sentences is read as well as any other, and none is left over.

use std::collections::HashMap;
use std::ops::Range;

use rand::Rng;
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

use super::corpus::Corpus;
use super::masking::{self, Hidden};
use super::tokenizer::{Vocabulary, WordPieces};
use crate::config::PAD_ID;
use crate::error::Error;

/// `[CLS]`, and a `[SEP]` after each segment.
pub(super) const SPECIAL_TOKENS: usize = 3;
/// A document with fewer tokens gives no example.
const MIN_TOKENS: usize = 8;
/// Examples that are not trained on: one in this many, and at most [`MOST_HELD_OUT`].
const PER_HELD_OUT: usize = 20;
const MOST_HELD_OUT: usize = 64;

/// The tokenized corpus, shared by all ranks.
#[derive(Debug, Serialize, Deserialize)]
pub struct Dataset {
    tokens: Vec<u32>,
    /// Where sentences start in `tokens`, and the end of the last one.
    starts: Vec<usize>,
    /// The sentences of each document that is used.
    documents: Vec<Range<usize>>,
    chunks: Vec<Chunk>,
    held_out: Vec<Chunk>,
    vocabulary: Vocabulary,
    seq_len: usize,
    census: Census,
    /// Where the text was read: on rank 0.
    #[serde(skip)]
    pieces: Option<WordPieces>,
}

/// Consecutive tokens of one document that fill a row, or less.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Chunk {
    document: usize,
    tokens: Range<usize>,
}

/// How much of a corpus is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Census {
    /// Documents, those without text included.
    pub documents: usize,
    /// Those long enough.
    pub used_documents: usize,
    /// Tokens of all documents.
    pub tokens: usize,
    /// Tokens in examples, held out or not.
    pub used_tokens: usize,
    /// Tokens that stand for what the vocabulary does not have.
    pub unknown_tokens: usize,
}

/// One row before it becomes a tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct Example {
    /// `[CLS] first [SEP] second [SEP]`, then padding, with tokens hidden.
    pub ids: Vec<u32>,
    /// Where the second segment, with its `[SEP]`, starts.
    pub second: usize,
    /// Where padding starts.
    pub end: usize,
    /// What was hidden, by position.
    pub hidden: Vec<Hidden>,
    /// Whether the second segment is from another document.
    pub random_next: bool,
}

impl Dataset {
    /// Tokenizes a corpus for rows of `seq_len` tokens.
    ///
    /// # Errors
    /// There are fewer than two documents, so that no random next sentence can be drawn.
    pub fn new(corpus: &Corpus, pieces: WordPieces, seq_len: usize) -> Result<Self, Error> {
        let (mut tokens, mut starts) = (Vec::new(), vec![0]);
        let sentences = corpus
            .documents
            .iter()
            .flat_map(|document| &document.sentences);
        pieces.encode(sentences.map(String::as_str), |ids| {
            tokens.extend_from_slice(ids);
            starts.push(tokens.len());
        })?;
        let mut sentence = 0;
        let mut documents = Vec::new();
        for document in &corpus.documents {
            let end = sentence + document.sentences.len();
            documents.push(sentence..end);
            sentence = end;
        }
        let vocabulary = pieces.vocabulary().clone();
        let mut dataset = Self::of_tokens(tokens, starts, documents, vocabulary, seq_len)?;
        dataset.census.documents += corpus.empty;
        dataset.pieces = Some(pieces);
        Ok(dataset)
    }

    pub(super) fn of_tokens(
        tokens: Vec<u32>,
        starts: Vec<usize>,
        mut documents: Vec<Range<usize>>,
        vocabulary: Vocabulary,
        seq_len: usize,
    ) -> Result<Self, Error> {
        let mut census = Census {
            documents: documents.len(),
            tokens: tokens.len(),
            ..Census::default()
        };
        documents.retain(|sentences| starts[sentences.end] - starts[sentences.start] >= MIN_TOKENS);
        census.used_documents = documents.len();
        if documents.len() < 2 {
            return Err(Error::TooFewDocuments {
                found: documents.len(),
                all: census.documents,
                least: MIN_TOKENS,
            });
        }
        let texts = documents
            .iter()
            .map(|sentences| starts[sentences.start]..starts[sentences.end]);
        let mut chunks = chunks(texts, seq_len - SPECIAL_TOKENS);
        census.used_tokens = chunks.iter().map(|chunk| chunk.tokens.len()).sum();
        let unknown = |id: &&u32| **id == vocabulary.unknown;
        census.unknown_tokens = tokens.iter().filter(unknown).count();
        let held_out = hold_out(&mut chunks);
        Ok(Self {
            tokens,
            starts,
            documents,
            chunks,
            held_out,
            vocabulary,
            seq_len,
            census,
            pieces: None,
        })
    }

    /// The tokenizer, where the text was read.
    pub fn pieces(&self) -> Option<&WordPieces> {
        self.pieces.as_ref()
    }

    /// How much of the corpus is used.
    pub fn census(&self) -> Census {
        self.census
    }

    /// Examples before a text comes again, then split and masked differently.
    pub fn examples(&self) -> usize {
        self.chunks.len()
    }

    /// Examples that are not trained on.
    pub fn held_out(&self) -> usize {
        self.held_out.len()
    }

    /// The loss of a model that knows how frequent each token is, and nothing else: the entropy of
    /// their distribution, in nats.
    pub fn entropy_of_frequencies(&self) -> f64 {
        let mut counts: HashMap<u32, usize> = HashMap::new();
        let chunks = self.chunks.iter().chain(&self.held_out);
        for &token in chunks.flat_map(|chunk| &self.tokens[chunk.tokens.clone()]) {
            *counts.entry(token).or_default() += 1;
        }
        let all = self.census.used_tokens as f64;
        // In one order, or the last digits would not repeat.
        let mut counts: Vec<usize> = counts.into_values().collect();
        counts.sort_unstable();
        let shares = counts.into_iter().map(|count| count as f64 / all);
        shares.map(|share| -share * share.ln()).sum()
    }

    /// Checks that each rank can fill a micro-batch without reading an example twice.
    ///
    /// # Errors
    /// There are fewer examples than rows in a step of all ranks.
    pub fn check_for(&self, world_size: usize, micro_batch: usize) -> Result<(), Error> {
        let found = self.chunks.len();
        // Huge numbers are refused as well.
        match world_size.saturating_mul(micro_batch) {
            needed if needed > found => Err(Error::TooFewExamples {
                found,
                world_size,
                micro_batch,
                needed,
            }),
            _ => Ok(()),
        }
    }

    /// Example `index` of those that are trained on, split and hidden as `rng` says.
    pub(super) fn example(&self, index: usize, rng: &mut ChaCha8Rng) -> Example {
        self.row(&self.chunks[index], rng)
    }

    /// Example `index` of those that are held out.
    pub(super) fn held_out_example(&self, index: usize, rng: &mut ChaCha8Rng) -> Example {
        self.row(&self.held_out[index], rng)
    }

    /// The sentences that hold some text.
    fn sentences_in(&self, tokens: &Range<usize>) -> Range<usize> {
        let first = self.starts.partition_point(|&start| start <= tokens.start);
        let end = self.starts.partition_point(|&start| start < tokens.end);
        first..end
    }

    /// Makes a row from a chunk: splits it in two, replaces the second half in half of the
    /// cases, hides tokens.
    fn row(&self, chunk: &Chunk, rng: &mut ChaCha8Rng) -> Example {
        let all = chunk.tokens.clone();
        // Between sentences if there are two.
        let inner = self.sentences_in(&all);
        let split = match inner.is_empty() {
            true => rng.random_range(all.start + 1..all.end),
            false => self.starts[rng.random_range(inner)],
        };
        let random_next = rng.random_bool(0.5);
        let second = if random_next {
            self.elsewhere(chunk.document, rng)
        } else {
            split..all.end
        };
        let [first, second] = self.truncate(all.start..split, second, rng);

        let mut ids = Vec::with_capacity(self.seq_len);
        ids.push(self.vocabulary.cls);
        ids.extend_from_slice(&self.tokens[first]);
        ids.push(self.vocabulary.sep);
        let second_start = ids.len();
        ids.extend_from_slice(&self.tokens[second]);
        ids.push(self.vocabulary.sep);
        let end = ids.len();
        ids.resize(self.seq_len, PAD_ID);

        let candidates: Vec<usize> = (1..end - 1)
            .filter(|position| position + 1 != second_start)
            .collect();
        let hidden = masking::hide(&mut ids, &candidates, &self.vocabulary, rng);
        Example {
            ids,
            second: second_start,
            end,
            hidden,
            random_next,
        }
    }

    /// Text of another document, from the start of some sentence.
    fn elsewhere(&self, document: usize, rng: &mut ChaCha8Rng) -> Range<usize> {
        let mut other = rng.random_range(0..self.documents.len() - 1);
        if other >= document {
            other += 1;
        }
        let sentences = self.documents[other].clone();
        let end = self.starts[sentences.end];
        let text = self.starts[rng.random_range(sentences.clone())]..end;
        match text.is_empty() {
            // Sentences without a token (of characters the tokenizer drops) end the document.
            true => self.starts[sentences.start]..end,
            false => text,
        }
    }

    /// Shortens the longer of two segments, at either end, until both fit a row.
    fn truncate(
        &self,
        mut first: Range<usize>,
        mut second: Range<usize>,
        rng: &mut ChaCha8Rng,
    ) -> [Range<usize>; 2] {
        let most = self.seq_len - SPECIAL_TOKENS;
        // Far more than fits is cut at the end at once.
        second.end = second.end.min(second.start + most);
        while first.len() + second.len() > most {
            let longer = if first.len() > second.len() {
                &mut first
            } else {
                &mut second
            };
            match rng.random_bool(0.5) {
                true => longer.start += 1,
                false => longer.end -= 1,
            }
        }
        [first, second]
    }
}

/// Cuts texts into runs of about equal length, of `most` tokens at most.
fn chunks(texts: impl Iterator<Item = Range<usize>>, most: usize) -> Vec<Chunk> {
    let mut chunks = Vec::new();
    for (document, text) in texts.enumerate() {
        let parts = text.len().div_ceil(most);
        let cut = |part: usize| text.start + text.len() * part / parts;
        chunks.extend((0..parts).map(|part| Chunk {
            document,
            tokens: cut(part)..cut(part + 1),
        }));
    }
    chunks
}

/// Takes some chunks out, spread over the text.
fn hold_out(chunks: &mut Vec<Chunk>) -> Vec<Chunk> {
    let count = (chunks.len() / PER_HELD_OUT).min(MOST_HELD_OUT);
    let Some(every) = chunks.len().checked_div(count) else {
        return Vec::new();
    };
    let mut held_out = Vec::new();
    let mut index = 0;
    chunks.retain(|chunk| {
        let is_out = index % every == every - 1 && held_out.len() < count;
        index += 1;
        if is_out {
            held_out.push(chunk.clone());
        }
        !is_out
    });
    held_out
}

#[cfg(test)]
pub(super) mod tests {
    use rand::SeedableRng;

    use super::*;

    /// The vocabulary of [`dataset`].
    pub(in crate::data) fn vocabulary(documents: usize) -> Vocabulary {
        let size = u32::try_from(100 * documents).unwrap();
        Vocabulary {
            size: 100 * documents,
            unknown: 1,
            cls: 2,
            sep: 3,
            mask: 4,
            words: (5..size).collect(),
        }
    }

    /// Document `d` has sentences of tokens `100 * d + 10 ..`, so that a token tells where it is
    /// from.
    pub(in crate::data) fn dataset(documents: usize, seq_len: usize) -> Dataset {
        let (mut tokens, mut starts, mut ranges) = (Vec::new(), vec![0], Vec::new());
        for document in 0..documents {
            let first = starts.len() - 1;
            for sentence in 0..4 + document % 3 {
                let from = u32::try_from(100 * document + 10 * (sentence + 1)).unwrap();
                tokens.extend(from..from + 9);
                starts.push(tokens.len());
            }
            ranges.push(first..starts.len() - 1);
        }
        Dataset::of_tokens(tokens, starts, ranges, vocabulary(documents), seq_len).unwrap()
    }

    /// Documents of one sentence each.
    fn of_lengths(lengths: &[usize], seq_len: usize) -> Result<Dataset, Error> {
        let mut starts = vec![0];
        let mut end = 0;
        for length in lengths {
            end += length;
            starts.push(end);
        }
        let ranges = (0..lengths.len()).map(|document| document..document + 1);
        Dataset::of_tokens(
            vec![7; end],
            starts,
            ranges.collect(),
            vocabulary(1),
            seq_len,
        )
    }

    #[test]
    fn a_sentence_longer_than_many_rows_is_read_to_its_end() {
        let dataset = of_lengths(&[4000; 60], 32).unwrap();
        let census = dataset.census();
        assert_eq!((census.tokens, census.used_tokens), (240_000, 240_000));
        let rows = dataset.examples() + dataset.held_out();
        assert_eq!(rows, 60 * 4000_usize.div_ceil(29));
        let mut next = 0;
        for chunk in chunks([0..4000].into_iter(), 29) {
            assert_eq!(chunk.tokens.start, next);
            assert!((28..=29).contains(&chunk.tokens.len()));
            next = chunk.tokens.end;
        }
        assert_eq!(next, 4000);
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        for index in 0..100 {
            let row = dataset.example(index, &mut rng);
            assert!(row.random_next || row.end >= 28 + SPECIAL_TOKENS, "{row:?}");
        }
    }

    #[test]
    fn short_documents_are_left_out_and_counted() {
        let census = of_lengths(&[7, 30, 8, 0, 3], 32).unwrap().census();
        let expected = Census {
            documents: 5,
            used_documents: 2,
            tokens: 48,
            used_tokens: 38,
            unknown_tokens: 0,
        };
        assert_eq!(census, expected);
        let error = of_lengths(&[7, 30, 3], 32).unwrap_err().to_string();
        assert_eq!(
            error,
            "1 of 3 documents has the 8 tokens of an example, pairs need at least 2 of them"
        );
    }

    #[test]
    fn held_out_examples_are_not_trained_on() {
        let dataset = dataset(50, 32);
        assert!(dataset.held_out() >= 4);
        for chunk in &dataset.held_out {
            assert!(!dataset.chunks.contains(chunk));
        }
        let tokens = dataset.chunks.iter().chain(&dataset.held_out);
        let tokens: usize = tokens.map(|chunk| chunk.tokens.len()).sum();
        assert_eq!(tokens, dataset.census().used_tokens);
        assert_eq!(of_lengths(&[30; 10], 64).unwrap().held_out(), 0);
    }

    #[test]
    fn the_entropy_of_frequencies_is_what_guessing_by_them_loses() {
        // Four tokens a quarter of the time each, then one all the time.
        let tokens: Vec<u32> = (0..32).map(|index| 5 + index % 4).collect();
        let dataset =
            Dataset::of_tokens(tokens, vec![0, 16, 32], vec![0..1, 1..2], vocabulary(1), 32);
        let entropy = dataset.unwrap().entropy_of_frequencies();
        assert!((entropy - 4_f64.ln()).abs() < 1e-12, "{entropy}");
        assert_eq!(
            of_lengths(&[16; 2], 32).unwrap().entropy_of_frequencies(),
            0.0
        );
    }

    #[test]
    fn too_little_text_is_refused_for_any_number_of_rows() {
        for (world_size, micro_batch) in [(4, 1000), (2, usize::MAX / 2 + 1), (usize::MAX, 3)] {
            let error = dataset(4, 32).check_for(world_size, micro_batch);
            let error = error.unwrap_err();
            assert!(matches!(error, Error::TooFewExamples { .. }), "{error}");
            assert!(!error.to_string().is_empty());
        }
    }
}
