//! Processes connected by TCP: a transport for [`Pairwise`](crate::Pairwise).
//!
//! Each pair of ranks has two connections (`peer.rs`), made once all ranks have met (`mesh.rs`).

mod mesh;
mod peer;

use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use crate::{
    sockets::wait,
    transport::{Fault, LIMIT_GRANULARITY, Limit, Transport},
};
use peer::Peer;

/// How long a rank that leaves waits for the others to leave too; what it sent arrives in any case.
const LINGER: Duration = Duration::from_millis(250);

/// Messages between processes over TCP; made by [`Rendezvous::tcp`](crate::Rendezvous::tcp).
///
/// An exchange sends and receives at the same time, and listens meanwhile to what all other ranks may
/// have to say. The end of a process is noticed at once, that of a whole host in about half a minute.
/// Last words are cut to 64 KiB.
#[derive(Debug)]
pub struct TcpTransport {
    rank: usize,
    /// In rank order; none for this rank.
    peers: Vec<Option<Peer>>,
}

impl TcpTransport {
    fn peer(&mut self, rank: usize) -> &mut Peer {
        self.peers[rank]
            .as_mut()
            .expect("an exchange should be with another rank")
    }

    /// Waits until data can move or a rank has something to say, which is then heard.
    fn wait(
        &mut self,
        to: Option<usize>,
        from: Option<usize>,
        time: Duration,
    ) -> Result<(), Fault> {
        let controls = self.peers.iter().flatten().filter_map(Peer::control);
        let mut fds: Vec<PollFd<'_>> = controls.map(|c| PollFd::new(c, PollFlags::IN)).collect();
        let data = |rank: usize, flags| {
            let peer = self.peers[rank].as_ref();
            peer.map(|peer| PollFd::new(peer.data(), flags))
        };
        fds.extend(to.and_then(|to| data(to, PollFlags::OUT)));
        fds.extend(from.and_then(|from| data(from, PollFlags::IN)));
        let result = wait(&mut fds, time);
        let said: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        if let Err(error) = result {
            let (peer, message) = (to.or(from).unwrap_or(self.rank), error.to_string());
            return Err(Fault::Gone { peer, message });
        }
        let listening = self.peers.iter_mut().flatten();
        let listening = listening.filter(|peer| peer.control().is_some());
        for (peer, said) in listening.zip(said) {
            if said {
                peer.listen()?;
            }
        }
        Ok(())
    }
}

impl Transport for TcpTransport {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.peers.len()
    }

    fn exchange(
        &mut self,
        to: usize,
        send: &[u8],
        from: usize,
        receive: &mut [u8],
        limit: Limit<'_>,
    ) -> Result<(), Fault> {
        let (mut sent, mut received) = (0, 0);
        loop {
            let before = sent + received;
            if sent < send.len() {
                sent += self.peer(to).send(&send[sent..])?;
            }
            if received < receive.len() {
                received += self.peer(from).receive(&mut receive[received..])?;
            }
            let unsent = (sent < send.len()).then_some(to);
            let awaited = (received < receive.len()).then_some(from);
            if unsent.is_none() && awaited.is_none() {
                return Ok(());
            }
            let mut peers: Vec<usize> = unsent.into_iter().chain(awaited).collect();
            peers.dedup();
            let slice = limit.slice(&peers)?;
            if sent + received == before {
                self.wait(unsent, awaited, slice)?;
            }
        }
    }

    fn poll(&mut self) -> Result<(), Fault> {
        self.wait(None, None, Duration::ZERO)
    }

    fn ask(&mut self, words: &[u8], limit: Limit<'_>) -> Option<Vec<(usize, Vec<u8>)>> {
        for peer in self.peers.iter_mut().flatten() {
            if let Err(error) = peer.tell(words, limit.at) {
                log::debug!("a rank was gone before it heard whom this one misses: {error}");
            }
        }
        let mut said = Vec::new();
        // A wait tells of one rank at a time.
        while let Ok(slice) = limit.slice(&[]) {
            if let Err(Fault::Farewell { peer, words }) = self.wait(None, None, slice)
                && !words.is_empty()
            {
                said.push((peer, words));
            }
            if self
                .peers
                .iter()
                .flatten()
                .all(|peer| peer.control().is_none())
            {
                break;
            }
        }
        Some(said)
    }

    fn farewell(&mut self, words: &[u8], limit: Limit<'_>) {
        for peer in self.peers.iter_mut().flatten() {
            if let Err(error) = peer.say_farewell(words, limit.at) {
                log::debug!("a rank was gone before it heard of the end: {error}");
            }
        }
        // Most of the time all ranks leave together.
        let until = limit.at.min(Instant::now() + LINGER);
        let mut staying: Vec<Peer> = self.peers.drain(..).flatten().collect();
        loop {
            staying.retain_mut(|peer| !peer.drain());
            let left = until.saturating_duration_since(Instant::now());
            if staying.is_empty() || left.is_zero() {
                return;
            }
            std::thread::sleep(left.min(LIMIT_GRANULARITY / 10));
        }
    }
}
