//! A listener that lets in only those who know the secret, and is not impressed by others.
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
    handshake::{
        ADMITTED, HEAD_BYTES, HELLO_BYTES, MAGIC, MAX_PAYLOAD_BYTES, PATIENCE, VERSION, head, shown,
    },
    secret::{Nonce, PROOF_BYTES, Secret, Side, nonce},
};
use crate::sockets::{is_transient, prepare};

/// Pending connections beyond those of the ranks.
const STRANGERS: usize = 128;
/// Refusals that are remembered for error messages.
const REMEMBERED: usize = 4;
/// Connections accepted before the pending ones are looked at again.
const ACCEPTED_AT_ONCE: usize = 64;

pub(crate) struct Door {
    listener: TcpListener,
    secret: Secret,
    capacity: usize,
    pending: VecDeque<Pending>,
    refused: usize,
    last_refused: VecDeque<String>,
}

/// One that knows the secret.
pub(crate) struct Guest {
    pub(crate) stream: TcpStream,
    pub(crate) from: SocketAddr,
    pub(crate) payload: Vec<u8>,
}

struct Pending {
    stream: TcpStream,
    from: SocketAddr,
    since: Instant,
    /// This end's and, once it has said hello, the other's.
    nonce: Nonce,
    hello: Option<Nonce>,
    inbox: Vec<u8>,
}

impl Door {
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

    /// What to wait for before [`Door::serve`].
    pub(crate) fn poll_fds<'a>(&'a self, fds: &mut Vec<PollFd<'a>>) {
        fds.push(PollFd::new(&self.listener, PollFlags::IN));
        fds.extend(
            self.pending
                .iter()
                .map(|pending| PollFd::new(&pending.stream, PollFlags::IN)),
        );
    }

    /// Goes on with what is ready, and returns those that have come in. Never waits.
    pub(crate) fn serve(&mut self) -> Vec<Guest> {
        self.accept();
        let mut guests = Vec::new();
        for mut pending in std::mem::take(&mut self.pending) {
            match pending.step(&self.secret) {
                Ok(Some(payload)) => guests.push(Guest {
                    stream: pending.stream,
                    from: pending.from,
                    payload,
                }),
                Ok(None) if pending.since.elapsed() < PATIENCE => self.pending.push_back(pending),
                Ok(None) => self.refuse(pending.from, "it did not finish the handshake in time"),
                Err(reason) => self.refuse(pending.from, &reason),
            }
        }
        guests
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

    /// What [`Door::refuse`] was told; empty if nothing.
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
                    match (prepare(&stream), nonce()) {
                        (Ok(()), Ok(nonce)) => self.pending.push_back(Pending {
                            stream,
                            from,
                            since: Instant::now(),
                            nonce,
                            hello: None,
                            inbox: Vec::new(),
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
        let ended = self.read()?;
        if self.hello.is_none() {
            let magic = self.inbox.len().min(MAGIC.len());
            if self.inbox[..magic] != MAGIC[..magic] {
                return Err(format!("it is not burn-shard: {}", shown(&self.inbox)));
            }
            if self.inbox.len() >= HEAD_BYTES {
                let version = u16::from_le_bytes([self.inbox[8], self.inbox[9]]);
                if version != VERSION {
                    // Tells it, so that it can say so on its side.
                    self.write(&head())?;
                    return Err(format!("it speaks version {version}, not {VERSION}"));
                }
            }
            if let Some(hello) = self.inbox.first_chunk::<HELLO_BYTES>() {
                let mut other: Nonce = [0; 32];
                other.copy_from_slice(&hello[HEAD_BYTES..]);
                self.hello = Some(other);
                self.inbox.drain(..HELLO_BYTES);
                let proof = secret.prove(Side::Host, [&other, &self.nonce], &[]);
                let mut challenge = head().to_vec();
                challenge.extend_from_slice(&self.nonce);
                challenge.extend_from_slice(&proof);
                self.write(&challenge)?;
            }
        }
        if let Some(other) = self.hello
            && let Some(length) = self.inbox.first_chunk::<2>()
        {
            let length = usize::from(u16::from_le_bytes(*length));
            if length > MAX_PAYLOAD_BYTES {
                return Err(format!("its message has {length} bytes"));
            }
            let whole = 2 + length + PROOF_BYTES;
            if self.inbox.len() > whole {
                return Err("it goes on without having been admitted".to_owned());
            }
            if self.inbox.len() == whole {
                let (payload, proof) = self.inbox[2..].split_at(length);
                let nonces = [&other, &self.nonce];
                if !secret.verify(proof, Side::Guest, nonces, payload) {
                    return Err("it has another token (BURN_SHARD_TOKEN)".to_owned());
                }
                let payload = payload.to_vec();
                self.write(&[ADMITTED])?;
                return Ok(Some(payload));
            }
        }
        match (ended, self.hello) {
            (false, _) => Ok(None),
            (true, None) => Err("it left in the middle of the handshake".to_owned()),
            (true, Some(_)) => Err("it left when it saw our proof (another token?)".to_owned()),
        }
    }

    /// Reads what is there; whether the connection has ended.
    fn read(&mut self) -> Result<bool, String> {
        let mut buffer = [0; 512];
        while self.inbox.len() <= HELLO_BYTES + MAX_PAYLOAD_BYTES + PROOF_BYTES + 2 {
            match self.stream.read(&mut buffer) {
                Ok(0) => return Ok(true),
                Ok(count) => self.inbox.extend_from_slice(&buffer[..count]),
                Err(error) if is_transient(&error) => return Ok(false),
                Err(error) => return Err(error.to_string()),
            }
        }
        Ok(false)
    }

    /// Fits any buffer of the system, unless the other end plays tricks.
    fn write(&mut self, bytes: &[u8]) -> Result<(), String> {
        match self.stream.write(bytes) {
            Ok(count) if count == bytes.len() => Ok(()),
            Ok(_) => Err("it does not read".to_owned()),
            Err(error) => Err(error.to_string()),
        }
    }
}
