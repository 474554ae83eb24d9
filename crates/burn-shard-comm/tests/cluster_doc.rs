//! `docs/cluster.md` quotes errors as they are.
#![allow(clippy::unwrap_used, reason = "a test ends at the first error")]

use std::time::Duration;

use burn_shard_comm::{
    Collective, Error, JobFault, Launcher, Placement, PlacementError, RendezvousError,
};

const DOC: &str = include_str!("../../../docs/cluster.md");

/// What stands before the way out, which the table leaves out.
fn beginning(message: &str) -> &str {
    message.split(" (").next().unwrap()
}

#[test]
fn the_messages_in_the_table_of_faults_are_real() {
    let waited = Duration::from_secs(300);
    let rendezvous = [
        RendezvousError::BindUnset {
            rank: 0,
            master: "gpu001".into(),
        },
        RendezvousError::TokenUnset {
            rank: 0,
            address: "0.0.0.0:29500".into(),
        },
        RendezvousError::Token {
            rank: 1,
            address: "10.0.0.1:29500".into(),
        },
        RendezvousError::Listen {
            rank: 0,
            address: "10.0.0.1:29500".parse().unwrap(),
            message: "Address already in use".into(),
        },
        RendezvousError::NoMaster {
            rank: 3,
            address: "gpu001:29500".into(),
            waited,
            message: "Connection refused".into(),
        },
    ];
    let jobs = [
        JobFault::DuplicateRank {
            duplicate: 2,
            first: "10.0.0.1:51812".parse().unwrap(),
            second: "10.0.0.2:40034".parse().unwrap(),
        },
        JobFault::WorldSize {
            other: 2,
            found: 8,
            expected: 16,
        },
        JobFault::Missing {
            waiting: 0,
            waited,
            missing: vec![5],
            refused: String::new(),
        },
    ];
    let errors = [
        Error::NoLauncher,
        Error::from(PlacementError::BatchShell { world_size: 4 }),
        Error::from(PlacementError::NotAnAddress {
            variable: "BURN_SHARD_BIND",
            value: "eth0".into(),
        }),
        Error::Deadline {
            rank: 1,
            collective: Collective::AllReduce,
            sequence: 17,
            waited,
            missing: vec![0],
        },
        Error::RankDied {
            rank: 2,
            peer: 1,
            message: "its process has ended".into(),
        },
    ];
    let messages = (rendezvous.iter().map(ToString::to_string))
        .chain(jobs.iter().map(ToString::to_string))
        .chain(errors.iter().map(ToString::to_string));
    for message in messages {
        assert!(
            DOC.contains(beginning(&message)),
            "not in docs/cluster.md: {message}"
        );
    }
}

#[test]
fn what_the_environment_lacks_is_quoted_as_it_is_said() {
    let cases = [
        "RANK=3 WORLD_SIZE=8 LOCAL_RANK=0",
        "RANK=4 WORLD_SIZE=8 LOCAL_RANK=4 LOCAL_WORLD_SIZE=4",
    ];
    for case in cases {
        let find = |name: &str| {
            let variables = case
                .split(' ')
                .filter_map(|variable| variable.split_once('='));
            variables
                .into_iter()
                .find_map(|(found, value)| (found == name).then(|| value.to_owned()))
        };
        let message = Placement::from_vars(find).unwrap_err().to_string();
        assert!(
            DOC.contains(beginning(&message)),
            "not in docs/cluster.md: {message}"
        );
    }
    let error = PlacementError::NoPort {
        launcher: Launcher::OpenMpi,
        rank: 1,
        world_size: 2,
    };
    let message = error.to_string();
    let (_, message) = message.split_once(": ").unwrap();
    assert!(
        DOC.contains(beginning(message)),
        "not in docs/cluster.md: {message}"
    );
}
