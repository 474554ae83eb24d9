//! Collectives that were started: waiting for them, and failing together.

use std::{
    io,
    sync::{
        Arc, Weak,
        mpsc::{Receiver, Sender},
    },
    thread,
    time::{Duration, Instant},
};

use burn_shard_comm::{Call, Collective, Communicator, Error, Segments, Work};
use parking_lot::Mutex;

use crate::{
    api::REMOTE_ERROR,
    comm::{Comm, pause},
    error::NcclError,
    memory::{Event, Memory},
    stage::{Launch, Stage},
};

/// How long the reason of a remote failure may take to arrive after the failure itself.
const REASON_DEADLINE: Duration = Duration::from_secs(2);
/// How long the stream may take to come to its end after an abort.
const ABORT_DEADLINE: Duration = Duration::from_secs(2);

pub(crate) const BACKEND: &str = "NCCL";

/// What one rank's collectives have in common.
pub(crate) struct Link {
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
    pub(crate) comm: Comm,
    pub(crate) memory: Arc<dyn Memory>,
    /// Not held: the rank leaves when its communicator is dropped, not when its last work is.
    pub(crate) control: Weak<dyn Communicator>,
    /// Number of the control group's first collective that is ours, if it had no other announcements.
    pub(crate) base: u64,
    /// Waits for those that nobody else waits for.
    pub(crate) watch: Sender<InFlight>,
}

impl Link {
    /// What poisoned the group, if this rank knows.
    pub(crate) fn failure(&self) -> Option<Arc<Error>> {
        let cause = self.control.upgrade()?.failure()?;
        Some(Arc::new(self.renumbered((*cause).clone())))
    }

    /// Poisons the group because of `error`, on all ranks.
    pub(crate) fn fail(&self, error: Error) -> Error {
        if let Some(control) = self.control.upgrade() {
            control.abort(&error.to_string());
        }
        self.comm.abort();
        error
    }

    /// An error of the control group, with our numbers.
    pub(crate) fn renumbered(&self, mut error: Error) -> Error {
        if let Error::Mismatch { sequence, .. }
        | Error::Deadline { sequence, .. }
        | Error::RankLeft { sequence, .. }
        | Error::Interrupted { sequence, .. }
        | Error::Backend { sequence, .. } = &mut error
        {
            *sequence = sequence.saturating_sub(self.base);
        }
        if let Error::Interrupted { cause, .. } | Error::Poisoned { cause, .. } = &mut error {
            *cause = Arc::new(self.renumbered((**cause).clone()));
        }
        error
    }
}

/// A collective whose calls are on the stream.
pub(crate) struct InFlight {
    pub(crate) link: Arc<Link>,
    pub(crate) collective: Collective,
    pub(crate) sequence: u64,
    pub(crate) deadline: Duration,
    agreement: Mutex<Agreement>,
    pub(crate) kept: Kept,
    outcome: Option<Result<(), Error>>,
}

/// Whether all ranks called the same.
enum Agreement {
    Pending(Box<dyn Work>),
    Settled(Result<(), Error>),
}

/// How a collective is called in errors.
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
        let Self {
            collective,
            sequence,
            ..
        } = *self;
        let rank = link.rank;
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
        if let Some(cause) = cause {
            link.comm.abort();
            return self.interrupted(link, cause);
        }
        link.fail(Error::Backend {
            rank,
            collective,
            sequence,
            backend: BACKEND,
            message: error.to_string(),
        })
    }

    fn interrupted(&self, link: &Link, cause: Arc<Error>) -> Error {
        Error::Interrupted {
            rank: link.rank,
            collective: self.collective,
            sequence: self.sequence,
            missing: Vec::new(),
            cause,
        }
    }
}

impl InFlight {
    pub(crate) fn new(link: &Arc<Link>, name: &Name, agreement: Box<dyn Work>, kept: Kept) -> Self {
        Self {
            link: Arc::clone(link),
            collective: name.collective,
            sequence: name.sequence,
            deadline: name.deadline,
            agreement: Mutex::new(Agreement::Pending(agreement)),
            kept,
            outcome: None,
        }
    }

    fn name(&self) -> Name {
        Name {
            collective: self.collective,
            sequence: self.sequence,
            deadline: self.deadline,
        }
    }

    /// Whether [`InFlight::complete`] would return at once.
    pub(crate) fn is_ready(&self) -> bool {
        if self.outcome.is_some() {
            return true;
        }
        let ready = match &*self.agreement.lock() {
            Agreement::Pending(work) => work.is_ready(),
            Agreement::Settled(_) => true,
        };
        ready
            && (self.settled().is_err()
                || self.kept.is_over().unwrap_or(true)
                || self.link.failure().is_some()
                || self.link.comm.async_error().is_err())
    }

    /// The error that is known by now, of this or of the group.
    pub(crate) fn failed(&self) -> Result<(), Error> {
        if let Some(outcome) = &self.outcome {
            return outcome.clone();
        }
        let cause = self.link.failure();
        cause.map_or(Ok(()), |cause| {
            Err(self.name().interrupted(&self.link, cause))
        })
    }

    /// Waits until all ranks have called this, and it is over.
    pub(crate) fn complete(&mut self) -> Result<(), Error> {
        if let Some(outcome) = &self.outcome {
            return outcome.clone();
        }
        let outcome = self.settled().and_then(|()| self.over());
        if outcome.is_err() {
            self.link.comm.abort();
        }
        self.kept.let_go();
        self.outcome = Some(outcome.clone());
        outcome
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
        loop {
            let over = self.kept.is_over();
            // In this order: an abort too lets the stream go on.
            let sound = self.link.comm.async_error();
            match sound.and(over) {
                Ok(true) => return Ok(()),
                Ok(false) => {}
                Err(error) => return Err(self.name().error(&self.link, &error)),
            }
            if self.link.failure().is_some() {
                let function = "waiting for NCCL";
                return Err(self
                    .name()
                    .error(&self.link, &NcclError::GivenUp { function }));
            }
            if start.elapsed() >= self.deadline {
                let error = NcclError::Timeout {
                    function: "what all ranks have started (a GPU, its driver or the network may hang): it",
                    waited: start.elapsed(),
                };
                return Err(self.name().error(&self.link, &error));
            }
            pause(start);
        }
    }

    /// Waits for the results of a collective that is over to come to the host.
    ///
    /// They queue behind what was started meanwhile.
    pub(crate) fn fetch(&mut self, launches: &[Launch]) -> Result<(), Error> {
        let kept = &mut self.kept;
        kept.over = false;
        let mut each = launches.iter();
        let stage = &mut kept.stage;
        let received =
            each.try_for_each(|launch| stage.receive(launch.receive, launch.result_bytes));
        let recorded = received.and_then(|()| self.kept.record());
        recorded.map_err(|error| self.name().error(&self.link, &error))?;
        self.outcome = None;
        self.complete()
    }

    /// Leaves the waiting to the watching thread.
    pub(crate) fn watch(mut self) {
        // Freed on the stream, after all that is on it by now.
        self.kept.stage.scratch.clear();
        if self.outcome.is_some() {
            return;
        }
        let watch = self.link.watch.clone();
        // The thread ends after the last sender.
        if let Err(unsent) = watch.send(self) {
            let mut unsent = unsent.0;
            let _result = unsent.complete();
        }
    }
}

/// What the stream reads and writes until it is over.
pub(crate) struct Kept {
    memory: Arc<dyn Memory>,
    input: Option<Arc<dyn Segments>>,
    pub(crate) stage: Stage,
    event: Option<Box<dyn Event>>,
    over: bool,
}

impl Kept {
    pub(crate) fn new(memory: &Arc<dyn Memory>, input: Option<Arc<dyn Segments>>) -> Self {
        Self {
            memory: Arc::clone(memory),
            input,
            stage: Stage::new(memory),
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
                let sent = std::mem::take(&mut self.stage.sent);
                let received = std::mem::take(&mut self.stage.received);
                Box::leak(Box::new((self.input.take(), sent, received)));
                return;
            }
            pause(start);
        }
        self.input = None;
        self.stage.sent.clear();
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
    receiver: Receiver<InFlight>,
) -> io::Result<thread::JoinHandle<()>> {
    let thread = thread::Builder::new().name(format!("nccl watch {rank}"));
    thread.spawn(move || {
        for mut in_flight in receiver {
            // A failure poisons the group: the next call of this rank reports it.
            let _result = in_flight.complete();
        }
    })
}
