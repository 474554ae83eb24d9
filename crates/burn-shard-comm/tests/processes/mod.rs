//! Ranks of a job as threads that know nothing of each other but a port.
#![allow(dead_code, reason = "each test uses some of it")]

use std::{
    net::{TcpListener, TcpStream},
    sync::atomic::{AtomicU32, AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

use burn_shard_comm::{Launcher, Placement, Rendezvous, Token};

/// Long enough never to be met by accident; no test waits for it.
pub(crate) const LONG: Duration = Duration::from_secs(90);

/// A port nobody listens on: below those that the system gives to connections, another at each call. None comes
/// twice, since a job whose rank 0 is dead waits for its port while others begin.
pub(crate) fn free_port() -> u16 {
    const PORTS: u32 = 500;
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let base = 10_500 + (std::process::id() % 44) * PORTS;
    loop {
        let offset = NEXT.fetch_add(1, Ordering::Relaxed);
        assert!(
            offset < PORTS,
            "a test program that needs more than {PORTS} ports"
        );
        let port = u16::try_from(base + offset).unwrap();
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

pub(crate) fn placement(rank: usize, world_size: usize, port: u16) -> Placement {
    Placement {
        rank,
        world_size,
        local_rank: rank,
        local_world_size: Some(world_size),
        master_addr: "127.0.0.1".to_owned(),
        master_port: port,
        job_id: "job".to_owned(),
        token: Some(Token::new(TOKEN).unwrap()),
        launcher: Launcher::Torchrun,
    }
}

pub(crate) fn rendezvous(rank: usize, world_size: usize, port: u16) -> Rendezvous {
    Rendezvous::new(placement(rank, world_size, port)).deadline(LONG)
}

/// Runs each of `ranks` in a thread of its own; results in their order.
pub(crate) fn all<T: Send, R: Send>(ranks: Vec<T>, run: impl Fn(T) -> R + Sync) -> Vec<R> {
    thread::scope(|scope| {
        let run = &run;
        let threads: Vec<_> = ranks
            .into_iter()
            .map(|rank| scope.spawn(move || run(rank)))
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

/// Keeps ranks until all are there, or one of them must have failed.
pub(crate) struct Hold {
    awaited: AtomicUsize,
}

impl Hold {
    pub(crate) fn new(ranks: usize) -> Self {
        Self {
            awaited: AtomicUsize::new(ranks),
        }
    }

    pub(crate) fn wait(&self) {
        let start = Instant::now();
        self.awaited.fetch_sub(1, Ordering::AcqRel);
        while self.awaited.load(Ordering::Acquire) > 0 && start.elapsed() < LONG {
            thread::sleep(Duration::from_millis(5));
        }
    }
}

/// A token that may be used beyond loopback.
pub(crate) const TOKEN: &str = "a secret of 30 different bytes";
/// The version of the handshake.
pub(crate) const VERSION: u16 = 2;

/// How a member of a job begins, in some version.
pub(crate) fn hello(version: u16) -> Vec<u8> {
    let mut hello = b"burnshrd".to_vec();
    hello.extend_from_slice(&version.to_le_bytes());
    hello.extend_from_slice(&[5; 32]);
    hello
}

/// Connects to the store, which may not be there yet.
pub(crate) fn connect(port: u16) -> TcpStream {
    let start = Instant::now();
    loop {
        match TcpStream::connect(("127.0.0.1", port)) {
            Ok(stream) if stream.local_addr().unwrap() != stream.peer_addr().unwrap() => {
                stream.set_read_timeout(Some(LONG)).unwrap();
                stream.set_nodelay(true).unwrap();
                return stream;
            }
            _ => assert!(start.elapsed() < LONG, "nothing listens on {port}"),
        }
        thread::sleep(Duration::from_millis(5));
    }
}
