//! Connects every rank with every other: the higher rank calls, the lower one listens.
//!
//! Ranks call those below them one after the other, then wait for those above. Rank 0 only waits, so rank
//! 1 comes to wait, and so on: no two wait for each other.

use std::{
    io,
    net::{SocketAddr, TcpListener, TcpStream},
    thread,
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};

use super::{TcpTransport, peer::Peer};
use crate::{
    rendezvous::{
        Acceptor, Failed, Rendezvous, RendezvousError, Secret, Store, dial, explain, offer,
    },
    sockets::{slice, wait},
};

/// The payload of a handshake between two ranks: it names one of their two connections.
#[derive(Serialize, Deserialize)]
struct Call {
    from: usize,
    to: usize,
    channel: Channel,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
enum Channel {
    Data,
    Control,
}

impl Rendezvous {
    /// Returns once every rank is connected with every other.
    ///
    /// Each rank listens on a port that the system chooses.
    ///
    /// # Errors
    ///
    /// See [`Rendezvous::store`]. Also fails on all ranks if one cannot reach another.
    pub fn tcp(&self) -> Result<TcpTransport, RendezvousError> {
        let until = self.until();
        let rank = self.placement().rank;
        self.reserve_files(2)?;
        let listener = self.listen(SocketAddr::new(self.listen_ip()?, 0))?;
        let address = listener
            .local_addr()
            .map_err(|error| system(rank, &error))?;
        let mut store = self.join(Some(address.port()), until)?;
        let (session, listens) = store.everyone(until)?;
        let mesh = Mesh {
            rank,
            start: Instant::now(),
            until,
            secret: self.secret().of_session(&session),
            address,
        };
        match mesh.connect(&mut store, listener, &listens) {
            Ok(transport) => {
                store.barrier_until(until)?;
                Ok(transport)
            }
            Err(error) => {
                store.report(&error);
                Err(error)
            }
        }
    }
}

/// The properties that all connections of a rank share.
struct Mesh {
    rank: usize,
    start: Instant,
    until: Instant,
    secret: Secret,
    address: SocketAddr,
}

/// The connections to one other rank that exist so far.
type Pair = [Option<TcpStream>; 2];

impl Mesh {
    fn connect(
        &self,
        store: &mut Store,
        listener: TcpListener,
        listens: &[Option<SocketAddr>],
    ) -> Result<TcpTransport, RendezvousError> {
        let world_size = listens.len();
        let acceptor = Acceptor::new(listener, self.secret.clone(), 2 * world_size);
        let acceptor = acceptor.map_err(|error| system(self.rank, &error))?;
        let mut pairs: Vec<Pair> = (0..world_size).map(|_| [None, None]).collect();
        for (peer, pair) in pairs.iter_mut().enumerate().take(self.rank) {
            for channel in [Channel::Data, Channel::Control] {
                pair[channel as usize] = Some(self.call(store, peer, channel, listens[peer])?);
            }
        }
        self.answer(store, acceptor, &mut pairs)?;
        let peers: io::Result<Vec<Option<Peer>>> = pairs
            .into_iter()
            .enumerate()
            .map(|(rank, pair)| match pair {
                [Some(data), Some(control)] => Peer::new(rank, data, control).map(Some),
                _ => Ok(None),
            })
            .collect();
        Ok(TcpTransport {
            rank: self.rank,
            peers: peers.map_err(|error| system(self.rank, &error))?,
        })
    }

    /// Connects to a lower rank.
    fn call(
        &self,
        store: &mut Store,
        peer: usize,
        channel: Channel,
        listens: Option<SocketAddr>,
    ) -> Result<TcpStream, RendezvousError> {
        let address = listens.map(|address| store.seen_from_here(address));
        let call = Call {
            from: self.rank,
            to: peer,
            channel,
        };
        let payload = postcard::to_allocvec(&call).expect("our own messages should serialize");
        let mut pause = Duration::from_millis(10);
        loop {
            let connected = address.ok_or_else(|| io::Error::other("it does not listen"));
            let result = connected
                .and_then(|address| dial(address, self.until))
                .map_err(Failed::from)
                .and_then(|stream| {
                    let watch = &mut || store.watch();
                    offer(&stream, &self.secret, &payload, self.until, watch)?;
                    Ok(stream)
                });
            let shown = address.map_or_else(|| "?".to_owned(), |address| address.to_string());
            let message = match result {
                Ok(stream) => return Ok(stream),
                Err(Failed::Interrupted(error)) => error.to_string(),
                Err(failed) => return Err(explain(self.rank, shown, failed)),
            };
            store.watch()?;
            let Some(slice) = slice(self.until, pause) else {
                return Err(RendezvousError::Unreachable {
                    rank: self.rank,
                    peer,
                    address: shown,
                    waited: self.start.elapsed(),
                    message,
                });
            };
            thread::sleep(slice);
            pause = (pause * 2).min(Duration::from_millis(500));
        }
    }

    /// Waits until all higher ranks have connected.
    fn answer(
        &self,
        store: &mut Store,
        mut acceptor: Acceptor,
        pairs: &mut [Pair],
    ) -> Result<(), RendezvousError> {
        loop {
            for admitted in acceptor.serve() {
                let slot = postcard::from_bytes::<Call>(&admitted.payload)
                    .ok()
                    .filter(|call| call.to == self.rank && call.from > self.rank)
                    .and_then(|call| pairs.get_mut(call.from)?.get_mut(call.channel as usize));
                match slot {
                    Some(slot @ None) => *slot = Some(admitted.stream),
                    _ => acceptor.refuse(admitted.from, "it is connected already, or not to be"),
                }
            }
            let above = pairs.iter().enumerate().skip(self.rank + 1);
            let missing = above.filter(|(_, pair)| pair.iter().any(Option::is_none));
            let peers: Vec<usize> = missing.map(|(peer, _)| peer).collect();
            if peers.is_empty() {
                return Ok(());
            }
            store.watch()?;
            let Some(slice) = slice(self.until, Duration::from_millis(100)) else {
                return Err(RendezvousError::Unconnected {
                    rank: self.rank,
                    peers,
                    address: self.address,
                    waited: self.start.elapsed(),
                });
            };
            let mut fds = vec![store.poll_fd()];
            acceptor.poll_fds(&mut fds);
            wait(&mut fds, slice).map_err(|error| system(self.rank, &error))?;
        }
    }
}

fn system(rank: usize, error: &io::Error) -> RendezvousError {
    RendezvousError::System {
        rank,
        action: "connect to the other ranks",
        message: error.to_string(),
    }
}
