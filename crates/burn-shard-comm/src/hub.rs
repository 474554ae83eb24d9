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
};

/// One rank's input, as its peers see it.
pub(crate) type Input = Option<Arc<dyn Segments>>;

pub(crate) struct Hub {
    world_size: usize,
    state: Mutex<State>,
    /// Signalled when an outcome is published, inputs are released, a rank leaves or the group fails.
    changed: Condvar,
    shelf: Arc<Shelf>,
}

struct State {
    /// The next number of each rank.
    next: Vec<u64>,
    /// Collectives some ranks have not posted yet.
    open: HashMap<u64, Open>,
    /// Ranks that will post no more.
    left: Vec<bool>,
    failure: Option<Arc<Error>>,
    /// Ranks that panicked, earliest first.
    panics: Vec<(usize, String)>,
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
            world_size,
            state: Mutex::new(State {
                next: vec![0; world_size],
                open: HashMap::new(),
                left: vec![false; world_size],
                failure: None,
                panics: Vec::new(),
            }),
            changed: Condvar::new(),
            shelf: Arc::default(),
        })
    }

    pub(crate) const fn world_size(&self) -> usize {
        self.world_size
    }

    /// Posts this rank's next collective; never waits.
    pub(crate) fn post(&self, rank: usize, call: Call, input: Input) -> Result<Arc<Slot>, Error> {
        let mut state = self.state.lock();
        if let Some(cause) = &state.failure {
            let cause = Arc::clone(cause);
            return Err(Error::Poisoned {
                rank,
                collective: call.collective,
                cause,
            });
        }
        let sequence = state.next[rank];
        state.next[rank] += 1;
        let open = state.open.entry(sequence).or_insert_with(|| Open {
            slot: Arc::new(Slot {
                sequence,
                outcome: OnceLock::new(),
            }),
            posts: (0..self.world_size).map(|_| None).collect(),
        });
        let slot = Arc::clone(&open.slot);
        open.posts[rank] = Some((call, input));
        let mut released = Vec::new();
        if open.posts.iter().all(Option::is_some) {
            let posts = state
                .open
                .remove(&sequence)
                .map(|open| open.posts)
                .unwrap_or_default();
            released = self.publish(&mut state, &slot, posts.into_iter().flatten().collect());
        }
        drop(state);
        drop(released);
        Ok(slot)
    }

    /// Compares what all ranks posted and wakes those that wait; returns inputs nobody will read.
    #[must_use]
    fn publish(&self, state: &mut State, slot: &Slot, posts: Vec<(Call, Input)>) -> Vec<Input> {
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
            let cause = Error::Mismatch {
                rank: 0,
                sequence: slot.sequence,
                calls: Arc::clone(&calls),
            };
            inputs.extend(self.fail_locked(state, cause));
            Outcome::Mismatch(calls)
        } else if calls[0].collective == Collective::AllReduce && announced == 0 {
            let op = calls[0].op.unwrap_or(ReduceOp::Sum);
            Outcome::Pieces(Pieces::new(
                &calls[0],
                op,
                std::mem::take(&mut inputs),
                &self.shelf,
            ))
        } else {
            Outcome::Exchanged(std::mem::take(&mut inputs))
        };
        let first = slot.outcome.set(outcome).is_ok();
        debug_assert!(first, "a slot should be published once");
        self.changed.notify_all();
        inputs
    }

    /// Waits until every rank has posted to `slot`.
    pub(crate) fn wait<'a>(&self, slot: &'a Slot, waiter: Waiter) -> Result<&'a Outcome, Error> {
        let outcome = self.wait_until(
            slot,
            waiter,
            || slot.outcome.get(),
            |state| Pending {
                missing: state.missing(slot.sequence),
                hopeless: state.failure.is_some(),
            },
        )?;
        match outcome {
            Outcome::Mismatch(calls) => Err(Error::Mismatch {
                rank: waiter.rank,
                sequence: slot.sequence,
                calls: Arc::clone(calls),
            }),
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
        waiter: Waiter,
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
        waiter: Waiter,
        done: impl Fn() -> Option<T>,
        pending: impl Fn(&State) -> Pending,
    ) -> Result<T, Error> {
        let Waiter {
            rank,
            collective,
            deadline,
        } = waiter;
        let sequence = slot.sequence;
        let start = Instant::now();
        let limit = start.checked_add(deadline);
        let mut state = self.state.lock();
        loop {
            if let Some(value) = done() {
                return Ok(value);
            }
            let Pending { missing, hopeless } = pending(&state);
            let left: Vec<usize> = missing.iter().copied().filter(|&r| state.left[r]).collect();
            let late = limit.is_some_and(|limit| Instant::now() >= limit);
            let error = match &state.failure {
                Some(cause) if hopeless || !left.is_empty() || late => {
                    let cause = Arc::clone(cause);
                    return Err(Error::Interrupted {
                        rank,
                        collective,
                        sequence,
                        missing,
                        cause,
                    });
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
                        Some(limit) => drop(self.changed.wait_until(&mut state, limit)),
                        None => self.changed.wait(&mut state),
                    }
                    continue;
                }
            };
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
        let state = self.state.lock();
        state.failure.is_some()
            || state
                .missing(slot.sequence)
                .into_iter()
                .any(|rank| state.left[rank])
    }

    /// Wakes waiters after something they look at outside the lock has changed.
    pub(crate) fn wake(&self) {
        // A waiter either sees the change before it sleeps or holds the lock until it sleeps.
        drop(self.state.lock());
        self.changed.notify_all();
    }

    /// Notes that `rank` will post no more.
    pub(crate) fn leave(&self, rank: usize) {
        self.state.lock().left[rank] = true;
        self.changed.notify_all();
    }

    /// What poisoned the group.
    pub(crate) fn failure(&self) -> Option<Arc<Error>> {
        self.state.lock().failure.clone()
    }

    /// Poisons the group, unless it is already.
    pub(crate) fn fail(&self, error: Error) {
        let mut state = self.state.lock();
        let released = self.fail_locked(&mut state, error);
        drop(state);
        drop(released);
    }

    /// Poisons the group because `rank` panicked.
    pub(crate) fn panicked(&self, rank: usize, message: String) {
        let mut state = self.state.lock();
        state.panics.push((rank, message.clone()));
        state.left[rank] = true;
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
            let posts = state
                .open
                .values_mut()
                .flat_map(|open| open.posts.iter_mut().flatten());
            released.extend(posts.map(|(_, input)| input.take()));
        }
        self.changed.notify_all();
        released
    }

    /// The panic that explains the others: that of the rank on which the failure began, or the first.
    pub(crate) fn first_panic(&self) -> Option<Error> {
        let state = self.state.lock();
        let origin = state.failure.as_ref().and_then(|failure| failure.origin());
        let of_origin = state.panics.iter().find(|(rank, _)| Some(*rank) == origin);
        let (rank, message) = of_origin.or_else(|| state.panics.first())?.clone();
        Some(Error::RankPanicked { rank, message })
    }
}

impl State {
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
pub(crate) struct Waiter {
    pub(crate) rank: usize,
    pub(crate) collective: Collective,
    pub(crate) deadline: Duration,
}

impl fmt::Debug for Hub {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.state.lock();
        f.debug_struct("Hub")
            .field("world_size", &self.world_size)
            .field("next", &state.next)
            .field("open", &state.open.len())
            .field("failure", &state.failure)
            .finish_non_exhaustive()
    }
}
