//! Which files a corpus has, and what of it is left out.

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use walkdir::WalkDir;

use crate::error::Error;

/// How a file's bytes become documents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    /// Blocks between blank lines.
    Plain,
    Markdown,
    /// A JSON object per line.
    JsonLines,
    Parquet,
}

impl Format {
    /// By the end of its name, `.gz` aside.
    fn of(path: &Path) -> Option<Self> {
        let is_packed = is_gzip(path);
        let extension = match is_packed {
            true => Path::new(path.file_stem()?).extension(),
            false => path.extension(),
        };
        match extension?.to_ascii_lowercase().to_str()? {
            "txt" | "text" => Some(Self::Plain),
            "md" | "markdown" => Some(Self::Markdown),
            "jsonl" | "ndjson" => Some(Self::JsonLines),
            "parquet" if !is_packed => Some(Self::Parquet),
            _ => None,
        }
    }
}

/// Whether its name says that it is compressed.
pub(super) fn is_gzip(path: &Path) -> bool {
    path.extension()
        .is_some_and(|extension| extension.eq_ignore_ascii_case("gz"))
}

/// A file to read.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Source {
    pub(super) path: PathBuf,
    pub(super) format: Format,
    /// Named by the user, who is told if it is no text; others are counted.
    pub(super) is_named: bool,
}

/// Why something that was found is not read, or not as it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Reason {
    OtherKind,
    Repeated,
    LoopOfLinks,
    NoFile,
    DeadLink,
    Binary,
    OtherEncoding,
    Damaged,
}

impl Reason {
    fn text(self) -> &'static str {
        match self {
            Self::OtherKind => "files of other kinds",
            Self::Repeated => "files that were met again",
            Self::LoopOfLinks => "links that lead back",
            Self::NoFile => "pipes, sockets or devices",
            Self::DeadLink => "links that lead nowhere",
            Self::Binary => "binary files",
            Self::OtherEncoding => "files in another encoding than UTF-8 (read as guessed)",
            Self::Damaged => "damaged characters",
        }
    }
}

/// How often each of them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LeftOut(BTreeMap<Reason, usize>);

impl LeftOut {
    pub(super) fn add(&mut self, reason: Reason, count: usize) {
        if count > 0 {
            *self.0.entry(reason).or_default() += count;
        }
    }

    #[cfg(test)]
    pub(super) fn count(&self, reason: Reason) -> usize {
        self.0.get(&reason).copied().unwrap_or(0)
    }

    /// Whether nothing was.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl fmt::Display for LeftOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (reason, count)) in self.0.iter().enumerate() {
            let comma = if index == 0 { "" } else { ", " };
            write!(f, "{comma}{count} {}", reason.text())?;
        }
        Ok(())
    }
}

/// The files named by `paths` and those of known formats in directories, sorted within each, every
/// one once. Links are followed.
///
/// # Errors
/// A path cannot be read, or a named file is of no known format.
pub(super) fn find(paths: &[PathBuf], left_out: &mut LeftOut) -> Result<Vec<Source>, Error> {
    let mut seen = HashSet::new();
    let mut sources = Vec::new();
    let mut add = |source: Source, left_out: &mut LeftOut| -> Result<(), Error> {
        let real = fs::canonicalize(&source.path).map_err(|error| Error::Read {
            path: source.path.clone(),
            source: error,
        })?;
        match seen.insert(real) {
            true => sources.push(source),
            false => left_out.add(Reason::Repeated, 1),
        }
        Ok(())
    };
    for path in paths {
        let metadata = fs::metadata(path).map_err(|source| Error::Read {
            path: path.clone(),
            source,
        })?;
        if !metadata.is_dir() {
            let format = Format::of(path).ok_or(Error::UnknownFormat { path: path.clone() })?;
            let source = Source {
                path: path.clone(),
                format,
                is_named: true,
            };
            add(source, left_out)?;
            continue;
        }
        for entry in WalkDir::new(path).follow_links(true).sort_by_file_name() {
            let entry = match entry {
                Ok(entry) => entry,
                Err(error) if error.loop_ancestor().is_some() => {
                    left_out.add(Reason::LoopOfLinks, 1);
                    continue;
                }
                Err(error) if is_dead_link(&error) => {
                    left_out.add(Reason::DeadLink, 1);
                    continue;
                }
                Err(error) => {
                    return Err(Error::Read {
                        path: error.path().unwrap_or(path).into(),
                        source: error.into(),
                    });
                }
            };
            let kind = entry.file_type();
            let format = Format::of(entry.path());
            match format {
                _ if kind.is_dir() => {}
                None => left_out.add(Reason::OtherKind, 1),
                Some(_) if !kind.is_file() => left_out.add(Reason::NoFile, 1),
                Some(format) => {
                    let source = Source {
                        path: entry.into_path(),
                        format,
                        is_named: false,
                    };
                    add(source, left_out)?;
                }
            }
        }
    }
    Ok(sources)
}

fn is_dead_link(error: &walkdir::Error) -> bool {
    let is_link = error
        .path()
        .is_some_and(|path| path.symlink_metadata().is_ok_and(|it| it.is_symlink()));
    let missing = error
        .io_error()
        .is_some_and(|error| error.kind() == std::io::ErrorKind::NotFound);
    is_link && missing
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(sources: &[Source]) -> Vec<&str> {
        let names = sources.iter().map(|source| source.path.file_name());
        names.map(|name| name.unwrap().to_str().unwrap()).collect()
    }

    #[test]
    fn kinds_are_told_by_the_end_of_a_name() {
        for (name, format) in [
            ("a.TXT", Some(Format::Plain)),
            ("a.b.ndjson", Some(Format::JsonLines)),
            ("a.md.gz", Some(Format::Markdown)),
            ("a.parquet", Some(Format::Parquet)),
            ("a.parquet.gz", None),
            ("a.gz", None),
            ("txt", None),
        ] {
            assert_eq!(Format::of(Path::new(name)), format, "{name}");
        }
    }

    #[cfg(unix)]
    #[test]
    fn every_file_is_found_once_whatever_leads_to_it() {
        use std::os::unix::fs::symlink;

        let root = tempfile::tempdir().unwrap();
        let path = |name: &str| root.path().join(name);
        for name in ["a", "b/c"] {
            fs::create_dir_all(path(name)).unwrap();
            fs::write(path(name).join("text.txt"), "text").unwrap();
        }
        fs::write(path("a/photo.png"), "no text").unwrap();
        // To itself, twice; to a sister; to nothing.
        symlink(".", path("a/x")).unwrap();
        symlink(".", path("a/y")).unwrap();
        symlink("../a", path("b/again")).unwrap();
        symlink("nowhere.txt", path("b/dead.txt")).unwrap();
        let made = std::process::Command::new("mkfifo")
            .arg(path("b/pipe.txt"))
            .status();
        assert!(made.unwrap().success());

        let mut left_out = LeftOut::default();
        let named = path("a/text.txt");
        let found = find(&[root.path().into(), named.clone()], &mut left_out).unwrap();
        assert_eq!(names(&found), ["text.txt"; 2]);
        assert_eq!(found[0].path, named);
        assert_eq!(found[1].path, path("b/c/text.txt"));
        for (reason, count) in [
            // By the link, and by its name.
            (Reason::Repeated, 2),
            // Two by each way into `a`.
            (Reason::LoopOfLinks, 4),
            (Reason::NoFile, 1),
            (Reason::DeadLink, 1),
            (Reason::OtherKind, 2),
        ] {
            assert_eq!(left_out.count(reason), count, "{reason:?}");
        }
        assert!(
            left_out.to_string().contains("4 links that lead back"),
            "{left_out}"
        );
    }
}
