//! How two processes make sure that they belong to one job: the wire format, and the end that connects.
//!
//! | # | from | bytes |
//! |---|---|---|
//! | 1 | guest | magic (8), version (2, little endian), nonce (32) |
//! | 2 | host | magic, version; if the version is the same: nonce (32), proof (32) |
//! | 3 | guest | length of the payload (2), payload, proof of both nonces and the payload (32) |
//! | 4 | host | one byte: admitted |
//!
//! A proof is an HMAC-SHA256 keyed by the job's token, which itself is never sent. It keeps strangers
//! out; it does not encrypt, and does not help against one who can change what is under way.
//!
//! The other end is `door.rs`.

use std::{
    io::{self, Read, Write},
    net::TcpStream,
    time::{Duration, Instant},
};

use rustix::event::PollFlags;

use super::{
    error::RendezvousError,
    secret::{Nonce, PROOF_BYTES, Secret, Side, nonce},
};
use crate::sockets::{is_transient, prepare, slice, wait_for};

pub(super) const MAGIC: [u8; 8] = *b"burnshrd";
/// Of this handshake and of the messages after it.
pub(super) const VERSION: u16 = 1;
pub(super) const HEAD_BYTES: usize = 10;
pub(super) const HELLO_BYTES: usize = HEAD_BYTES + 32;
pub(super) const MAX_PAYLOAD_BYTES: usize = 1024;
pub(super) const ADMITTED: u8 = 1;

/// How long the other end may take for each step of the handshake before it has proven anything.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);

pub(super) fn head() -> [u8; HEAD_BYTES] {
    let mut head = [0; HEAD_BYTES];
    head[..8].copy_from_slice(&MAGIC);
    head[8..].copy_from_slice(&VERSION.to_le_bytes());
    head
}

/// Bytes of a stranger, as they may be shown.
pub(super) fn shown(bytes: &[u8]) -> String {
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
    let mut proof = [0; PROOF_BYTES];
    read_exact(stream, &mut proof, soon, watch)?;
    if !secret.verify(&proof, Side::Host, [&own, &other], &[]) {
        return Err(Failed::Secret);
    }

    // From here on the other end is known, and may take its time: to come back while it may have
    // admitted this end would look like another guest of the same name.
    let length = u16::try_from(payload.len()).expect("a payload should be short");
    let mut message = length.to_le_bytes().to_vec();
    message.extend_from_slice(payload);
    message.extend_from_slice(&secret.prove(Side::Guest, [&own, &other], payload));
    write_all(stream, &message, until, watch)?;
    let mut admitted = [0];
    read_exact(stream, &mut admitted, until, watch)?;
    if admitted != [ADMITTED] {
        return Err(Failed::Stranger(shown(&admitted)));
    }
    Ok(())
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
