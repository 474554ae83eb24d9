//! Ranks that are processes find each other, or are told why not.
#![allow(clippy::unwrap_used, reason = "a test ends at the first error")]

mod processes;

use std::{
    io::{Read, Write},
    net::TcpListener,
    thread,
    time::{Duration, Instant},
};

use burn_shard_comm::{JobFault, Placement, Rendezvous, RendezvousError, Store, Token};
use processes::{LONG, VERSION, all, connect, free_port, hello, placement, rendezvous};

/// For what is to fail by its deadline; everything else fails, or succeeds, long before it.
const SHORT: Duration = Duration::from_millis(1500);

fn fault(result: &Result<Store, RendezvousError>) -> (usize, &JobFault) {
    match result {
        Err(RendezvousError::Job { rank, fault }) => (*rank, fault),
        other => panic!("{other:?}"),
    }
}

#[test]
fn all_ranks_meet_and_share_small_things() {
    for world_size in 1..=5 {
        let port = free_port();
        let ranks = (0..world_size).map(|rank| rendezvous(rank, world_size, port));
        all(ranks.collect(), |rendezvous| {
            let mut store = rendezvous.store().unwrap();
            assert_eq!(store.world_size(), world_size);
            let last = world_size - 1;
            if store.rank() == last {
                thread::sleep(Duration::from_millis(20));
                store.set("key", b"value of the last").unwrap();
                store.set("large", &[7; 64 << 10]).unwrap();
            }
            assert_eq!(store.get("key").unwrap(), b"value of the last");
            assert_eq!(store.get("large").unwrap(), [7; 64 << 10]);
            store.barrier().unwrap();
            store.barrier().unwrap();
        });
    }
}

#[test]
fn a_barrier_waits_for_the_slowest() {
    let port = free_port();
    let ranks = (0..3).map(|rank| rendezvous(rank, 3, port)).collect();
    let start = Instant::now();
    all(ranks, |rendezvous| {
        let mut store = rendezvous.store().unwrap();
        store.barrier().unwrap();
        if store.rank() == 2 {
            thread::sleep(Duration::from_millis(200));
        }
        store.barrier().unwrap();
        assert!(start.elapsed() >= Duration::from_millis(200));
    });
}

#[test]
fn the_master_may_come_last() {
    let port = free_port();
    let ranks = (0..3).map(|rank| rendezvous(rank, 3, port)).collect();
    let start = Instant::now();
    all(ranks, |rendezvous: Rendezvous| {
        if format!("{rendezvous:?}").contains("rank: 0") {
            thread::sleep(Duration::from_millis(400));
        }
        rendezvous.store().unwrap();
    });
    assert!(start.elapsed() < LONG / 2);
}

#[test]
fn a_rank_that_is_there_twice_is_told_to_all() {
    let port = free_port();
    let start = Instant::now();
    let ranks = [0, 1, 1].map(|rank| rendezvous(rank, 4, port));
    for result in all(ranks.into(), |rendezvous| rendezvous.store()) {
        let (_, fault) = fault(&result);
        assert!(
            matches!(fault, JobFault::DuplicateRank { duplicate: 1, .. }),
            "{fault}"
        );
    }
    assert!(start.elapsed() < LONG / 2);
}

#[test]
fn two_masters_are_told_to_all() {
    let port = free_port();
    let start = Instant::now();
    let ranks = [0, 0, 1].map(|rank| rendezvous(rank, 3, port));
    for result in all(ranks.into(), |rendezvous| rendezvous.store()) {
        let (_, fault) = fault(&result);
        assert!(
            matches!(fault, JobFault::DuplicateRank { duplicate: 0, .. }),
            "{fault}"
        );
    }
    assert!(start.elapsed() < LONG / 2);
}

#[test]
fn a_taken_port_is_an_error_at_once() {
    let port = free_port();
    let _other = TcpListener::bind(("127.0.0.1", port)).unwrap();
    let start = Instant::now();
    let error = rendezvous(0, 2, port).store().unwrap_err();
    let RendezvousError::Listen {
        rank: 0, address, ..
    } = &error
    else {
        panic!("{error}")
    };
    assert_eq!(address.port(), port);
    assert!(error.to_string().contains("MASTER_PORT"), "{error}");
    assert!(start.elapsed() < LONG / 2);
}

#[test]
fn two_jobs_on_one_port_do_not_mix() {
    let port = free_port();
    let start = Instant::now();
    let other = |rank| {
        let mut placement = placement(rank, 2, port);
        placement.token = Some(Token::new("another secret").unwrap());
        Rendezvous::new(placement).deadline(LONG)
    };
    thread::scope(|scope| {
        let first = scope.spawn(|| rendezvous(0, 2, port).store().unwrap());
        thread::sleep(Duration::from_millis(200));
        let error = other(0).store().unwrap_err();
        assert!(
            matches!(error, RendezvousError::Listen { rank: 0, .. }),
            "{error}"
        );
        let error = other(1).store().unwrap_err();
        assert!(
            matches!(error, RendezvousError::Token { rank: 1, .. }),
            "{error}"
        );
        // The first job is none the worse for it.
        let second = rendezvous(1, 2, port).store().unwrap();
        drop((second, first.join().unwrap()));
    });
    assert!(start.elapsed() < LONG / 2);
}

#[test]
fn ranks_that_disagree_on_how_many_they_are_are_told() {
    let port = free_port();
    let start = Instant::now();
    let ranks = vec![
        rendezvous(0, 4, port),
        rendezvous(1, 4, port),
        rendezvous(2, 5, port),
    ];
    for (rank, result) in all(ranks, |rendezvous| rendezvous.store())
        .iter()
        .enumerate()
    {
        let expected = JobFault::WorldSize {
            other: 2,
            found: 5,
            expected: 4,
        };
        assert_eq!(fault(result), (rank, &expected));
    }
    assert!(start.elapsed() < LONG / 2);
}

#[test]
fn a_rank_that_comes_after_the_failure_is_told_too() {
    let port = free_port();
    let start = Instant::now();
    thread::scope(|scope| {
        let first = scope.spawn(|| rendezvous(0, 3, port).store());
        let different = rendezvous(1, 2, port).store();
        let late = rendezvous(2, 3, port).store();
        for result in [&first.join().unwrap(), &different, &late] {
            let (_, fault) = fault(result);
            assert!(
                matches!(fault, JobFault::WorldSize { other: 1, .. }),
                "{fault}"
            );
        }
    });
    assert!(start.elapsed() < LONG / 2);
}

#[test]
fn a_rendezvous_that_failed_may_be_tried_again() {
    let port = free_port();
    let ranks = vec![rendezvous(0, 2, port), rendezvous(1, 3, port)];
    for result in all(ranks, |rendezvous| rendezvous.store()) {
        fault(&result);
    }
    let ranks = vec![rendezvous(0, 2, port), rendezvous(1, 2, port)];
    let start = Instant::now();
    for result in all(ranks, |rendezvous| {
        // A rank that comes early may still hear of the failure.
        loop {
            match rendezvous.store() {
                Err(RendezvousError::Job { rank: 1, .. }) if start.elapsed() < LONG => {}
                result => return result,
            }
        }
    }) {
        result.unwrap();
    }
}

#[test]
fn a_rank_out_of_range_is_refused() {
    let error = rendezvous(3, 3, free_port()).store().unwrap_err();
    let expected = RendezvousError::RankOutOfRange {
        rank: 3,
        world_size: 3,
    };
    assert_eq!(error, expected);
}

/// Rank 1 of 2 with something changed, beside a rank 0 that meets its deadline: both errors.
fn misfit(change: impl FnOnce(&mut Placement)) -> [RendezvousError; 2] {
    let port = free_port();
    let mut changed = placement(1, 2, port);
    change(&mut changed);
    let ranks = vec![
        rendezvous(0, 2, port).deadline(SHORT),
        Rendezvous::new(changed).deadline(LONG),
    ];
    let mut results = all(ranks, |rendezvous| rendezvous.store().unwrap_err());
    let second = results.pop().unwrap();
    let first = results.pop().unwrap();
    let RendezvousError::Job {
        rank: 0,
        fault:
            JobFault::Missing {
                missing,
                waited,
                refused,
                waiting: 0,
            },
    } = &first
    else {
        panic!("{first}")
    };
    assert_eq!(missing, &[1]);
    assert!(*waited >= SHORT / 2 && *waited < LONG / 2);
    assert!(refused.contains("connections were refused"), "{first}");
    [first, second]
}

#[test]
fn another_token_gets_nowhere() {
    let [_, second] = misfit(|placement| placement.token = Some(Token::new("A secret").unwrap()));
    assert!(
        matches!(second, RendezvousError::Token { rank: 1, .. }),
        "{second}"
    );
    let [_, second] = misfit(|placement| placement.token = None);
    assert!(
        matches!(second, RendezvousError::Token { rank: 1, .. }),
        "{second}"
    );
}

#[test]
fn tokens_are_bytes() {
    // Both were U+FFFD if they were read as text.
    let [first, second] = [&[0xff][..], &[0xfe]].map(|bytes| Token::new(bytes).unwrap());
    let port = free_port();
    let ranks = [(0, &first, SHORT), (1, &second, LONG)].map(|(rank, token, deadline)| {
        let mut placement = placement(rank, 2, port);
        placement.token = Some(token.clone());
        Rendezvous::new(placement).deadline(deadline)
    });
    let errors = all(ranks.into(), |rendezvous| rendezvous.store().unwrap_err());
    assert!(
        matches!(errors[1], RendezvousError::Token { rank: 1, .. }),
        "{errors:?}"
    );
}

#[test]
fn a_weak_token_is_for_loopback_only() {
    for weak in ["secret", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"] {
        let mut placement = placement(0, 1, free_port());
        placement.token = Some(Token::new(weak).unwrap());
        let rendezvous = Rendezvous::new(placement).deadline(SHORT);
        rendezvous.store().unwrap();
        let error = rendezvous
            .bind("0.0.0.0".parse().unwrap())
            .store()
            .unwrap_err();
        assert!(
            matches!(error, RendezvousError::TokenWeak { rank: 0, .. }),
            "{error}"
        );
        assert!(
            error
                .to_string()
                .contains("at least 16 bytes, 8 of them different"),
            "{error}"
        );
        assert!(!error.to_string().contains(weak), "{error}");
    }
}

#[test]
fn another_job_is_told_so() {
    let [first, second] = misfit(|placement| placement.job_id = "another".to_owned());
    let expected = JobFault::OtherJob {
        expected: "job".to_owned(),
        found: "another".to_owned(),
    };
    assert_eq!(
        second,
        RendezvousError::Job {
            rank: 1,
            fault: expected
        }
    );
    assert!(first.to_string().contains("job \"another\""), "{first}");
}

#[test]
fn a_job_id_that_does_not_fit_is_refused() {
    let mut placement = placement(0, 1, free_port());
    placement.job_id = "x".repeat(513);
    let error = Rendezvous::new(placement.clone()).store().unwrap_err();
    let expected = RendezvousError::JobIdTooLong {
        rank: 0,
        found_bytes: 513,
        max_bytes: 512,
    };
    assert_eq!(error, expected);
    placement.job_id = "x".repeat(512);
    Rendezvous::new(placement).deadline(SHORT).store().unwrap();
}

#[test]
fn a_token_is_not_needed_on_loopback() {
    let port = free_port();
    let ranks = (0..2).map(|rank| {
        let mut placement = placement(rank, 2, port);
        placement.token = None;
        placement.master_addr = "localhost".to_owned();
        Rendezvous::new(placement).deadline(LONG)
    });
    for result in all(ranks.collect(), |rendezvous| rendezvous.store()) {
        result.unwrap();
    }
}

#[test]
fn nothing_listens_beyond_loopback_unless_told_to() {
    let mut placement = placement(1, 2, free_port());
    placement.master_addr = "192.0.2.1".to_owned();
    let error = Rendezvous::new(placement.clone())
        .deadline(SHORT)
        .store()
        .unwrap_err();
    assert!(
        matches!(error, RendezvousError::BindUnset { rank: 1, .. }),
        "{error}"
    );
    assert!(error.to_string().contains("BURN_SHARD_BIND"), "{error}");
    placement.token = None;
    let anywhere = "0.0.0.0".parse().unwrap();
    let error = Rendezvous::new(placement)
        .bind(anywhere)
        .deadline(SHORT)
        .tcp()
        .unwrap_err();
    assert!(
        matches!(error, RendezvousError::TokenUnset { rank: 1, .. }),
        "{error}"
    );
    assert!(error.to_string().contains("BURN_SHARD_TOKEN"), "{error}");
}

#[test]
fn all_addresses_may_be_listened_on_with_a_token() {
    let port = free_port();
    let ranks = (0..3).map(|rank| rendezvous(rank, 3, port).bind("0.0.0.0".parse().unwrap()));
    for result in all(ranks.collect(), |rendezvous| rendezvous.tcp()) {
        result.unwrap();
    }
}

#[test]
fn a_master_that_never_comes_is_an_error_after_the_deadline() {
    let port = free_port();
    let start = Instant::now();
    let error = rendezvous(1, 2, port).deadline(SHORT).store().unwrap_err();
    let RendezvousError::NoMaster {
        rank: 1,
        address,
        waited,
        ..
    } = &error
    else {
        panic!("{error}")
    };
    assert_eq!(*address, format!("127.0.0.1:{port}"));
    assert!(*waited >= SHORT);
    assert!(start.elapsed() < LONG / 2);
}

#[test]
fn a_rank_that_never_comes_is_named_to_all() {
    let port = free_port();
    let start = Instant::now();
    // The deadline of one is enough for all.
    let deadlines = [LONG, SHORT, LONG];
    let ranks = deadlines.into_iter().enumerate();
    let ranks = ranks.map(|(rank, deadline)| rendezvous(rank, 5, port).deadline(deadline));
    for (rank, result) in all(ranks.collect(), |rendezvous: Rendezvous| rendezvous.store())
        .iter()
        .enumerate()
    {
        let (told, fault) = fault(result);
        let JobFault::Missing {
            waiting: 1,
            missing,
            refused,
            ..
        } = fault
        else {
            panic!("{fault}")
        };
        assert_eq!(
            (told, missing.as_slice(), refused.as_str()),
            (rank, &[3, 4][..], "")
        );
    }
    assert!(start.elapsed() < LONG / 2);
}

#[test]
fn a_rank_that_leaves_a_barrier_out_is_named_to_all() {
    let port = free_port();
    let ranks = (0..3).map(|rank| rendezvous(rank, 3, port).deadline(SHORT));
    let results = all(ranks.collect(), |rendezvous| {
        let mut store = rendezvous.store().unwrap();
        if store.rank() == 1 {
            thread::sleep(SHORT * 2);
        }
        store.barrier().map(|()| store)
    });
    for (rank, result) in results.iter().enumerate() {
        let (told, fault) = fault(result);
        assert_eq!(told, rank);
        assert!(
            matches!(fault, JobFault::Missing { missing, .. } if missing == &[1]),
            "{fault}"
        );
    }
}

#[test]
fn a_key_that_nobody_sets_is_an_error_after_the_deadline() {
    let mut store = rendezvous(0, 1, free_port())
        .deadline(SHORT)
        .store()
        .unwrap();
    let error = store.get("key").unwrap_err();
    assert!(
        matches!(&error, RendezvousError::NoValue { rank: 0, key, .. } if key == "key"),
        "{error}"
    );
    // The store is as usable as before.
    store.set("key", &[]).unwrap();
    assert_eq!(store.get("key").unwrap(), Vec::<u8>::new());
}

#[test]
fn the_store_is_small() {
    let mut store = rendezvous(0, 1, free_port()).store().unwrap();
    let too_large = |result| match result {
        Err(RendezvousError::TooLarge { rank: 0, .. }) => {}
        other => panic!("{other:?}"),
    };
    too_large(store.set(&"k".repeat(129), &[]));
    too_large(store.set("k", &[0; (64 << 10) + 1]));
    store.set(&"k".repeat(128), &[0; 64 << 10]).unwrap();
    let mut kept = 1;
    let last = loop {
        match store.set(&format!("{kept:03}"), &[0; 64 << 10]) {
            Ok(()) => kept += 1,
            last => break last,
        }
    };
    too_large(last);
    assert!((200..256).contains(&kept), "{kept}");
    store.get("001").unwrap();
}

#[test]
fn another_version_is_told_on_both_sides() {
    // This process beside a newer master.
    let port = free_port();
    let newer = TcpListener::bind(("127.0.0.1", port)).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            let (mut stream, _) = newer.accept().unwrap();
            let mut found = [0; 42];
            stream.read_exact(&mut found).unwrap();
            assert_eq!(found[..10], hello(VERSION)[..10]);
            stream.write_all(&hello(7)[..10]).unwrap();
        });
        let error = rendezvous(1, 2, port).store().unwrap_err();
        let RendezvousError::Version {
            rank: 1,
            found: 7,
            expected: VERSION,
            ..
        } = &error
        else {
            panic!("{error}")
        };
    });
    // A newer process beside this one as master.
    let port = free_port();
    thread::scope(|scope| {
        let master = scope.spawn(|| rendezvous(0, 2, port).deadline(SHORT).store());
        let mut stream = connect(port);
        stream.write_all(&hello(7)).unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        assert_eq!(answer, hello(VERSION)[..10]);
        let error = master.join().unwrap().unwrap_err();
        assert!(error.to_string().contains("version 7"), "{error}");
    });
}

#[test]
fn something_else_at_the_masters_address_is_an_error_at_once() {
    let port = free_port();
    let other = TcpListener::bind(("127.0.0.1", port)).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            let (mut stream, _) = other.accept().unwrap();
            stream.write_all(b"SSH-2.0-OpenSSH_9.2\r\n").unwrap();
            // Until the other end is gone.
            let _count = stream.read_to_end(&mut Vec::new());
        });
        let start = Instant::now();
        let error = rendezvous(1, 2, port).store().unwrap_err();
        let RendezvousError::NotBurnShard {
            rank: 1, answer, ..
        } = &error
        else {
            panic!("{error}")
        };
        assert!(answer.starts_with("\"SSH-2.0"), "{answer}");
        assert!(start.elapsed() < LONG / 2);
    });
}
