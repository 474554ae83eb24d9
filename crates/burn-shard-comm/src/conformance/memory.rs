//! A transport between threads that loses, delays and ends ranks as it is told.

use std::{
    collections::VecDeque,
    io::{Read, Write},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::probe::hash;
use crate::transport::{Fault, LIMIT_GRANULARITY, Limit, Transport};

/// One rank's end of a network in memory, for tests of what is built on transports.
///
/// Pipes between ranks are bounded, so that ranks that wait for each other block as they would on sockets.
#[derive(Debug)]
pub struct MemoryTransport {
    net: Arc<Net>,
    rank: usize,
    exchanges: u64,
    die_at: Option<u64>,
    stall_at: Option<u64>,
    delays: Option<(u64, Duration)>,
}

#[derive(Debug)]
struct Net {
    world_size: usize,
    capacity_bytes: usize,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    /// From rank `a` to rank `b`: number `a * world_size + b`.
    pipes: Vec<VecDeque<u8>>,
    fates: Vec<Fate>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Fate {
    Present,
    /// Its process has ended without a word.
    Dead,
    /// It is present and does nothing any more.
    Stalled,
    /// It said farewell, with these words.
    Left(Vec<u8>),
}

impl MemoryTransport {
    /// The ends of all ranks, in rank order; pipes hold 16 KiB.
    #[must_use]
    pub fn group(world_size: usize) -> Vec<Self> {
        Self::group_with_pipes(world_size, 16 << 10)
    }

    /// The ends of all ranks, in rank order, with pipes that hold `capacity_bytes`.
    #[must_use]
    pub fn group_with_pipes(world_size: usize, capacity_bytes: usize) -> Vec<Self> {
        let net = Arc::new(Net {
            world_size,
            capacity_bytes,
            state: Mutex::new(State {
                pipes: vec![VecDeque::new(); world_size * world_size],
                fates: vec![Fate::Present; world_size],
            }),
            changed: Condvar::new(),
        });
        (0..world_size)
            .map(|rank| Self {
                net: Arc::clone(&net),
                rank,
                exchanges: 0,
                die_at: None,
                stall_at: None,
                delays: None,
            })
            .collect()
    }

    /// This rank's process ends in its exchange number `exchange`, counted from 0, half-way through.
    #[must_use]
    pub fn die_at(mut self, exchange: u64) -> Self {
        self.die_at = Some(exchange);
        self
    }

    /// This rank does nothing any more from its exchange number `exchange` on, as if it were stopped,
    /// until all others are gone or a minute is over.
    #[must_use]
    pub fn stall_at(mut self, exchange: u64) -> Self {
        self.stall_at = Some(exchange);
        self
    }

    /// Sleeps before each exchange, for a random time up to `longest`.
    #[must_use]
    pub fn with_delays(mut self, seed: u64, longest: Duration) -> Self {
        self.delays = Some((hash(seed ^ hash(self.rank as u64)), longest));
        self
    }

    /// The fault that another rank's fate is, if it is one for all.
    fn fault(&self, state: &State) -> Result<(), Fault> {
        for (peer, fate) in state.fates.iter().enumerate() {
            match fate {
                Fate::Dead if peer == self.rank => return Err(self.ended()),
                Fate::Left(words) if peer != self.rank && !words.is_empty() => {
                    let words = words.clone();
                    return Err(Fault::Farewell { peer, words });
                }
                Fate::Dead | Fate::Present | Fate::Stalled | Fate::Left(_) => {}
            }
        }
        let dead = state.fates.iter().position(|fate| *fate == Fate::Dead);
        dead.map_or(Ok(()), |peer| {
            Err(Fault::Gone {
                peer,
                message: "connection reset by test".to_owned(),
            })
        })
    }

    /// What a rank sees of its own end.
    fn ended(&self) -> Fault {
        Fault::Gone {
            peer: self.rank,
            message: "this rank has ended".to_owned(),
        }
    }

    fn set_fate(&self, fate: Fate) {
        self.net.state.lock().fates[self.rank] = fate;
        self.net.changed.notify_all();
    }

    fn stall(&self, limit: Limit<'_>) -> Fault {
        self.set_fate(Fate::Stalled);
        let late = Instant::now() + Duration::from_secs(60);
        let mut state = self.net.state.lock();
        let others_are_there = |state: &State| state.fates.contains(&Fate::Present);
        while others_are_there(&state) && Instant::now() < late {
            self.net.changed.wait_for(&mut state, LIMIT_GRANULARITY);
        }
        drop(state);
        thread::sleep(limit.at.saturating_duration_since(Instant::now()));
        Fault::TimedOut { peers: Vec::new() }
    }

    fn pipe<'a>(
        &self,
        state: &'a mut MutexGuard<'_, State>,
        from: usize,
        to: usize,
    ) -> &'a mut VecDeque<u8> {
        &mut state.pipes[from * self.net.world_size + to]
    }
}

impl Transport for MemoryTransport {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.net.world_size
    }

    fn exchange(
        &mut self,
        to: usize,
        send: &[u8],
        from: usize,
        receive: &mut [u8],
        limit: Limit<'_>,
    ) -> Result<(), Fault> {
        assert!(
            to != self.rank && from != self.rank,
            "a rank does not exchange with itself"
        );
        let number = self.exchanges;
        self.exchanges += 1;
        if let Some((state, longest)) = &mut self.delays {
            *state = hash(*state);
            thread::sleep(longest.mul_f64((*state >> 11) as f64 / (1u64 << 53) as f64));
        }
        if self.stall_at == Some(number) {
            return Err(self.stall(limit));
        }
        let dies = self.die_at == Some(number);
        let mut unsent = if dies { &send[..send.len() / 2] } else { send };
        let mut received = 0;
        let mut state = self.net.state.lock();
        loop {
            self.fault(&state)?;
            let out = self.pipe(&mut state, self.rank, to);
            let room = self.net.capacity_bytes - out.len();
            let (now, later) = unsent.split_at(unsent.len().min(room));
            let mut moved = now.len();
            out.write_all(now).expect("a queue should take any bytes");
            unsent = later;
            let bytes = self
                .pipe(&mut state, from, self.rank)
                .read(&mut receive[received..]);
            let bytes = bytes.expect("a queue should give its bytes");
            moved += bytes;
            received += bytes;
            if moved > 0 {
                self.net.changed.notify_all();
            }
            if dies && unsent.is_empty() {
                drop(state);
                self.set_fate(Fate::Dead);
                return Err(self.ended());
            }
            let mut peers = Vec::new();
            if received < receive.len() {
                peers.push(from);
            }
            if !unsent.is_empty() && !peers.contains(&to) {
                peers.push(to);
            }
            if peers.is_empty() {
                return Ok(());
            }
            if moved > 0 {
                // There may be more: a queue gives its bytes in two parts when it wraps around.
                continue;
            }
            // An orderly farewell has no words.
            let left = |&&peer: &&usize| matches!(state.fates[peer], Fate::Left(_));
            if let Some(&peer) = peers.iter().find(left) {
                let words = Vec::new();
                return Err(Fault::Farewell { peer, words });
            }
            let slice = limit.slice(&peers)?;
            self.net.changed.wait_for(&mut state, slice);
        }
    }

    fn poll(&mut self) -> Result<(), Fault> {
        self.fault(&self.net.state.lock())
    }

    fn ask(&mut self, words: &[u8], limit: Limit<'_>) -> Option<Vec<(usize, Vec<u8>)>> {
        self.farewell(words, limit);
        let mut state = self.net.state.lock();
        let here = |fate: &Fate| matches!(fate, Fate::Present | Fate::Stalled);
        while state.fates.iter().any(here)
            && let Ok(slice) = limit.slice(&[])
        {
            self.net.changed.wait_for(&mut state, slice);
        }
        let fates = state.fates.iter().enumerate();
        let said = fates.filter(|&(peer, _)| peer != self.rank);
        let said = said.filter_map(|(peer, fate)| match fate {
            Fate::Left(words) if !words.is_empty() => Some((peer, words.clone())),
            Fate::Left(_) | Fate::Present | Fate::Dead | Fate::Stalled => None,
        });
        Some(said.collect())
    }

    fn farewell(&mut self, words: &[u8], _: Limit<'_>) {
        let mut state = self.net.state.lock();
        if state.fates[self.rank] == Fate::Present {
            state.fates[self.rank] = Fate::Left(words.to_vec());
        }
        self.net.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;

    #[test]
    fn what_a_rank_sent_before_it_left_arrives_however_it_lies_in_the_pipe() {
        let limit = Limit {
            at: Instant::now() + Duration::from_secs(60),
            cancelled: &AtomicBool::new(false),
        };
        let mut ranks = MemoryTransport::group(2);
        let (mut second, mut first) = (ranks.pop().unwrap(), ranks.pop().unwrap());
        let mut buffer = [0; 12_288];
        first.exchange(1, &[1; 12_288], 1, &mut [], limit).unwrap();
        second
            .exchange(0, &[], 0, &mut buffer[..12_000], limit)
            .unwrap();
        // Wraps around.
        first.exchange(1, &[1; 8000], 1, &mut [], limit).unwrap();
        first.farewell(&[], limit);
        second
            .exchange(0, &[], 0, &mut buffer[..8288], limit)
            .unwrap();
        let fault = second.exchange(0, &[], 0, &mut buffer[..1], limit);
        assert!(matches!(fault, Err(Fault::Farewell { peer: 0, .. })));
    }
}
