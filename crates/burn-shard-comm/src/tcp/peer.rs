//! The two connections to one other rank: one for data, one for last words.
//!
//! Words have a connection of their own so that they arrive while data is under way, and so that
//! they are not lost when a connection with unread data is closed, which the system does by reset.

use std::{
    io::{self, Read, Write},
    net::{Shutdown, TcpStream},
    time::{Duration, Instant},
};

use rustix::event::PollFlags;

use crate::{
    sockets::{is_transient, prepare, slice, wait_for, watch_over},
    transport::{Fault, LIMIT_GRANULARITY},
};

/// Longest last words; what is longer is cut.
pub(super) const MAX_WORDS_BYTES: usize = 64 << 10;
/// How long after the end of the data the words, or the end, of the other connection are waited for.
const WORDS_TIME: Duration = Duration::from_secs(1);
/// A reader that does not read must not keep a writer from looking at what else is ready.
const BYTES_AT_ONCE: usize = 1 << 20;
/// Bytes that are thrown away before a rank that leaves looks at its clock.
const DRAINED_AT_ONCE: usize = 256 << 10;

#[derive(Debug)]
pub(super) struct Peer {
    rank: usize,
    data: TcpStream,
    control: TcpStream,
    /// What came of its last words: a length (4 bytes, little endian), then the words.
    inbox: Vec<u8>,
    /// Nothing more is to be heard of it: it has said farewell, or is gone.
    left: bool,
    /// It was told this rank's last words.
    told: bool,
}

impl Peer {
    pub(super) fn new(rank: usize, data: TcpStream, control: TcpStream) -> io::Result<Self> {
        prepare(&data)?;
        prepare(&control)?;
        watch_over(&control)?;
        Ok(Self {
            rank,
            data,
            control,
            inbox: Vec::new(),
            left: false,
            told: false,
        })
    }

    pub(super) fn data(&self) -> &TcpStream {
        &self.data
    }

    /// What is to be waited for besides data; none once it has left.
    pub(super) fn control(&self) -> Option<&TcpStream> {
        (!self.left).then_some(&self.control)
    }

    /// Sends what the system takes; how much that was.
    pub(super) fn send(&mut self, bytes: &[u8]) -> Result<usize, Fault> {
        if self.left {
            return Err(self.farewell_without_words());
        }
        let bytes = &bytes[..bytes.len().min(BYTES_AT_ONCE)];
        match (&self.data).write(bytes) {
            Ok(count) => Ok(count),
            Err(error) if is_transient(&error) => Ok(0),
            Err(error) => Err(self.reason(error.to_string())),
        }
    }

    /// Receives what is there; how much that was.
    pub(super) fn receive(&mut self, bytes: &mut [u8]) -> Result<usize, Fault> {
        let length = bytes.len().min(BYTES_AT_ONCE);
        match (&self.data).read(&mut bytes[..length]) {
            Ok(0) => Err(self.reason("the connection was closed".to_owned())),
            Ok(count) => Ok(count),
            Err(error) if is_transient(&error) => Ok(0),
            Err(error) => Err(self.reason(error.to_string())),
        }
    }

    /// Looks for last words and for the end of the process; never waits. Tells of either once.
    pub(super) fn listen(&mut self) -> Result<(), Fault> {
        let heard = self.look();
        self.left |= heard.is_err();
        heard
    }

    fn look(&mut self) -> Result<(), Fault> {
        while !self.left {
            if let Some(length) = self.inbox.first_chunk::<4>() {
                let length = usize::try_from(u32::from_le_bytes(*length)).unwrap_or(usize::MAX);
                if length == 0 {
                    self.left = true;
                    return Ok(());
                }
                if length > MAX_WORDS_BYTES {
                    let message = format!("its last words would be {length} bytes long");
                    return Err(self.gone(message));
                }
                if let Some(words) = self.inbox.get(4..4 + length) {
                    let (peer, words) = (self.rank, words.to_vec());
                    return Err(Fault::Farewell { peer, words });
                }
            }
            let mut buffer = [0; 4096];
            match self.control.read(&mut buffer) {
                Ok(0) => return Err(self.gone("its process has ended".to_owned())),
                Ok(count) => self.inbox.extend_from_slice(&buffer[..count]),
                Err(error) if is_transient(&error) => return Ok(()),
                Err(error) => return Err(self.gone(error.to_string())),
            }
        }
        Ok(())
    }

    /// Why the data has ended: what the other connection says, in a moment or two.
    fn reason(&mut self, message: String) -> Fault {
        let until = Instant::now() + WORDS_TIME;
        loop {
            if let Err(fault) = self.listen() {
                return fault;
            }
            if self.left {
                return self.farewell_without_words();
            }
            let waited = slice(until, LIMIT_GRANULARITY)
                .map(|slice| wait_for(&self.control, PollFlags::IN, slice));
            match waited {
                Some(Ok(())) => {}
                Some(Err(_)) | None => return self.gone(message),
            }
        }
    }

    fn farewell_without_words(&self) -> Fault {
        let (peer, words) = (self.rank, Vec::new());
        Fault::Farewell { peer, words }
    }

    fn gone(&self, message: String) -> Fault {
        let peer = self.rank;
        Fault::Gone { peer, message }
    }

    /// Sends last words, unless it was told some; empty ones say that all is well.
    pub(super) fn tell(&mut self, words: &[u8], until: Instant) -> io::Result<()> {
        if self.told {
            return Ok(());
        }
        self.told = true;
        let words = &words[..words.len().min(MAX_WORDS_BYTES)];
        let length = u32::try_from(words.len()).expect("words were cut to 64 KiB");
        let mut message = length.to_le_bytes().to_vec();
        message.extend_from_slice(words);
        let mut sent = 0;
        while sent < message.len() {
            match self.control.write(&message[sent..]) {
                Ok(count) => sent += count,
                Err(error) if is_transient(&error) => {
                    let timeout = slice(until, LIMIT_GRANULARITY);
                    let timeout = timeout.ok_or(io::ErrorKind::TimedOut)?;
                    wait_for(&self.control, PollFlags::OUT, timeout)?;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Sends last words, and that nothing comes after them.
    pub(super) fn say_farewell(&mut self, words: &[u8], until: Instant) -> io::Result<()> {
        self.tell(words, until)?;
        self.control.shutdown(Shutdown::Write)?;
        self.data.shutdown(Shutdown::Write)
    }

    /// Throws away what still comes, so that closing does not reset the connection; whether both
    /// connections have ended.
    pub(super) fn drain(&mut self) -> bool {
        let ended = [&self.data, &self.control].map(drain);
        ended == [true, true]
    }
}

/// Throws away some of what has come, since more may come as fast; whether the connection has ended.
fn drain(mut stream: &TcpStream) -> bool {
    let mut buffer = [0; DRAINED_AT_ONCE / 16];
    for _ in 0..16 {
        match stream.read(&mut buffer) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(error) => return !is_transient(&error),
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    /// The two ends of a connection.
    fn connection() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (one, listener.accept().unwrap().0)
    }

    #[test]
    fn a_rank_that_sends_without_end_does_not_keep_another_from_leaving() {
        let ((data, mut sender), (control, other)) = (connection(), connection());
        let mut peer = Peer::new(1, data, control).unwrap();
        sender.set_nonblocking(true).unwrap();
        let mut sent = 0;
        while let Ok(count) = sender.write(&[0; 64 << 10]) {
            sent += count;
        }
        drop((sender, other));
        assert!(sent > DRAINED_AT_ONCE, "{sent} bytes are too few for this");
        // Though all of it is there, and the end of it, it comes back before.
        assert!(!peer.drain());
        let until = Instant::now() + Duration::from_secs(60);
        while !peer.drain() {
            assert!(Instant::now() < until);
        }
    }
}
