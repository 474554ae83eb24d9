//! How two processes make sure that they belong to one job: the wire format, the end that connects, and the
//! accepting end apart from any connection.
//!
//! | # | from | bytes |
//! |---|---|---|
//! | 1 | connecting | magic (8), version (2, little endian), nonce (32) |
//! | 2 | accepting | magic, version; if the version is the same: nonce (32) |
//! | 3 | connecting | length of the payload (2), payload, proof of both nonces and the payload (32) |
//! | 4 | accepting | one byte: refused, or admitted and a proof of the same (32) |
//!
//! A proof is an HMAC-SHA256 keyed by the job's token, which itself is never sent. The connecting end proves
//! first: a stranger who connects gets a nonce and nothing that a token could be tried on offline. One who
//! listens in a rank's place, or reads what is under way, can do that, so tokens have a minimum strength beyond
//! loopback (`placement/token.rs`). The handshake keeps strangers out; it does not encrypt, and does not help
//! against one who can change what is under way.
//!
//! The connections of the accepting end are in `acceptor.rs`.

use std::{
    io::{self, Read, Write},
    net::TcpStream,
    time::{Duration, Instant},
};

use rustix::event::PollFlags;

use super::{
    error::RendezvousError,
    secret::{Nonce, PROOF_BYTES, Role, Secret, nonce},
};
use crate::sockets::{is_transient, prepare, slice, wait_for};

const MAGIC: [u8; 8] = *b"burnshrd";
/// Version of this handshake and of the messages after it.
pub(super) const VERSION: u16 = 2;
const HEAD_BYTES: usize = 10;
const HELLO_BYTES: usize = HEAD_BYTES + 32;
const MAX_PAYLOAD_BYTES: usize = 1024;
const REFUSED: u8 = 0;
const ADMITTED: u8 = 1;

/// How long the other end may take for each step of the handshake before it has proven anything.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);

fn head() -> [u8; HEAD_BYTES] {
    let mut head = [0; HEAD_BYTES];
    head[..8].copy_from_slice(&MAGIC);
    head[8..].copy_from_slice(&VERSION.to_le_bytes());
    head
}

/// The first bytes of a stranger, as they may be shown.
fn shown(bytes: &[u8]) -> String {
    format!("\"{}\"", bytes[..bytes.len().min(16)].escape_ascii())
}

/// Why a handshake did not succeed.
pub(crate) enum Failed {
    /// The connection was refused, ended, or stayed silent. Trying again may help.
    Interrupted(io::Error),
    /// What answers is not burn-shard.
    Stranger(String),
    /// What answers speaks this version.
    Version(u16),
    /// What answers does not know the secret.
    Secret,
    /// `watch` ended the wait.
    Told(RendezvousError),
}

impl From<io::Error> for Failed {
    fn from(error: io::Error) -> Self {
        Self::Interrupted(error)
    }
}

/// Called now and then during a wait; an error ends it.
pub(crate) type Watch<'a> = &'a mut dyn FnMut() -> Result<(), RendezvousError>;

/// Makes sure that `stream` leads to a process that knows `secret`, and hands it `payload`.
pub(crate) fn offer(
    stream: &TcpStream,
    secret: &Secret,
    payload: &[u8],
    until: Instant,
    watch: Watch<'_>,
) -> Result<(), Failed> {
    prepare(stream)?;
    let own = nonce()?;
    let soon = until.min(Instant::now() + PATIENCE);
    let mut hello = [0; HELLO_BYTES];
    hello[..HEAD_BYTES].copy_from_slice(&head());
    hello[HEAD_BYTES..].copy_from_slice(&own);
    write_all(stream, &hello, soon, watch)?;

    let mut answer = [0; HEAD_BYTES];
    read_magic(stream, &mut answer, soon, watch)?;
    let version = u16::from_le_bytes([answer[8], answer[9]]);
    if version != VERSION {
        return Err(Failed::Version(version));
    }
    let mut other: Nonce = [0; 32];
    read_exact(stream, &mut other, soon, watch)?;

    // From here on the other end may take its time: to come back while it may have admitted this end would
    // look like another process of the same rank.
    let length = u16::try_from(payload.len()).expect("a payload should be short");
    let mut message = length.to_le_bytes().to_vec();
    message.extend_from_slice(payload);
    message.extend_from_slice(&secret.prove(Role::Connecting, [&own, &other], payload));
    write_all(stream, &message, until, watch)?;
    let mut answer = [0];
    read_exact(stream, &mut answer, until, watch)?;
    match answer {
        [ADMITTED] => {}
        [REFUSED] => return Err(Failed::Secret),
        _ => return Err(Failed::Stranger(shown(&answer))),
    }
    let mut proof = [0; PROOF_BYTES];
    read_exact(stream, &mut proof, until, watch)?;
    if secret.verify(&proof, Role::Accepting, [&own, &other], payload) {
        Ok(())
    } else {
        Err(Failed::Secret)
    }
}

/// The accepting end of one handshake: bytes in, bytes out.
pub(super) struct Accepting {
    nonce: Nonce,
    /// The nonce of the other end, once it has said hello.
    hello: Option<Nonce>,
    inbox: Vec<u8>,
}

impl Accepting {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self {
            nonce: nonce()?,
            hello: None,
            inbox: Vec::new(),
        })
    }

    /// How many more bytes of the other end are of interest now.
    pub(super) fn wanted_bytes(&self) -> usize {
        // One more than a whole message has, so that one that goes on is noticed.
        let most = HELLO_BYTES + 2 + MAX_PAYLOAD_BYTES + PROOF_BYTES + 1;
        most.saturating_sub(self.inbox.len())
    }

    /// Goes on with `bytes` of the other end, and adds what is to be sent to it to `answer`, also before an
    /// error. Returns the payload once it has come with its proof; an error if the connection is to be dropped.
    pub(super) fn advance(
        &mut self,
        bytes: &[u8],
        secret: &Secret,
        answer: &mut Vec<u8>,
    ) -> Result<Option<Vec<u8>>, String> {
        self.inbox.extend_from_slice(bytes);
        let Some(other) = self.hello(answer)? else {
            return Ok(None);
        };
        let Some(length) = self.inbox.first_chunk::<2>() else {
            return Ok(None);
        };
        let length = usize::from(u16::from_le_bytes(*length));
        if length > MAX_PAYLOAD_BYTES {
            return Err(format!("its message has {length} bytes"));
        }
        let whole = 2 + length + PROOF_BYTES;
        if self.inbox.len() > whole {
            return Err("it goes on without having been admitted".to_owned());
        }
        if self.inbox.len() < whole {
            return Ok(None);
        }
        let (payload, proof) = self.inbox[2..].split_at(length);
        let nonces = [&other, &self.nonce];
        if !secret.verify(proof, Role::Connecting, nonces, payload) {
            // Tells it, so that it can say so on its side.
            answer.push(REFUSED);
            return Err("it has another token (BURN_SHARD_TOKEN)".to_owned());
        }
        answer.push(ADMITTED);
        answer.extend_from_slice(&secret.prove(Role::Accepting, nonces, payload));
        Ok(Some(payload.to_vec()))
    }

    /// The other end's nonce, once its hello has come whole; answers it then.
    fn hello(&mut self, answer: &mut Vec<u8>) -> Result<Option<Nonce>, String> {
        if self.hello.is_some() {
            return Ok(self.hello);
        }
        let magic = self.inbox.len().min(MAGIC.len());
        if self.inbox[..magic] != MAGIC[..magic] {
            return Err(format!("it is not burn-shard: {}", shown(&self.inbox)));
        }
        if self.inbox.len() >= HEAD_BYTES {
            let version = u16::from_le_bytes([self.inbox[8], self.inbox[9]]);
            if version != VERSION {
                // Tells it, so that it can say so on its side.
                answer.extend_from_slice(&head());
                return Err(format!("it speaks version {version}, not {VERSION}"));
            }
        }
        let Some(hello) = self.inbox.first_chunk::<HELLO_BYTES>() else {
            return Ok(None);
        };
        let mut other: Nonce = [0; 32];
        other.copy_from_slice(&hello[HEAD_BYTES..]);
        self.hello = Some(other);
        self.inbox.drain(..HELLO_BYTES);
        answer.extend_from_slice(&head());
        answer.extend_from_slice(&self.nonce);
        Ok(Some(other))
    }
}

/// Reads the head, and tells a stranger by its first bytes, however few they are.
fn read_magic(
    stream: &TcpStream,
    head: &mut [u8; HEAD_BYTES],
    until: Instant,
    watch: Watch<'_>,
) -> Result<(), Failed> {
    let mut found = 0;
    while found < head.len() {
        let count = read_some(stream, &mut head[found..], until, watch)?;
        found += count;
        let magic = found.min(MAGIC.len());
        if head[..magic] != MAGIC[..magic] {
            return Err(Failed::Stranger(shown(&head[..found])));
        }
    }
    Ok(())
}

fn read_exact(
    stream: &TcpStream,
    buffer: &mut [u8],
    until: Instant,
    watch: Watch<'_>,
) -> Result<(), Failed> {
    let mut found = 0;
    while found < buffer.len() {
        found += read_some(stream, &mut buffer[found..], until, watch)?;
    }
    Ok(())
}

fn read_some(
    mut stream: &TcpStream,
    buffer: &mut [u8],
    until: Instant,
    watch: Watch<'_>,
) -> Result<usize, Failed> {
    loop {
        match stream.read(buffer) {
            Ok(0) => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
            Ok(count) => return Ok(count),
            Err(error) if is_transient(&error) => pause(stream, PollFlags::IN, until, watch)?,
            Err(error) => return Err(error.into()),
        }
    }
}

fn write_all(
    mut stream: &TcpStream,
    bytes: &[u8],
    until: Instant,
    watch: Watch<'_>,
) -> Result<(), Failed> {
    let mut sent = 0;
    while sent < bytes.len() {
        match stream.write(&bytes[sent..]) {
            Ok(count) => sent += count,
            Err(error) if is_transient(&error) => pause(stream, PollFlags::OUT, until, watch)?,
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

fn pause(
    stream: &TcpStream,
    flags: PollFlags,
    until: Instant,
    watch: Watch<'_>,
) -> Result<(), Failed> {
    watch().map_err(Failed::Told)?;
    let Some(slice) = slice(until, Duration::from_millis(50)) else {
        return Err(io::Error::new(io::ErrorKind::TimedOut, "it does not answer").into());
    };
    Ok(wait_for(stream, flags, slice)?)
}
