//! Processes connected by TCP: what a transport promises, the conformance suite, and ends of all kinds.
#![allow(clippy::unwrap_used, reason = "a test ends at the first error")]
#![allow(clippy::cast_possible_truncation, reason = "the low bits are as good")]

mod processes;

use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use burn_shard_comm::{Fault, Limit, TcpTransport, Transport};
use processes::{Hold, LONG, all, free_port, rendezvous};

const MIB: usize = 1 << 20;
static NOT_CANCELLED: AtomicBool = AtomicBool::new(false);

fn limit() -> Limit<'static> {
    within(LONG)
}

fn within(time: Duration) -> Limit<'static> {
    Limit {
        at: Instant::now() + time,
        cancelled: &NOT_CANCELLED,
    }
}

/// Runs `run` on every rank of a new mesh, each in its own thread; results in rank order.
fn mesh<R: Send>(world_size: usize, run: impl Fn(TcpTransport) -> R + Sync) -> Vec<R> {
    let port = free_port();
    let ranks = (0..world_size).map(|rank| rendezvous(rank, world_size, port));
    all(ranks.collect(), |rendezvous| run(rendezvous.tcp().unwrap()))
}

fn bytes(seed: usize, count: usize) -> Vec<u8> {
    (0..count)
        .map(|index| (index * 31 + index / 251 + seed * 7) as u8)
        .collect()
}

#[test]
fn every_rank_is_connected_with_every_other() {
    for world_size in 1..=6 {
        mesh(world_size, |mut transport| {
            let rank = transport.rank();
            assert_eq!(transport.world_size(), world_size);
            for distance in 1..world_size {
                let to = (rank + distance) % world_size;
                let from = (rank + world_size - distance) % world_size;
                let mut received = [0; 2];
                let sent = [rank as u8, to as u8];
                transport
                    .exchange(to, &sent, from, &mut received, limit())
                    .unwrap();
                assert_eq!(received, [from as u8, rank as u8]);
            }
            transport.farewell(&[], limit());
        });
    }
}

#[test]
fn a_ring_of_messages_larger_than_any_buffer_does_not_block() {
    for world_size in 2..=4 {
        mesh(world_size, |mut transport| {
            let rank = transport.rank();
            let (to, from) = (
                (rank + 1) % world_size,
                (rank + world_size - 1) % world_size,
            );
            let mut received = vec![0; 24 * MIB];
            let sent = bytes(rank, 24 * MIB);
            transport
                .exchange(to, &sent, from, &mut received, limit())
                .unwrap();
            assert!(received == bytes(from, 24 * MIB));
            transport.farewell(&[], limit());
        });
    }
}

#[test]
fn messages_have_no_borders_and_keep_their_order() {
    mesh(2, |mut transport| {
        let other = 1 - transport.rank();
        let whole = bytes(transport.rank(), 100_000);
        let mut received = vec![0; 100_000];
        if transport.rank() == 0 {
            // Small ones out, one large one in, and the other way round.
            for piece in whole.chunks(997) {
                transport
                    .exchange(other, piece, other, &mut [], limit())
                    .unwrap();
            }
            transport
                .exchange(other, &[], other, &mut received, limit())
                .unwrap();
        } else {
            let (first, second) = received.split_at_mut(30_000);
            transport
                .exchange(other, &whole, other, first, limit())
                .unwrap();
            transport
                .exchange(other, &[], other, &mut [], limit())
                .unwrap();
            transport
                .exchange(other, &[], other, second, limit())
                .unwrap();
        }
        assert!(received == bytes(other, 100_000));
        transport.farewell(&[], limit());
    });
}

#[test]
fn the_last_data_of_a_rank_that_leaves_is_not_lost() {
    mesh(3, |mut transport| match transport.rank() {
        0 => {
            let sent = bytes(0, 3 * MIB);
            transport.exchange(1, &sent, 2, &mut [], limit()).unwrap();
            transport.farewell(&[], limit());
        }
        1 => {
            thread::sleep(Duration::from_millis(600));
            // That a rank has left concerns only those who need more of it.
            transport.poll().unwrap();
            let mut received = vec![0; MIB];
            for piece in bytes(0, 3 * MIB).chunks(MIB) {
                transport
                    .exchange(2, &[], 0, &mut received, limit())
                    .unwrap();
                assert!(received == piece);
            }
            transport
                .exchange(2, b"still here", 2, &mut [], limit())
                .unwrap();
            let left = Fault::Farewell {
                peer: 0,
                words: Vec::new(),
            };
            let found = transport.exchange(2, &[], 0, &mut [0], limit());
            assert_eq!(found, Err(left.clone()));
            let found = transport.exchange(0, &[0], 2, &mut [], limit());
            assert_eq!(found, Err(left));
            transport.farewell(&[], limit());
        }
        _ => {
            let mut received = [0; 10];
            transport
                .exchange(0, &[], 1, &mut received, limit())
                .unwrap();
            assert_eq!(received, *b"still here");
            transport.farewell(&[], limit());
        }
    });
}

#[test]
fn last_words_arrive_while_data_is_under_way() {
    let start = Instant::now();
    for words in [b"the disk is full".to_vec(), bytes(3, 64 << 10)] {
        // A rank that is gone would be news for the others.
        let hold = Hold::new(4);
        mesh(4, |mut transport| {
            let fault = Fault::Farewell {
                peer: 3,
                words: words.clone(),
            };
            match transport.rank() {
                // Sends more than rank 1 will take, receives what rank 3 will never send.
                0 => {
                    let sent = vec![0; 64 * MIB];
                    let found = transport.exchange(1, &sent, 3, &mut [0], limit());
                    assert_eq!(found, Err(fault));
                }
                // Concerns an exchange of others as well.
                1 => {
                    let found = transport.exchange(2, &[], 2, &mut [0], limit());
                    assert_eq!(found, Err(fault));
                }
                // And one who does not exchange anything.
                2 => {
                    let found = loop {
                        match transport.poll() {
                            Ok(()) if start.elapsed() < LONG => {
                                thread::sleep(Duration::from_millis(5))
                            }
                            found => break found,
                        }
                    };
                    assert_eq!(found, Err(fault));
                }
                _ => {
                    thread::sleep(Duration::from_millis(100));
                    transport.farewell(&words, limit());
                }
            }
            hold.wait();
        });
    }
    assert!(start.elapsed() < LONG / 2);
}

#[test]
fn words_are_preferred_to_a_broken_connection() {
    // Rank 1 fails in the middle of receiving: what it has not read resets the connection.
    for round in 0..10 {
        mesh(2, |mut transport| {
            if transport.rank() == 1 {
                transport
                    .exchange(0, &[], 0, &mut [0; 1000], limit())
                    .unwrap();
                transport.farewell(b"no more memory", within(Duration::from_millis(round)));
                return;
            }
            let sent = vec![0; 32 * MIB];
            let found = transport.exchange(1, &sent, 1, &mut [], limit());
            let words = b"no more memory".to_vec();
            assert_eq!(found, Err(Fault::Farewell { peer: 1, words }));
        });
    }
}

#[test]
fn a_rank_that_dies_is_noticed_by_all() {
    let hold = Hold::new(4);
    let start = Instant::now();
    mesh(4, |mut transport| {
        let gone = |found: Result<(), Fault>| match found {
            Err(Fault::Gone { peer: 2, message }) => assert!(!message.is_empty()),
            found => panic!("{found:?}"),
        };
        match transport.rank() {
            0 => gone(transport.exchange(2, &vec![0; 64 * MIB], 2, &mut [], limit())),
            1 => gone(transport.exchange(2, &[], 2, &mut [0], limit())),
            // Neither sends to it nor receives from it.
            3 => gone(transport.exchange(0, &[], 0, &mut [0], limit())),
            _ => {
                thread::sleep(Duration::from_millis(100));
                drop(transport);
                hold.wait();
                return;
            }
        }
        hold.wait();
    });
    assert!(start.elapsed() < LONG / 2);
}

#[test]
fn a_rank_that_is_silent_is_named_after_the_deadline() {
    let start = Instant::now();
    mesh(3, |mut transport| {
        let timed_out = |peers: &[usize]| {
            Err(Fault::TimedOut {
                peers: peers.to_vec(),
            })
        };
        if transport.rank() == 0 {
            let time = Duration::from_millis(200);
            let waiting = Instant::now();
            let found = transport.exchange(1, &vec![0; 64 * MIB], 2, &mut [0], within(time));
            assert_eq!(found, timed_out(&[1, 2]));
            let found = transport.exchange(1, &[], 1, &mut [0], within(time));
            assert_eq!(found, timed_out(&[1]));
            assert!(waiting.elapsed() >= time * 2 && waiting.elapsed() < LONG / 2);
            transport.farewell(b"enough", limit());
        } else {
            while transport.poll().is_ok() && start.elapsed() < LONG {
                thread::sleep(Duration::from_millis(5));
            }
        }
    });
}

#[test]
fn another_thread_may_end_a_wait() {
    let cancelled = AtomicBool::new(false);
    let hold = Hold::new(2);
    let start = Instant::now();
    mesh(2, |mut transport| {
        if transport.rank() == 0 {
            let limit = Limit {
                at: Instant::now() + LONG,
                cancelled: &cancelled,
            };
            let found = transport.exchange(1, &[], 1, &mut [0], limit);
            assert_eq!(found, Err(Fault::Cancelled));
        } else {
            thread::sleep(Duration::from_millis(100));
            cancelled.store(true, Ordering::Release);
        }
        hold.wait();
        transport.farewell(&[], within(LONG));
    });
    assert!(start.elapsed() < LONG / 2);
}

#[test]
fn leaving_does_not_wait_for_those_who_stay() {
    mesh(2, |mut transport| {
        if transport.rank() == 0 {
            let start = Instant::now();
            transport.farewell(&[], limit());
            assert!(start.elapsed() < LONG / 10);
        } else {
            thread::sleep(Duration::from_secs(1));
            transport.farewell(&[], limit());
        }
    });
}
