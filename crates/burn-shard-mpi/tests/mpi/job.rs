//! A job of this test binary under `mpirun`, with a deadline.

use std::{
    env,
    io::Read,
    process::{Child, Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

/// Names what the ranks do.
pub(crate) const SCENARIO: &str = "BURN_SHARD_MPI_SCENARIO";
/// A number for them.
pub(crate) const SEED: &str = "BURN_SHARD_MPI_SEED";

const TIMEOUT: &str = "BURN_SHARD_TIMEOUT";

/// Far beyond what a job takes: the machine may be busy.
const DEADLINE: Duration = Duration::from_secs(300);

/// How a job ended.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) status: ExitStatus,
    /// What ranks and `mpirun` printed.
    pub(crate) output: String,
    pub(crate) took: Duration,
}

/// Runs `scenario` on `ranks` ranks.
///
/// # Panics
///
/// When the job does not end.
pub(crate) fn run(ranks: usize, scenario: &str, seed: u64) -> Outcome {
    run_with_timeout(None, ranks, scenario, seed)
}

/// Runs `scenario` where `BURN_SHARD_TIMEOUT` is `timeout`; see [`run`].
pub(crate) fn run_with_timeout(
    timeout: Option<&str>,
    ranks: usize,
    scenario: &str,
    seed: u64,
) -> Outcome {
    let start = Instant::now();
    let mut child = Command::new("mpirun")
        .args([
            "--allow-run-as-root",
            "--oversubscribe",
            "-n",
            &ranks.to_string(),
        ])
        .arg(env::current_exe().unwrap())
        .args([
            "rank",
            "--exact",
            "--ignored",
            "--nocapture",
            "--test-threads=1",
        ])
        .env(SCENARIO, scenario)
        .env(SEED, seed.to_string())
        .envs(timeout.map(|timeout| (TIMEOUT, timeout)))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("mpirun should be installed (Debian: openmpi-bin)");
    let stdout = child.stdout.take().map(read);
    let stderr = child.stderr.take().map(read);
    let status = wait(&mut child, start + DEADLINE);
    let output = [stdout, stderr]
        .map(|text| text.unwrap().join().unwrap())
        .join("\n");
    let status = status.unwrap_or_else(|| panic!("{scenario} did not end: {output}"));
    Outcome {
        status,
        output,
        took: start.elapsed(),
    }
}

/// Runs `scenario`, which has to end well.
pub(crate) fn succeed(ranks: usize, scenario: &str) {
    let outcome = run(ranks, scenario, 0);
    assert!(
        outcome.status.success(),
        "{scenario} on {ranks} ranks: {}",
        outcome.output
    );
    // The output of ranks is mixed, but what is written at once stays together: not "test result: ok".
    let passed = outcome.output.matches(" 1 passed; 0 failed;").count();
    assert_eq!(
        passed, ranks,
        "{scenario} on {ranks} ranks: {}",
        outcome.output
    );
}

/// None: it was ended for being late.
fn wait(child: &mut Child, end: Instant) -> Option<ExitStatus> {
    while Instant::now() < end {
        if let Some(status) = child.try_wait().unwrap() {
            return Some(status);
        }
        thread::sleep(Duration::from_millis(20));
    }
    // To be told lets mpirun end its ranks, too.
    let pid = libc::pid_t::try_from(child.id()).unwrap();
    // SAFETY: sends a signal to a child that was not waited for.
    let _sent = unsafe { libc::kill(pid, libc::SIGTERM) };
    child.wait().unwrap();
    None
}

fn read(mut from: impl Read + Send + 'static) -> thread::JoinHandle<String> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        from.read_to_end(&mut bytes).unwrap();
        String::from_utf8_lossy(&bytes).into_owned()
    })
}
