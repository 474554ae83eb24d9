//! What a trained model makes of text that it has not seen: how many hidden tokens it finds, and some
//! sentences to look at.

use console::style;
use serde::{Deserialize, Serialize};

use crate::data::batches::Batch;
use crate::data::dataset::Example;
use crate::data::tokenizer::WordPieces;
use crate::report::{line, width};

/// Sentences that are shown.
const SHOWN: usize = 3;

/// The guesses for the hidden tokens of some rows.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Guesses {
    /// In the order of the rows, and of what is hidden in each.
    pub tokens: Vec<u32>,
}

impl Guesses {
    /// How many are right, of how many.
    pub fn right(&self, batch: &Batch) -> (usize, usize) {
        let hidden = batch.rows.iter().flat_map(|row| &row.hidden);
        let pairs = hidden.zip(&self.tokens);
        let right = pairs.filter(|(hidden, guess)| hidden.token == **guess);
        (right.count(), self.tokens.len())
    }
}

/// Prints how many guesses are right, and the first rows with every guess in its place.
pub fn show(guesses: &Guesses, batch: &Batch, pieces: &WordPieces) {
    let (right, all) = guesses.right(batch);
    line(format_args!(
        "hidden tokens found in {} rows that were not trained on: {right} of {all} ({:.0} %)",
        batch.rows.len(),
        100.0 * right as f64 / all.max(1) as f64
    ));
    line(
        "some of them, with [guesses] where tokens were hidden, and (what was there) if it was another:",
    );
    let mut tokens = guesses.tokens.iter().copied();
    for row in batch.rows.iter().take(SHOWN) {
        let row = filled(row, tokens.by_ref(), pieces);
        for text in wrapped(&row, width().saturating_sub(4)) {
            line(format_args!("    {text}"));
        }
        line("");
    }
}

/// A word, and whether a guess is in it.
#[derive(Clone, Debug, PartialEq)]
struct Word {
    text: String,
    guess: Option<Found>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Found {
    Right,
    Wrong,
}

/// The words of a row, without its special tokens. Takes as many guesses as the row has hidden tokens.
fn filled(row: &Example, guesses: impl Iterator<Item = u32>, pieces: &WordPieces) -> Vec<Word> {
    let mut hidden = row.hidden.iter().zip(guesses).peekable();
    let mut words: Vec<Word> = Vec::new();
    // In a row of whole text: `[CLS] first [SEP] second [SEP]`.
    for position in 1..row.end - 1 {
        if position + 1 == row.second {
            words.push(Word {
                text: "|".into(),
                guess: None,
            });
            continue;
        }
        let here = hidden.next_if(|(hidden, _)| hidden.position == position);
        let (piece, guess) = match here {
            None => (pieces.piece(row.ids[position]), None),
            Some((hidden, guess)) => {
                let text = pieces.piece(guess);
                let (continues, text) = match text.strip_prefix("##") {
                    Some(rest) => ("##", rest),
                    None => ("", text.as_str()),
                };
                match guess == hidden.token {
                    true => (format!("{continues}[{text}]"), Some(Found::Right)),
                    false => {
                        let token = pieces.piece(hidden.token);
                        (format!("{continues}[{text}]({token})"), Some(Found::Wrong))
                    }
                }
            }
        };
        match (piece.strip_prefix("##"), words.last_mut()) {
            (Some(rest), Some(word)) if word.text != "|" => {
                word.text += rest;
                word.guess = guess.or(word.guess);
            }
            _ => words.push(Word { text: piece, guess }),
        }
    }
    words
}

/// Lines of at most `width` columns, of words longer than that one each.
fn wrapped(words: &[Word], width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    let mut columns = 0;
    for word in words {
        let length = console::measure_text_width(&word.text);
        let text = match word.guess {
            None => word.text.clone(),
            Some(Found::Right) => style(&word.text).green().bold().to_string(),
            Some(Found::Wrong) => style(&word.text).red().to_string(),
        };
        match lines.last_mut() {
            Some(line) if columns == 0 => {
                *line += &text;
                columns = length;
            }
            Some(line) if columns + 1 + length <= width => {
                *line += " ";
                *line += &text;
                columns += 1 + length;
            }
            _ => {
                lines.push(text);
                columns = length;
            }
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::corpus::{Corpus, Document};
    use crate::data::masking::Hidden;

    #[test]
    fn guesses_stand_where_tokens_were_hidden() {
        let sentence = "the rank gathers a shard".to_owned();
        let corpus = Corpus {
            documents: vec![Document {
                sentences: vec![sentence.clone(); 2],
            }],
            ..Corpus::default()
        };
        let pieces = WordPieces::trained_on(&corpus, 100).unwrap();
        let mut ids = Vec::new();
        pieces
            .encode([&*sentence], |found| ids.extend(found))
            .unwrap();
        let vocabulary = pieces.vocabulary();
        // [CLS] the rank [SEP] gathers a shard [SEP]
        let mut row = vec![vocabulary.cls];
        row.extend(&ids[..2]);
        row.push(vocabulary.sep);
        row.extend(&ids[2..]);
        row.push(vocabulary.sep);
        let hidden = [(2, ids[1]), (4, ids[2])].map(|(position, token)| Hidden { position, token });
        for hidden in &hidden {
            row[hidden.position] = vocabulary.mask;
        }
        let example = Example {
            end: row.len(),
            ids: row,
            second: 4,
            hidden: hidden.into(),
            random_next: false,
        };
        let guesses = Guesses {
            tokens: vec![ids[1], ids[0]],
        };
        let words = filled(&example, guesses.tokens.iter().copied(), &pieces);
        let text: Vec<&str> = words.iter().map(|word| &*word.text).collect();
        assert_eq!(text.join(" "), "the [rank] | [the](gathers) a shard");
        assert_eq!(words[1].guess, Some(Found::Right));
        assert_eq!(words[3].guess, Some(Found::Wrong));
        let batch = Batch {
            rows: vec![example],
        };
        assert_eq!(guesses.right(&batch), (1, 2));
    }

    #[test]
    fn lines_are_as_narrow_as_asked() {
        let word = |text: &str| Word {
            text: text.into(),
            guess: None,
        };
        let words: Vec<Word> = "one two three four".split(' ').map(word).collect();
        assert_eq!(wrapped(&words, 9), ["one two", "three", "four"]);
        assert_eq!(wrapped(&words, 1), ["one", "two", "three", "four"]);
    }
}
