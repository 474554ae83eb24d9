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

use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::{
    call::Call,
    communicator::{Collective, ReduceOp},
    error::Error,
    pieces::Pieces,
    segments::Segments,
};

/// One rank's input, as its peers see it.
pub(crate) type Input = Option<Arc<dyn Segments>>;

pub(crate) struct Hub {
    world_size: usize,
    state: Mutex<State>,
    /// Signalled when an outcome is published, inputs are released, a rank leaves or the group fails.
    changed: Condvar,
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
        if open.posts.iter().all(Option::is_some) {
            let posts = state
                .open
                .remove(&sequence)
                .map(|open| open.posts)
                .unwrap_or_default();
            self.publish(&mut state, &slot, posts.into_iter().flatten().collect());
        }
        Ok(slot)
    }

    /// Compares what all ranks posted and wakes those that wait.
    fn publish(&self, state: &mut State, slot: &Slot, posts: Vec<(Call, Input)>) {
        let (calls, inputs): (Vec<Call>, Vec<Input>) = posts.into_iter().unzip();
        let outcome = if calls.iter().any(|call| *call != calls[0]) {
            let calls: Arc<[Call]> = calls.into();
            let (sequence, calls_of_cause) = (slot.sequence, Arc::clone(&calls));
            // The rank of this copy of the error is the one that completed the slot: nobody's fault.
            let rank = 0;
            self.fail_locked(
                state,
                Error::Mismatch {
                    rank,
                    sequence,
                    calls: calls_of_cause,
                },
            );
            Outcome::Mismatch(calls)
        } else if calls[0].collective == Collective::AllReduce {
            let op = calls[0].op.unwrap_or(ReduceOp::Sum);
            Outcome::Pieces(Pieces::new(&calls[0], op, inputs))
        } else {
            Outcome::Exchanged(inputs)
        };
        let first = slot.outcome.set(outcome).is_ok();
        debug_assert!(first, "a slot should be published once");
        self.changed.notify_all();
    }

    /// Waits until every rank has posted to `slot`.
    pub(crate) fn wait<'a>(&self, slot: &'a Slot, waiter: Waiter) -> Result<&'a Outcome, Error> {
        let state = self.state.lock();
        self.wait_locked(
            state,
            slot.sequence,
            waiter,
            || slot.outcome.get(),
            |state| state.missing(slot.sequence),
        )
        .and_then(|outcome| match outcome {
            Outcome::Mismatch(calls) => Err(Error::Mismatch {
                rank: waiter.rank,
                sequence: slot.sequence,
                calls: Arc::clone(calls),
            }),
            Outcome::Exchanged(_) | Outcome::Pieces(_) => Ok(outcome),
        })
    }

    /// Waits until the ranks that reduce `pieces` are done.
    pub(crate) fn wait_for_pieces(
        &self,
        slot: &Slot,
        pieces: &Pieces,
        waiter: Waiter,
    ) -> Result<(), Error> {
        let state = self.state.lock();
        self.wait_locked(
            state,
            slot.sequence,
            waiter,
            || pieces.released().then_some(()),
            |_| pieces.workers(),
        )
    }

    fn wait_locked<T>(
        &self,
        mut state: MutexGuard<'_, State>,
        sequence: u64,
        waiter: Waiter,
        done: impl Fn() -> Option<T>,
        missing: impl Fn(&State) -> Vec<usize>,
    ) -> Result<T, Error> {
        let Waiter {
            rank,
            collective,
            deadline,
        } = waiter;
        let start = Instant::now();
        let limit = start.checked_add(deadline);
        loop {
            if let Some(value) = done() {
                return Ok(value);
            }
            let missing = missing(&state);
            if let Some(cause) = &state.failure {
                let cause = Arc::clone(cause);
                return Err(Error::Interrupted {
                    rank,
                    collective,
                    sequence,
                    missing,
                    cause,
                });
            }
            let left: Vec<usize> = missing.iter().copied().filter(|&r| state.left[r]).collect();
            let error = if !left.is_empty() {
                Error::RankLeft {
                    rank,
                    collective,
                    sequence,
                    missing: left,
                }
            } else if limit.is_some_and(|limit| Instant::now() >= limit) {
                Error::Deadline {
                    rank,
                    collective,
                    sequence,
                    waited: start.elapsed(),
                    missing,
                }
            } else {
                match limit {
                    Some(limit) => {
                        self.changed.wait_until(&mut state, limit);
                    }
                    None => self.changed.wait(&mut state),
                }
                continue;
            };
            self.fail_locked(&mut state, error.clone());
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

    /// Poisons the group, unless it is already.
    pub(crate) fn fail(&self, error: Error) {
        self.fail_locked(&mut self.state.lock(), error);
    }

    /// Poisons the group because `rank` panicked.
    pub(crate) fn panicked(&self, rank: usize, message: String) {
        let mut state = self.state.lock();
        state.panics.push((rank, message.clone()));
        state.left[rank] = true;
        self.fail_locked(&mut state, Error::RankPanicked { rank, message });
    }

    fn fail_locked(&self, state: &mut State, error: Error) {
        if state.failure.is_none() {
            state.failure = Some(Arc::new(error));
            // Nobody will complete these: let go of the buffers, keep who had arrived.
            for (_, input) in state
                .open
                .values_mut()
                .flat_map(|open| open.posts.iter_mut().flatten())
            {
                *input = None;
            }
        }
        self.changed.notify_all();
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
