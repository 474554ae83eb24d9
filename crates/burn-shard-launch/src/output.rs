//! What ranks write: whole lines, each with its rank before it.

use std::{
    collections::VecDeque,
    io::{self, BufRead, BufReader, Read, Write},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc::{Sender, channel},
    },
    thread::{self, JoinHandle},
};

/// A longer line is written in pieces of this many bytes, each as a line.
const LONGEST_LINE_BYTES: u64 = 16 << 20;
/// Lines kept for the report of a failure, and bytes of each. The message of a panic comes before its
/// backtrace, and is not to be pushed out by it.
const TAIL_LINES: usize = 60;
const TAIL_LINE_BYTES: usize = 500;

#[derive(Clone, Copy, Debug)]
pub(crate) enum Stream {
    Out,
    Err,
}

/// The launcher's own streams, of which one line is written at a time: they may be one file.
#[derive(Debug, Default)]
pub(crate) struct Sink {
    turn: Mutex<()>,
    begun: AtomicU64,
    written: AtomicU64,
    out_is_closed: AtomicBool,
}

impl Sink {
    /// Takes as long as the reader of the stream does.
    fn write(&self, stream: Stream, line: &[u8]) {
        self.begun.fetch_add(1, Ordering::Relaxed);
        let turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let result = match stream {
            Stream::Out => write_all(io::stdout().lock(), line),
            Stream::Err => write_all(io::stderr().lock(), line),
        };
        drop(turn);
        self.written.fetch_add(1, Ordering::Relaxed);
        // A training run is not worth less when nobody reads along.
        if let (Stream::Out, Err(error)) = (stream, result)
            && !self.out_is_closed.swap(true, Ordering::Relaxed)
        {
            let remark = format!("standard output: {error}; what ranks write there is lost");
            self.write(Stream::Err, &as_remark(&remark));
        }
    }

    /// Lines written so far.
    pub(crate) fn written(&self) -> u64 {
        self.written.load(Ordering::Relaxed)
    }

    /// Whether lines were written since there were `before`, or one waits for the reader of a stream.
    pub(crate) fn is_busy(&self, before: &mut u64) -> bool {
        let written = self.written();
        let since = written - std::mem::replace(before, written);
        since > 0 || self.begun.load(Ordering::Relaxed) > written
    }
}

fn write_all(mut to: impl Write, line: &[u8]) -> io::Result<()> {
    to.write_all(line)?;
    to.flush()
}

fn as_remark(text: &str) -> Vec<u8> {
    format!("[launch] {text}\n").into_bytes()
}

/// What the launcher says itself, on the standard error. A thread writes it, so that a terminal that
/// stands still does not keep the launcher from ending its ranks.
#[derive(Debug)]
pub(crate) struct Remarks {
    lines: Sender<Vec<u8>>,
    thread: JoinHandle<()>,
}

impl Remarks {
    pub(crate) fn start(sink: Arc<Sink>) -> io::Result<Self> {
        let (lines, received) = channel::<Vec<u8>>();
        let thread = thread::Builder::new()
            .name("remarks".to_owned())
            .spawn(move || {
                for line in received {
                    sink.write(Stream::Err, &line);
                }
            })?;
        Ok(Self { lines, thread })
    }

    pub(crate) fn say(&self, text: &str) {
        self.lines.send(as_remark(text)).ok();
    }

    pub(crate) fn quote(&self, line: &[u8]) {
        self.lines.send([b"    ", line, b"\n"].concat()).ok();
    }

    /// Waits until all is written.
    pub(crate) fn finish(self) {
        drop(self.lines);
        self.thread.join().ok();
    }
}

/// The last lines of one rank.
#[derive(Debug, Default)]
pub(crate) struct Tail(Mutex<VecDeque<Vec<u8>>>);

impl Tail {
    fn push(&self, line: &[u8]) {
        let mut lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if lines.len() == TAIL_LINES {
            lines.pop_front();
        }
        lines.push_back(line[..line.len().min(TAIL_LINE_BYTES)].to_vec());
    }

    pub(crate) fn lines(&self) -> Vec<Vec<u8>> {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .iter()
            .cloned()
            .collect()
    }
}

/// Copies lines of `rank` until it, and whoever else holds the pipe, has closed it.
pub(crate) fn relay(from: impl Read, rank: usize, stream: Stream, sink: &Sink, tail: &Arc<Tail>) {
    let mut from = BufReader::with_capacity(64 << 10, from);
    let prefix = format!("[{rank}] ").into_bytes();
    loop {
        let mut line = prefix.clone();
        match from
            .by_ref()
            .take(LONGEST_LINE_BYTES)
            .read_until(b'\n', &mut line)
        {
            Ok(0) | Err(_) => return,
            Ok(_) => {}
        }
        if line.last() != Some(&b'\n') {
            line.push(b'\n');
        }
        tail.push(&line[prefix.len()..line.len() - 1]);
        sink.write(stream, &line);
    }
}
