//! Documents, from files the user names or from what the machine has anyway.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::PathBuf;

use super::files;
pub use super::files::LeftOut;
use super::{formats, prose, registry};
use crate::error::Error;

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
#[derive(Clone, Debug, Default)]
pub struct Corpus {
    /// Those with text, in a fixed order.
    pub documents: Vec<Document>,
    /// Where they are from, for people.
    pub source: String,
    /// Documents that had no text.
    pub empty: usize,
    /// What else was found, and not read.
    pub left_out: LeftOut,
}

impl Corpus {
    /// Reads files (`.txt`, `.md`, `.jsonl` with a field `text`, `.parquet` with a column
    /// `text`), and directories for such files at any depth.
    ///
    /// # Errors
    /// A path cannot be read or is of another kind, or there is no text in any.
    pub fn read(paths: &[PathBuf]) -> Result<Self, Error> {
        let mut left_out = LeftOut::default();
        let sources = files::find(paths, &mut left_out)?;
        let mut documents = Vec::new();
        for source in &sources {
            documents.extend(formats::read(source, &mut left_out)?);
        }
        let found = documents.len();
        documents.retain(|document| !document.sentences.is_empty());
        if documents.is_empty() {
            return Err(Error::EmptyCorpus {
                paths: paths.to_vec(),
                left_out,
            });
        }
        Ok(Self {
            source: format!("{} files", sources.len()),
            empty: found - documents.len(),
            documents,
            left_out,
        })
    }

    /// The files that [`Corpus::read`] would read.
    ///
    /// # Errors
    /// A path cannot be read or is of another kind.
    pub fn files(paths: &[PathBuf]) -> Result<Vec<PathBuf>, Error> {
        let sources = files::find(paths, &mut LeftOut::default())?;
        for source in sources.iter().filter(|source| source.is_named) {
            crate::input::open(&source.path)?;
        }
        Ok(sources.into_iter().map(|source| source.path).collect())
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
        Ok(Self {
            documents,
            source,
            ..Self::default()
        })
    }

    /// Length of the text.
    pub fn bytes(&self) -> usize {
        self.documents.iter().map(Document::bytes).sum()
    }

    /// A number that is the same for the same text, on any machine with the same Rust release.
    pub fn fingerprint(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        for document in &self.documents {
            document.sentences.hash(&mut hasher);
        }
        hasher.finish()
    }
}
