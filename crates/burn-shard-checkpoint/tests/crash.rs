//! Ranks that are killed while they save: whatever the moment, the newest complete checkpoint opens,
//! verifies, and is none older than the last one that was said to be published.
//!
//! Two ranks are two processes, which save the small model in a loop and tell each other of it through
//! files. A trial lets them run for a time that comes from a seed, kills one or both of them, looks, and
//! starts them again in the same directory.
#![cfg(unix)]
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test ends at the first error, and the ranks tell it what they published"
)]

mod common;

use std::fs::{self, File};
use std::io::Write;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use burn_shard_checkpoint::{
    Checkpoint, Error, Keep, Prepared, RankReport, Writer, tell, told, told_by_all,
};
use common::{assert_holds_its_step, describe, model, names};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

const WORLD_SIZE: usize = 2;
/// Where the ranks save, their rank, and where they leave messages.
const ROOT: &str = "BURN_SHARD_TEST_CRASH_ROOT";
const RANK: &str = "BURN_SHARD_TEST_CRASH_RANK";
const MESSAGES: &str = "BURN_SHARD_TEST_CRASH_MESSAGES";
const SEED: &str = "BURN_SHARD_TEST_CRASH_SEED";
const DEADLINE: Duration = Duration::from_secs(120);

/// A collective made of files: good enough for ranks that may be killed at any time.
struct Exchange {
    directory: PathBuf,
    sent: u64,
}

impl Exchange {
    fn send(&self, rank: usize, bytes: &[u8]) {
        let path = self.path(rank);
        let temporary = path.with_extension("partial");
        fs::write(&temporary, bytes).unwrap();
        fs::rename(temporary, path).unwrap();
    }

    fn receive(&self, rank: usize) -> Vec<u8> {
        let since = Instant::now();
        loop {
            if let Ok(bytes) = fs::read(self.path(rank)) {
                return bytes;
            }
            assert!(since.elapsed() < DEADLINE, "rank {rank} is gone");
            thread::sleep(Duration::from_micros(200));
        }
    }

    fn path(&self, rank: usize) -> PathBuf {
        self.directory.join(format!("{}-{rank}", self.sent))
    }

    fn broadcast(&mut self, rank: usize, message: impl FnOnce() -> Vec<u8>) -> Vec<u8> {
        self.sent += 1;
        if rank == 0 {
            self.send(0, &message());
        }
        self.receive(0)
    }

    fn gather(&mut self, rank: usize, message: &[u8]) -> Vec<Vec<u8>> {
        self.sent += 1;
        self.send(rank, message);
        (0..WORLD_SIZE).map(|rank| self.receive(rank)).collect()
    }
}

/// Saves step after step, as the crate's page says, until `last`.
fn save_in_a_loop(root: &Path, rank: usize, exchange: &mut Exchange, last: u64) {
    let first = match Checkpoint::open(root) {
        Ok(checkpoint) => checkpoint.manifest().step + 1,
        Err(Error::NoCheckpoint { .. } | Error::Io { .. }) => 1,
        Err(other) => panic!("{other}"),
    };
    // What rank 0 saw; the other may look while it publishes already.
    let first = exchange.broadcast(rank, || first.to_string().into_bytes());
    let first = String::from_utf8(first).unwrap().parse().unwrap();
    for step in first..=last {
        let mut writer = None;
        let prepared = exchange.broadcast(rank, || {
            let created = Writer::create(root, step);
            let prepared = created.as_ref().map(|writer| writer.prepared().clone());
            let message = tell(0, &prepared.map_err(|error| panic!("{error}")));
            writer = created.ok();
            message
        });
        let prepared: Prepared = told(&prepared).unwrap();
        let joined = writer
            .is_none()
            .then(|| Writer::join(root, &prepared).unwrap());
        let model = model(step);
        let parts = model
            .iter()
            .map(|tensor| tensor.part(rank, WORLD_SIZE))
            .collect();
        let report = writer
            .as_ref()
            .or(joined.as_ref())
            .unwrap()
            .write_rank(rank, parts);
        let reports: Vec<RankReport> =
            told_by_all(exchange.gather(rank, &tell(rank, &report))).unwrap();
        let published = exchange.broadcast(rank, || {
            let keep = Keep::last(NonZeroUsize::new(3).unwrap());
            tell(0, &writer.unwrap().publish(&reports, &describe(step), keep))
        });
        told::<burn_shard_checkpoint::Published>(&published).unwrap();
        if rank == 0 {
            println!("published {step}");
        }
    }
}

/// Without [`ROOT`] both ranks are threads and save five steps; with it this is one rank, until it
/// is killed.
#[test]
fn ranks_save_in_a_loop() {
    if let Some(root) = std::env::var_os(ROOT) {
        let rank = std::env::var(RANK).unwrap().parse().unwrap();
        let directory = std::env::var_os(MESSAGES).unwrap().into();
        let mut exchange = Exchange { directory, sent: 0 };
        return save_in_a_loop(Path::new(&root), rank, &mut exchange, u64::MAX);
    }
    let (root, messages) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    thread::scope(|scope| {
        for rank in 0..WORLD_SIZE {
            let (root, directory) = (root.path(), messages.path().into());
            scope.spawn(move || {
                save_in_a_loop(root, rank, &mut Exchange { directory, sent: 0 }, 5);
            });
        }
    });
    let checkpoint = Checkpoint::open(root.path()).unwrap();
    assert_eq!(checkpoint.manifest().step, 5);
    checkpoint.verify().unwrap();
    assert_holds_its_step(&checkpoint);
}

/// What killed ranks had left behind, to see that the trials hit more than one kind of moment.
#[derive(Debug, Default)]
struct Seen {
    /// Saves that were not published: without a file, with some, with a manifest.
    empty: usize,
    files: usize,
    manifest: usize,
    /// Checkpoints that `latest` did not name yet.
    unnamed: usize,
    removals: usize,
    nothing: usize,
}

impl Seen {
    fn look(&mut self, root: &Path) {
        let names_there = names(root);
        let hidden = |suffix| {
            names_there
                .iter()
                .filter(move |name| name.ends_with(suffix))
        };
        let mut any = false;
        for name in hidden(".partial").filter(|name| name.starts_with(".step-")) {
            let inside = names(&root.join(name));
            any = true;
            if inside.iter().any(|name| name == "manifest.json") {
                self.manifest += 1;
            } else if inside.is_empty() {
                self.empty += 1;
            } else {
                self.files += 1;
            }
        }
        self.removals += hidden(".removed").count();
        let latest = fs::read_to_string(root.join("latest")).unwrap_or_default();
        let complete = |name: &&String| name.starts_with("step-");
        // By sequence number, which is the step here.
        if names_there
            .iter()
            .filter(complete)
            .max()
            .is_some_and(|newest| *newest != latest.trim())
        {
            self.unnamed += 1;
            any = true;
        }
        self.nothing += usize::from(!any);
    }
}

struct Ranks {
    children: Vec<Child>,
    output: PathBuf,
}

impl Ranks {
    fn start(root: &Path, messages: &Path) -> Self {
        let output = messages.join("output");
        let rank = |rank: usize| {
            let stdout = if rank == 0 {
                File::create(&output).unwrap().into()
            } else {
                Stdio::null()
            };
            Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "--nocapture", "ranks_save_in_a_loop"])
                .env(ROOT, root)
                .env(RANK, rank.to_string())
                .env(MESSAGES, messages)
                .stdout(stdout)
                .stderr(Stdio::null())
                .spawn()
                .unwrap()
        };
        Self {
            children: (0..WORLD_SIZE).map(rank).collect(),
            output,
        }
    }

    /// The last step that rank 0 said was published.
    fn published(&self) -> u64 {
        let text = fs::read_to_string(&self.output).unwrap();
        // A line that was cut off says nothing.
        let (lines, _) = text.rsplit_once('\n').unwrap_or_default();
        let mut steps = lines
            .lines()
            .filter_map(|line| line.rsplit_once("published ")?.1.parse().ok());
        steps.next_back().unwrap_or(0)
    }

    fn kill(&mut self, rank: usize) {
        self.children[rank].kill().unwrap();
        self.children[rank].wait().unwrap();
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for child in &mut self.children {
            let (Ok(()) | Err(_)) = child.kill();
            let (Ok(_) | Err(_)) = child.wait();
        }
    }
}

fn trials(count: usize, seed: u64) -> Seen {
    let root = tempfile::tempdir().unwrap();
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let mut seen = Seen::default();
    let mut newest = 0;
    for trial in 0..count {
        let messages = tempfile::tempdir().unwrap();
        let mut ranks = Ranks::start(root.path(), messages.path());
        // The clock starts with their first save, so that the moments are moments of saving.
        let since = Instant::now();
        while ranks.published() <= newest {
            assert!(
                since.elapsed() < DEADLINE,
                "seed {seed}, trial {trial}: nothing is saved"
            );
            thread::sleep(Duration::from_millis(1));
        }
        let (moment, victims) = (random.random_range(0..30_000), random.random_range(0..3));
        thread::sleep(Duration::from_micros(moment));
        match victims {
            0 => ranks.kill(0),
            1 => ranks.kill(1),
            _ => (0..WORLD_SIZE).for_each(|rank| ranks.kill(rank)),
        }
        let published = ranks.published();
        let look = |when: &str| {
            let checked = Checkpoint::open(root.path()).and_then(|checkpoint| {
                checkpoint.verify()?;
                Ok(checkpoint)
            });
            let context = format!("seed {seed}, trial {trial}, {when}");
            let checkpoint = checked.unwrap_or_else(|error| panic!("{context}: {error}"));
            assert_holds_its_step(&checkpoint);
            let step = checkpoint.manifest().step;
            assert!(
                step >= published,
                "{context}: {step} is older than {published}"
            );
            step
        };
        // The rank that lives on may go on with what it was at, but not for long.
        if victims == 0 {
            look("one rank lives on");
        }
        drop(ranks);
        seen.look(root.path());
        newest = look("all ranks are dead");
    }
    let (Ok(()) | Err(_)) = writeln!(std::io::stderr(), "seed {seed}: {newest} steps, {seen:?}");
    seen
}

fn seed() -> u64 {
    std::env::var(SEED).map_or(12, |seed| seed.parse().unwrap())
}

#[test]
fn nothing_is_lost_if_ranks_are_killed_at_20_random_moments() {
    trials(20, seed());
}

#[test]
#[ignore = "takes half a minute: starts 400 processes"]
fn nothing_is_lost_if_ranks_are_killed_at_200_random_moments() {
    let seen = trials(200, seed());
    assert!(
        seen.empty + seen.files + seen.manifest + seen.unnamed > 20,
        "{seen:?}"
    );
}
