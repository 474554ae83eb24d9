//! Where ranks that are threads meet: numbered slots, one lock, one condition variable.
//!
//! Each call posts its header and its input to the slot of its number. The last rank to post compares
//! the headers and publishes the outcome; from then on every rank works on its own, reading its
//! peers' buffers directly. Nothing is torn down by agreement: inputs are owned by `Arc`s, so a rank
//! that is done may leave while others still read what it posted.
//!
//! Nothing here knows what a collective computes.

use std::{
    collections::HashMap,
    fmt,
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use parking_lot::{Condvar, Mutex};

use crate::{
    call::Call,
    communicator::{Collective, ReduceOp},
    error::Error,
    pieces::{Pieces, Shelf},
    segments::Segments,
    split::Members,
};

/// One rank's input, as its peers see it.
pub(crate) type Input = Option<Arc<dyn Segments>>;

/// Where the ranks of one group meet. Sub-groups have hubs of their own, which share one lock and one failure.
pub(crate) struct Hub {
    /// Number of the group; 0 for the one that all sub-groups come from.
    number: u64,
    /// Its ranks, as that group numbers them.
    ranks: Arc<[usize]>,
    shared: Arc<Shared>,
}

/// What a group and all its sub-groups have in common: one lock, and so one failure.
struct Shared {
    state: Mutex<State>,
    /// Signalled when an outcome is published, inputs are released, a rank leaves or the group fails.
    changed: Condvar,
    shelf: Arc<Shelf>,
}

struct State {
    groups: HashMap<u64, Group>,
    /// Number of the next sub-group.
    next_group: u64,
    /// Sub-groups that some of their ranks have not entered yet, by group, number of the split and color.
    splits: HashMap<(u64, u64, usize), Split>,
    failure: Option<Arc<Error>>,
    /// Ranks that panicked, earliest first.
    panics: Vec<(usize, String)>,
}

struct Group {
    /// The next number of each rank.
    next: Vec<u64>,
    /// Collectives some ranks have not posted yet.
    open: HashMap<u64, Open>,
    /// Ranks that will post no more.
    left: Vec<bool>,
    /// Hubs of this group that are still there, or to come.
    hubs: usize,
}

struct Split {
    group: u64,
    /// Ranks that have not entered yet.
    missing: usize,
}

struct Open {
    slot: Arc<Slot>,
    posts: Vec<Option<(Call, Input)>>,
}

/// One collective, shared by the ranks that take part.
pub(crate) struct Slot {
    pub(crate) sequence: u64,
    outcome: OnceLock<Outcome>,
}

/// What all ranks know once all have posted.
pub(crate) enum Outcome {
    /// The inputs in rank order.
    Exchanged(Vec<Input>),
    /// An `all_reduce`, cut into pieces for whoever waits first.
    Pieces(Pieces),
    /// The headers were not equal.
    Mismatch(Arc<[Call]>),
}

impl Hub {
    pub(crate) fn new(world_size: usize) -> Arc<Self> {
        Arc::new(Self {
            number: 0,
            ranks: (0..world_size).collect(),
            shared: Arc::new(Shared {
                state: Mutex::new(State {
                    groups: HashMap::from([(0, Group::new(world_size, 1))]),
                    next_group: 1,
                    splits: HashMap::new(),
                    failure: None,
                    panics: Vec::new(),
                }),
                changed: Condvar::new(),
                shelf: Arc::default(),
            }),
        })
    }

    /// One rank's way into the sub-group of `ranks` that split number `split` makes for `color`.
    pub(crate) fn enter(&self, split: u64, color: usize, ranks: Arc<[usize]>) -> Arc<Self> {
        let mut state = self.shared.state.lock();
        let State {
            groups,
            next_group,
            splits,
            ..
        } = &mut *state;
        let key = (self.number, split, color);
        let entry = splits.entry(key).or_insert_with(|| {
            let group = *next_group;
            *next_group += 1;
            groups.insert(group, Group::new(ranks.len(), ranks.len()));
            Split {
                group,
                missing: ranks.len(),
            }
        });
        entry.missing -= 1;
        let number = entry.group;
        if entry.missing == 0 {
            splits.remove(&key);
        }
        drop(state);
        Arc::new(Self {
            number,
            ranks,
            shared: Arc::clone(&self.shared),
        })
    }

    pub(crate) fn world_size(&self) -> usize {
        self.ranks.len()
    }

    /// Posts this rank's next collective; never waits.
    pub(crate) fn post(
        &self,
        members: &Members,
        call: Call,
        input: Input,
    ) -> Result<Arc<Slot>, Error> {
        let rank = members.rank;
        let mut state = self.shared.state.lock();
        if let Some(cause) = &state.failure {
            let cause = Arc::clone(cause);
            return Err(Error::Poisoned {
                rank: self.ranks[rank],
                collective: call.collective,
                cause,
            });
        }
        let group = state.group(self.number);
        let sequence = group.next[rank];
        group.next[rank] += 1;
        let open = group.open.entry(sequence).or_insert_with(|| Open {
            slot: Arc::new(Slot {
                sequence,
                outcome: OnceLock::new(),
            }),
            posts: self.ranks.iter().map(|_| None).collect(),
        });
        let slot = Arc::clone(&open.slot);
        open.posts[rank] = Some((call, input));
        let mut released = Vec::new();
        if open.posts.iter().all(Option::is_some) {
            let posts = group
                .open
                .remove(&sequence)
                .map(|open| open.posts)
                .unwrap_or_default();
            let posts = posts.into_iter().flatten().collect();
            released = self.publish(&mut state, &slot, posts, members);
        }
        drop(state);
        drop(released);
        Ok(slot)
    }

    /// Compares what all ranks posted and wakes those that wait; returns inputs nobody will read.
    #[must_use]
    fn publish(
        &self,
        state: &mut State,
        slot: &Slot,
        posts: Vec<(Call, Input)>,
        members: &Members,
    ) -> Vec<Input> {
        let (calls, mut inputs): (Vec<Call>, Vec<Input>) = posts.into_iter().unzip();
        // Only some have announced what the others do: they have nothing to exchange.
        let announced = inputs.iter().filter(|input| input.is_none()).count();
        let mixed = calls[0].collective != Collective::Broadcast
            && announced != 0
            && announced != inputs.len();
        let outcome = if mixed || calls.iter().any(|call| *call != calls[0]) {
            let described = calls.iter().zip(&inputs);
            let calls: Arc<[Call]> = described
                .map(|(call, input)| call.described(input.as_deref()))
                .collect();
            // The rank of this copy, which later calls see as their cause, means nothing.
            let cause = members.named(Error::Mismatch {
                rank: self.ranks[0],
                sequence: slot.sequence,
                calls: Arc::clone(&calls),
            });
            inputs.extend(self.fail_locked(state, cause));
            Outcome::Mismatch(calls)
        } else if calls[0].collective == Collective::AllReduce && announced == 0 {
            let op = calls[0].op.unwrap_or(ReduceOp::Sum);
            Outcome::Pieces(Pieces::new(
                &calls[0],
                op,
                std::mem::take(&mut inputs),
                &self.shared.shelf,
            ))
        } else {
            Outcome::Exchanged(std::mem::take(&mut inputs))
        };
        let first = slot.outcome.set(outcome).is_ok();
        debug_assert!(first, "a slot should be published once");
        self.shared.changed.notify_all();
        inputs
    }

    /// Waits until every rank has posted to `slot`.
    pub(crate) fn wait<'a>(
        &self,
        slot: &'a Slot,
        waiter: Waiter<'_>,
    ) -> Result<&'a Outcome, Error> {
        let outcome = self.wait_until(
            slot,
            waiter,
            || slot.outcome.get(),
            |state| Pending {
                missing: state.group(self.number).missing(slot.sequence),
                hopeless: state.failure.is_some(),
            },
        )?;
        match outcome {
            Outcome::Mismatch(calls) => Err(waiter.members.named(Error::Mismatch {
                rank: waiter.members.root_rank(),
                sequence: slot.sequence,
                calls: Arc::clone(calls),
            })),
            Outcome::Exchanged(_) | Outcome::Pieces(_) => Ok(outcome),
        }
    }

    /// Waits until the ranks that reduce `pieces` are done.
    ///
    /// They wait for nobody, so a failure elsewhere is no reason to give up.
    pub(crate) fn wait_for_pieces(
        &self,
        slot: &Slot,
        pieces: &Pieces,
        waiter: Waiter<'_>,
    ) -> Result<(), Error> {
        self.wait_until(
            slot,
            waiter,
            || pieces.released().then_some(()),
            |_| Pending {
                missing: pieces.workers(),
                hopeless: false,
            },
        )
    }

    fn wait_until<T>(
        &self,
        slot: &Slot,
        waiter: Waiter<'_>,
        done: impl Fn() -> Option<T>,
        pending: impl Fn(&mut State) -> Pending,
    ) -> Result<T, Error> {
        let Waiter {
            members,
            collective,
            deadline,
        } = waiter;
        let rank = members.root_rank();
        let sequence = slot.sequence;
        let start = Instant::now();
        let limit = start.checked_add(deadline);
        let mut state = self.shared.state.lock();
        loop {
            if let Some(value) = done() {
                return Ok(value);
            }
            let Pending { missing, hopeless } = pending(&mut state);
            let left = missing.iter().copied();
            let left: Vec<usize> = left.filter(|&r| self.has_left(&mut state, r)).collect();
            let [missing, left] = [missing, left].map(|ranks| {
                ranks
                    .into_iter()
                    .map(|rank| self.ranks[rank])
                    .collect::<Vec<_>>()
            });
            let late = limit.is_some_and(|limit| Instant::now() >= limit);
            let error = match &state.failure {
                Some(cause) if hopeless || !left.is_empty() || late => {
                    let cause = Arc::clone(cause);
                    return Err(members.named(Error::Interrupted {
                        rank,
                        collective,
                        sequence,
                        missing,
                        cause,
                    }));
                }
                _ if !left.is_empty() => Error::RankLeft {
                    rank,
                    collective,
                    sequence,
                    missing: left,
                },
                _ if late => {
                    let waited = start.elapsed();
                    Error::Deadline {
                        rank,
                        collective,
                        sequence,
                        waited,
                        missing,
                    }
                }
                _ => {
                    match limit {
                        Some(limit) => drop(self.shared.changed.wait_until(&mut state, limit)),
                        None => self.shared.changed.wait(&mut state),
                    }
                    continue;
                }
            };
            let error = members.named(error);
            let released = self.fail_locked(&mut state, error.clone());
            drop(state);
            drop(released);
            return Err(error);
        }
    }

    /// Whether a wait for `slot` would return at once.
    pub(crate) fn is_ready(&self, slot: &Slot) -> bool {
        if slot.outcome.get().is_some() {
            return true;
        }
        let mut state = self.shared.state.lock();
        let missing = state.group(self.number).missing(slot.sequence);
        state.failure.is_some() || missing.into_iter().any(|r| self.has_left(&mut state, r))
    }

    /// Wakes waiters after something they look at outside the lock has changed.
    pub(crate) fn wake(&self) {
        // A waiter either sees the change before it sleeps or holds the lock until it sleeps.
        drop(self.shared.state.lock());
        self.shared.changed.notify_all();
    }

    /// Notes that `rank` will post no more.
    pub(crate) fn leave(&self, rank: usize) {
        self.shared.state.lock().group(self.number).left[rank] = true;
        self.shared.changed.notify_all();
    }

    /// Whether a rank will post no more, here or at all.
    fn has_left(&self, state: &mut State, rank: usize) -> bool {
        state.group(self.number).left[rank] || state.group(0).left[self.ranks[rank]]
    }

    /// What poisoned the group.
    pub(crate) fn failure(&self) -> Option<Arc<Error>> {
        self.shared.state.lock().failure.clone()
    }

    /// Poisons the group, unless it is already.
    pub(crate) fn fail(&self, error: Error) {
        let mut state = self.shared.state.lock();
        let released = self.fail_locked(&mut state, error);
        drop(state);
        drop(released);
    }

    /// Poisons the group because `rank` panicked.
    pub(crate) fn panicked(&self, rank: usize, message: String) {
        let mut state = self.shared.state.lock();
        state.panics.push((rank, message.clone()));
        state.group(self.number).left[rank] = true;
        let released = self.fail_locked(&mut state, Error::RankPanicked { rank, message });
        drop(state);
        drop(released);
    }

    /// Poisons the group, unless it is already; returns inputs nobody will read.
    ///
    /// They are to be dropped after the lock: what they own may itself want to leave the group.
    #[must_use]
    fn fail_locked(&self, state: &mut State, error: Error) -> Vec<Input> {
        let mut released = Vec::new();
        if state.failure.is_none() {
            state.failure = Some(Arc::new(error));
            // Nobody will complete these: let go of the buffers, keep who had arrived.
            let groups = state.groups.values_mut();
            let open = groups.flat_map(|group| group.open.values_mut());
            let posts = open.flat_map(|open| open.posts.iter_mut().flatten());
            released.extend(posts.map(|(_, input)| input.take()));
        }
        self.shared.changed.notify_all();
        released
    }

    /// The panic that explains the others: that of the rank on which the failure began, or the first.
    pub(crate) fn first_panic(&self) -> Option<Error> {
        let state = self.shared.state.lock();
        let origin = state.failure.as_ref().and_then(|failure| failure.origin());
        let of_origin = state.panics.iter().find(|(rank, _)| Some(*rank) == origin);
        let (rank, message) = of_origin.or_else(|| state.panics.first())?.clone();
        Some(Error::RankPanicked { rank, message })
    }
}

impl State {
    fn group(&mut self, number: u64) -> &mut Group {
        let group = self.groups.get_mut(&number);
        group.expect("a group should be there as long as it has hubs")
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        let group = state.group(self.number);
        group.hubs -= 1;
        // Sub-groups look at who has left the whole group.
        if group.hubs == 0 && self.number != 0 {
            state.groups.remove(&self.number);
        }
    }
}

impl Group {
    fn new(world_size: usize, hubs: usize) -> Self {
        Self {
            next: vec![0; world_size],
            open: HashMap::new(),
            left: vec![false; world_size],
            hubs,
        }
    }

    /// Ranks that have not posted to `sequence`.
    fn missing(&self, sequence: u64) -> Vec<usize> {
        self.open.get(&sequence).map_or_else(Vec::new, |open| {
            let posts = open.posts.iter().enumerate();
            posts
                .filter(|(_, post)| post.is_none())
                .map(|(rank, _)| rank)
                .collect()
        })
    }
}

/// Why a waiter has to go on waiting.
struct Pending {
    /// The ranks it waits for.
    missing: Vec<usize>,
    /// Whether they will never be done.
    hopeless: bool,
}

/// Who waits, for what, how long.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Waiter<'a> {
    pub(crate) members: &'a Members,
    pub(crate) collective: Collective,
    pub(crate) deadline: Duration,
}

impl fmt::Debug for Hub {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.shared.state.lock();
        f.debug_struct("Hub")
            .field("number", &self.number)
            .field("ranks", &self.ranks)
            .field("groups", &state.groups.len())
            .field("failure", &state.failure)
            .finish_non_exhaustive()
    }
}
