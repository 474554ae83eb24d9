//! Two hosts with two ranks each, as network namespaces, and the link between them.
//!
//! Needs root and namespaces, so it is ignored by default; `scripts/test-netns.sh` makes them and runs it.
#![cfg(target_os = "linux")]
#![allow(
    clippy::unwrap_used,
    clippy::wildcard_enum_match_arm,
    reason = "a test ends at the first error"
)]

mod processes;
#[path = "processes/programs.rs"]
mod programs;

use std::{process::Command, thread, time::Duration};

use parking_lot::{Mutex, MutexGuard};
use programs::{End, Job, Rank};

/// For what ends by itself, however busy the machine.
const SOON: Duration = Duration::from_secs(30);
const TOKEN: &str = "a secret of all ranks";

#[test]
fn this_program_can_be_a_rank() {
    programs::this_program_can_be_a_rank();
}

/// The namespaces, for one test at a time; each has an interface `cable` with one of the addresses.
struct Hosts {
    names: [String; 2],
    addresses: [String; 2],
    _alone: MutexGuard<'static, ()>,
}

impl Hosts {
    /// The hosts, with the link up.
    fn connected() -> Self {
        static ALONE: Mutex<()> = Mutex::new(());
        let two = |variable| {
            let value = std::env::var(variable);
            let value =
                value.expect("start this with scripts/test-netns.sh, which makes two hosts");
            let (first, second) = value.split_once(' ').unwrap();
            [first.to_owned(), second.to_owned()]
        };
        let hosts = Self {
            names: two("BURN_SHARD_TEST_NETNS"),
            addresses: two("BURN_SHARD_TEST_ADDRESSES"),
            _alone: ALONE.lock(),
        };
        hosts.link("up");
        hosts
    }

    fn link(&self, state: &str) {
        for name in &self.names {
            let mut ip = Command::new("ip");
            ip.args(["-n", name, "link", "set", "cable", state]);
            assert!(ip.status().unwrap().success(), "{ip:?}");
        }
    }

    /// Bytes that the first host has sent over the link.
    fn sent_bytes(&self) -> u64 {
        let mut cat = Command::new("ip");
        let file = "/sys/class/net/cable/statistics/tx_bytes";
        cat.args(["netns", "exec", &self.names[0], "cat", file]);
        let output = String::from_utf8(cat.output().unwrap().stdout).unwrap();
        output.trim().parse().unwrap()
    }

    /// Starts two ranks of `job` on each host; `change` has the last word on their variables.
    fn start(&self, job: &Job, change: impl Fn(&mut Command)) -> Vec<Rank> {
        let start = |rank: usize| {
            let host = rank / 2;
            let inner = job.command(rank);
            let mut command = Command::new("ip");
            command
                .args(["netns", "exec", &self.names[host]])
                .arg(inner.get_program())
                .args(inner.get_args())
                .env_clear()
                .env("PATH", std::env::var_os("PATH").unwrap())
                .envs(
                    inner
                        .get_envs()
                        .filter_map(|(name, value)| Some((name, value?))),
                )
                .env("MASTER_ADDR", &self.addresses[0])
                .env("BURN_SHARD_BIND", &self.addresses[host])
                .env("BURN_SHARD_TOKEN", TOKEN);
            change(&mut command);
            Rank::start(command)
        };
        (0..4).map(start).collect()
    }

    /// Fails unless each rank blames ranks of the other host, and no others.
    fn assert_blame_crosses(ends: &[End]) {
        for (rank, end) in ends.iter().enumerate() {
            let blamed = end.blamed().unwrap_or_default();
            let crosses = blamed.iter().all(|&other| other / 2 != rank / 2);
            assert!(crosses && !blamed.is_empty(), "rank {rank}: {}", end.output);
        }
    }
}

fn end_all(ranks: Vec<Rank>, limit: Duration) -> Vec<End> {
    ranks.into_iter().map(|rank| rank.end(limit)).collect()
}

#[test]
#[ignore = "needs root: scripts/test-netns.sh"]
fn ranks_of_two_hosts_exchange() {
    let hosts = Hosts::connected();
    let job = Job {
        rounds: 5,
        numel: 1_000_003,
        ..Job::new(4)
    };
    let before = hosts.sent_bytes();
    for end in end_all(hosts.start(&job, |_| ()), 2 * SOON) {
        assert!(end.output.contains("done"), "{}", end.output);
    }
    // Two ranks send half of each buffer to the other host in each of five rounds, and more.
    let sent = hosts.sent_bytes() - before;
    assert!(
        sent > 5 * 2 * 4 * 500_000,
        "{sent} bytes went over the link"
    );
}

#[test]
#[ignore = "needs root: scripts/test-netns.sh"]
fn a_cut_in_the_middle_of_a_step_ends_all_ranks_of_both_hosts() {
    let hosts = Hosts::connected();
    for numel in [1000, 1_000_003] {
        hosts.link("up");
        let timeout = Duration::from_secs(10);
        let job = Job {
            timeout,
            numel,
            ..Job::new(4)
        };
        let mut ranks = hosts.start(&job, |_| ());
        ranks.iter_mut().for_each(Rank::wait_until_ready);
        thread::sleep(Duration::from_millis(500));
        hosts.link("down");
        let ends = end_all(ranks, timeout + SOON);
        Hosts::assert_blame_crosses(&ends);
    }
}

#[test]
#[ignore = "needs root: scripts/test-netns.sh"]
fn hosts_that_do_not_reach_each_other_are_told_so_at_the_deadline() {
    let hosts = Hosts::connected();
    hosts.link("down");
    let timeout = Duration::from_secs(10);
    let job = Job {
        timeout,
        ..Job::new(4)
    };
    let ends = end_all(hosts.start(&job, |_| ()), timeout + SOON);
    Hosts::assert_blame_crosses(&ends);
    assert!(
        ends[3].output.contains("no master at"),
        "{}",
        ends[3].output
    );
}

#[test]
#[ignore = "needs root: scripts/test-netns.sh"]
fn ranks_of_two_hosts_need_an_address_and_a_token() {
    let hosts = Hosts::connected();
    let job = Job::new(4);
    let without = |variable: &str, expected: &str| {
        let ranks = hosts.start(&job, |command| {
            command.env_remove(variable);
        });
        for end in end_all(ranks, SOON) {
            assert!(end.output.contains(expected), "{}", end.output);
        }
    };
    without("BURN_SHARD_BIND", "set BURN_SHARD_BIND");
    without("BURN_SHARD_TOKEN", "without a token");
}
