//! Collectives that were started: waiting for them, and failing together.
//!
//! A thread looks after each of them from its start, whoever else does: a rank may be held in the driver,
//! behind a collective that never ends, while it calls something of which we know nothing.

use std::{
    io,
    sync::{
        Arc, Weak,
        mpsc::{Receiver, Sender},
    },
    thread,
    time::{Duration, Instant},
};

use burn_shard_comm::{Call, Collective, Communicator, Error, Members, Segments, Work};
use parking_lot::Mutex;

use crate::{
    api::REMOTE_ERROR,
    comm::{Comm, Patience, pause},
    error::NcclError,
    memory::{Event, Memory},
    numbers::Numbers,
    staging::{Received, Staging},
};

/// How long the reason of a remote failure may take to arrive after the failure itself.
const REASON_DEADLINE: Duration = Duration::from_secs(2);
/// How long the stream may take to come to its end after an abort.
const ABORT_DEADLINE: Duration = Duration::from_secs(2);

pub(crate) const BACKEND: &str = "NCCL";

/// What one rank's collectives have in common.
pub(crate) struct Link {
    pub(crate) members: Members,
    pub(crate) comm: Comm,
    pub(crate) memory: Arc<dyn Memory>,
    pub(crate) staging: Arc<Staging>,
    /// Not held: the rank leaves when its communicator is dropped, not when its last work is.
    pub(crate) control: Weak<dyn Communicator>,
    pub(crate) numbers: Numbers,
    /// Waits for each that was started, so that somebody does.
    pub(crate) watch: Sender<Arc<Flight>>,
    /// In the order of their splits.
    pub(crate) sub_groups: Mutex<Vec<Weak<Self>>>,
}

impl Link {
    /// What poisoned the group, if this rank knows.
    pub(crate) fn failure(&self) -> Option<Arc<Error>> {
        let cause = self.control.upgrade()?.failure()?;
        Some(Arc::new(self.numbers.of_cause((*cause).clone())))
    }

    /// Poisons the group because of `error`, on all ranks.
    pub(crate) fn fail(&self, error: Error) -> Error {
        if let Some(control) = self.control.upgrade() {
            control.abort(&error.to_string());
        }
        self.comm.abort();
        self.members.named(error)
    }

    /// An error of the control group, with our numbers.
    pub(crate) fn renumbered(&self, error: Error) -> Error {
        self.numbers.of_group(&self.members, error)
    }

    /// Ends NCCL in order: first that of the sub-groups which are still there.
    pub(crate) fn close(&self) -> Result<(), NcclError> {
        let sub_groups = std::mem::take(&mut *self.sub_groups.lock());
        let closed = sub_groups.iter().filter_map(Weak::upgrade);
        let closed = closed.map(|link| link.close()).fold(Ok(()), Result::and);
        closed.and(self.comm.close())
    }
}

/// Whether all ranks called the same.
enum Agreement {
    Pending(Box<dyn Work>),
    Settled(Result<(), Error>),
}

/// How a collective is called in errors, and how long it may take.
#[derive(Clone, Copy)]
pub(crate) struct Name {
    pub(crate) collective: Collective,
    pub(crate) sequence: u64,
    pub(crate) deadline: Duration,
}

impl Name {
    pub(crate) fn new(call: &Call, sequence: u64, deadline: Duration) -> Self {
        Self {
            collective: call.collective,
            sequence,
            deadline,
        }
    }

    /// The error that a call's failure is: what the group failed of, if it has.
    pub(crate) fn error(&self, link: &Link, error: &NcclError) -> Error {
        match self.consequence(link, error) {
            Some(consequence) => consequence,
            None => link.fail(self.backend(link, error.to_string())),
        }
    }

    /// The error of this call if `error` follows from a failure of the group.
    pub(crate) fn consequence(&self, link: &Link, error: &NcclError) -> Option<Error> {
        // A peer's end is seen on the wire before, or after, its reason is heard.
        let remote = matches!(
            error,
            NcclError::Call {
                code: REMOTE_ERROR,
                ..
            }
        );
        let start = Instant::now();
        let cause = loop {
            let cause = link.failure();
            if cause.is_some() || !remote || start.elapsed() >= REASON_DEADLINE {
                break cause;
            }
            pause(start);
        };
        let cause = cause?;
        link.comm.abort();
        Some(self.interrupted(link, cause))
    }

    /// A failure of NCCL in this call, without the name of the group.
    pub(crate) fn backend(&self, link: &Link, message: String) -> Error {
        Error::Backend {
            rank: link.members.root_rank(),
            collective: self.collective,
            sequence: self.sequence,
            backend: BACKEND,
            message,
        }
    }

    fn interrupted(&self, link: &Link, cause: Arc<Error>) -> Error {
        link.members.named(Error::Interrupted {
            rank: link.members.root_rank(),
            collective: self.collective,
            sequence: self.sequence,
            missing: Vec::new(),
            cause,
        })
    }
}

/// A collective whose calls are on the stream.
pub(crate) struct Flight {
    pub(crate) link: Arc<Link>,
    pub(crate) name: Name,
    agreement: Mutex<Agreement>,
    kept: Mutex<Kept>,
    /// Locked while somebody waits for it.
    outcome: Mutex<Option<Result<(), Error>>>,
}

impl Flight {
    /// Has it watched from now on.
    pub(crate) fn start(
        link: &Arc<Link>,
        name: Name,
        agreement: Box<dyn Work>,
        kept: Kept,
    ) -> Arc<Self> {
        let flight = Arc::new(Self {
            link: Arc::clone(link),
            name,
            agreement: Mutex::new(Agreement::Pending(agreement)),
            kept: Mutex::new(kept),
            outcome: Mutex::default(),
        });
        // The thread ends after the last sender.
        let _unwatched = link.watch.send(Arc::clone(&flight));
        flight
    }

    /// Whether [`Flight::complete`] would return at once.
    pub(crate) fn is_ready(&self) -> bool {
        if self
            .outcome
            .try_lock()
            .is_some_and(|outcome| outcome.is_some())
        {
            return true;
        }
        // Whoever holds the lock waits for the other ranks.
        let Some(agreement) = self.agreement.try_lock() else {
            return false;
        };
        match &*agreement {
            Agreement::Pending(work) if !work.is_ready() => return false,
            Agreement::Settled(Err(_)) => return true,
            Agreement::Pending(_) | Agreement::Settled(Ok(())) => {}
        }
        self.kept.lock().is_over().unwrap_or(true)
            || self.link.failure().is_some()
            || self.link.comm.async_error().is_err()
    }

    /// The error that is known by now, of this or of the group.
    pub(crate) fn failed(&self) -> Result<(), Error> {
        if let Some(outcome) = self.outcome.try_lock()
            && let Some(Err(error)) = &*outcome
        {
            return Err(error.clone());
        }
        let cause = self.link.failure();
        cause.map_or(Ok(()), |cause| {
            Err(self.name.interrupted(&self.link, cause))
        })
    }

    /// Waits until all ranks have called this, and it is over.
    pub(crate) fn complete(&self) -> Result<(), Error> {
        let mut outcome = self.outcome.lock();
        if let Some(outcome) = &*outcome {
            return outcome.clone();
        }
        let result = self.settled().and_then(|()| self.over());
        if result.is_err() {
            self.link.comm.abort();
        }
        self.kept.lock().let_go();
        *outcome = Some(result.clone());
        result
    }

    /// Waits until all ranks have called this.
    fn settled(&self) -> Result<(), Error> {
        let mut agreement = self.agreement.lock();
        if let Agreement::Pending(work) = &mut *agreement {
            let result = work.wait().map_err(|error| self.link.renumbered(error));
            *agreement = Agreement::Settled(result);
        }
        match &*agreement {
            Agreement::Settled(result) => result.clone(),
            Agreement::Pending(_) => Ok(()),
        }
    }

    /// Waits until the stream has come to the end of this.
    fn over(&self) -> Result<(), Error> {
        let start = Instant::now();
        let hopeless = || self.link.failure().is_some();
        let patience = Patience {
            deadline: self.name.deadline,
            hopeless: &hopeless,
        };
        loop {
            let over = self.kept.lock().is_over();
            // In this order: an abort too lets the stream go on.
            let sound = self.link.comm.async_error();
            let waited = match sound.and(over) {
                Ok(true) => return Ok(()),
                Ok(false) => patience.check(WAITING, start),
                Err(error) => Err(error),
            };
            waited.map_err(|error| self.name.error(&self.link, &error))?;
            pause(start);
        }
    }

    /// What came to the host, once it is over. There is nothing a second time.
    pub(crate) fn take_received(&self) -> Vec<Option<Received>> {
        std::mem::take(&mut self.kept.lock().received)
    }
}

const WAITING: &str = "what all ranks have started (a GPU, its driver or the network may hang): it";

/// What has to stay until the stream has passed the end of a collective.
pub(crate) struct Kept {
    memory: Arc<dyn Memory>,
    input: Option<Arc<dyn Segments>>,
    /// The result of each call, if it was small.
    pub(crate) received: Vec<Option<Received>>,
    event: Option<Box<dyn Event>>,
    over: bool,
}

impl Kept {
    pub(crate) fn new(memory: &Arc<dyn Memory>, input: Option<Arc<dyn Segments>>) -> Self {
        Self {
            memory: Arc::clone(memory),
            input,
            received: Vec::new(),
            event: None,
            over: false,
        }
    }

    /// Marks the end of what this is kept for.
    pub(crate) fn record(&mut self) -> Result<(), NcclError> {
        self.event = Some(self.memory.record()?);
        Ok(())
    }

    fn is_over(&self) -> Result<bool, NcclError> {
        self.event
            .as_ref()
            .map_or(Ok(false), |event| event.is_over())
    }

    /// Gives back what the stream does not need any more. If it does not come to its end though it was
    /// aborted, it stays allocated for good.
    fn let_go(&mut self) {
        if self.over {
            return;
        }
        self.over = true;
        if self.event.is_none() {
            self.event = self.memory.record().ok();
        }
        let start = Instant::now();
        while !self.is_over().unwrap_or(false) {
            if self.event.is_none() || start.elapsed() >= ABORT_DEADLINE {
                let received = std::mem::take(&mut self.received);
                Box::leak(Box::new((self.input.take(), received)));
                return;
            }
            pause(start);
        }
        self.input = None;
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.let_go();
    }
}

/// Completes what it is sent until nobody can send any more.
pub(crate) fn watch(
    rank: usize,
    receiver: Receiver<Arc<Flight>>,
) -> io::Result<thread::JoinHandle<()>> {
    let thread = thread::Builder::new().name(format!("nccl watch {rank}"));
    thread.spawn(move || {
        for flight in receiver {
            // A failure poisons the group: the next call of this rank reports it.
            let _result = flight.complete();
        }
    })
}
