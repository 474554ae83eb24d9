//! Messages over a connection that never waits: a length (4 bytes, little endian), then the message.

use std::{
    io::{Read, Write},
    net::TcpStream,
};

use rustix::event::{PollFd, PollFlags};
use serde::{Serialize, de::DeserializeOwned};

use crate::sockets::is_transient;

/// Bytes that may wait for a reader that does not read.
const MAX_UNSENT_BYTES: usize = 4 << 20;

pub(super) struct Framed {
    pub(super) stream: TcpStream,
    /// Longest message that is accepted.
    max_bytes: usize,
    inbox: Vec<u8>,
    outbox: Vec<u8>,
    ended: Option<String>,
}

pub(super) enum Received<T> {
    Message(T),
    /// Not yet.
    Nothing,
    /// There will be no more, because of this.
    Ended(String),
}

impl Framed {
    pub(super) fn new(stream: TcpStream, max_bytes: usize) -> Self {
        Self {
            stream,
            max_bytes,
            inbox: Vec::new(),
            outbox: Vec::new(),
            ended: None,
        }
    }

    pub(super) fn poll_fd(&self) -> PollFd<'_> {
        let mut flags = PollFlags::IN;
        if !self.outbox.is_empty() {
            flags |= PollFlags::OUT;
        }
        PollFd::new(&self.stream, flags)
    }

    /// Sends `message` as far as the system takes it; the rest goes with [`Framed::flush`].
    pub(super) fn send(&mut self, message: &impl Serialize) {
        let bytes = postcard::to_allocvec(message).expect("our own messages should serialize");
        let length = u32::try_from(bytes.len()).expect("our own messages should be short");
        if self.outbox.len() + bytes.len() > MAX_UNSENT_BYTES {
            self.ended = Some("it does not read what it is sent".to_owned());
            return;
        }
        self.outbox.extend_from_slice(&length.to_le_bytes());
        self.outbox.extend_from_slice(&bytes);
        self.flush();
    }

    /// Whether everything was handed to the system.
    pub(super) fn flush(&mut self) -> bool {
        while !self.outbox.is_empty() {
            match self.stream.write(&self.outbox) {
                Ok(count) => drop(self.outbox.drain(..count)),
                Err(error) if is_transient(&error) => return false,
                // What the other end said before it went is still to be read.
                Err(_) => self.outbox.clear(),
            }
        }
        true
    }

    pub(super) fn receive<T: DeserializeOwned>(&mut self) -> Received<T> {
        self.flush();
        loop {
            if let Some(reason) = &self.ended {
                return Received::Ended(reason.clone());
            }
            match first_message(&mut self.inbox, self.max_bytes) {
                Ok(Some(message)) => return Received::Message(message),
                Ok(None) => {}
                Err(reason) => {
                    self.ended = Some(reason);
                    continue;
                }
            }
            let mut buffer = [0; 4096];
            match self.stream.read(&mut buffer) {
                Ok(0) => self.ended = Some("the connection was closed".to_owned()),
                Ok(count) => self.inbox.extend_from_slice(&buffer[..count]),
                Err(error) if is_transient(&error) => return Received::Nothing,
                Err(error) => self.ended = Some(error.to_string()),
            }
        }
    }
}

/// Takes the first message out of `inbox`, once it is whole; an error if it is none.
pub(super) fn first_message<T: DeserializeOwned>(
    inbox: &mut Vec<u8>,
    max_bytes: usize,
) -> Result<Option<T>, String> {
    let Some(length) = inbox.first_chunk::<4>() else {
        return Ok(None);
    };
    let length = usize::try_from(u32::from_le_bytes(*length)).unwrap_or(usize::MAX);
    if length > max_bytes {
        return Err(format!("it sent a message of {length} bytes"));
    }
    let Some(bytes) = inbox.get(4..4 + length) else {
        return Ok(None);
    };
    let message = postcard::from_bytes(bytes);
    inbox.drain(..4 + length);
    message
        .map(Some)
        .map_err(|error| format!("its message is wrong: {error}"))
}
