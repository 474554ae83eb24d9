//! A listener that admits only processes that know the secret, and that others cannot hold up.
//!
//! No connection is waited for: whatever the pending ones do, those that are ready are served. There
//! are at most so many pending at a time, each has a few seconds, and the oldest makes room for a new
//! one; a member of the job that is turned away comes again.

use std::{
    collections::VecDeque,
    io::{self, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    thread,
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags};

use super::{
    handshake::{Accepting, PATIENCE},
    secret::Secret,
};
use crate::sockets::{is_transient, prepare};

/// Pending connections beyond those of the ranks.
const STRANGERS: usize = 128;
/// Refusals that are remembered for error messages.
const REMEMBERED: usize = 4;
/// Connections accepted before the pending ones are looked at again.
const ACCEPTED_AT_ONCE: usize = 64;

pub(crate) struct Acceptor {
    listener: TcpListener,
    secret: Secret,
    capacity: usize,
    pending: VecDeque<Pending>,
    refused: usize,
    last_refused: VecDeque<String>,
}

/// A connection to a process that knows the secret.
pub(crate) struct Admitted {
    pub(crate) stream: TcpStream,
    pub(crate) from: SocketAddr,
    pub(crate) payload: Vec<u8>,
}

struct Pending {
    stream: TcpStream,
    from: SocketAddr,
    since: Instant,
    handshake: Accepting,
}

impl Acceptor {
    pub(crate) fn new(
        listener: TcpListener,
        secret: Secret,
        world_size: usize,
    ) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        Ok(Self {
            listener,
            secret,
            capacity: world_size + STRANGERS,
            pending: VecDeque::new(),
            refused: 0,
            last_refused: VecDeque::new(),
        })
    }

    /// What to wait for before [`Acceptor::serve`].
    pub(crate) fn poll_fds<'a>(&'a self, fds: &mut Vec<PollFd<'a>>) {
        fds.push(PollFd::new(&self.listener, PollFlags::IN));
        fds.extend(
            self.pending
                .iter()
                .map(|pending| PollFd::new(&pending.stream, PollFlags::IN)),
        );
    }

    /// Goes on with what is ready, and returns the connections that were admitted. Never waits.
    pub(crate) fn serve(&mut self) -> Vec<Admitted> {
        self.accept();
        let mut admitted = Vec::new();
        for mut pending in std::mem::take(&mut self.pending) {
            match pending.step(&self.secret) {
                Ok(Some(payload)) => admitted.push(Admitted {
                    stream: pending.stream,
                    from: pending.from,
                    payload,
                }),
                Ok(None) if pending.since.elapsed() < PATIENCE => self.pending.push_back(pending),
                Ok(None) => self.refuse(pending.from, "it did not finish the handshake in time"),
                Err(reason) => self.refuse(pending.from, &reason),
            }
        }
        admitted
    }

    /// Remembers for error messages that a connection was refused.
    pub(crate) fn refuse(&mut self, from: SocketAddr, reason: &str) {
        log::info!("refused {from}: {reason}");
        self.refused += 1;
        if self.last_refused.len() == REMEMBERED {
            self.last_refused.pop_front();
        }
        self.last_refused.push_back(format!("{from}: {reason}"));
    }

    /// What [`Acceptor::refuse`] was told; empty if nothing.
    pub(crate) fn refusals(&self) -> String {
        if self.refused == 0 {
            return String::new();
        }
        let last: Vec<&str> = self.last_refused.iter().map(String::as_str).collect();
        format!(
            "{} connections were refused, the last: {}",
            self.refused,
            last.join("; ")
        )
    }

    fn accept(&mut self) {
        for _ in 0..ACCEPTED_AT_ONCE {
            match self.listener.accept() {
                Ok((stream, from)) => {
                    if self.pending.len() == self.capacity
                        && let Some(oldest) = self.pending.pop_front()
                    {
                        self.refuse(oldest.from, "too many connections at once");
                    }
                    match (prepare(&stream), Accepting::new()) {
                        (Ok(()), Ok(handshake)) => self.pending.push_back(Pending {
                            stream,
                            from,
                            since: Instant::now(),
                            handshake,
                        }),
                        (Err(error), _) | (_, Err(error)) => self.refuse(from, &error.to_string()),
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(error) if is_transient(&error) => return,
                Err(error) => {
                    // Most likely too many open files: make room, and do not spin.
                    log::warn!("cannot accept a connection: {error}");
                    drop(self.pending.pop_front());
                    thread::sleep(Duration::from_millis(10));
                    return;
                }
            }
        }
    }
}

impl Pending {
    /// The payload, once it has come with its proof; an error if the connection is to be dropped.
    fn step(&mut self, secret: &Secret) -> Result<Option<Vec<u8>>, String> {
        let (bytes, has_ended) = self.read()?;
        let mut answer = Vec::new();
        let result = self.handshake.advance(&bytes, secret, &mut answer);
        let written = self.write(&answer);
        match result {
            Ok(None) if has_ended => Err("it left in the middle of the handshake".to_owned()),
            Ok(payload) => written.map(|()| payload),
            Err(reason) => Err(reason),
        }
    }

    /// Reads what is there; and whether the connection has ended.
    fn read(&mut self) -> Result<(Vec<u8>, bool), String> {
        let mut bytes = Vec::new();
        let mut buffer = [0; 512];
        loop {
            let wanted = self.handshake.wanted_bytes().saturating_sub(bytes.len());
            if wanted == 0 {
                return Ok((bytes, false));
            }
            match self.stream.read(&mut buffer[..wanted.min(512)]) {
                Ok(0) => return Ok((bytes, true)),
                Ok(count) => bytes.extend_from_slice(&buffer[..count]),
                Err(error) if is_transient(&error) => return Ok((bytes, false)),
                Err(error) => return Err(error.to_string()),
            }
        }
    }

    /// Sends an answer, which fits any buffer of the system unless the other end plays tricks.
    fn write(&mut self, bytes: &[u8]) -> Result<(), String> {
        if bytes.is_empty() {
            return Ok(());
        }
        match self.stream.write(bytes) {
            Ok(count) if count == bytes.len() => Ok(()),
            Ok(_) => Err("it does not read".to_owned()),
            Err(error) => Err(error.to_string()),
        }
    }
}
