//! The paths of the options, checked before anything takes time; and files that come into place complete.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::path::Path;

use crate::cli::Options;
use crate::data::corpus::Corpus;
use crate::error::Error;
use crate::input;
use crate::weights;

/// Checks that inputs can be opened, and that the output can be and is no input. Creates the output, and
/// leaves what it holds as it is.
///
/// # Errors
/// A path that is wrong.
pub fn check(options: &Options) -> Result<(), Error> {
    let given = [
        ("tokenizer", options.tokenizer.as_deref()),
        ("weights", options.weights.as_deref()),
    ];
    for (_, path) in given {
        path.map(input::open).transpose()?;
    }
    let corpus = Corpus::files(&options.corpus)?;
    let inputs = given
        .into_iter()
        .filter_map(|(input, path)| Some((input, path?)))
        .chain(corpus.iter().map(|path| ("corpus", path.as_path())));
    let inputs: Vec<(&'static str, &Path)> = inputs.collect();
    if let Some(output) = &options.losses {
        spares("losses", output, &inputs)?;
        writable(output)?;
    }
    if let Some(dir) = &options.export {
        for file in weights::FILES {
            spares("export", &dir.join(file), &inputs)?;
        }
        let made = fs::create_dir_all(dir).and_then(|()| tempfile::tempfile_in(dir));
        made.map_err(|source| Error::Write {
            path: dir.clone(),
            source,
        })?;
    }
    Ok(())
}

/// Refuses an output that is one of the inputs.
fn spares(
    option: &'static str,
    output: &Path,
    inputs: &[(&'static str, &Path)],
) -> Result<(), Error> {
    for (input, path) in inputs {
        // By what it is, whatever it is called.
        if same_file::is_same_file(output, path).unwrap_or(false) {
            return Err(Error::Overwrites {
                option,
                path: output.into(),
                input,
            });
        }
    }
    Ok(())
}

/// Puts a file in place, whatever is there, as `scratch` makes files: exclusively, under a random name. A rename
/// replaces a link.
///
/// # Errors
/// The directory cannot be written to.
pub(crate) fn replace(path: &Path, bytes: &[u8], scratch: &tempfile::Builder) -> io::Result<()> {
    let mut scratch = scratch.tempfile_in(path.parent().unwrap_or(Path::new(".")))?;
    scratch.write_all(bytes)?;
    scratch.persist(path).map_err(|error| error.error)?;
    Ok(())
}

fn writable(path: &Path) -> Result<(), Error> {
    // Devices are fine (`/dev/null`), a pipe would be waited for.
    #[cfg(unix)]
    if let Ok(metadata) = path.metadata() {
        use std::os::unix::fs::FileTypeExt;

        if metadata.file_type().is_fifo() {
            return Err(Error::NotAFile {
                path: path.into(),
                what: "a pipe",
            });
        }
    }
    let file = OpenOptions::new().append(true).create(true).open(path);
    file.map(drop).map_err(|source| Error::Write {
        path: path.into(),
        source,
    })
}

#[cfg(test)]
mod tests {

    use clap::Parser;

    use super::*;

    fn refused(arguments: &[&str]) -> String {
        let arguments = ["bert-large"].iter().chain(arguments);
        let options = Options::try_parse_from(arguments).unwrap();
        check(&options).unwrap_err().to_string()
    }

    #[test]
    fn an_output_never_destroys_an_input() {
        let root = tempfile::tempdir().unwrap();
        let path = |name: &str| root.path().join(name).to_str().unwrap().to_owned();
        let (text, link) = (path("a.jsonl"), path("link.csv"));
        fs::write(&text, "{\"text\": \"One.\"}").unwrap();
        fs::hard_link(&text, &link).unwrap();
        let directory = root.path().to_str().unwrap();
        for (corpus, output) in [(&*text, &text), (directory, &text), (&text, &link)] {
            let error = refused(&["--corpus", corpus, "--losses", output]);
            let expected =
                format!("--losses {output} is also read, as part of --corpus (name another file)");
            assert_eq!(error, expected);
        }
        let exported = path("tokenizer.json");
        fs::hard_link(&text, &exported).unwrap();
        let error = refused(&["--tokenizer", &text, "--export", directory]);
        let expected =
            format!("--export {exported} is also read, as part of --tokenizer (name another file)");
        assert_eq!(error, expected);
        let error = refused(&["--tokenizer", &text, "--losses", &text]);
        assert!(error.contains("as part of --tokenizer"), "{error}");
        assert!(fs::read_to_string(&text).unwrap().contains("One."));
    }

    #[test]
    fn an_output_that_cannot_be_written_is_named() {
        let root = tempfile::tempdir().unwrap();
        let directory = root.path().to_str().unwrap();
        let error = refused(&["--losses", directory]);
        assert!(
            error.starts_with(&format!("cannot write {directory}: ")),
            "{error}"
        );
        let nowhere = format!("{directory}/no/losses.csv");
        let error = refused(&["--losses", &nowhere]);
        assert!(
            error.starts_with(&format!("cannot write {nowhere}: ")),
            "{error}"
        );
    }

    #[test]
    fn an_output_is_left_as_it_is() {
        let root = tempfile::tempdir().unwrap();
        let output = root.path().join("losses.csv");
        fs::write(&output, "of an earlier run").unwrap();
        let options = Options::parse_from(["bert-large", "--losses", output.to_str().unwrap()]);
        check(&options).unwrap();
        assert_eq!(fs::read_to_string(output).unwrap(), "of an earlier run");
    }
}
