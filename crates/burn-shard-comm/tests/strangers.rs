//! Who does not belong to the job neither joins nor stalls it.
#![allow(clippy::unwrap_used, reason = "a test ends at the first error")]

mod processes;

use std::{
    collections::VecDeque,
    io::{Read, Write},
    net::{Shutdown, TcpStream},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use burn_shard_comm::RendezvousError;
use processes::{LONG, VERSION, connect, free_port, hello, rendezvous};
use rand::{Rng, SeedableRng, seq::IndexedRandom};
use rand_chacha::ChaCha8Rng;

/// Ranks 0 and 1 of 3 wait while `strangers` runs; then rank 2 comes and all have to meet.
fn disturbed(strangers: impl FnOnce(u16)) {
    let port = free_port();
    let start = Instant::now();
    thread::scope(|scope| {
        let waiting = [0, 1].map(|rank| scope.spawn(move || rendezvous(rank, 3, port).tcp()));
        strangers(port);
        rendezvous(2, 3, port).tcp().unwrap();
        for rank in waiting {
            rank.join().unwrap().unwrap();
        }
    });
    assert!(start.elapsed() < LONG / 2);
}

#[test]
fn strangers_neither_join_nor_stall() {
    disturbed(|port| {
        // These are dropped at the first bytes.
        for text in ["GET / HTTP/1.1\r\nHost: master\r\n\r\n", "burnshre", "\0"] {
            let mut stream = connect(port);
            stream.write_all(text.as_bytes()).unwrap();
            assert_eq!(stream.read(&mut [0]).unwrap_or(0), 0, "{text}");
        }
        // This one is cut off in the middle of its message, however diligent it is.
        let mut slow = connect(port);
        let start = Instant::now();
        for byte in hello(VERSION) {
            if slow.write_all(&[byte]).is_err() {
                break;
            }
            thread::sleep(Duration::from_millis(250));
        }
        assert_eq!(slow.read(&mut [0]).unwrap_or(0), 0);
        assert!(start.elapsed() < LONG / 2);
    });
}

#[test]
fn a_thousand_silent_connections_do_not_keep_a_rank_out() {
    let mut silent = Vec::new();
    disturbed(|port| {
        for index in 0..1000 {
            let mut stream = connect(port);
            if index % 2 == 0 {
                stream.write_all(&hello(VERSION)[..index % 42]).unwrap();
            }
            silent.push(stream);
        }
    });
}

#[test]
fn a_flood_of_connections_does_not_keep_a_rank_out() {
    let port = free_port();
    let over = AtomicBool::new(false);
    let start = Instant::now();
    thread::scope(|scope| {
        let waiting = [0, 1].map(|rank| scope.spawn(move || rendezvous(rank, 3, port).tcp()));
        let mut floods = Vec::new();
        for _ in 0..2 {
            floods.push(scope.spawn(|| {
                let mut held = VecDeque::new();
                while !over.load(Ordering::Relaxed) {
                    // It may be too fast for the system, or the store already gone.
                    held.extend(TcpStream::connect(("127.0.0.1", port)));
                    held.drain(..held.len().saturating_sub(300));
                }
            }));
        }
        thread::sleep(Duration::from_millis(300));
        rendezvous(2, 3, port).tcp().unwrap();
        for rank in waiting {
            rank.join().unwrap().unwrap();
        }
        over.store(true, Ordering::Relaxed);
    });
    assert!(start.elapsed() < LONG / 2);
}

#[test]
fn five_hundred_wrong_handshakes_change_nothing() {
    disturbed(|port| {
        let mut random = ChaCha8Rng::seed_from_u64(0x7e57);
        for trial in 0..500 {
            // What a member would send, but for the proof, which nobody can know; then mutated.
            let mut bytes = hello(VERSION);
            let length = random.random_range(0..1100u16);
            bytes.extend_from_slice(&length.to_le_bytes());
            bytes.extend((0..length + 32).map(|_| random.random::<u8>()));
            match trial % 5 {
                0 => {}
                1 => bytes.truncate(random.random_range(0..bytes.len())),
                2 => {
                    for _ in 0..random.random_range(1..20) {
                        let index = random.random_range(0..bytes.len().min(60));
                        bytes[index] ^= 1 << random.random_range(0..8);
                    }
                }
                3 => bytes.extend_from_slice(&bytes.clone()),
                _ => bytes.iter_mut().for_each(|byte| *byte = random.random()),
            }
            let mut stream = connect(port);
            // The store may have closed it before it has all.
            let pieces = *[1, 7, 4096].choose(&mut random).unwrap();
            let _sent = bytes
                .chunks(bytes.len() / pieces + 1)
                .try_for_each(|piece| stream.write_all(piece));
            let _closed = stream.shutdown(Shutdown::Write);
            let mut answer = Vec::new();
            let _end = stream.read_to_end(&mut answer);
            // Nothing, the head, the nonce, or a byte that refuses; never one that admits.
            let refused = answer.len() == 43 && answer[42] == 0;
            assert!(
                refused || [0, 10, 42].contains(&answer.len()),
                "trial {trial}: {answer:?}"
            );
        }
    });
}

#[test]
fn a_stranger_gets_nothing_that_a_token_could_be_tried_on() {
    disturbed(|port| {
        let mut stream = connect(port);
        stream.write_all(&hello(VERSION)).unwrap();
        // The head and a nonce, which is random: another one for each connection.
        let mut challenges = [[0; 42]; 2];
        stream.read_exact(&mut challenges[0]).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_millis(300)))
            .unwrap();
        assert!(stream.read(&mut [0]).is_err(), "more than a nonce");
        stream.set_read_timeout(Some(LONG)).unwrap();
        // An empty payload and a proof that is none.
        stream.write_all(&[0; 34]).unwrap();
        let mut rest = Vec::new();
        stream.read_to_end(&mut rest).unwrap();
        assert_eq!(rest, [0]);
        let mut stream = connect(port);
        stream.write_all(&hello(VERSION)).unwrap();
        stream.read_exact(&mut challenges[1]).unwrap();
        assert_eq!(challenges[0][..10], hello(VERSION)[..10]);
        assert_ne!(challenges[0][10..], challenges[1][10..]);
    });
}

#[test]
fn one_who_listens_in_the_masters_place_is_found_out() {
    let port = free_port();
    let listener = std::net::TcpListener::bind(("127.0.0.1", port)).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            let (mut stream, _) = listener.accept().unwrap();
            stream.write_all(&hello(VERSION)).unwrap();
            // Admits whoever comes, with a proof that is none.
            stream.write_all(&[1; 33]).unwrap();
            let _end = stream.read_to_end(&mut Vec::new());
        });
        let error = rendezvous(1, 2, port).store().unwrap_err();
        assert!(
            matches!(error, RendezvousError::Token { rank: 1, .. }),
            "{error}"
        );
    });
}
