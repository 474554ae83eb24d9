//! The file of `--losses`: what every step lost, with all digits.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use crate::error::Error;
use crate::train::StepLoss;

/// Written step by step, so that a run that fails or is stopped leaves what it had.
#[derive(Debug)]
pub struct LossLog {
    path: PathBuf,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    file: File,
    error: Option<io::Error>,
}

impl LossLog {
    /// Starts a file, in place of what was there.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn create(path: &Path) -> Result<Self, Error> {
        let failed = |source| Error::Write {
            path: path.into(),
            source,
        };
        let mut file = File::create(path).map_err(failed)?;
        writeln!(file, "step,masked_lm,next_sentence").map_err(failed)?;
        Ok(Self {
            path: path.into(),
            state: Mutex::new(State { file, error: None }),
        })
    }

    /// Adds a step, by its number in the whole run. Digits suffice to tell two numbers apart. Training goes on if it fails; see
    /// [`LossLog::finish`].
    pub fn add(&self, step: usize, loss: &StepLoss) {
        let Ok(mut state) = self.state.lock() else {
            return;
        };
        let row = format!("{step},{},{}\n", loss.masked_lm, loss.next_sentence);
        if let Err(error) = state.file.write_all(row.as_bytes()) {
            state.error.get_or_insert(error);
        }
    }

    /// Says whether all steps were written.
    ///
    /// # Errors
    /// The first that could not be.
    pub fn finish(self) -> Result<(), Error> {
        let state = self.state.into_inner().ok();
        match state.and_then(|state| state.error) {
            Some(source) => Err(Error::Write {
                path: self.path,
                source,
            }),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_step_is_in_the_file_before_the_next() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("losses.csv");
        let log = LossLog::create(&path).unwrap();
        let loss = StepLoss {
            masked_lm: 0.1,
            next_sentence: 1.0 / 3.0,
        };
        log.add(7, &loss);
        assert_eq!(
            std::fs::read_to_string(&path).unwrap(),
            "step,masked_lm,next_sentence\n7,0.1,0.3333333333333333\n"
        );
        log.finish().unwrap();
        #[cfg(target_os = "linux")]
        {
            // A full disk.
            let error = LossLog::create(Path::new("/dev/full")).unwrap_err();
            assert!(matches!(error, Error::Write { .. }), "{error}");
        }
    }
}
