//! What the files of all ranks say side by side.

use std::{
    collections::BTreeMap,
    fmt::{self, Write as _},
};

use super::dump::{Dump, Entry, FlightGroup, State};

/// Who stopped where, in which collective, and who waited for whom.
///
/// # Examples
///
/// ```no_run
/// use std::path::Path;
///
/// use burn_shard_comm::flight::{Dump, FlightReport};
///
/// let dumps = Dump::read_all(Path::new("flight"))?;
/// println!("{}", FlightReport::new(&dumps));
/// # Ok::<(), burn_shard_comm::flight::DumpError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlightReport {
    lines: Vec<String>,
}

/// Ranks that did the same.
struct Same<'a> {
    ranks: Vec<usize>,
    entry: &'a Entry,
}

impl<'a> Same<'a> {
    fn none_yet(entry: &'a Entry) -> Self {
        Self {
            ranks: Vec::new(),
            entry,
        }
    }
}

/// A group and what the ranks with a file did in it.
struct Side<'a> {
    group: &'a FlightGroup,
    ranks: BTreeMap<usize, Deeds<'a>>,
}

/// What one rank did in a group.
struct Deeds<'a> {
    /// By number; the last thousand.
    entries: BTreeMap<u64, &'a Entry>,
    /// When the rank knew of a failure, by its own clock.
    failed_ns: Option<u64>,
}

impl Deeds<'_> {
    /// The last collective of which the rank has the result.
    fn finished(&self) -> Option<u64> {
        let is_done = |entry: &&&Entry| matches!(entry.state, State::Finished | State::Agreed);
        self.entries
            .values()
            .rfind(is_done)
            .map(|entry| entry.number)
    }

    /// The first collective in which the rank was when its group failed.
    fn open(&self) -> Option<&Entry> {
        let is_open = |entry: &&&Entry| matches!(entry.state, State::Started | State::Failed);
        self.entries.values().find(is_open).copied()
    }

    /// The last collective that was not started in a group that had failed.
    fn last_in_time(&self) -> Option<&Entry> {
        let is_in_time = |entry: &&&Entry| entry.state != State::Late;
        self.entries.values().rfind(is_in_time).copied()
    }

    /// How long the rank was in a collective, in seconds of its own clock.
    fn waited(&self, number: u64) -> Option<f64> {
        let entry = self.entries.get(&number)?;
        let until = entry.ended_ns.or(self.failed_ns)?;
        Some(until.saturating_sub(entry.started_ns) as f64 / 1e9)
    }
}

impl FlightReport {
    /// Compares the files of one attempt.
    ///
    /// # Panics
    ///
    /// If there are none; [`Dump::read_all`] refuses that.
    #[must_use]
    pub fn new(dumps: &[Dump]) -> Self {
        let first = &dumps[0];
        let mut report = Self { lines: Vec::new() };
        report.say(format_args!(
            "{} of {} ranks have written their last collectives{}",
            dumps.len(),
            first.world_size,
            match first.attempt {
                0 => String::new(),
                restarts => format!(", after {restarts} restarts"),
            }
        ));
        let has_file = |rank: &usize| dumps.iter().any(|dump| dump.rank == *rank);
        let missing: Vec<usize> = (0..first.world_size)
            .filter(|rank| !has_file(rank))
            .collect();
        if !missing.is_empty() {
            report.say(format_args!(
                "{} no file: killed, ended by exit, or still running",
                have(&missing)
            ));
        }
        report.failures(dumps);
        let mut groups: BTreeMap<&[(u64, usize)], Side<'_>> = BTreeMap::new();
        for dump in dumps {
            for group in &dump.groups {
                let side = groups.entry(&group.path).or_insert_with(|| Side {
                    group,
                    ranks: BTreeMap::new(),
                });
                let failed_ns = dump.failure.as_ref().map(|failure| failure.at_ns);
                let entries = BTreeMap::new();
                side.ranks.insert(dump.rank, Deeds { entries, failed_ns });
            }
            for entry in &dump.entries {
                let side = groups.get_mut(&*dump.groups[entry.group].path);
                if let Some(deeds) = side.and_then(|side| side.ranks.get_mut(&dump.rank)) {
                    deeds.entries.insert(entry.number, entry);
                }
            }
        }
        for side in groups.into_values() {
            report.group(&side);
        }
        report
    }

    /// The sentences.
    #[must_use]
    pub fn lines(&self) -> &[String] {
        &self.lines
    }

    /// Adds a line. Texts of errors may come from anywhere: what would move the cursor is shown escaped.
    fn say(&mut self, line: impl fmt::Display) {
        let mut shown = String::new();
        for character in line.to_string().chars() {
            if character.is_control() {
                shown.extend(character.escape_default());
            } else {
                shown.push(character);
            }
        }
        self.lines.push(shown);
    }

    fn failures(&mut self, dumps: &[Dump]) {
        let failed = dumps
            .iter()
            .filter_map(|dump| Some((dump, dump.failure.as_ref()?)));
        let mut failed: Vec<_> = failed.collect();
        failed.sort_by_key(|(_, failure)| failure.at_ns);
        if failed.is_empty() {
            self.say("no rank saw its group fail");
        }
        for (place, (dump, failure)) in failed.into_iter().enumerate() {
            let order = if place == 0 { "first, " } else { "" };
            let text = failure.text.lines().next().unwrap_or_default();
            self.say(format_args!("{order}rank {} failed: {text}", dump.rank));
        }
        let left = dumps.iter().filter(|dump| dump.failure.is_none());
        let left: Vec<usize> = left.map(|dump| dump.rank).collect();
        if !left.is_empty() {
            self.say(format_args!("{} left in order", ranks_of(&left)));
        }
    }

    fn group(&mut self, side: &Side<'_>) {
        let name = name(side.group);
        if side.ranks.values().all(|deeds| deeds.entries.is_empty()) {
            return;
        }
        let who = match side.ranks.len() == side.group.ranks.len() {
            true => "all of them",
            false => "all with a file",
        };
        let by_all = side.ranks.values().map(Deeds::finished).min().flatten();
        let entry = by_all.and_then(|number| {
            let mut same = side
                .ranks
                .values()
                .filter_map(|deeds| deeds.entries.get(&number));
            same.next()
        });
        match (by_all, entry) {
            (Some(number), Some(entry)) => self.say(format_args!(
                "{name}: the last collective that {who} {} is number {number}, {entry}",
                if entry.state == State::Agreed {
                    "had started (its end is the device's)"
                } else {
                    "finished"
                }
            )),
            _ => self.say(format_args!("{name}: no collective was finished by {who}")),
        }
        if let Some(number) = self.mismatch(side, &name) {
            self.say(format_args!(
                "{name}: what came after number {number} cannot be compared"
            ));
            return;
        }
        self.waiting(side, &name);
    }

    /// The first number under which ranks did different things.
    fn mismatch(&mut self, side: &Side<'_>, name: &str) -> Option<u64> {
        let mut calls: BTreeMap<u64, BTreeMap<&str, Same<'_>>> = BTreeMap::new();
        for (&rank, deeds) in &side.ranks {
            for (&number, &entry) in &deeds.entries {
                let call = calls.entry(number).or_default();
                let same = call.entry(&*entry.identity);
                let same = same.or_insert_with(|| Same::none_yet(entry));
                same.ranks.push(rank);
            }
        }
        let (number, differing) = calls.into_iter().find(|(_, calls)| calls.len() > 1)?;
        self.say(format_args!(
            "{name}: ranks did different things as number {number}"
        ));
        for Same { ranks, entry } in differing.into_values() {
            self.say(format_args!("    {}: {entry}", ranks_of(&ranks)));
        }
        Some(number)
    }

    /// Who waited in a collective that others had not started when the group failed.
    fn waiting(&mut self, side: &Side<'_>, name: &str) {
        let mut open: BTreeMap<u64, Same<'_>> = BTreeMap::new();
        for (&rank, deeds) in &side.ranks {
            if let Some(entry) = deeds.open() {
                let same = open.entry(entry.number);
                let same = same.or_insert_with(|| Same::none_yet(entry));
                same.ranks.push(rank);
            }
        }
        for (number, Same { ranks, entry }) in open {
            let waits = ranks
                .iter()
                .filter_map(|rank| side.ranks[rank].waited(number));
            let waited = waits
                .reduce(f64::max)
                .map_or(String::new(), |seconds| format!(", for {seconds:.1} s"));
            self.say(format_args!(
                "{name}: {} in number {number}, {entry}{waited}",
                were(&ranks)
            ));
            if ranks.len() == side.group.ranks.len() {
                self.say(
                    "    all of its ranks had started it: one was stopped, or what it sent did not arrive",
                );
            }
            for (&rank, deeds) in &side.ranks {
                let last = deeds.last_in_time();
                if last.is_some_and(|last| last.number >= number) {
                    continue;
                }
                let late = match deeds.entries.get(&number) {
                    Some(_) => ", and it started this one after the failure",
                    None => "",
                };
                match last {
                    Some(last) => self.say(format_args!(
                        "    rank {rank} had not started it: its last one was number {}, {last} ({}){late}",
                        last.number,
                        state(last.state)
                    )),
                    None => self.say(format_args!("    rank {rank} had not started any{late}")),
                }
            }
            let ranks = side.group.ranks.iter().copied();
            let missing: Vec<usize> = ranks
                .filter(|rank| !side.ranks.contains_key(rank))
                .collect();
            if !missing.is_empty() {
                let missing = ranks_of(&missing);
                self.say(format_args!(
                    "    nothing is known of {missing}, without a file"
                ));
            }
        }
    }
}

impl fmt::Display for FlightReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.lines.join("\n"))
    }
}

fn name(group: &FlightGroup) -> String {
    if group.path.is_empty() {
        return "all ranks".to_owned();
    }
    let mut name = "the group of".to_owned();
    for rank in &group.ranks {
        write!(name, " {rank}").expect("writing to a string should succeed");
    }
    name
}

fn state(state: State) -> &'static str {
    match state {
        State::Started => "not finished",
        State::Finished => "finished",
        State::Agreed => "started by all ranks",
        State::Dropped => "given up",
        State::Refused => "refused",
        State::Failed => "failed",
        State::Late => "after the failure",
    }
}

/// `rank 2`, or `ranks 0, 1`.
fn ranks_of(ranks: &[usize]) -> String {
    let all: Vec<String> = ranks.iter().map(ToString::to_string).collect();
    let plural = if ranks.len() == 1 { "" } else { "s" };
    format!("rank{plural} {}", all.join(", "))
}

fn have(ranks: &[usize]) -> String {
    let verb = if ranks.len() == 1 { "has" } else { "have" };
    format!("{} {verb}", ranks_of(ranks))
}

fn were(ranks: &[usize]) -> String {
    let verb = if ranks.len() == 1 { "was" } else { "were" };
    format!("{} {verb}", ranks_of(ranks))
}
