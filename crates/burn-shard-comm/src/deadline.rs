//! How long ranks wait for each other: in all calls, from the environment, and in one call.

use std::time::Duration;

use crate::{group::ProcessGroup, local::DEFAULT_DEADLINE, placement::PlacementError};

const TIMEOUT: &str = "BURN_SHARD_TIMEOUT";

impl ProcessGroup {
    /// How long ranks that are processes wait for each other, at the start and in each collective: the
    /// seconds in `BURN_SHARD_TIMEOUT`, or 300 if it is not set.
    ///
    /// # Errors
    ///
    /// Refuses what is no number of seconds, more than 0 and at most a week.
    pub fn deadline_from_env() -> Result<Duration, PlacementError> {
        deadline(std::env::var_os(TIMEOUT).map(|value| value.to_string_lossy().into_owned()))
    }

    /// Runs `calls` with another deadline for this rank, and returns what it returns. Afterwards the deadline
    /// is as before, also if `calls` panics.
    ///
    /// For a wait that is known to be long, so that all others stay short. Each rank has a deadline of its own:
    /// the rank that the others wait for keeps its short one, and so notices at once when another is gone.
    /// Calls that other threads of this rank begin meanwhile have the deadline of `calls`, too.
    ///
    /// # Examples
    ///
    /// Rank 0 prepares something for an hour at most. All other waits have the deadline of the group, those of
    /// rank 0 included:
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use burn_shard_comm::{Error, ProcessGroup};
    /// # fn prepare() -> Vec<u8> { vec![7] }
    /// # fn main() -> Result<(), Error> {
    /// let texts = ProcessGroup::spawn(2, |group| -> Result<Vec<u8>, Error> {
    ///     let text = if group.rank() == 0 {
    ///         let text = prepare();
    ///         group.barrier()?;
    ///         text
    ///     } else {
    ///         group.with_deadline(Duration::from_secs(3600), |group| group.barrier())?;
    ///         Vec::new()
    ///     };
    ///     group.broadcast_bytes(text, 0)
    /// })?;
    /// # for text in texts { assert_eq!(text?, [7]); }
    /// # Ok(())
    /// # }
    /// ```
    pub fn with_deadline<T>(&self, deadline: Duration, calls: impl FnOnce(&Self) -> T) -> T {
        let _restored = Restored {
            group: self,
            deadline: self.deadline(),
        };
        self.set_deadline(deadline);
        calls(self)
    }
}

/// Sets a deadline when it is dropped.
struct Restored<'a> {
    group: &'a ProcessGroup,
    deadline: Duration,
}

impl Drop for Restored<'_> {
    fn drop(&mut self) {
        self.group.set_deadline(self.deadline);
    }
}

fn deadline(value: Option<String>) -> Result<Duration, PlacementError> {
    let Some(value) = value else {
        return Ok(DEFAULT_DEADLINE);
    };
    let seconds = value.trim().parse::<f64>().ok();
    let deadline = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    // A week: what is longer may not be added to a point in time.
    let allowed = |deadline: &Duration| !deadline.is_zero() && deadline.as_secs() <= 7 * 86_400;
    deadline.filter(allowed).ok_or(PlacementError::NotANumber {
        variable: TIMEOUT,
        value,
        expected: "a number of seconds, more than 0 and at most a week",
    })
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;
    use crate::error::Error;

    #[test]
    fn a_deadline_is_a_positive_number_of_seconds() {
        assert_eq!(deadline(None).unwrap(), Duration::from_secs(300));
        let half = deadline(Some(" 2.5 ".to_owned())).unwrap();
        assert_eq!(half, Duration::from_millis(2500));
        for wrong in ["", "0", "-1", "NaN", "inf", "1e9", "5m"] {
            let error = deadline(Some(wrong.to_owned())).unwrap_err();
            assert!(error.to_string().contains(TIMEOUT), "{wrong}: {error}");
        }
    }

    #[test]
    fn a_deadline_for_some_calls_is_that_of_no_others() {
        let deadlines = ProcessGroup::spawn(1, |group| {
            let before = group.deadline();
            let hour = Duration::from_secs(3600);
            let within = group.with_deadline(hour, ProcessGroup::deadline);
            assert_eq!(within, hour);
            assert_eq!(group.deadline(), before);
            let panics = || group.with_deadline(hour, |_| panic!("within"));
            assert!(catch_unwind(AssertUnwindSafe(panics)).is_err());
            (before, group.deadline())
        });
        let (before, after) = deadlines.unwrap()[0];
        assert_eq!(before, after);
    }

    #[test]
    fn a_rank_that_does_not_come_is_noticed_by_the_one_with_the_short_deadline() {
        let results = ProcessGroup::spawn(3, |group| match group.rank() {
            0 => group.with_deadline(Duration::from_millis(200), ProcessGroup::barrier),
            1 => group.with_deadline(Duration::from_secs(3600), ProcessGroup::barrier),
            _ => {
                // It does not come until the others have failed.
                while group.communicator().failure().is_none() {
                    std::thread::sleep(Duration::from_millis(5));
                }
                Ok(())
            }
        });
        let results = results.unwrap();
        assert!(matches!(&results[0], Err(Error::Deadline { missing, .. }) if missing == &[2]));
        assert!(
            matches!(&results[1], Err(Error::Interrupted { .. })),
            "{results:?}"
        );
    }
}
