//! How ranks that are processes find each other.
//!
//! Rank 0 serves a *store* on a port that all ranks were told; every rank, rank 0 too, connects to it,
//! joins, and waits until all have. What goes wrong until then is told to all of them: a rank that is
//! there twice, a world size that differs, a rank that died or did not come in time.
//!
//! Connections are tried again until the deadline, since ranks start at different times. What cannot get
//! better ends at once: a port that something else holds, another token, another version.
//!
//! Strangers: whoever does not know the job's token gets no further than the handshake
//! (`handshake.rs`), and cannot keep others from it (`acceptor.rs`). Without a token that is hard to guess only
//! loopback is listened on, and without any, other users of the host are trusted. Nothing is encrypted.
//!
//! | file | |
//! |---|---|
//! | `secret.rs`, `handshake.rs` | the proof of belonging to the job, and the end that connects |
//! | `acceptor.rs` | the end that listens |
//! | `limits.rs` | how many files a rank may open |
//! | `names.rs` | addresses of a host |
//! | `frame.rs`, `message.rs` | what is said afterwards |
//! | `server.rs`, `store.rs` | the store, and a rank's end of it |

mod acceptor;
mod error;
mod frame;
mod handshake;
mod limits;
mod message;
mod names;
#[cfg(test)]
mod properties;
mod secret;
mod server;
mod store;
#[cfg(test)]
mod tests;
#[cfg(any(test, fuzzing))]
#[allow(unreachable_pub, reason = "public where it is fuzzed")]
pub mod wire_checks;

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream},
    thread,
    time::{Duration, Instant},
};

pub use error::RendezvousError;
pub use message::JobFault;
pub use store::Store;

pub(crate) use acceptor::Acceptor;
pub(crate) use handshake::{Failed, offer};
pub(crate) use secret::Secret;

use crate::{local::DEFAULT_DEADLINE, placement::Placement, sockets::slice, time::after};
use frame::Framed;
use handshake::VERSION;
use limits::TooFew;
use message::{Join, MAX_REPLY_BYTES};
use server::{FAILED_TIME, Server};

/// Longest job id, so that it fits the handshake.
const MAX_JOB_ID_BYTES: usize = 512;
/// Most ranks of a job: a list of where they all listen fits a message.
const MAX_WORLD_SIZE: usize = 1 << 15;
/// How long rank 0 tries to get its port: a rank that looks for it may hold it for a moment, and a
/// rendezvous that failed in this process for some more.
const LISTEN_TIME: Duration = FAILED_TIME.saturating_add(Duration::from_secs(1));
/// How long one attempt to connect may take.
const CONNECT_TIME: Duration = Duration::from_secs(5);

/// Lets the processes of a job find each other.
///
/// Every process makes one, with its own [`Placement`], and calls the same method of it.
///
/// # Examples
///
/// ```no_run
/// # use std::time::Duration;
/// # use burn_shard_comm::{Error, Placement, Rendezvous};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let placement = Placement::from_env()?.ok_or("start me with a launcher")?;
/// let transport = Rendezvous::new(placement).deadline(Duration::from_secs(60)).tcp()?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Rendezvous {
    placement: Placement,
    deadline: Duration,
    bind: Option<IpAddr>,
}

impl Rendezvous {
    /// A rendezvous at the master of `placement`, with a deadline of five minutes.
    #[must_use]
    pub fn new(placement: Placement) -> Self {
        Self {
            placement,
            deadline: DEFAULT_DEADLINE,
            bind: None,
        }
    }

    /// Sets how long this rank waits for the others.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Sets the address of this host to listen on; unspecified (`0.0.0.0`, `::`) for all of them.
    ///
    /// Without this call: loopback if the master is named by a loopback address; else a refusal.
    #[must_use]
    pub fn bind(mut self, address: IpAddr) -> Self {
        self.bind = Some(address);
        self
    }

    /// Returns once all ranks have called it: this rank's end of the store.
    ///
    /// # Errors
    ///
    /// Refuses to listen beyond loopback without being told to ([`RendezvousError::BindUnset`]) or without a
    /// token that is hard to guess ([`RendezvousError::TokenUnset`], [`RendezvousError::TokenWeak`]), a rank out of range, and more than 32768 ranks.
    ///
    /// Fails on this rank alone if it does not get to the store: its port is taken, nothing or something else
    /// listens there, or it has another token, version or job. The other ranks are told at their deadline that
    /// this one is missing. Fails on all ranks, as [`RendezvousError::Job`], for every [`JobFault`], and if one may
    /// not open enough files ([`RendezvousError::TooFewFiles`]).
    pub fn store(&self) -> Result<Store, RendezvousError> {
        let until = self.until();
        self.reserve_files(0)?;
        let mut store = self.join(None, until)?;
        store.everyone(until)?;
        Ok(store)
    }

    /// Makes sure that this process may open its connections to the store, and `connections` to each of the other
    /// ranks. If it may not, the other ranks, which would wait for it, are told.
    pub(crate) fn reserve_files(&self, connections: usize) -> Result<(), RendezvousError> {
        self.listen_ip()?;
        let Placement {
            rank, world_size, ..
        } = self.placement;
        // Rank 0 has both ends of its own connection.
        let to_store = if rank == 0 { world_size + 1 } else { 1 };
        let Err(TooFew { needed, limit }) =
            limits::reserve(to_store + connections * (world_size - 1))
        else {
            return Ok(());
        };
        let error = RendezvousError::TooFewFiles {
            rank,
            world_size,
            needed,
            limit,
        };
        let soon = self.until().min(Instant::now() + CONNECT_TIME);
        if let Ok(mut store) = self.join(None, soon) {
            store.report(&error);
        }
        Err(error)
    }

    pub(crate) const fn placement(&self) -> &Placement {
        &self.placement
    }

    pub(crate) fn until(&self) -> Instant {
        after(Instant::now(), self.deadline)
    }

    pub(crate) fn secret(&self) -> Secret {
        Secret::new(self.placement.token.as_ref())
    }

    /// Where this rank listens; checks what can be checked before anything is sent.
    pub(crate) fn listen_ip(&self) -> Result<IpAddr, RendezvousError> {
        let Placement {
            rank,
            world_size,
            master_addr,
            job_id,
            ..
        } = &self.placement;
        let (rank, world_size) = (*rank, *world_size);
        if rank >= world_size {
            return Err(RendezvousError::RankOutOfRange { rank, world_size });
        }
        if world_size > MAX_WORLD_SIZE {
            return Err(RendezvousError::TooManyRanks {
                rank,
                world_size,
                max_world_size: MAX_WORLD_SIZE,
            });
        }
        if job_id.len() > MAX_JOB_ID_BYTES {
            return Err(RendezvousError::JobIdTooLong {
                rank,
                found_bytes: job_id.len(),
                max_bytes: MAX_JOB_ID_BYTES,
            });
        }
        let ip = match self.bind {
            Some(ip) => ip,
            None if self.placement.master_is_loopback() => {
                master_addr.parse().unwrap_or(Ipv4Addr::LOCALHOST.into())
            }
            None => {
                let master = master_addr.clone();
                return Err(RendezvousError::BindUnset { rank, master });
            }
        };
        if ip.is_loopback() {
            return Ok(ip);
        }
        let address = ip.to_string();
        match &self.placement.token {
            None => Err(RendezvousError::TokenUnset { rank, address }),
            Some(token) if !token.is_strong() => Err(RendezvousError::TokenWeak { rank, address }),
            Some(_) => Ok(ip),
        }
    }

    /// Listens on `address`, and explains it if that is not possible.
    pub(crate) fn listen(&self, address: SocketAddr) -> Result<TcpListener, RendezvousError> {
        TcpListener::bind(address).map_err(|error| RendezvousError::Listen {
            rank: self.placement.rank,
            address,
            message: error.to_string(),
        })
    }

    /// Joins the store, on rank 0 after having started it. `port`: where this rank listens for others.
    pub(crate) fn join(&self, port: Option<u16>, until: Instant) -> Result<Store, RendezvousError> {
        let ip = self.listen_ip()?;
        let Placement {
            rank,
            world_size,
            master_addr,
            master_port,
            job_id,
            ..
        } = &self.placement;
        let (rank, world_size) = (*rank, *world_size);
        if rank != 0 {
            let target = format!("{master_addr}:{master_port}");
            let resolve = || names::resolve(master_addr, *master_port, until);
            return self.connect(&target, &resolve, port, until);
        }
        let address = SocketAddr::new(ip, *master_port);
        let listener = match self.listen_for_a_while(address) {
            Ok(listener) => listener,
            Err(error) => {
                // If the store of this very job holds the port, there are two ranks 0, and all others are
                // to hear of it: joining there tells them.
                let soon = until.min(Instant::now() + CONNECT_TIME);
                let own = SocketAddr::new(reachable(ip), *master_port);
                let joined = self.connect(&own.to_string(), &|| Ok(vec![own]), port, soon);
                return Err(match joined.and_then(|mut store| store.everyone(soon)) {
                    Err(told @ RendezvousError::Job { .. }) => told,
                    _ => error,
                });
            }
        };
        let system = |action| {
            move |error: std::io::Error| RendezvousError::System {
                rank,
                action,
                message: error.to_string(),
            }
        };
        let port_of_store = listener
            .local_addr()
            .map_err(system("listen for the other ranks"))?
            .port();
        let ended = Acceptor::new(listener, self.secret(), world_size)
            .and_then(|acceptor| Server::start(acceptor, job_id.clone(), world_size))
            .map_err(system("start the store"))?;
        let own = SocketAddr::new(reachable(ip), port_of_store);
        let mut store = self.connect(&own.to_string(), &|| Ok(vec![own]), port, until)?;
        store.ended = Some(ended);
        Ok(store)
    }

    fn listen_for_a_while(&self, address: SocketAddr) -> Result<TcpListener, RendezvousError> {
        let until = Instant::now() + LISTEN_TIME;
        loop {
            match self.listen(address) {
                Err(_) if Instant::now() < until => thread::sleep(Duration::from_millis(50)),
                result => return result,
            }
        }
    }

    /// Connects to the store until it succeeds, cannot succeed, or time is up.
    fn connect(
        &self,
        target: &str,
        resolve: &dyn Fn() -> std::io::Result<Vec<SocketAddr>>,
        port: Option<u16>,
        until: Instant,
    ) -> Result<Store, RendezvousError> {
        let Placement {
            rank, world_size, ..
        } = self.placement;
        let start = Instant::now();
        let mut pause = Duration::from_millis(10);
        loop {
            let message = match resolve() {
                Err(error) => error.to_string(),
                Ok(addresses) if addresses.is_empty() => "it has no address".to_owned(),
                Ok(addresses) => {
                    let mut message = String::new();
                    for address in addresses {
                        match self.try_to_join(address, port, until) {
                            Ok(stream) => {
                                return Ok(Store {
                                    rank,
                                    world_size,
                                    deadline: self.deadline,
                                    address,
                                    link: Framed::new(stream, MAX_REPLY_BYTES),
                                    ended: None,
                                });
                            }
                            Err(Failed::Interrupted(error)) => message = error.to_string(),
                            Err(failed) => return Err(explain(rank, address.to_string(), failed)),
                        }
                    }
                    message
                }
            };
            let Some(slice) = slice(until, pause) else {
                return Err(RendezvousError::NoMaster {
                    rank,
                    address: target.to_owned(),
                    waited: start.elapsed(),
                    message,
                });
            };
            thread::sleep(slice);
            pause = (pause * 2).min(Duration::from_millis(500));
        }
    }

    fn try_to_join(
        &self,
        address: SocketAddr,
        port: Option<u16>,
        until: Instant,
    ) -> Result<TcpStream, Failed> {
        let stream = dial(address, until)?;
        let listens = match port {
            None => None,
            Some(port) => Some(SocketAddr::new(self.shown_ip(&stream)?, port)),
        };
        let join = Join {
            rank: self.placement.rank,
            world_size: self.placement.world_size,
            job_id: self.placement.job_id.clone(),
            listens,
        };
        let payload = postcard::to_allocvec(&join).expect("our own messages should serialize");
        offer(&stream, &self.secret(), &payload, until, &mut || Ok(()))?;
        Ok(stream)
    }

    /// The address under which others are to look for this rank.
    fn shown_ip(&self, to_store: &TcpStream) -> std::io::Result<IpAddr> {
        match self.listen_ip() {
            Ok(ip) if !ip.is_unspecified() => Ok(ip),
            // Rank 0 may have reached its own store by loopback: the others know how they reached it.
            _ if self.placement.rank == 0 => Ok(Ipv4Addr::UNSPECIFIED.into()),
            _ => Ok(to_store.local_addr()?.ip()),
        }
    }
}

/// Connects once.
pub(crate) fn dial(address: SocketAddr, until: Instant) -> std::io::Result<TcpStream> {
    let Some(slice) = slice(until, CONNECT_TIME) else {
        return Err(std::io::ErrorKind::TimedOut.into());
    };
    let stream = TcpStream::connect_timeout(&address, slice)?;
    // On loopback a connection to a port that nobody listens on may be given that very port.
    if stream.local_addr()? == stream.peer_addr()? {
        return Err(std::io::ErrorKind::ConnectionRefused.into());
    }
    Ok(stream)
}

/// What a handshake that cannot succeed means; `address` is the other end.
pub(crate) fn explain(rank: usize, address: String, failed: Failed) -> RendezvousError {
    match failed {
        Failed::Interrupted(error) => RendezvousError::System {
            rank,
            action: "talk to another rank",
            message: format!("{address}: {error}"),
        },
        Failed::Stranger(answer) => RendezvousError::NotBurnShard {
            rank,
            address,
            answer,
        },
        Failed::Version(found) => RendezvousError::Version {
            rank,
            address,
            found,
            expected: VERSION,
        },
        Failed::Secret => RendezvousError::Token { rank, address },
        Failed::Told(error) => error,
    }
}

/// An address of this host at which `ip` is listened on.
fn reachable(ip: IpAddr) -> IpAddr {
    match ip {
        ip if !ip.is_unspecified() => ip,
        IpAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
    }
}
