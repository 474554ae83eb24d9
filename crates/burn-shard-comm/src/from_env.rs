//! A group from what the environment says: the way in for programs that a launcher starts.

use std::{net::IpAddr, sync::Arc, time::Duration};

use crate::{
    error::Error,
    group::ProcessGroup,
    local::DEFAULT_DEADLINE,
    pairwise::Pairwise,
    placement::{Placement, PlacementError},
    rendezvous::Rendezvous,
    spawn::Local,
    tcp::record::{Ending, record},
};

const BIND: &str = "BURN_SHARD_BIND";
const TIMEOUT: &str = "BURN_SHARD_TIMEOUT";

impl ProcessGroup {
    /// This process's end of the group that its launcher started: every rank is a process, and all are
    /// connected by TCP.
    ///
    /// The variables of torchrun and `burn-shard launch`, SLURM, OpenMPI and PMI are understood; see
    /// [`Placement`]. A job of one process needs no network. Besides these:
    ///
    /// | variable | |
    /// |---|---|
    /// | `BURN_SHARD_TOKEN` | shared secret of the job; needed beyond one host |
    /// | `BURN_SHARD_BIND` | address of this host to listen on, `0.0.0.0` for all; needed beyond one host |
    /// | `BURN_SHARD_TIMEOUT` | see [`ProcessGroup::deadline_from_env`] |
    /// | `BURN_SHARD_ERROR_FILE` | set by `burn-shard launch`: where this rank records when its group failed or was left, so that the launcher can tell which rank failed first |
    ///
    /// # Errors
    ///
    /// Refuses an environment without a launcher's variables ([`Error::NoLauncher`]) or with wrong ones
    /// ([`Error::Placement`]). Fails if the ranks do not find each other ([`Error::Rendezvous`]).
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # use burn_shard_comm::{Error, ProcessGroup, ReduceOp};
    /// # fn main() -> Result<(), Error> {
    /// let group = ProcessGroup::from_env()?;
    /// let mut ranks = [1u64];
    /// group.all_reduce(&mut ranks, ReduceOp::Sum)?;
    /// assert_eq!(ranks[0], group.world_size() as u64);
    /// # Ok(())
    /// # }
    /// ```
    pub fn from_env() -> Result<Self, Error> {
        let placement = Placement::from_env()?.ok_or(Error::NoLauncher)?;
        let deadline = Self::deadline_from_env()?;
        let bind = bind(variable(BIND))?;
        if placement.world_size == 1 {
            let alone = Local::new(1).deadline(deadline).groups().pop();
            return alone.ok_or(Error::NoRanks);
        }
        let mut rendezvous = Rendezvous::new(placement).deadline(deadline);
        if let Some(address) = bind {
            rendezvous = rendezvous.bind(address);
        }
        let transport = rendezvous.tcp().inspect_err(|_| record(Ending::Failed))?;
        Ok(Self::new(Arc::new(Pairwise::new(transport, deadline))))
    }

    /// How long ranks that are processes wait for each other, at the start and in each collective: the
    /// seconds in `BURN_SHARD_TIMEOUT`, or 300 if it is not set.
    ///
    /// # Errors
    ///
    /// Refuses what is no number of seconds, more than 0 and at most a week.
    pub fn deadline_from_env() -> Result<Duration, PlacementError> {
        deadline(variable(TIMEOUT))
    }
}

fn variable(name: &str) -> Option<String> {
    std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
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

fn bind(value: Option<String>) -> Result<Option<IpAddr>, PlacementError> {
    let Some(value) = value else {
        return Ok(None);
    };
    match value.trim().parse() {
        Ok(address) => Ok(Some(address)),
        Err(_) => Err(PlacementError::NotAnAddress {
            variable: BIND,
            value,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn an_address_to_listen_on_is_an_ip_address_and_nothing_else() {
        assert_eq!(bind(None).unwrap(), None);
        let any = bind(Some(" 0.0.0.0 ".to_owned())).unwrap();
        assert_eq!(any, Some(IpAddr::from([0, 0, 0, 0])));
        for wrong in ["", "eth0", "gpu001", "10.0.0.1:80", "10.0.0", "[::1]"] {
            let error = bind(Some(wrong.to_owned())).unwrap_err();
            let expected = PlacementError::NotAnAddress {
                variable: BIND,
                value: wrong.to_owned(),
            };
            assert_eq!(error, expected);
            let text = error.to_string();
            let start = format!("BURN_SHARD_BIND is {wrong:?}, which is not the IP address");
            assert!(text.starts_with(&start), "{text}");
        }
    }
}
