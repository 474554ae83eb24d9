//! Ranks that are processes: the control group over TCP, NCCL's double between them.
//!
//! The test starts this program again, once per rank, to run the test `rank` alone.

#![allow(clippy::unwrap_used, reason = "a test ends at the first error")]

mod common;

use std::{
    env,
    io::{BufRead, BufReader},
    net::TcpListener,
    process::{Child, Command, Output, Stdio},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use burn_shard_comm::{Error, Local, OwnedSegments, ProcessGroup, ReduceOp};
use common::{LONG, join};

const WORLD_SIZE: usize = 2;
const WHAT: &str = "BURN_SHARD_TEST_WHAT";

struct Ranks(Vec<Child>);

/// Starts all ranks; what is left of them ends with the value.
fn start(what: &str) -> Ranks {
    let port = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let ranks = (0..WORLD_SIZE).map(|rank| {
        Command::new(env::current_exe().unwrap())
            .args(["--ignored", "--exact", "rank", "--nocapture"])
            .env(WHAT, what)
            .env("RANK", rank.to_string())
            .env("LOCAL_RANK", rank.to_string())
            .env("WORLD_SIZE", WORLD_SIZE.to_string())
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", port.to_string())
            .env("BURN_SHARD_TIMEOUT", LONG.as_secs().to_string())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    });
    Ranks(ranks.collect())
}

impl Ranks {
    fn outputs(mut self) -> Vec<Output> {
        let children = std::mem::take(&mut self.0);
        let start = Instant::now();
        let outputs = children.into_iter().map(|mut child| {
            while child.try_wait().unwrap().is_none() {
                if start.elapsed() > LONG {
                    child.kill().unwrap();
                }
                thread::sleep(Duration::from_millis(20));
            }
            child.wait_with_output().unwrap()
        });
        outputs.collect()
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _result = child.kill();
            let _result = child.wait();
        }
    }
}

fn text(output: &Output) -> String {
    let text = [&output.stdout[..], &output.stderr[..]].concat();
    String::from_utf8_lossy(&text).into_owned()
}

#[test]
fn processes_get_the_bits_of_threads() {
    let outputs = start("bits").outputs();
    let line = |output: &Output| {
        let text = text(output);
        assert!(output.status.success(), "{text}");
        text.lines()
            .find(|line| line.contains("bits:"))
            .unwrap_or_else(|| panic!("{text}"))
            .to_owned()
    };
    let threads = Local::new(WORLD_SIZE).spawn(|group| bits(&group)).unwrap();
    for (output, threads) in outputs.iter().zip(threads) {
        assert!(
            line(output).contains(&format!("bits:{threads}")),
            "{}",
            text(output)
        );
    }
}

#[test]
fn a_process_that_dies_is_named_by_the_other() {
    a_death_is_noticed("loop");
}

/// By its number in the whole group.
#[test]
fn a_process_that_dies_is_named_in_a_sub_group() {
    a_death_is_noticed("loop in a sub-group");
}

fn a_death_is_noticed(what: &str) {
    let mut ranks = start(what);
    let mut said: Vec<_> = ranks
        .0
        .iter_mut()
        .map(|rank| BufReader::new(rank.stdout.take().unwrap()).lines())
        .collect();
    for lines in &mut said {
        assert!(lines.any(|line| line.unwrap().contains("ready")));
    }
    let start = Instant::now();
    ranks.0[1].kill().unwrap();
    let text: Vec<String> = said.remove(0).map(Result::unwrap).collect();
    let text = text.join("\n");
    assert!(
        start.elapsed() < LONG / 2,
        "a death should be noticed before the deadline"
    );
    assert!(
        text.contains("failed: ") && text.contains("rank 1 is gone"),
        "{text}"
    );
}

/// Makes a sub-group of all ranks, in the other order.
fn reversed(group: &ProcessGroup) -> ProcessGroup {
    let reversed = group.split(Some(3), WORLD_SIZE - group.rank());
    reversed.unwrap().unwrap()
}

/// One number for all results of some collectives, in the group and in a sub-group.
fn bits(group: &ProcessGroup) -> u64 {
    let rank = group.rank();
    let whole = bits_of(group, rank);
    whole ^ bits_of(&reversed(group), rank).rotate_left(32)
}

fn bits_of(group: &ProcessGroup, rank: usize) -> u64 {
    let mut hash = 0u64;
    for numel in [1usize, 7, 4099, 300_001] {
        let value = |index: usize| 1.0 / (index % 977 + 3 * rank + 1) as f32;
        let input: Vec<f32> = (0..numel).map(value).collect();
        let shard = numel.div_ceil(WORLD_SIZE);
        let (mut sum, mut own, mut all) = (input.clone(), vec![0.0; shard], vec![0.0f32; numel]);
        group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
        group
            .reduce_scatter(&input, &mut own, ReduceOp::Mean)
            .unwrap();
        group.all_gather(&own, &mut all).unwrap();
        group.broadcast(&mut own, WORLD_SIZE - 1).unwrap();
        // In the order of the ranks.
        let mut inputs = vec![0.0f32; numel];
        group.all_gather(&input[..shard], &mut inputs).unwrap();
        for value in sum.iter().chain(&own).chain(&all).chain(&inputs) {
            hash = hash.rotate_left(7) ^ u64::from(value.to_bits());
        }
    }
    hash
}

/// One rank, when started by [`start`].
#[test]
#[ignore = "started by the other tests, once per rank"]
fn rank() {
    let what = env::var(WHAT).expect("started by the other tests, not by hand");
    let control = ProcessGroup::from_env().unwrap();
    let (communicator, _memory) = join(&control);
    drop(control);
    let group = ProcessGroup::new(Arc::new(communicator));
    if what == "bits" {
        println!("bits:{}", bits(&group));
        group.barrier().unwrap();
        return;
    }
    let group = if what == "loop" {
        group
    } else {
        reversed(&group)
    };
    let step = || -> Result<(), Error> {
        loop {
            group.all_reduce(&mut [1.0f32; 1000], ReduceOp::Sum)?;
            let input = Arc::new(OwnedSegments(vec![vec![1.0f32; 1000]]));
            let work = group.communicator().reduce_scatter(input, ReduceOp::Sum)?;
            work.finish(&mut OwnedSegments(vec![vec![0.0f32; 500]]))?;
        }
    };
    group.all_reduce(&mut [1.0f32], ReduceOp::Sum).unwrap();
    println!("ready");
    println!("failed: {}", step().unwrap_err());
}
