//! Saving while training goes on: one thread, one job, and a result that is not lost.

use std::fmt;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, TryRecvError};
use std::thread;
use std::time::Duration;

use crate::Error;

/// Writes in the background, one save at a time.
///
/// The job owns what it writes: a copy on the host, made before training goes on. See
/// [the crate's page](crate) for an example. Dropping it waits for nothing; a failure that nobody
/// has seen by then is logged.
pub struct Background<T> {
    result: Option<Receiver<Result<T, Error>>>,
}

impl<T: Send + 'static> Background<T> {
    /// Nothing in flight.
    #[must_use]
    pub const fn new() -> Self {
        Self { result: None }
    }

    /// Runs `job` on a thread of its own.
    ///
    /// # Errors
    ///
    /// If the save before has failed and nobody was told: its error; it is told now, and `job` did
    /// not run. [`Error::InFlight`] if the save before is not finished, or its result was not taken
    /// by [`wait`](Self::wait). [`Error::Io`] if there is no thread to be had.
    pub fn begin(
        &mut self,
        job: impl FnOnce() -> Result<T, Error> + Send + 'static,
    ) -> Result<(), Error> {
        if let Some(receiver) = self.result.take() {
            match receiver.try_recv() {
                Ok(Err(error)) => return Err(error),
                Err(TryRecvError::Disconnected) => return Err(Error::Panicked),
                Ok(Ok(value)) => {
                    // Put back, for `wait`.
                    let (sender, receiver) = mpsc::channel();
                    if sender.send(Ok(value)).is_ok() {
                        self.result = Some(receiver);
                    }
                    return Err(Error::InFlight);
                }
                Err(TryRecvError::Empty) => {
                    self.result = Some(receiver);
                    return Err(Error::InFlight);
                }
            }
        }
        let (sender, receiver) = mpsc::channel();
        thread::Builder::new()
            .name("checkpoint".into())
            .spawn(move || {
                if let Err(mpsc::SendError(Err(error))) = sender.send(job()) {
                    log::error!(
                        "a save in the background failed, and nobody waits for it: {error}"
                    );
                }
            })
            .map_err(Error::io(
                "start a thread for",
                "the save in the background",
            ))?;
        self.result = Some(receiver);
        Ok(())
    }

    /// Whether nothing is in flight and no result waits to be taken.
    #[must_use]
    pub const fn is_idle(&self) -> bool {
        self.result.is_none()
    }

    /// Takes the result of the save in flight, when it is finished; `None` if there is none.
    ///
    /// # Errors
    ///
    /// The save's own error, [`Error::Panicked`], or [`Error::StillWriting`] if it takes longer than
    /// `at_most`: then it goes on, and may be waited for again.
    pub fn wait(&mut self, at_most: Duration) -> Result<Option<T>, Error> {
        let Some(receiver) = self.result.take() else {
            return Ok(None);
        };
        match receiver.recv_timeout(at_most) {
            Ok(result) => result.map(Some),
            Err(RecvTimeoutError::Disconnected) => Err(Error::Panicked),
            Err(RecvTimeoutError::Timeout) => {
                self.result = Some(receiver);
                Err(Error::StillWriting { waited: at_most })
            }
        }
    }
}

impl<T: Send + 'static> Default for Background<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T> fmt::Debug for Background<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Background")
            .field("idle", &self.result.is_none())
            .finish()
    }
}

impl<T> Drop for Background<T> {
    fn drop(&mut self) {
        if let Some(Ok(Err(error))) = self.result.take().map(|receiver| receiver.try_recv()) {
            log::error!("a save in the background failed, and nobody has waited for it: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    fn failure() -> Error {
        Error::NotRankZero
    }

    #[test]
    fn one_save_is_in_flight_and_its_result_is_given_once() {
        let mut background = Background::new();
        let (go, gate) = mpsc::channel::<()>();
        background
            .begin(move || Ok(gate.recv().map(|()| 7).unwrap()))
            .unwrap();
        assert!(matches!(background.begin(|| Ok(8)), Err(Error::InFlight)));
        assert!(matches!(
            background.wait(Duration::ZERO),
            Err(Error::StillWriting { .. })
        ));
        go.send(()).unwrap();
        assert_eq!(background.wait(LONG).unwrap(), Some(7));
        assert_eq!(background.wait(LONG).unwrap(), None);
        assert!(background.is_idle());
    }

    #[test]
    fn a_failure_is_told_by_wait() {
        let mut background = Background::<()>::new();
        background.begin(|| Err(failure())).unwrap();
        assert!(matches!(background.wait(LONG), Err(Error::NotRankZero)));
        assert!(background.is_idle());
    }

    #[test]
    fn a_failure_that_nobody_waited_for_is_told_by_the_next_begin_and_only_once() {
        let mut background = Background::new();
        background.begin(|| Err(failure())).unwrap();
        let error = loop {
            match background.begin(|| Ok(())) {
                Err(Error::InFlight) => thread::yield_now(),
                other => break other.unwrap_err(),
            }
        };
        assert!(matches!(error, Error::NotRankZero));
        background.begin(|| Ok(())).unwrap();
        assert_eq!(background.wait(LONG).unwrap(), Some(()));
    }

    #[test]
    fn a_result_that_nobody_has_taken_is_not_overwritten() {
        let mut background = Background::new();
        background.begin(|| Ok(1)).unwrap();
        let deadline = std::time::Instant::now() + LONG;
        // Whether it is finished or not, the second is refused.
        while background
            .result
            .as_ref()
            .is_some_and(|_| std::time::Instant::now() < deadline)
        {
            assert!(matches!(background.begin(|| Ok(2)), Err(Error::InFlight)));
            if let Ok(Some(value)) = background.wait(Duration::ZERO) {
                assert_eq!(value, 1);
            }
        }
    }

    #[test]
    fn a_panic_is_an_error() {
        let mut background = Background::<()>::new();
        background.begin(|| panic!("for the test")).unwrap();
        assert!(matches!(background.wait(LONG), Err(Error::Panicked)));
    }
}
