//! A group from what the environment says: the way in for programs that a launcher starts.

use std::{net::IpAddr, sync::Arc};

use crate::{
    ending::{Ending, record},
    error::Error,
    group::ProcessGroup,
    pairwise::Pairwise,
    placement::{Placement, PlacementError},
    recording::Recording,
    rendezvous::Rendezvous,
    spawn::Local,
};

const BIND: &str = "BURN_SHARD_BIND";

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
    /// | `BURN_SHARD_FLIGHT_RECORDER` | a directory for each rank's last collectives, see [`flight`](crate::flight) |
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
        let communicator = Arc::new(Pairwise::new(transport, deadline));
        Ok(Self::new(Recording::flight_from_env(communicator)))
    }

    /// Runs `f` once per rank that this process is to run, and returns the results in rank order: in a job that
    /// a launcher started, this process's rank ([`ProcessGroup::from_env`]) and so one result; otherwise
    /// `world_size` ranks as threads ([`ProcessGroup::spawn`]) and so as many.
    ///
    /// One `main` serves a laptop and a cluster. In a launcher's job its world size counts, and `world_size` is
    /// not looked at.
    ///
    /// # Errors
    ///
    /// See [`ProcessGroup::from_env`] for a job of a launcher and [`Local::spawn`] without one. A rank that panics is
    /// [`Error::RankPanicked`] if it is a thread; in a launcher's job the panic ends the process as any other
    /// does, and the other ranks are told.
    ///
    /// # Examples
    ///
    /// The ranks of `cargo run` are two threads, those of `burn-shard launch -n 8 -- program` are eight
    /// processes:
    ///
    /// ```
    /// # use burn_shard_comm::{Error, ProcessGroup, ReduceOp};
    /// fn train(group: ProcessGroup) -> Result<u64, Error> {
    ///     let mut ranks = [1u64];
    ///     group.all_reduce(&mut ranks, ReduceOp::Sum)?;
    ///     Ok(ranks[0])
    /// }
    ///
    /// fn main() -> Result<(), Error> {
    ///     for ranks in ProcessGroup::from_env_or_spawn(2, train)? {
    ///         println!("the sum over ranks is {}", ranks?);
    ///     }
    ///     Ok(())
    /// }
    /// ```
    pub fn from_env_or_spawn<T: Send, F: Fn(Self) -> T + Sync>(
        world_size: usize,
        f: F,
    ) -> Result<Vec<T>, Error> {
        match Self::from_env() {
            Ok(group) => Ok(vec![f(group)]),
            Err(Error::NoLauncher) => Self::spawn(world_size, f),
            Err(error) => Err(error),
        }
    }
}

fn variable(name: &str) -> Option<String> {
    std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
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
