//! Ranks that misbehave after they were let in, which takes what is private here.

use super::*;
use crate::placement::Rule;

fn rendezvous(rank: usize, port: u16) -> Rendezvous {
    Rendezvous::new(Placement {
        rank,
        world_size: 4,
        local_rank: rank,
        local_world_size: None,
        master_addr: "127.0.0.1".to_owned(),
        master_port: port,
        job_id: String::new(),
        token: Some("secret".to_owned()),
        rule: Rule::Torchrun,
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
