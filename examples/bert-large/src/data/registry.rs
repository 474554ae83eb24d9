//! The default corpus: prose that every machine that built this program has. Cargo keeps the
//! sources of all dependencies, with their Markdown files and doc comments.

use std::collections::HashSet;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use walkdir::WalkDir;

use super::corpus::Document;
use super::prose;

/// One crate gives at most this much, so that a few large ones do not make up the corpus.
const CRATE_BYTES: usize = 64 << 10;

/// Where Cargo unpacks crates: `$CARGO_HOME/registry/src`, by default under the home directory.
pub(super) fn directory() -> Option<PathBuf> {
    let home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| std::env::home_dir().map(|home| home.join(".cargo")))?;
    Some(home.join("registry").join("src"))
}

/// The documents of all crates under `directory`, one per source file, crates by name, up to
/// about `limit_bytes`. Returns how many crates gave text.
pub(super) fn read(directory: &Path, limit_bytes: usize) -> (Vec<Document>, usize) {
    let mut crates: Vec<PathBuf> = sorted(directory)
        .iter()
        .flat_map(|index| sorted(index))
        .collect();
    crates.sort_by(|a, b| a.file_name().cmp(&b.file_name()));
    let texts: Vec<Vec<Vec<String>>> = crates.par_iter().map(|path| crate_text(path)).collect();

    // Licences, badges and copied comments repeat: each paragraph counts once.
    let mut seen = HashSet::new();
    let mut documents = Vec::new();
    let (mut bytes, mut used) = (0, 0);
    for files in texts {
        if bytes >= limit_bytes {
            break;
        }
        let before = documents.len();
        let mut crate_bytes = 0;
        for paragraphs in files {
            let fresh = paragraphs.into_iter().filter(|paragraph| {
                let mut hasher = DefaultHasher::new();
                paragraph.hash(&mut hasher);
                seen.insert(hasher.finish())
            });
            let document = Document::from_paragraphs(fresh);
            if document.sentences.len() > 1 && crate_bytes < CRATE_BYTES {
                crate_bytes += document.bytes();
                documents.push(document);
            }
        }
        bytes += crate_bytes;
        used += usize::from(documents.len() > before);
    }
    (documents, used)
}

/// The paragraphs of each file of a crate, stopping once there are plenty.
fn crate_text(path: &Path) -> Vec<Vec<String>> {
    let mut files = Vec::new();
    let mut bytes = 0;
    let entries = WalkDir::new(path).sort_by_file_name().into_iter();
    for entry in entries
        .flatten()
        .filter(|entry| entry.file_type().is_file())
    {
        if bytes > 2 * CRATE_BYTES {
            break;
        }
        let extension = entry.path().extension();
        let Some(extension @ ("md" | "rs")) = extension.and_then(|extension| extension.to_str())
        else {
            continue;
        };
        let Ok(text) = fs::read_to_string(entry.path()) else {
            continue;
        };
        let paragraphs = match extension {
            "md" => prose::paragraphs(text.lines()),
            _ => prose::paragraphs(doc_comments(&text)),
        };
        bytes += paragraphs.iter().map(String::len).sum::<usize>();
        files.push(paragraphs);
    }
    files
}

/// The lines of `///` and `//!` comments; any other line ends a paragraph.
fn doc_comments(source: &str) -> impl Iterator<Item = &str> {
    source.lines().map(|line| {
        let line = line.trim_start();
        let comment = line
            .strip_prefix("///")
            .or_else(|| line.strip_prefix("//!"));
        comment
            .filter(|comment| !comment.starts_with('/'))
            .unwrap_or("")
    })
}

fn sorted(directory: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(directory) else {
        return Vec::new();
    };
    let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    paths.sort();
    paths
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crate_gives_its_markdown_and_doc_comments_once() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("index/a-1.0.0/src");
        fs::create_dir_all(&path).unwrap();
        let readme = "The first sentence of the readme. The second sentence of the readme.";
        fs::write(path.join("../README.md"), readme).unwrap();
        let code = "//! The first sentence of the crate.\n//! Another sentence of the crate.\n\
                    use std::fs; // no doc comment at all, although long enough\n\
                    /// The first sentence of the readme. The second sentence of the readme.\n";
        fs::write(path.join("lib.rs"), code).unwrap();

        let (documents, crates) = read(root.path(), usize::MAX);
        let sentences: Vec<_> = documents
            .iter()
            .map(|document| &document.sentences[..])
            .collect();
        assert_eq!(crates, 1);
        assert_eq!(
            sentences,
            [
                [
                    "The first sentence of the readme.",
                    "The second sentence of the readme."
                ],
                [
                    "The first sentence of the crate.",
                    "Another sentence of the crate."
                ]
            ]
        );
    }
}
