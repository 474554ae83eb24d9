//! The store itself: one thread in the process of rank 0, which waits for no connection in particular.
//!
//! It has no deadline of its own. Each rank has, and says so when it gives up; the first to give up
//! fails the job for all. What goes wrong is told to every rank that has joined.

use std::{
    collections::HashMap,
    io,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use super::{
    acceptor::{Acceptor, Admitted},
    frame::{Framed, Received},
    message::{JobFault, Join, MAX_REQUEST_BYTES, MAX_TEXT_BYTES, Reply, Request},
    secret::{Nonce, nonce},
};
use crate::sockets::wait;

/// Keys and values together.
const MAX_STORED_BYTES: usize = 16 << 20;
/// How long one that was refused may take to read why.
const LEAVE_TIME: Duration = Duration::from_secs(2);
/// How long a failed store stays for ranks that have not come, or do not leave.
pub(super) const FAILED_TIME: Duration = Duration::from_secs(3);

pub(super) struct Server {
    world_size: usize,
    job_id: String,
    session: Nonce,
    acceptor: Acceptor,
    members: Vec<Option<Member>>,
    /// Ranks that have said they need the store no more.
    done: Vec<bool>,
    everyone: bool,
    /// Barriers that are over.
    released: u64,
    values: HashMap<String, Vec<u8>>,
    fault: Option<(JobFault, Instant)>,
    /// Ranks that have been told of the fault, or are gone.
    told: Vec<bool>,
    /// Refused, but not before they have read why.
    leaving: Vec<(Framed, Instant)>,
}

struct Member {
    link: Framed,
    from: SocketAddr,
    listens: Option<SocketAddr>,
    /// Barriers it has come to.
    arrived: u64,
}

impl Server {
    /// Starts the thread; it ends when all ranks have left, or some time after a failure. The flag is set
    /// when it has.
    pub(super) fn start(
        acceptor: Acceptor,
        job_id: String,
        world_size: usize,
    ) -> io::Result<Arc<AtomicBool>> {
        let mut server = Self {
            world_size,
            job_id,
            session: nonce()?,
            acceptor,
            members: (0..world_size).map(|_| None).collect(),
            done: vec![false; world_size],
            everyone: false,
            released: 0,
            values: HashMap::new(),
            fault: None,
            told: vec![false; world_size],
            leaving: Vec::new(),
        };
        let ended = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&ended);
        thread::Builder::new()
            .name("rendezvous".to_owned())
            .spawn(move || {
                server.run();
                drop(server);
                flag.store(true, Ordering::Release);
            })?;
        Ok(ended)
    }

    fn run(&mut self) {
        while !self.over() {
            let mut fds = Vec::new();
            self.acceptor.poll_fds(&mut fds);
            let members = self.members.iter().flatten().map(|member| &member.link);
            let leaving = self.leaving.iter().map(|(link, _)| link);
            fds.extend(members.chain(leaving).map(Framed::poll_fd));
            if let Err(error) = wait(&mut fds, Duration::from_millis(100)) {
                log::warn!("the rendezvous cannot wait for connections: {error}");
                thread::sleep(Duration::from_millis(100));
            }
            for admitted in self.acceptor.serve() {
                self.admit(admitted);
            }
            for rank in 0..self.world_size {
                self.serve(rank);
            }
            self.leaving.retain_mut(|(link, since)| {
                let gone = matches!(link.receive::<Request>(), Received::Ended(_));
                !gone && since.elapsed() < LEAVE_TIME
            });
        }
    }

    fn over(&self) -> bool {
        let empty = self.members.iter().all(Option::is_none) && self.leaving.is_empty();
        match &self.fault {
            Some((_, since)) => {
                let all_told = self.told.iter().all(|&told| told);
                empty && all_told || since.elapsed() > FAILED_TIME
            }
            None => empty && self.everyone,
        }
    }

    fn admit(&mut self, admitted: Admitted) {
        let Admitted {
            stream,
            from,
            payload,
        } = admitted;
        let Ok(join) = postcard::from_bytes::<Join>(&payload) else {
            return self
                .acceptor
                .refuse(from, "its message is not for the store");
        };
        let mut link = Framed::new(stream, MAX_REQUEST_BYTES);
        let rank = join.rank;
        if join.job_id != self.job_id {
            let expected = self.job_id.clone();
            let reason = format!("it belongs to job \"{}\"", join.job_id);
            self.acceptor.refuse(from, &reason);
            let found = join.job_id;
            link.send(&Reply::Fault(JobFault::OtherJob { expected, found }));
            return self.leaving.push((link, Instant::now()));
        }
        let taken = self.members.get(rank).and_then(Option::as_ref);
        let fault = if join.world_size != self.world_size {
            Some(JobFault::WorldSize {
                other: rank,
                found: join.world_size,
                expected: self.world_size,
            })
        } else if rank >= self.world_size {
            Some(JobFault::RankOutOfRange {
                other: rank,
                world_size: self.world_size,
            })
        } else if taken.is_some() || self.done[rank] {
            Some(JobFault::DuplicateRank {
                duplicate: rank,
                first: taken.map_or(from, |member| member.from),
                second: from,
            })
        } else {
            None
        };
        if let Some(fault) = fault {
            self.fail(fault);
        }
        if let Some((fault, _)) = &self.fault {
            link.send(&Reply::Fault(fault.clone()));
            if let Some(told) = self.told.get_mut(rank) {
                *told = true;
            }
            return self.leaving.push((link, Instant::now()));
        }
        self.members[rank] = Some(Member {
            link,
            from,
            listens: join.listens,
            arrived: 0,
        });
        if self.members.iter().all(Option::is_some) {
            self.everyone = true;
            let listens = self.members.iter().flatten().map(|m| m.listens).collect();
            let session = self.session;
            self.tell_all(&Reply::Everyone { session, listens });
        }
    }

    fn serve(&mut self, rank: usize) {
        while let Some(member) = &mut self.members[rank] {
            match member.link.receive() {
                Received::Nothing => return,
                Received::Message(request) => self.answer(rank, request),
                Received::Ended(message) => {
                    self.members[rank] = None;
                    self.told[rank] = true;
                    let other = rank;
                    self.fail(JobFault::Died { other, message });
                }
            }
        }
    }

    fn answer(&mut self, rank: usize, request: Request) {
        let Some(member) = &mut self.members[rank] else {
            return;
        };
        match request {
            Request::Arrive => {
                member.arrived += 1;
                if self.everyone && self.absent().is_empty() {
                    self.released += 1;
                    self.tell_all(&Reply::Released);
                }
            }
            Request::Set { key, value } => {
                let stored: usize = self.values.iter().map(|(k, v)| k.len() + v.len()).sum();
                let room = stored + key.len() + value.len() <= MAX_STORED_BYTES;
                if room {
                    self.values.insert(key, value);
                }
                member.link.send(&Reply::Stored(room));
            }
            Request::Get { key } => {
                let value = self.values.get(&key).cloned();
                member.link.send(&Reply::Value(value));
            }
            Request::GiveUp { waited } => {
                let missing = self.absent();
                if !missing.is_empty() {
                    self.fail(JobFault::Missing {
                        waiting: rank,
                        waited,
                        missing,
                        refused: self.acceptor.refusals(),
                    });
                }
            }
            Request::Report { mut message } => {
                message.truncate(message.floor_char_boundary(MAX_TEXT_BYTES));
                self.fail(JobFault::Reported {
                    other: rank,
                    message,
                });
            }
            Request::Bye => {
                self.members[rank] = None;
                self.told[rank] = true;
                self.done[rank] = true;
                if !self.everyone {
                    self.fail(JobFault::Died {
                        other: rank,
                        message: "it left".to_owned(),
                    });
                }
            }
        }
    }

    /// Ranks that have not joined; once all have, those that are not at the next barrier.
    fn absent(&self) -> Vec<usize> {
        let here = |member: &Member| !self.everyone || member.arrived > self.released;
        (0..self.world_size)
            .filter(|&rank| !self.members[rank].as_ref().is_some_and(here))
            .collect()
    }

    fn fail(&mut self, fault: JobFault) {
        if self.fault.is_none() {
            log::info!("the rendezvous failed: {fault}");
            self.tell_all(&Reply::Fault(fault.clone()));
            for (told, member) in self.told.iter_mut().zip(&self.members) {
                *told |= member.is_some();
            }
            self.fault = Some((fault, Instant::now()));
        }
    }

    fn tell_all(&mut self, reply: &Reply) {
        for member in self.members.iter_mut().flatten() {
            member.link.send(reply);
        }
    }
}
