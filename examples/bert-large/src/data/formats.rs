//! From the files of a corpus to documents: plain text, Markdown and JSON lines. [`super::parquet`]
//! reads the rest.

use std::io::Read;
use std::path::Path;

use flate2::read::MultiGzDecoder;

use super::corpus::Document;
use super::files::{Format, LeftOut, Reason, Source, is_gzip};
use super::text::{Decoded, decode};
use super::{parquet, prose};
use crate::error::Error;
use crate::input;

/// A text file longer than this is taken for many documents, cut between sentences.
const DOCUMENT_BYTES: usize = 16 << 10;

/// The documents of a file, those without text included.
///
/// # Errors
/// The file cannot be read, a row has no text, or the user named a file that is no text.
pub(super) fn read(source: &Source, left_out: &mut LeftOut) -> Result<Vec<Document>, Error> {
    let of_text: fn(&Path, &str) -> Result<Vec<Document>, Error> = match source.format {
        Format::Plain => |_, text| Ok(cut(blocks(text))),
        Format::Markdown => |_, text| Ok(cut(prose::paragraphs(text.lines()).into_iter())),
        Format::JsonLines => json_lines,
        Format::Parquet => return parquet::read(&source.path),
    };
    match text_of(source, left_out)? {
        Some(text) => of_text(&source.path, &text),
        None => Ok(Vec::new()),
    }
}

/// The text of a file, `None` if it is binary.
fn text_of(source: &Source, left_out: &mut LeftOut) -> Result<Option<String>, Error> {
    let path = &source.path;
    let mut bytes = input::read(path)?;
    if is_gzip(path) {
        let mut unpacked = Vec::new();
        let mut reader = MultiGzDecoder::new(&bytes[..]);
        reader
            .read_to_end(&mut unpacked)
            .map_err(|source| Error::Read {
                path: path.clone(),
                source,
            })?;
        bytes = unpacked;
    }
    match decode(&bytes) {
        Decoded::Text {
            text,
            encoding,
            damaged,
        } => {
            left_out.add(Reason::OtherEncoding, usize::from(encoding.is_some()));
            left_out.add(Reason::Damaged, damaged);
            Ok(Some(text))
        }
        Decoded::Binary if source.is_named => Err(Error::NoTextFile {
            path: path.clone(),
            what: input::kind_of(&bytes).unwrap_or("binary data"),
        }),
        Decoded::Binary => {
            left_out.add(Reason::Binary, 1);
            Ok(None)
        }
    }
}

/// Blocks of lines between blank lines.
pub(super) fn blocks(text: &str) -> impl Iterator<Item = String> {
    let mut lines = text.lines();
    std::iter::from_fn(move || {
        let start = lines
            .by_ref()
            .map(str::trim)
            .find(|line| !line.is_empty())?;
        let mut block = start.to_owned();
        for line in lines
            .by_ref()
            .map(str::trim)
            .take_while(|line| !line.is_empty())
        {
            block.push(' ');
            block.push_str(line);
        }
        Some(block)
    })
}

fn cut(paragraphs: impl Iterator<Item = String>) -> Vec<Document> {
    let mut documents = vec![Document::default()];
    let mut bytes = 0;
    for sentence in Document::from_paragraphs(paragraphs).sentences {
        if bytes > DOCUMENT_BYTES {
            documents.push(Document::default());
            bytes = 0;
        }
        bytes += sentence.len();
        if let Some(document) = documents.last_mut() {
            document.sentences.push(sentence);
        }
    }
    documents
}

fn json_lines(path: &Path, text: &str) -> Result<Vec<Document>, Error> {
    let lines = text
        .lines()
        .enumerate()
        .filter(|(_, line)| !line.trim().is_empty());
    lines
        .map(|(index, line)| {
            let line_number = index + 1;
            let value: serde_json::Value = serde_json::from_str(line).map_err(|error| {
                // It counts lines, too, and sees one.
                let message = error.to_string();
                let message = message.split(" at line ").next().unwrap_or_default();
                Error::Json {
                    path: path.into(),
                    line: line_number,
                    column: error.column(),
                    message: message.to_owned(),
                }
            })?;
            match value.get("text") {
                Some(serde_json::Value::String(text)) => {
                    Ok(Document::from_paragraphs(blocks(text)))
                }
                // As in a Parquet file: a document without text.
                Some(serde_json::Value::Null) => Ok(Document::default()),
                _ => Err(Error::NoText {
                    path: path.into(),
                    line: line_number,
                }),
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Write;

    use super::super::corpus::Corpus;
    use super::*;

    fn corpus(name: &str, bytes: &[u8]) -> Result<Corpus, Error> {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join(name), bytes).unwrap();
        Corpus::read(&[directory.path().to_owned()])
    }

    fn sentences(name: &str, bytes: &[u8]) -> Vec<Vec<String>> {
        let documents = corpus(name, bytes).unwrap().documents.into_iter();
        documents.map(|document| document.sentences).collect()
    }

    #[test]
    fn a_text_file_is_cut_into_documents_between_sentences() {
        let text = "One sentence here. Another one there.\n\n".repeat(1000);
        assert_eq!(sentences("a.txt", text.as_bytes()).len(), 3);
        // One paragraph, no full stop.
        let text = "only words on one line ".repeat(2000);
        assert_eq!(sentences("a.txt", text.as_bytes()).len(), 3);
    }

    #[test]
    fn a_line_of_json_is_a_document() {
        let rows =
            "\u{feff}{\"text\": \"One. Two.\"}\n\n{\"text\": null}\n{\"text\": \"Three.\"}\n";
        assert_eq!(
            sentences("a.jsonl", rows.as_bytes()),
            [vec!["One.", "Two."], vec!["Three."]]
        );
        assert_eq!(corpus("a.jsonl", rows.as_bytes()).unwrap().empty, 1);

        let refused = |rows: &str| corpus("a.jsonl", rows.as_bytes()).unwrap_err().to_string();
        let error = refused("{\"text\": \"One.\"}\n{\"body\": 1}\n");
        assert!(
            error.ends_with("a.jsonl:2: no string field `text`"),
            "{error}"
        );
        let error = refused("{\"text\": \"One.\"}\n\n{\"text\": }\n");
        assert!(error.ends_with("a.jsonl:3:10: expected value"), "{error}");
    }

    #[test]
    fn compressed_text_is_read() {
        let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        packed.write_all(b"{\"text\": \"One. Two.\"}\n").unwrap();
        let packed = packed.finish().unwrap();
        assert_eq!(sentences("a.jsonl.gz", &packed), [["One.", "Two."]]);
        let error = corpus("a.jsonl.gz", &packed[..12]).unwrap_err();
        assert!(matches!(error, Error::Read { .. }), "{error}");
    }

    #[test]
    fn no_text_is_an_error() {
        for (name, text) in [("a.txt", "\n\n"), ("a.rs", "no corpus")] {
            let error = corpus(name, text.as_bytes()).unwrap_err();
            assert!(matches!(error, Error::EmptyCorpus { .. }), "{error}");
        }
    }

    #[test]
    fn binary_files_are_refused_by_name_and_counted_in_a_directory() {
        let directory = tempfile::tempdir().unwrap();
        let binary = directory.path().join("a.txt");
        fs::write(&binary, b"PK\x03\x04\0\0\0\x08\x07\x01").unwrap();
        let (latin, _, _) = encoding_rs::WINDOWS_1252.encode("Grüße aus Köln.");
        fs::write(directory.path().join("b.txt"), latin).unwrap();
        let corpus = Corpus::read(&[directory.path().to_owned()]).unwrap();
        assert_eq!(corpus.documents[0].sentences, ["Grüße aus Köln."]);
        assert_eq!(
            corpus.left_out.to_string(),
            "1 binary files, 1 files in another encoding than UTF-8 (read as guessed)"
        );
        let error = Corpus::read(&[binary]).unwrap_err().to_string();
        assert!(
            error.ends_with("a.txt: no text, but a zip archive, as PyTorch writes them"),
            "{error}"
        );
    }
}
