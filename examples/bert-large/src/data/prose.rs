//! Plain paragraphs and sentences out of Markdown-like text.

use unicode_segmentation::UnicodeSegmentation;

/// Paragraphs shorter than this are headings, labels and captions.
const MIN_WORDS: usize = 6;
/// Longer sentences are cut. No example is as long, so that nothing is lost by it.
const MAX_SENTENCE_BYTES: usize = 2 << 10;

/// The paragraphs of a Markdown text: code blocks, tables, headings, HTML and link targets are
/// left out, list items and quotes count as paragraphs.
pub(super) fn paragraphs<'a>(lines: impl Iterator<Item = &'a str>) -> Vec<String> {
    let mut paragraphs = Vec::new();
    let mut current = String::new();
    let mut in_code = false;
    let mut finish = |current: &mut String| {
        let paragraph = std::mem::take(current);
        // A Chinese character counts as a word.
        if paragraph.unicode_words().nth(MIN_WORDS - 1).is_some() {
            paragraphs.push(paragraph);
        }
    };
    for line in lines {
        let line = line.trim();
        if line.starts_with("```") || line.starts_with("~~~") {
            in_code = !in_code;
            finish(&mut current);
            continue;
        }
        let item = line
            .strip_prefix(['-', '*', '+', '>'])
            .filter(|rest| rest.starts_with(' '));
        let is_target = line.starts_with('[') && line.contains("]: ");
        if in_code || line.is_empty() || line.starts_with(['#', '|', '<', '=']) || is_target {
            finish(&mut current);
            continue;
        }
        if item.is_some() {
            finish(&mut current);
        }
        if !current.is_empty() {
            current.push(' ');
        }
        push_plain(&mut current, item.unwrap_or(line).trim());
    }
    finish(&mut current);
    paragraphs
}

/// Appends a line without backticks, emphasis and link targets: `[text](target)` is `text`.
fn push_plain(out: &mut String, line: &str) {
    let mut rest = line.chars();
    let mut after_text = false;
    while let Some(next) = rest.next() {
        let was_after_text = std::mem::replace(&mut after_text, next == ']');
        match next {
            '`' | '[' | ']' | '*' if next != '[' || !was_after_text => {}
            '(' | '[' if was_after_text => {
                let close = if next == '(' { ')' } else { ']' };
                for skipped in rest.by_ref() {
                    if skipped == close {
                        break;
                    }
                }
            }
            _ => out.push(next),
        }
    }
}

/// Splits a paragraph where Unicode (UAX #29) ends sentences, which needs a capital after a full
/// stop, and in text without capitals after every full stop. What has no ends is cut between words.
pub(super) fn sentences(paragraph: &str) -> impl Iterator<Item = &str> {
    let is_lower_case = !paragraph.contains(char::is_uppercase);
    paragraph
        .split_sentence_bounds()
        .flat_map(move |sentence| {
            let stops = match is_lower_case {
                true => sentence.match_indices(". ").map(|(at, _)| at + 1).collect(),
                false => Vec::new(),
            };
            pieces(sentence, stops)
        })
        .flat_map(|sentence| pieces(sentence, cuts(sentence)))
        .map(str::trim)
        .filter(|sentence| !sentence.is_empty())
}

/// The text between `cuts`.
fn pieces(text: &str, cuts: Vec<usize>) -> impl Iterator<Item = &str> {
    let ends = cuts.into_iter().chain([text.len()]);
    ends.scan(0, |start, end| {
        Some(&text[std::mem::replace(start, end)..end])
    })
}

/// Where to cut a text that is too long for a sentence: after a blank if there is one.
fn cuts(text: &str) -> Vec<usize> {
    let mut cuts = Vec::new();
    let mut start = 0;
    while text.len() - start > MAX_SENTENCE_BYTES {
        let end = text.floor_char_boundary(start + MAX_SENTENCE_BYTES);
        let blank = text[start..end].rfind(char::is_whitespace);
        start = match blank {
            Some(blank) if blank > 0 => start + blank,
            _ => end,
        };
        cuts.push(start);
    }
    cuts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markdown_becomes_plain_paragraphs() {
        let text = "# Title\nReads a [`File`](https://x.y) from disk and\nreturns *all* bytes.\n\n\
                    ```rust\nlet not_prose = one + two + three + four + five;\n```\n\
                    - the first item of a list in Markdown\n- short one\n| a | b | c | d | e | f |\n\
                    [link]: https://example.com and some more words here\n";
        assert_eq!(
            paragraphs(text.lines()),
            [
                "Reads a File from disk and returns all bytes.",
                "the first item of a list in Markdown"
            ]
        );
    }

    #[test]
    fn sentences_end_where_unicode_says() {
        for (text, expected) in [
            (
                "Version 1.2 of e.g. this is out. Is it? Yes! It is.",
                &[
                    "Version 1.2 of e.g. this is out.",
                    "Is it?",
                    "Yes!",
                    "It is.",
                ][..],
            ),
            (
                "今天天气很好。我们去公园吧！好吗？",
                &["今天天气很好。", "我们去公园吧！", "好吗？"],
            ),
            (
                "all of it is lower case. this, too. yes",
                &["all of it is lower case.", "this, too.", "yes"],
            ),
            ("\u{feff} ", &["\u{feff}"]),
            ("  ", &[]),
        ] {
            assert_eq!(sentences(text).collect::<Vec<_>>(), expected);
        }
    }

    #[test]
    fn text_without_sentences_is_cut_between_words_and_none_is_lost() {
        for word in ["word ", "слово", "字"] {
            let text = word.repeat(4000);
            let found: Vec<_> = sentences(&text).collect();
            assert!(found.len() > 1 && found.iter().all(|part| part.len() <= MAX_SENTENCE_BYTES));
            let joined = found.concat();
            assert_eq!(joined.replace(' ', ""), text.replace(' ', ""));
            assert!(word != "word " || found.iter().all(|part| part.ends_with("word")));
        }
    }

    #[test]
    fn a_chinese_paragraph_is_no_heading() {
        let text = "# 标题\n今天天气很好，我们去公园吧。\n\n短句\n";
        assert_eq!(paragraphs(text.lines()), ["今天天气很好，我们去公园吧。"]);
    }
}
