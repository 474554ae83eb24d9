//! Documents, from files the user names or from what the machine has anyway.

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};

use super::{prose, registry};
use crate::error::Error;

/// A text file longer than this is taken for many documents, cut between paragraphs.
const DOCUMENT_BYTES: usize = 16 << 10;

/// Text that belongs together, sentence by sentence.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Document {
    /// In order.
    pub sentences: Vec<String>,
}

impl Document {
    pub(super) fn from_paragraphs(paragraphs: impl IntoIterator<Item = impl AsRef<str>>) -> Self {
        let mut sentences = Vec::new();
        for paragraph in paragraphs {
            sentences.extend(prose::sentences(paragraph.as_ref()).map(str::to_owned));
        }
        Self { sentences }
    }

    /// Length of the text.
    pub fn bytes(&self) -> usize {
        self.sentences.iter().map(String::len).sum()
    }
}

/// All text of a run.
#[derive(Clone, Debug)]
pub struct Corpus {
    /// Those with text, in a fixed order.
    pub documents: Vec<Document>,
    /// Where they are from, for people.
    pub source: String,
}

impl Corpus {
    /// Reads files (`.txt`, `.md`, `.jsonl` with a field `text`, `.parquet` with a column
    /// `text`), and directories for such files at any depth.
    ///
    /// # Errors
    /// A path cannot be read or is of another kind, or there is no text in any.
    pub fn read(paths: &[PathBuf]) -> Result<Self, Error> {
        let mut files = Vec::new();
        for path in paths {
            let is_directory = fs::metadata(path)
                .map_err(|source| Error::Read {
                    path: path.clone(),
                    source,
                })?
                .is_dir();
            match is_directory {
                true => find(path, &mut files)?,
                false => files.push(path.clone()),
            }
        }
        let mut documents = Vec::new();
        for file in &files {
            documents.extend(read_file(file)?);
        }
        documents.retain(|document| !document.sentences.is_empty());
        if documents.is_empty() {
            return Err(Error::EmptyCorpus {
                paths: paths.to_vec(),
            });
        }
        let source = format!("{} files", files.len());
        Ok(Self { documents, source })
    }

    /// Reads the Markdown files and doc comments of the crates Cargo has unpacked on this
    /// machine, up to about `limit_bytes`.
    ///
    /// # Errors
    /// There are none.
    pub fn of_cargo_registry(limit_bytes: usize) -> Result<Self, Error> {
        let directory = registry::directory().ok_or(Error::NoHome)?;
        let (documents, crates) = registry::read(&directory, limit_bytes);
        if documents.is_empty() {
            return Err(Error::EmptyRegistry { path: directory });
        }
        let source = format!(
            "Markdown and doc comments of {crates} crates in {}",
            directory.display()
        );
        Ok(Self { documents, source })
    }

    /// Length of the text.
    pub fn bytes(&self) -> usize {
        self.documents.iter().map(Document::bytes).sum()
    }

    /// The same for the same text, on any machine with the same Rust release.
    pub fn fingerprint(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        for document in &self.documents {
            document.sentences.hash(&mut hasher);
        }
        hasher.finish()
    }
}

/// Collects the files of known kinds under a directory, sorted by path.
fn find(directory: &Path, files: &mut Vec<PathBuf>) -> Result<(), Error> {
    let failed = |source| Error::Read {
        path: directory.into(),
        source,
    };
    let entries = fs::read_dir(directory).map_err(failed)?;
    let mut paths = entries
        .map(|entry| entry.map(|entry| entry.path()))
        .collect::<Result<Vec<_>, _>>()
        .map_err(failed)?;
    paths.sort();
    for path in paths {
        if path.is_dir() {
            find(&path, files)?;
        } else if matches!(extension(&path), "txt" | "md" | "jsonl" | "parquet") {
            files.push(path);
        }
    }
    Ok(())
}

fn extension(path: &Path) -> &str {
    path.extension()
        .and_then(|extension| extension.to_str())
        .unwrap_or("")
}

fn read_file(path: &Path) -> Result<Vec<Document>, Error> {
    let read = || -> Result<String, Error> {
        let bytes = fs::read(path).map_err(|source| Error::Read {
            path: path.into(),
            source,
        })?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    };
    match extension(path) {
        "txt" => Ok(cut(blocks(&read()?))),
        "md" => Ok(cut(prose::paragraphs(read()?.lines()).into_iter())),
        "jsonl" => jsonl(path, &read()?),
        "parquet" => parquet(path),
        _ => Err(Error::UnknownFormat { path: path.into() }),
    }
}

/// Blocks of lines between blank lines.
fn blocks(text: &str) -> impl Iterator<Item = String> {
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
    for paragraph in paragraphs {
        if bytes > DOCUMENT_BYTES {
            documents.push(Document::default());
            bytes = 0;
        }
        bytes += paragraph.len();
        if let Some(document) = documents.last_mut() {
            document
                .sentences
                .extend(Document::from_paragraphs([paragraph]).sentences);
        }
    }
    documents
}

fn jsonl(path: &Path, text: &str) -> Result<Vec<Document>, Error> {
    let lines = text
        .lines()
        .enumerate()
        .filter(|(_, line)| !line.trim().is_empty());
    lines
        .map(|(index, line)| {
            let value: serde_json::Value =
                serde_json::from_str(line).map_err(|source| Error::Json {
                    path: path.into(),
                    line: index + 1,
                    source,
                })?;
            let text = value.get("text").and_then(serde_json::Value::as_str);
            let text = text.ok_or(Error::NoText {
                path: path.into(),
                line: index + 1,
            })?;
            Ok(Document::from_paragraphs(blocks(text)))
        })
        .collect()
}

#[cfg(feature = "parquet")]
fn parquet(path: &Path) -> Result<Vec<Document>, Error> {
    use ::parquet::file::reader::{FileReader, SerializedFileReader};
    use ::parquet::record::RowAccessor;
    use ::parquet::schema::types::Type;

    let failed = |source| Error::Parquet {
        path: path.into(),
        source: Box::new(source),
    };
    let file = fs::File::open(path).map_err(|source| Error::Read {
        path: path.into(),
        source,
    })?;
    let reader = SerializedFileReader::new(file).map_err(failed)?;
    let schema = reader.metadata().file_metadata().schema();
    let Some(text) = schema
        .get_fields()
        .iter()
        .find(|field| field.name() == "text")
    else {
        let columns = schema
            .get_fields()
            .iter()
            .map(|field| field.name().to_owned())
            .collect();
        return Err(Error::NoTextColumn {
            path: path.into(),
            columns,
        });
    };
    let only_text = Type::group_type_builder(schema.name()).with_fields(vec![text.clone()]);
    let only_text = only_text.build().map_err(failed)?;
    let rows = reader.get_row_iter(Some(only_text)).map_err(failed)?;
    rows.map(|row| {
        let row = row.map_err(failed)?;
        // A null is an empty document.
        let text = row.get_string(0).map(String::as_str).unwrap_or("");
        Ok(Document::from_paragraphs(blocks(text)))
    })
    .collect()
}

#[cfg(not(feature = "parquet"))]
fn parquet(path: &Path) -> Result<Vec<Document>, Error> {
    Err(Error::NoParquet { path: path.into() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_text(name: &str, text: &str) -> Result<Corpus, Error> {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join(name), text).unwrap();
        Corpus::read(&[directory.path().to_owned()])
    }

    #[test]
    fn a_text_file_is_cut_into_documents_between_paragraphs() {
        let paragraph = "One sentence here. Another one there.\n\n".repeat(1000);
        let corpus = read_text("a.txt", &paragraph).unwrap();
        assert_eq!(corpus.documents.len(), 3);
        assert!(
            corpus
                .documents
                .iter()
                .all(|document| document.sentences.len() % 2 == 0)
        );
    }

    #[test]
    fn a_line_of_jsonl_is_a_document() {
        let corpus = read_text(
            "a.jsonl",
            "{\"text\": \"One. Two.\"}\n{\"text\": \"Three.\"}\n",
        );
        let sentences: Vec<_> = corpus
            .unwrap()
            .documents
            .into_iter()
            .map(|document| document.sentences)
            .collect();
        assert_eq!(sentences, [vec!["One.", "Two."], vec!["Three."]]);
        let error = read_text("a.jsonl", "{\"text\": \"One.\"}\n{\"body\": 1}\n").unwrap_err();
        assert!(
            error
                .to_string()
                .ends_with("a.jsonl:2: no string field `text`"),
            "{error}"
        );
    }

    #[test]
    fn no_text_is_an_error() {
        assert!(matches!(
            read_text("a.txt", "\n\n"),
            Err(Error::EmptyCorpus { .. })
        ));
        assert!(matches!(
            read_text("a.rs", "no corpus"),
            Err(Error::EmptyCorpus { .. })
        ));
    }

    #[cfg(feature = "parquet")]
    #[test]
    fn a_row_of_parquet_is_a_document() {
        use ::parquet::basic::Compression;
        use ::parquet::data_type::{ByteArray, ByteArrayType, Int32Type};
        use ::parquet::file::properties::WriterProperties;
        use ::parquet::file::writer::SerializedFileWriter;
        use ::parquet::schema::parser::parse_message_type;

        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.parquet");
        let write = |name: &str| {
            let schema =
                format!("message m {{ required int32 id; required binary {name} (UTF8); }}");
            let schema = parse_message_type(&schema).unwrap().into();
            let properties = WriterProperties::builder().set_compression(Compression::SNAPPY);
            let file = fs::File::create(&path).unwrap();
            let mut file =
                SerializedFileWriter::new(file, schema, properties.build().into()).unwrap();
            let mut rows = file.next_row_group().unwrap();
            let mut column = rows.next_column().unwrap().unwrap();
            let ids = column.typed::<Int32Type>();
            ids.write_batch(&[1, 2], None, None).unwrap();
            column.close().unwrap();
            let mut column = rows.next_column().unwrap().unwrap();
            let texts = ["One. Two.", "Three."].map(ByteArray::from);
            let column_of_texts = column.typed::<ByteArrayType>();
            column_of_texts.write_batch(&texts, None, None).unwrap();
            column.close().unwrap();
            rows.close().unwrap();
            file.close().unwrap();
        };
        write("text");
        let documents = Corpus::read(std::slice::from_ref(&path)).unwrap().documents;
        let sentences: Vec<_> = documents
            .into_iter()
            .map(|document| document.sentences)
            .collect();
        assert_eq!(sentences, [vec!["One.", "Two."], vec!["Three."]]);
        write("body");
        let error = Corpus::read(std::slice::from_ref(&path))
            .unwrap_err()
            .to_string();
        assert!(
            error.ends_with(r#"no column `text` (there are ["id", "body"])"#),
            "{error}"
        );
    }
}
