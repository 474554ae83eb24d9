//! Ranks that misbehave after they were let in, which takes what is private here.

use super::*;
use crate::placement::{Launcher, Token};

fn rendezvous(rank: usize, port: u16) -> Rendezvous {
    Rendezvous::new(Placement {
        rank,
        world_size: 4,
        local_rank: rank,
        local_world_size: None,
        master_addr: "127.0.0.1".to_owned(),
        master_port: port,
        job_id: String::new(),
        token: Some(Token::new("secret").unwrap()),
        launcher: Launcher::Torchrun,
    })
    .deadline(Duration::from_secs(60))
}

/// What ranks 0 and 1 of 4 are told, when `third` does something as rank 2; rank 3 does not come.
fn told(third: impl FnOnce(Rendezvous, Instant)) -> [RendezvousError; 2] {
    // Below the ports that the system gives to connections.
    let taken = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let port = taken.local_addr().unwrap().port() % 2000 + 17_000;
    thread::scope(|scope| {
        let ranks = [0, 1].map(|rank| scope.spawn(move || rendezvous(rank, port).store()));
        let third_rank = rendezvous(2, port);
        let until = third_rank.until();
        third(third_rank, until);
        ranks.map(|rank| rank.join().unwrap().unwrap_err())
    })
}

#[test]
fn a_rank_that_dies_before_all_have_come_is_named_to_all() {
    for (rank, error) in told(|third, until| {
        let store = third.join(None, until).unwrap();
        let Framed { stream, .. } = &store.link;
        stream.shutdown(std::net::Shutdown::Both).unwrap();
    })
    .iter()
    .enumerate()
    {
        let RendezvousError::Job {
            rank: told,
            fault: JobFault::Died { other: 2, .. },
        } = error
        else {
            panic!("{error}")
        };
        assert_eq!(*told, rank);
    }
}

#[test]
fn a_rank_out_of_range_is_named_to_all() {
    for error in told(|mut third, until| {
        third.placement.rank = 4;
        let address = SocketAddr::from(([127, 0, 0, 1], third.placement.master_port));
        while third.try_to_join(address, None, until).is_err() {
            thread::sleep(Duration::from_millis(10));
        }
    }) {
        let RendezvousError::Job { fault, .. } = error else {
            panic!("{error}")
        };
        let expected = JobFault::RankOutOfRange {
            other: 4,
            world_size: 4,
        };
        assert_eq!(fault, expected);
    }
}

#[test]
fn a_report_reaches_all() {
    for error in told(|third, until| {
        let mut store = third.join(None, until).unwrap();
        let error = RendezvousError::RankOutOfRange {
            rank: 7,
            world_size: 5,
        };
        store.report(&error);
    }) {
        let text = error.to_string();
        assert!(
            text.contains("rank 2 failed: rank 7 in a job of 5"),
            "{text}"
        );
    }
}

#[test]
fn a_long_report_reaches_all_too() {
    for error in told(|third, until| {
        let mut store = third.join(None, until).unwrap();
        store.report(&RendezvousError::System {
            rank: 2,
            action: "do much",
            message: "x".repeat(100_000),
        });
    }) {
        let text = error.to_string();
        assert!(
            text.contains("rank 2 failed: rank 2: cannot do much: xxx"),
            "{text}"
        );
        assert!(text.len() < 5000, "{} bytes", text.len());
    }
}

#[test]
fn no_memory_is_taken_for_an_absurd_number_of_ranks() {
    let mut absurd = rendezvous(0, 0);
    absurd.placement.world_size = usize::MAX;
    let expected = RendezvousError::TooManyRanks {
        rank: 0,
        world_size: usize::MAX,
        max_world_size: MAX_WORLD_SIZE,
    };
    assert_eq!(absurd.store().unwrap_err(), expected);
    assert_eq!(absurd.tcp().unwrap_err(), expected);
    // What is allowed fits the message that tells all ranks of all.
    let everyone = message::Reply::Everyone {
        session: [0xff; 32],
        listens: vec![Some("[ffff::ffff]:65535".parse().unwrap()); MAX_WORLD_SIZE],
    };
    let bytes = postcard::to_allocvec(&everyone).unwrap().len();
    assert!(bytes <= MAX_REPLY_BYTES, "{bytes} bytes");
}

#[test]
fn a_deadline_may_be_as_long_as_one_likes() {
    let mut alone = rendezvous(0, 0).deadline(Duration::MAX);
    alone.placement.world_size = 1;
    let mut store = alone.store().unwrap();
    store.set("key", b"value").unwrap();
    assert_eq!(store.get("key").unwrap(), b"value");
    store.barrier().unwrap();
}

#[test]
fn a_member_that_talks_nonsense_is_named_to_all() {
    for error in told(|third, until| {
        let store = third.join(None, until).unwrap();
        let mut stream = &store.link.stream;
        std::io::Write::write_all(&mut stream, &[255; 64]).unwrap();
    }) {
        let text = error.to_string();
        assert!(text.contains("rank 2 was gone"), "{text}");
        assert!(text.contains("a message of 4294967295 bytes"), "{text}");
    }
}
