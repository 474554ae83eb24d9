//! One start of a job's ranks on this host, until all of them have ended.

use std::{
    ffi::OsString,
    io,
    sync::{
        Arc,
        mpsc::{Receiver, RecvTimeoutError, Sender},
    },
    thread,
    time::{Duration, Instant, SystemTime},
};

use rustix::process::Signal;

use crate::{
    blame::{Ended, Interruption, LATE, first_to_fail},
    environment::{Environment, removed},
    error::LaunchError,
    event::Event,
    options::Options,
    outcome::{Ending, Failure, Outcome},
    output::{Remarks, Sink, Stream, Tail, relay},
    ranks::{self, Ranks},
    records::Records,
    signals,
    watch::Watch,
};

/// How long a killed rank may take to be gone. Freeing the memory of a GPU takes a while.
const AFTER_KILL: Duration = Duration::from_secs(30);
/// How long output is waited for once all ranks have ended: what they started may hold the pipe.
const FOR_OUTPUT: Duration = Duration::from_secs(2);

fn describe(options: &Options, environment: &Environment, remarks: &Remarks) {
    let (first, end) = (
        options.first_rank(),
        options.first_rank() + options.local_world_size,
    );
    let threads = match environment.threads_per_rank {
        Some(threads) => format!("RAYON_NUM_THREADS={threads} (cores by ranks; set it to choose)"),
        None => "RAYON_NUM_THREADS as it is set".to_owned(),
    };
    remarks.say(&format!(
        "ranks {first}..{end} of {}: {}; they meet at {}; {threads}",
        options.world_size(),
        options.program.display(),
        environment.master
    ));
}

/// How long the ends of ranks are gathered after the first failure, before the other ranks are told to end. The rank
/// that failed first may be one of those whose end is seen a moment later, and one that was told cannot be told apart
/// from it.
const SETTLE: Duration = LATE;

/// The time at which the launcher acts next, and what it does then.
#[derive(Clone, Copy)]
enum Deadline {
    /// The others are told to end because of this rank, see [`Job::end_others`].
    Settle(Instant, usize, Ending),
    /// The time of grace is over, see [`Job::end_of_grace`].
    Grace(Instant),
    /// Every rank should be gone by now.
    GiveUp(Instant),
}

pub(crate) struct Job<'a> {
    options: &'a Options,
    /// How often the ranks were started before.
    attempt: usize,
    sink: Arc<Sink>,
    remarks: &'a Remarks,
    ranks: Ranks,
    records: Records,
    tails: Vec<Arc<Tail>>,
    /// The ending of each rank and the time at which it was seen, by its number on this host.
    ended: Vec<Option<(Ending, SystemTime)>>,
    /// Whether a rank was told to end before it had.
    was_told: Vec<bool>,
    interruption: Option<Interruption>,
    open_streams: usize,
    deadline: Option<Deadline>,
}

impl<'a> Job<'a> {
    /// Starts the ranks and waits until they have ended.
    pub(crate) fn run(
        options: &'a Options,
        attempt: usize,
        (sink, remarks): (&Arc<Sink>, &'a Remarks),
        (sender, events): (&Sender<Event>, &Receiver<Event>),
    ) -> Result<Outcome, LaunchError> {
        let environment = Environment::new(options, attempt)?;
        let failed = |what| move |source| LaunchError::System { what, source };
        let records = Records::new().map_err(failed(
            "make a folder for what ranks record of their failures (TMPDIR chooses the place)",
        ))?;
        let mut watch = Watch::start(records.folder())
            .map_err(failed("start /bin/sh to watch the launcher"))?;
        describe(options, &environment, remarks);

        let mut job = Self {
            options,
            attempt,
            sink: Arc::clone(sink),
            remarks,
            ranks: Ranks::default(),
            records,
            tails: Vec::new(),
            ended: vec![None; options.local_world_size],
            was_told: vec![false; options.local_world_size],
            interruption: None,
            open_streams: 0,
            deadline: None,
        };
        let removed = removed();
        for local_rank in 0..options.local_world_size {
            let mut variables = environment.of(options, local_rank);
            variables.push(job.records.variable(local_rank));
            job.start(local_rank, (&variables, &removed), &mut watch, sender)?;
        }
        job.wait(events)?;
        job.drain(events);
        let outcome = job.end();
        watch.done();
        Ok(outcome)
    }

    fn start(
        &mut self,
        local_rank: usize,
        (variables, removed): (&[(&'static str, OsString)], &[OsString]),
        watch: &mut Watch,
        events: &Sender<Event>,
    ) -> Result<(), LaunchError> {
        let rank = self.rank(local_rank);
        let failed = |source: io::Error| LaunchError::Start {
            rank,
            program: self.options.program.clone(),
            source,
        };
        let started = self.ranks.start(self.options, variables, removed);
        let (pid, out, err) = started.map_err(failed)?;
        watch.add(pid).map_err(failed)?;
        let tail = Arc::new(Tail::default());
        self.tails.push(Arc::clone(&tail));
        let (sink, ended) = (Arc::clone(&self.sink), events.clone());
        let (out_sink, out_tail, out_closed) =
            (Arc::clone(&sink), Arc::clone(&tail), events.clone());
        let err_closed = events.clone();
        let attempt = self.attempt;
        in_thread(move || {
            relay(out, rank, Stream::Out, &out_sink, &out_tail);
            out_closed.send(Event::Closed { attempt }).ok();
        })?;
        in_thread(move || {
            relay(err, rank, Stream::Err, &sink, &tail);
            err_closed.send(Event::Closed { attempt }).ok();
        })?;
        in_thread(move || {
            // It can only fail if this process's own code has reaped the child.
            let ending = ranks::wait(pid).unwrap_or(Ending::Exited(1));
            ended
                .send(Event::Ended(local_rank, ending, SystemTime::now()))
                .ok();
        })?;
        self.open_streams += 2;
        Ok(())
    }

    /// Until every rank has ended.
    fn wait(&mut self, events: &Receiver<Event>) -> Result<(), LaunchError> {
        while let Some(waiting_for) = self.ended.iter().position(Option::is_none) {
            match receive(events, self.deadline.map(Deadline::at)) {
                Some(event) => self.handle(&event),
                None => match self.deadline {
                    Some(Deadline::Settle(_, local_rank, ending)) => {
                        self.deadline = None;
                        self.end_others(local_rank, ending);
                    }
                    Some(Deadline::Grace(_)) => self.end_of_grace(),
                    Some(Deadline::GiveUp(_)) | None => {
                        return Err(LaunchError::Undead {
                            rank: self.rank(waiting_for),
                            pid: self.ranks.pid(waiting_for),
                            waited: AFTER_KILL,
                        });
                    }
                },
            }
        }
        Ok(())
    }

    fn handle(&mut self, event: &Event) {
        match *event {
            Event::Ended(local_rank, ending, seen) => {
                self.ended[local_rank] = Some((ending, seen));
                if !ending.is_success() {
                    // Ranks that were told to end already may take a second signal for impatience.
                    self.deadline.get_or_insert(Deadline::Settle(
                        after(SETTLE),
                        local_rank,
                        ending,
                    ));
                }
            }
            // A stream of an earlier attempt was not waited for.
            Event::Closed { attempt } if attempt == self.attempt => self.open_streams -= 1,
            Event::Closed { .. } => {}
            Event::Signal(number) => {
                let Some(signal) = Signal::from_named_raw(number) else {
                    return;
                };
                self.ranks.signal(signal, |rank| self.is_running(rank));
                let name = signal_hook::low_level::signal_name(number).unwrap_or("a signal");
                if signals::ends(number) {
                    let at = SystemTime::now();
                    self.interruption
                        .get_or_insert(Interruption { signal: number, at });
                    let grace = self.options.grace;
                    self.remarks.say(&format!(
                        "{name} passed on; what is left is killed in {grace:?}"
                    ));
                    self.begin_grace(|_| true);
                } else {
                    self.remarks.say(&format!("{name} passed on"));
                }
            }
        }
    }

    /// After the first failure: tells the other ranks to end, but for those that have recorded that they are
    /// ending already. One of these is the cause, unless the rank that has ended is.
    fn end_others(&mut self, local_rank: usize, ending: Ending) {
        let running = (0..self.ended.len()).filter(|&rank| self.is_running(rank));
        let (leaving, staying): (Vec<usize>, Vec<usize>) =
            running.partition(|&rank| self.records.read(rank).is_some());
        let mut remark = format!("rank {} failed: {ending}", self.rank(local_rank));
        if !staying.is_empty() {
            remark += &format!("; ending {}", self.named(&staying));
        }
        if !leaving.is_empty() {
            let (named, grace) = (self.named(&leaving), self.options.grace);
            remark += &format!("; {named} may end without a signal within {grace:?}");
        }
        self.remarks.say(&remark);
        self.ranks
            .signal(Signal::TERM, |rank| staying.contains(&rank));
        self.begin_grace(|rank| staying.contains(&rank));
    }

    /// From now on the ranks that `to` picks count as told to end, and the time of grace runs.
    fn begin_grace(&mut self, to: impl Fn(usize) -> bool) {
        for rank in 0..self.ended.len() {
            self.was_told[rank] |= to(rank) && self.is_running(rank);
        }
        // A stopped process gets its signals only once it goes on.
        self.ranks
            .signal(Signal::CONT, |rank| self.is_running(rank));
        if matches!(self.deadline, None | Some(Deadline::Settle(..))) {
            self.deadline = Some(Deadline::Grace(after(self.options.grace)));
        }
    }

    /// Kills the ranks that were told to end and did not. Those that were to end without being told get as
    /// long again.
    fn end_of_grace(&mut self) {
        let running = (0..self.ended.len()).filter(|&rank| self.is_running(rank));
        let (told, spared): (Vec<usize>, Vec<usize>) =
            running.partition(|&rank| self.was_told[rank]);
        let grace = self.options.grace;
        for (ranks, signal, name) in [
            (&told, Signal::KILL, "SIGKILL"),
            (&spared, Signal::TERM, "SIGTERM"),
        ] {
            if !ranks.is_empty() {
                let named = self.named(ranks);
                self.remarks
                    .say(&format!("{named} did not end within {grace:?}: {name}"));
                self.ranks.signal(signal, |rank| ranks.contains(&rank));
            }
        }
        self.deadline = None;
        if spared.is_empty() {
            self.deadline = Some(Deadline::GiveUp(after(AFTER_KILL)));
        } else {
            self.begin_grace(|rank| spared.contains(&rank));
        }
    }

    /// Waits for the last of the output, and ends what holds the pipes after its rank.
    fn drain(&mut self, events: &Receiver<Event>) {
        let mut before = self.sink.written();
        for signal in [Signal::TERM, Signal::KILL] {
            if self.is_drained(events) {
                return;
            }
            if !self.sink.is_busy(&mut before) {
                self.remarks
                    .say("what ranks have started still holds their output: ending it");
            }
            self.ranks.signal(signal, |_| true);
        }
        // The rest is in the pipes, and goes as fast as the launcher's own reader takes it.
        while !self.is_drained(events) {
            if !self.sink.is_busy(&mut before) {
                self.remarks
                    .say("a process that left its rank's group holds its output: not waited for");
                return;
            }
        }
    }

    /// Whether all streams are closed, now or within [`FOR_OUTPUT`].
    fn is_drained(&mut self, events: &Receiver<Event>) -> bool {
        let deadline = Instant::now() + FOR_OUTPUT;
        while self.open_streams > 0 {
            let Some(event) = receive(events, Some(deadline)) else {
                return false;
            };
            self.handle(&event);
        }
        true
    }

    fn end(self) -> Outcome {
        let ended = self.ended.iter().flatten().enumerate();
        let ended: Vec<Ended> = ended
            .map(|(local_rank, &(ending, seen))| Ended {
                ending,
                seen,
                was_told: self.was_told[local_rank],
                record: self.records.read(local_rank),
            })
            .collect();
        let first_failure = first_to_fail(&ended, self.interruption).map(|local_rank| Failure {
            rank: self.rank(local_rank),
            ending: ended[local_rank].ending,
            last_lines: self.tails[local_rank].lines(),
        });
        let endings: Vec<(usize, Ending)> = (self.options.first_rank()..)
            .zip(ended.iter().map(|rank| rank.ending))
            .collect();
        self.ranks.reap();
        Outcome {
            endings,
            first_failure,
            interruption: self.interruption.map(|interruption| interruption.signal),
            restarts: self.attempt,
        }
    }

    fn is_running(&self, local_rank: usize) -> bool {
        self.ended[local_rank].is_none()
    }

    /// `rank 1, 2`, given their numbers on this host.
    fn named(&self, ranks: &[usize]) -> String {
        let ranks = ranks.iter().map(|&index| self.rank(index).to_string());
        format!("rank {}", ranks.collect::<Vec<String>>().join(", "))
    }

    fn rank(&self, local_rank: usize) -> usize {
        self.options.first_rank() + local_rank
    }
}

impl Deadline {
    const fn at(self) -> Instant {
        let (Self::Settle(at, ..) | Self::Grace(at) | Self::GiveUp(at)) = self;
        at
    }
}

/// `duration` from now, or so late that nobody will know the difference.
fn after(duration: Duration) -> Instant {
    const LATE: Duration = Duration::from_secs(1 << 30);
    Instant::now() + duration.min(LATE)
}

fn in_thread(run: impl FnOnce() + Send + 'static) -> Result<(), LaunchError> {
    let thread = thread::Builder::new().spawn(run);
    thread.map(drop).map_err(|source| LaunchError::System {
        what: "start a thread",
        source,
    })
}

/// The next event, or `None` at the deadline.
fn receive(events: &Receiver<Event>, deadline: Option<Instant>) -> Option<Event> {
    // Without a deadline too: the job itself may last as long as it likes.
    let long = Duration::from_secs(3600);
    loop {
        let wait = deadline.map_or(long, |at| at.saturating_duration_since(Instant::now()));
        match events.recv_timeout(wait) {
            Ok(event) => return Some(event),
            Err(RecvTimeoutError::Timeout) if deadline.is_none() => {}
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => return None,
        }
    }
}
