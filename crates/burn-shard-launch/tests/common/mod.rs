//! Launchers of shell scripts, and what is left of them.
#![allow(dead_code, reason = "each test file uses a part")]
#![allow(clippy::unwrap_used, reason = "a test ends at the first error")]

use std::{
    fs,
    io::{BufRead, BufReader},
    process::{Child, ChildStdout, Command, ExitStatus, Output, Stdio},
    sync::{
        atomic::{AtomicUsize, Ordering},
        mpsc::{RecvTimeoutError, Sender, channel},
    },
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};

/// Long, because machines that run tests are busy. No test waits that long when all is well.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);
const TOO_LONG: Duration = PATIENCE.saturating_mul(2);
const MARK: &str = "BURN_SHARD_LAUNCH_TEST";

/// One launch; the processes that belong to it are known by a variable they inherit.
pub(crate) struct Job {
    mark: String,
    command: Command,
    /// Dropped with the job; see [`watch`].
    end: Option<Sender<()>>,
    started: Instant,
}

/// Kills what belongs to a job that lasts too long, so that its test fails instead of hanging.
fn watch(mark: String) -> Sender<()> {
    let (end, ended) = channel();
    std::thread::spawn(move || {
        if ended.recv_timeout(TOO_LONG) == Err(RecvTimeoutError::Timeout) {
            for (pid, line) in processes(&mark) {
                eprintln!("killed after {TOO_LONG:?}: {line}");
                kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).ok();
            }
        }
    });
    end
}

impl Job {
    /// `burn-shard launch` with these arguments, each rank runs `script`.
    pub(crate) fn new(arguments: &str, script: &str) -> Self {
        Self::of(arguments, &["sh", "-c", script])
    }

    pub(crate) fn of(arguments: &str, program: &[&str]) -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let mark = format!(
            "{}-{}",
            std::process::id(),
            NEXT.fetch_add(1, Ordering::Relaxed)
        );
        let mut command = Command::new(env!("CARGO_BIN_EXE_burn-shard"));
        command
            .arg("launch")
            .args(arguments.split_whitespace())
            .arg("--")
            .args(program);
        for inherited in [
            "BURN_SHARD_TOKEN",
            "BURN_SHARD_JOB_ID",
            "BURN_SHARD_BIND",
            "BURN_SHARD_ERROR_FILE",
            "RAYON_NUM_THREADS",
        ] {
            command.env_remove(inherited);
        }
        command.env(MARK, &mark);
        let (end, started) = (None, Instant::now());
        Self {
            mark,
            command,
            end,
            started,
        }
    }

    pub(crate) fn env(mut self, name: &str, value: &str) -> Self {
        self.command.env(name, value);
        self
    }

    /// Starts the launcher from a shell that does something first; `"$@"` is the launcher.
    pub(crate) fn wrap(&mut self, script: &str) {
        let mut shell = Command::new("sh");
        shell
            .args(["-c", script, "sh"])
            .arg(self.command.get_program())
            .args(self.command.get_args());
        for (name, value) in self.command.get_envs() {
            match value {
                Some(value) => shell.env(name, value),
                None => shell.env_remove(name),
            };
        }
        self.command = shell;
    }

    /// Runs the launch to its end; fails if anything is left of it.
    pub(crate) fn run(mut self) -> Output {
        self.end = Some(watch(self.mark.clone()));
        let output = self.command.stdin(Stdio::null()).output().unwrap();
        self.assert_gone();
        output
    }

    pub(crate) fn start(mut self) -> Running {
        self.end = Some(watch(self.mark.clone()));
        self.command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut launcher = self.command.spawn().unwrap();
        let out = BufReader::new(launcher.stdout.take().unwrap());
        Running {
            launcher,
            out,
            job: self,
        }
    }

    /// Waits until no process of this launch is left.
    pub(crate) fn assert_gone(&self) {
        let start = Instant::now();
        loop {
            let left = self.processes();
            if left.is_empty() {
                assert!(self.started.elapsed() < TOO_LONG, "it had to be killed");
                return;
            }
            assert!(start.elapsed() < PATIENCE, "still there: {left:?}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Number and command line of every process of this launch, the launcher included.
    pub(crate) fn processes(&self) -> Vec<(i32, String)> {
        processes(&self.mark)
    }
}

fn processes(mark: &str) -> Vec<(i32, String)> {
    let wanted = format!("{MARK}={mark}").into_bytes();
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let Some(pid) = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok())
        else {
            continue;
        };
        // A zombie's environment is empty; a process may end while it is looked at.
        let environment = fs::read(entry.path().join("environ")).unwrap_or_default();
        if environment
            .split(|&byte| byte == 0)
            .any(|variable| variable == wanted)
        {
            let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
            found.push((pid, String::from_utf8_lossy(&line).replace('\0', " ")));
        }
    }
    found
}

/// A launch that is under way.
pub(crate) struct Running {
    pub(crate) launcher: Child,
    pub(crate) out: BufReader<ChildStdout>,
    pub(crate) job: Job,
}

impl Running {
    /// Reads until `count` lines that hold `text` have come.
    pub(crate) fn wait_for(&mut self, text: &str, count: usize) {
        let mut seen = 0;
        while seen < count {
            let mut line = String::new();
            assert_ne!(
                self.out.read_line(&mut line).unwrap(),
                0,
                "the output ended without {text:?}"
            );
            seen += usize::from(line.contains(text));
        }
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.launcher), signal).unwrap();
    }

    /// How it ended, the rest of its output, and what it wrote to the standard error.
    pub(crate) fn end(self) -> (ExitStatus, String, String) {
        let Self {
            mut launcher,
            mut out,
            job,
        } = self;
        let mut err = launcher.stderr.take().unwrap();
        let err = std::thread::spawn(move || std::io::read_to_string(&mut err).unwrap());
        let out = std::io::read_to_string(&mut out).unwrap();
        let status = launcher.wait().unwrap();
        job.assert_gone();
        (status, out, err.join().unwrap())
    }
}

pub(crate) fn kill(pid: i32, signal: Signal) {
    kill_process(Pid::from_raw(pid).unwrap(), signal).unwrap();
}

pub(crate) fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}
