//! The life of a job on this host.

use std::{
    io,
    sync::{
        Arc,
        mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    },
    thread,
    time::{Duration, Instant},
};

use rustix::process::Signal;

use crate::{
    environment::Environment,
    error::LaunchError,
    event::Event,
    options::Options,
    outcome::{Ending, Failure, Outcome},
    output::{Remarks, Sink, Stream, Tail, relay},
    ranks::{self, Ranks},
    signals,
    watch::Watch,
};

/// How long a killed rank may take to be gone. Freeing the memory of a GPU takes a while.
const AFTER_KILL: Duration = Duration::from_secs(30);
/// How long output is waited for once all ranks have ended: what they started may hold the pipe.
const FOR_OUTPUT: Duration = Duration::from_secs(2);

/// Starts the ranks of this host, passes on what they write and the signals that come, and returns when
/// all have ended.
///
/// From here on SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 are the launcher's; they stay without effect
/// afterwards, so a program should end soon after its launch. Children of this process that are not ranks
/// are left alone.
///
/// # Errors
///
/// A rank that fails is an [`Outcome`]. Refusals (see [`LaunchError`]) come before anything is started;
/// if a rank cannot be started, those before it are killed.
///
/// # Panics
///
/// When the system has no thread left.
pub fn launch(options: &Options) -> Result<Outcome, LaunchError> {
    options.check()?;
    let failed = |source| LaunchError::System {
        what: "start a thread",
        source,
    };
    let sink = Arc::new(Sink::default());
    let remarks = Remarks::start(Arc::clone(&sink)).map_err(failed)?;
    let outcome = run(options, sink, &remarks);
    remarks.finish();
    outcome
}

fn run(options: &Options, sink: Arc<Sink>, remarks: &Remarks) -> Result<Outcome, LaunchError> {
    let environment = Environment::new(options)?;
    let (sender, events) = channel();
    let failed = |what| move |source| LaunchError::System { what, source };
    let signals = signals::Receiver::start(sender.clone()).map_err(failed("receive signals"))?;
    let mut watch = Watch::start().map_err(failed("start /bin/sh to watch the launcher"))?;
    describe(options, &environment, remarks);

    let mut job = Job {
        options,
        sink,
        remarks,
        ranks: Ranks::default(),
        tails: Vec::new(),
        endings: vec![None; options.local_world_size],
        first_failure: None,
        open_streams: 0,
        deadline: None,
    };
    for local_rank in 0..options.local_world_size {
        job.start(local_rank, &environment, &mut watch, &sender)?;
    }
    job.wait(&events)?;
    job.drain(&events);
    let outcome = job.end();
    watch.done();
    drop(signals);
    Ok(outcome)
}

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

/// When patience ends, and what then.
#[derive(Clone, Copy)]
enum Deadline {
    Kill(Instant),
    GiveUp(Instant),
}

struct Job<'a> {
    options: &'a Options,
    sink: Arc<Sink>,
    remarks: &'a Remarks,
    ranks: Ranks,
    tails: Vec<Arc<Tail>>,
    endings: Vec<Option<Ending>>,
    /// By its number on this host.
    first_failure: Option<(usize, Ending, Instant)>,
    open_streams: usize,
    deadline: Option<Deadline>,
}

impl Job<'_> {
    fn start(
        &mut self,
        local_rank: usize,
        environment: &Environment,
        watch: &mut Watch,
        events: &Sender<Event>,
    ) -> Result<(), LaunchError> {
        let rank = self.rank(local_rank);
        let failed = |source: io::Error| LaunchError::Start {
            rank,
            program: self.options.program.clone(),
            source,
        };
        let variables = environment.of(self.options, local_rank);
        let (pid, out, err) = self.ranks.start(self.options, variables).map_err(failed)?;
        watch.add(pid).map_err(failed)?;
        let tail = Arc::new(Tail::default());
        self.tails.push(Arc::clone(&tail));
        let (sink, ended) = (Arc::clone(&self.sink), events.clone());
        let (out_sink, out_tail, out_closed) =
            (Arc::clone(&sink), Arc::clone(&tail), events.clone());
        let err_closed = events.clone();
        thread::spawn(move || {
            relay(out, rank, Stream::Out, &out_sink, &out_tail);
            out_closed.send(Event::Closed).ok();
        });
        thread::spawn(move || {
            relay(err, rank, Stream::Err, &sink, &tail);
            err_closed.send(Event::Closed).ok();
        });
        thread::spawn(move || {
            // It can only fail if this process's own code has reaped the child.
            let ending = ranks::wait(pid).unwrap_or(Ending::Exited(1));
            ended.send(Event::Ended(local_rank, ending)).ok();
        });
        self.open_streams += 2;
        Ok(())
    }

    /// Until every rank has ended.
    fn wait(&mut self, events: &Receiver<Event>) -> Result<(), LaunchError> {
        while let Some(waiting_for) = self.endings.iter().position(Option::is_none) {
            match receive(events, self.deadline.map(Deadline::at)) {
                Some(event) => self.handle(&event),
                None if matches!(self.deadline, Some(Deadline::Kill(_))) => {
                    self.remarks.say(&format!(
                        "{} did not end within {:?}: SIGKILL",
                        self.running(),
                        self.options.grace
                    ));
                    self.signal_running(Signal::KILL);
                    self.deadline = Some(Deadline::GiveUp(Instant::now() + AFTER_KILL));
                }
                None => {
                    return Err(LaunchError::Undead {
                        rank: self.rank(waiting_for),
                        pid: self.ranks.pid(waiting_for),
                        waited: AFTER_KILL,
                    });
                }
            }
        }
        Ok(())
    }

    fn handle(&mut self, event: &Event) {
        match *event {
            Event::Ended(local_rank, ending) => {
                self.endings[local_rank] = Some(ending);
                self.look_at(local_rank, ending);
            }
            Event::Closed => self.open_streams -= 1,
            Event::Signal(number) => {
                let Some(signal) = Signal::from_named_raw(number) else {
                    return;
                };
                self.signal_running(signal);
                let name = signal_hook::low_level::signal_name(number).unwrap_or("a signal");
                if signals::ends(number) {
                    let grace = self.options.grace;
                    self.remarks.say(&format!(
                        "{name} passed on; what is left is killed in {grace:?}"
                    ));
                    self.kill_in_time();
                } else {
                    self.remarks.say(&format!("{name} passed on"));
                }
            }
        }
    }

    fn look_at(&mut self, local_rank: usize, ending: Ending) {
        let now = Instant::now();
        match self.first_failure {
            _ if ending.is_success() => {}
            None => {
                self.first_failure = Some((local_rank, ending, now));
                self.end_others(local_rank, ending);
            }
            // A rank that the launcher itself has killed explains nothing.
            Some(_) if matches!(self.deadline, Some(Deadline::GiveUp(_))) => {}
            Some((_, first, at)) if ending.explains(first, now - at) => {
                self.first_failure = Some((local_rank, ending, at));
            }
            Some(_) => {}
        }
    }

    fn end_others(&mut self, local_rank: usize, ending: Ending) {
        // Ranks that were told to end already may take a second signal for impatience.
        if self.deadline.is_some() || self.endings.iter().all(Option::is_some) {
            return;
        }
        let rank = self.rank(local_rank);
        self.remarks.say(&format!(
            "rank {rank} failed: {ending}; ending {}",
            self.running()
        ));
        self.signal_running(Signal::TERM);
        self.kill_in_time();
    }

    fn kill_in_time(&mut self) {
        // A stopped process gets its signals only once it goes on.
        self.signal_running(Signal::CONT);
        self.deadline
            .get_or_insert(Deadline::Kill(Instant::now() + self.options.grace));
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
        let first_failure = self.first_failure.map(|(local_rank, ending, _)| Failure {
            rank: self.options.first_rank() + local_rank,
            ending,
            last_lines: self.tails[local_rank].lines(),
        });
        let endings: Vec<(usize, Ending)> = (self.options.first_rank()..)
            .zip(self.endings.into_iter().flatten())
            .collect();
        self.ranks.reap();
        if let Some(failure) = &first_failure {
            report(failure, &endings, self.remarks);
        }
        Outcome {
            endings,
            first_failure,
        }
    }

    fn signal_running(&self, signal: Signal) {
        self.ranks
            .signal(signal, |local_rank| self.endings[local_rank].is_none());
    }

    fn running(&self) -> String {
        let running = self
            .endings
            .iter()
            .enumerate()
            .filter(|(_, ending)| ending.is_none());
        let running: Vec<String> = running
            .map(|(index, _)| self.rank(index).to_string())
            .collect();
        format!("rank {}", running.join(", "))
    }

    fn rank(&self, local_rank: usize) -> usize {
        self.options.first_rank() + local_rank
    }
}

impl Deadline {
    const fn at(self) -> Instant {
        let (Self::Kill(at) | Self::GiveUp(at)) = self;
        at
    }
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

fn report(failure: &Failure, endings: &[(usize, Ending)], remarks: &Remarks) {
    let Failure {
        rank,
        ending,
        last_lines,
    } = failure;
    remarks.say(&format!("rank {rank} was the first to fail: {ending}"));
    let others = endings.iter().filter(|(other, _)| other != rank);
    let others: Vec<String> = others
        .map(|(other, ending)| format!("rank {other}: {ending}"))
        .collect();
    if !others.is_empty() {
        remarks.say(&format!("the others: {}", others.join(", ")));
    }
    if last_lines.is_empty() {
        remarks.say(&format!("rank {rank} has written nothing"));
        return;
    }
    remarks.say(&format!("last lines of rank {rank}:"));
    for line in last_lines {
        remarks.quote(line);
    }
}
