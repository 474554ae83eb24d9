//! Plain paragraphs and sentences out of Markdown-like text.

/// Paragraphs shorter than this are headings, labels and captions.
const MIN_WORDS: usize = 6;

/// The paragraphs of a Markdown text: code blocks, tables, headings, HTML and link targets are
/// left out, list items and quotes count as paragraphs.
pub(super) fn paragraphs<'a>(lines: impl Iterator<Item = &'a str>) -> Vec<String> {
    let mut paragraphs = Vec::new();
    let mut current = String::new();
    let mut in_code = false;
    let mut finish = |current: &mut String| {
        let paragraph = std::mem::take(current);
        if paragraph.split_whitespace().nth(MIN_WORDS - 1).is_some() {
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

/// Splits a paragraph after `.`, `!` or `?` where a new sentence seems to start.
pub(super) fn sentences(paragraph: &str) -> impl Iterator<Item = &str> {
    let mut rest = paragraph.trim();
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let end = rest
            .match_indices(['.', '!', '?'])
            .map(|(at, _)| at + 1)
            .find(|&end| {
                let after = &rest[end..];
                let next = after.trim_start();
                after.len() > next.len() && next.starts_with(|c: char| c.is_uppercase() || c == '"')
            });
        let (sentence, remainder) = rest.split_at(end.unwrap_or(rest.len()));
        rest = remainder.trim_start();
        Some(sentence.trim())
    })
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
    fn sentences_end_before_a_capital() {
        let text = "Version 1.2 of e.g. this is out. Is it? Yes! it is.";
        let found: Vec<_> = sentences(text).collect();
        assert_eq!(
            found,
            ["Version 1.2 of e.g. this is out.", "Is it?", "Yes! it is."]
        );
    }
}
