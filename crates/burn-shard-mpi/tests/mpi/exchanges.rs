//! The transport by itself.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use burn_shard_comm::{Fault, Limit, Transport};
use burn_shard_mpi::MpiTransport;

use crate::job;

static NEVER: AtomicBool = AtomicBool::new(false);

/// None, one, around one chunk, many.
const NUMELS: [usize; 8] = [0, 1, 4095, 262_143, 262_144, 262_145, 1_048_579, 5_000_011];

pub(crate) fn within(seconds: u64) -> Limit<'static> {
    Limit {
        at: Instant::now() + Duration::from_secs(seconds),
        cancelled: &NEVER,
    }
}

/// What `from` sends to `to` in round `round`.
fn message(from: usize, to: usize, round: usize, numel: usize) -> Vec<u8> {
    let mut state = (from * 31 + to * 7 + round + 1) as u64;
    (0..numel)
        .map(|_| {
            state = state
                .wrapping_mul(0x5851_f42d_4c95_7f2d)
                .wrapping_add(0x1405_7b7e_f767_814f);
            state.to_be_bytes()[0]
        })
        .collect()
}

/// All ranks have come this far.
fn meet(transport: &mut MpiTransport) {
    let (rank, world_size) = (transport.rank(), transport.world_size());
    for k in 1..world_size {
        let (to, from) = (
            (rank + k) % world_size,
            (rank + world_size - k) % world_size,
        );
        transport
            .exchange(to, &[1], from, &mut [0], within(200))
            .unwrap();
    }
}

pub(crate) fn carry_every_byte() {
    let mut transport = MpiTransport::init().unwrap();
    let (rank, world_size) = (transport.rank(), transport.world_size());
    assert!(transport.local_rank() < transport.local_size());
    println!("single copy: {}", transport.single_copy());
    for (round, numel) in NUMELS.into_iter().enumerate() {
        for k in 1..world_size {
            // Lengths differ by rank, so that one end is done first.
            let length = |rank: usize| numel + 1000 * rank * (numel % 2);
            let (to, from) = (
                (rank + k) % world_size,
                (rank + world_size - k) % world_size,
            );
            let sent = message(rank, to, round, length(rank));
            let mut received = vec![0xab; length(from)];
            transport
                .exchange(to, &sent, from, &mut received, within(200))
                .unwrap();
            assert!(
                received == message(from, rank, round, length(from)),
                "{numel} bytes"
            );
            // One way.
            if rank == 0 {
                transport
                    .exchange(k, &sent, k, &mut [], within(200))
                    .unwrap();
            } else if rank == k {
                let mut received = vec![0xab; length(0)];
                transport
                    .exchange(0, &[], 0, &mut received, within(200))
                    .unwrap();
                assert!(received == message(0, k, round, length(0)), "{numel} bytes");
            }
        }
    }
    transport.poll().unwrap();
    transport.farewell(&[], within(200));
}

#[test]
fn exchanges_carry_every_byte() {
    for ranks in 1..=4 {
        job::succeed(ranks, "exchanges_carry_every_byte");
    }
}

/// Every rank sends before any receives.
pub(crate) fn small_first() {
    let mut transport = MpiTransport::init().unwrap();
    let (rank, world_size) = (transport.rank(), transport.world_size());
    let others = (0..world_size).filter(|&other| other != rank);
    for other in others.clone() {
        let sent = message(rank, other, 0, 4096);
        transport
            .exchange(other, &sent, other, &mut [], within(20))
            .unwrap();
    }
    let mut after = MpiTransport::init().unwrap();
    meet(&mut after);
    for other in others {
        let mut received = vec![0; 4096];
        transport
            .exchange(other, &[], other, &mut received, within(200))
            .unwrap();
        assert!(received == message(other, rank, 0, 4096));
    }
    transport.farewell(&[], within(200));
    after.farewell(&[], within(200));
}

#[test]
fn small_messages_need_no_receiver() {
    job::succeed(4, "small_messages_need_no_receiver");
}

pub(crate) fn stay_in_their_group() {
    for round in 0..6u8 {
        let members = 2 + usize::from(round) % 2;
        let Some(mut transport) = MpiTransport::first(members).unwrap() else {
            continue;
        };
        // Every other group fails, after a message that nobody receives.
        let words = [b'w', round];
        let words: &[u8] = if round % 2 == 0 { &words } else { &[] };
        if transport.rank() == 0 {
            transport
                .exchange(1, &[round], 1, &mut [], within(200))
                .unwrap();
            if !words.is_empty() {
                transport
                    .exchange(1, &[0xee; 8], 1, &mut [], within(200))
                    .unwrap();
            }
        } else if transport.rank() == 1 {
            let mut first = [0];
            match transport.exchange(0, &[], 0, &mut first, within(200)) {
                Ok(()) => assert_eq!(first, [round]),
                // They may be faster than the message.
                Err(Fault::Farewell { words: heard, .. }) => assert_eq!(heard, [b'w', round]),
                Err(fault) => panic!("{fault:?}"),
            }
        }
        transport.farewell(words, within(200));
    }
    MpiTransport::init().unwrap().farewell(&[], within(200));
}

#[test]
fn messages_of_one_group_do_not_reach_the_next() {
    job::succeed(4, "messages_of_one_group_do_not_reach_the_next");
}

pub(crate) fn words_reach_every_rank() {
    let words = vec![0x77; 100_000];
    let expected = Fault::Farewell {
        peer: 1,
        words: words.clone(),
    };
    let mut transport = MpiTransport::init().unwrap();
    meet(&mut transport);
    match transport.rank() {
        1 => {
            // The others are this far.
            for other in [0, 2] {
                transport
                    .exchange(other, &[], other, &mut [0], within(200))
                    .unwrap();
            }
            transport.farewell(&words, within(200));
        }
        3 => {
            let fault = loop {
                if let Err(fault) = transport.poll() {
                    break fault;
                }
                thread::sleep(Duration::from_millis(1));
            };
            assert!(fault == expected);
        }
        rank => {
            // They wait for a message of each other, not for rank 1.
            let other = 2 - rank;
            transport
                .exchange(1, &[1], 1, &mut [], within(200))
                .unwrap();
            let fault = transport.exchange(other, &[], other, &mut [0], within(200));
            assert!(fault == Err(expected));
        }
    }
    if transport.rank() != 1 {
        transport.farewell(&[], within(200));
    }
    MpiTransport::init().unwrap().farewell(&[], within(200));
}

#[test]
fn words_reach_every_rank_that_waits_for_another() {
    job::succeed(4, "words_reach_every_rank");
}

pub(crate) fn a_rank_leaves_in_order() {
    const NUMEL: usize = 1_000_003;
    let mut transport = MpiTransport::init().unwrap();
    let rank = transport.rank();
    meet(&mut transport);
    if rank == 1 {
        transport
            .exchange(0, &message(1, 0, 0, 3), 0, &mut [], within(200))
            .unwrap();
        transport
            .exchange(0, &message(1, 0, 1, NUMEL), 0, &mut [], within(200))
            .unwrap();
        transport.farewell(&[], within(200));
        // Stays alive: its farewell has to be what the others see.
        MpiTransport::init().unwrap().farewell(&[], within(200));
        return;
    }
    let left = Fault::Farewell {
        peer: 1,
        words: Vec::new(),
    };
    if rank == 0 {
        for (round, numel) in [3, NUMEL].into_iter().enumerate() {
            let mut received = vec![0; numel];
            transport
                .exchange(1, &[], 1, &mut received, within(200))
                .unwrap();
            assert!(received == message(1, 0, round, numel));
        }
    }
    // The others are not concerned.
    for _ in 0..100 {
        transport
            .exchange(2 - rank, &[5], 2 - rank, &mut [0], within(200))
            .unwrap();
        transport.poll().unwrap();
    }
    let fault = if rank == 0 {
        transport.exchange(1, &[], 1, &mut [0], within(200))
    } else {
        transport.exchange(1, &[1; NUMEL], 1, &mut [], within(200))
    };
    assert_eq!(fault, Err(left));
    transport.farewell(&[], within(200));
    MpiTransport::init().unwrap().farewell(&[], within(200));
}

#[test]
fn a_rank_may_leave_once_it_has_sent_all() {
    job::succeed(3, "a_rank_may_leave_once_it_has_sent_all");
}

/// An exchange that is given up leaves its message under way, and the caller its memory.
pub(crate) fn sent_bytes_stay() {
    const NUMEL: usize = 200_000;
    let mut transport = MpiTransport::init().unwrap();
    let mut after = MpiTransport::init().unwrap();
    meet(&mut transport);
    if transport.rank() == 0 {
        let mut sent = message(0, 1, 0, NUMEL);
        let mut received = vec![0xab; NUMEL];
        let limit = Limit {
            at: Instant::now() + Duration::from_millis(200),
            cancelled: &NEVER,
        };
        let fault = transport
            .exchange(1, &sent, 1, &mut received, limit)
            .unwrap_err();
        assert_eq!(fault, Fault::TimedOut { peers: vec![1] });
        sent.fill(0xff);
        after.exchange(1, &[1], 1, &mut [], within(200)).unwrap();
        // Meanwhile rank 1 sends, into what this rank has given up.
        after.exchange(1, &[], 1, &mut [0], within(200)).unwrap();
        assert!(received.iter().all(|&byte| byte == 0xab));
    } else {
        after.exchange(0, &[], 0, &mut [0], within(200)).unwrap();
        let mut received = vec![0; NUMEL];
        // Nobody takes what it sends.
        let fault = transport
            .exchange(0, &[0xcd; NUMEL], 0, &mut received, within(10))
            .unwrap_err();
        assert_eq!(fault, Fault::TimedOut { peers: vec![0] });
        assert!(received == message(0, 1, 0, NUMEL));
        after.exchange(0, &[1], 0, &mut [], within(200)).unwrap();
    }
    transport.farewell(&[], within(200));
    after.farewell(&[], within(200));
    MpiTransport::init().unwrap().farewell(&[], within(200));
}

#[test]
fn what_was_sent_does_not_change_later() {
    job::succeed(2, "what_was_sent_does_not_change_later");
}

pub(crate) fn cancelled() {
    let mut transport = MpiTransport::init().unwrap();
    meet(&mut transport);
    if transport.rank() == 0 {
        let cancelled = AtomicBool::new(false);
        let limit = Limit {
            at: Instant::now() + Duration::from_secs(200),
            cancelled: &cancelled,
        };
        thread::scope(|scope| {
            scope.spawn(|| {
                thread::sleep(Duration::from_millis(50));
                cancelled.store(true, Ordering::Release);
            });
            let fault = transport.exchange(1, &[0; 9], 1, &mut [0; 1_000_000], limit);
            assert_eq!(fault, Err(Fault::Cancelled));
        });
        transport.farewell(b"cancelled", within(200));
    } else {
        // Sends nothing, and hears of it while it does something else.
        let fault = loop {
            if let Err(fault) = transport.poll() {
                break fault;
            }
            thread::sleep(Duration::from_millis(1));
        };
        let words = b"cancelled".to_vec();
        assert_eq!(fault, Fault::Farewell { peer: 0, words });
        transport.farewell(&[], within(200));
    }
    MpiTransport::init().unwrap().farewell(&[], within(200));
}

#[test]
fn an_exchange_can_be_cancelled() {
    job::succeed(2, "an_exchange_can_be_cancelled");
}
