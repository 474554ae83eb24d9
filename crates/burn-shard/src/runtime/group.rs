//! One group of parameters on one rank, and the states it can be in.
//!
//! ```text
//! params   Sharded --start--> Gathering --finish--> Gathered --reshard--> Sharded
//! grads    Idle --collect--> Collecting --start--> Reducing --complete--> Reduced --take--> Idle
//! ```
//!
//! After PyTorch's `FSDPParamGroup`. What is *done* when is decided in `unshard.rs` and `reduce.rs`;
//! here stands what is possible.

use std::any::Any;
use std::sync::Arc;

use burn_shard_comm::Work;

use super::collective_io::CollectiveInput;
use super::pass::PassId;
use crate::storage::flat::{Flat, FlatTensor};

/// The state of one group.
#[derive(Debug, Default)]
pub(crate) struct ParamGroup {
    pub(crate) params: Params,
    pub(crate) grads: Grads,
    /// By member: gradients of earlier passes that were not reduced, summed, in the type of the stored
    /// parameters. Empty if there are none.
    pub(crate) accumulated: Vec<Option<FlatTensor>>,
    /// By member: what the autodiff seam made of the parameter's first read. Dropped when the
    /// parameter is.
    reads: Vec<Option<CachedRead>>,
    /// How often whole parameters were dropped.
    reshards: u64,
}

/// The first read of a parameter in a pass, which later reads share.
#[derive(Clone)]
struct CachedRead {
    pass: PassId,
    /// Which stored tensor was read.
    key: u64,
    read: Arc<dyn Any + Send + Sync>,
}

impl std::fmt::Debug for CachedRead {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CachedRead")
            .field("pass", &self.pass)
            .finish_non_exhaustive()
    }
}

/// Where the parameters of a group are.
#[derive(Debug, Default)]
pub(crate) enum Params {
    /// Parameters as they are stored.
    #[default]
    Sharded,
    /// A gather has been started ahead of their use.
    Gathering(Gather),
    /// Whole, in the compute type.
    Gathered(Gathered),
}

/// A gather that was started.
pub(crate) struct Gather {
    /// The shards it reads; other shards are another value of the module.
    pub(crate) shards: Flat,
    pub(crate) work: Box<dyn Work>,
}

impl std::fmt::Debug for Gather {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gather").finish_non_exhaustive()
    }
}

/// Whole parameters.
#[derive(Debug)]
pub(crate) struct Gathered {
    /// What they were made from.
    pub(crate) shards: Flat,
    /// By member.
    pub(crate) full: Vec<FlatTensor>,
    /// By member: not read since.
    pub(crate) unread: Vec<bool>,
    pub(crate) last_read: u64,
}

/// Where the gradients of a group are.
#[derive(Debug, Default)]
pub(crate) enum Grads {
    /// None has come.
    #[default]
    Idle,
    /// By member: the sum over the reads of this pass so far.
    Collecting(Vec<Option<FlatTensor>>),
    /// Over the ranks.
    Reducing(Reduction),
    /// By member: the average; of members that take no part, none.
    Reduced(Vec<Option<FlatTensor>>),
}

/// A reduction that was started.
pub(crate) struct Reduction {
    /// Indices of the parameters that take part: those that require a gradient.
    pub(crate) members: Vec<usize>,
    /// Bytes of this rank's gradients.
    pub(crate) held_bytes: usize,
    pub(crate) input: CollectiveInput,
    pub(crate) work: Box<dyn Work>,
}

impl std::fmt::Debug for Reduction {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reduction")
            .field("members", &self.members)
            .finish_non_exhaustive()
    }
}

impl Grads {
    /// The sum of one member so far, to be added to.
    pub(crate) fn collect(&mut self, members: usize, member: usize) -> &mut Option<FlatTensor> {
        if matches!(self, Self::Idle) {
            *self = Self::Collecting(vec![None; members]);
        }
        match self {
            Self::Collecting(sums) => &mut sums[member],
            Self::Idle | Self::Reducing(_) | Self::Reduced(_) => {
                panic!("a gradient came after the reduction of its group: {self:?}")
            }
        }
    }

    /// Takes what was collected, to reduce or to accumulate it.
    pub(crate) fn take_collected(&mut self, members: usize) -> Vec<Option<FlatTensor>> {
        match std::mem::take(self) {
            Self::Idle => vec![None; members],
            Self::Collecting(sums) => sums,
            other @ (Self::Reducing(_) | Self::Reduced(_)) => {
                panic!("a group was reduced twice in one pass: {other:?}")
            }
        }
    }

    /// Takes the reduction that was started.
    pub(crate) fn take_reduction(&mut self) -> Reduction {
        match std::mem::take(self) {
            Self::Reducing(reduction) => reduction,
            other @ (Self::Idle | Self::Collecting(_) | Self::Reduced(_)) => {
                panic!("a reduction was completed that had not been started: {other:?}")
            }
        }
    }

    /// Takes the averages.
    pub(crate) fn take_reduced(&mut self) -> Option<Vec<Option<FlatTensor>>> {
        match std::mem::take(self) {
            Self::Idle => None,
            Self::Reduced(averages) => Some(averages),
            other @ (Self::Collecting(_) | Self::Reducing(_)) => {
                panic!("a pass ended before the reduction of a group: {other:?}")
            }
        }
    }
}

impl ParamGroup {
    /// Drops the whole parameters, or gives up their gather.
    pub(crate) fn reshard(&mut self) {
        if matches!(std::mem::take(&mut self.params), Params::Gathered(_)) {
            self.reshards += 1;
        }
        self.reads.clear();
    }

    /// How often whole parameters were dropped: a read after that is another read.
    pub(crate) fn reshards(&self) -> u64 {
        self.reshards
    }

    /// The gathered parameters, if they were made from `shards`.
    pub(crate) fn gathered_from(&mut self, shards: &Flat) -> Option<&mut Gathered> {
        match &mut self.params {
            Params::Gathered(gathered) if gathered.shards.is(shards) => Some(gathered),
            Params::Sharded | Params::Gathering(_) | Params::Gathered(_) => None,
        }
    }

    /// Whether whole parameters were made from `shards`, or are about to be.
    pub(crate) fn is_made_from(&self, shards: &Flat) -> bool {
        match &self.params {
            Params::Sharded => false,
            Params::Gathering(gather) => gather.shards.is(shards),
            Params::Gathered(gathered) => gathered.shards.is(shards),
        }
    }

    /// Takes the gather that was started from `shards`.
    pub(crate) fn take_gather_of(&mut self, shards: &Flat) -> Option<Gather> {
        match std::mem::take(&mut self.params) {
            Params::Gathering(gather) if gather.shards.is(shards) => Some(gather),
            other @ (Params::Sharded | Params::Gathering(_) | Params::Gathered(_)) => {
                self.params = other;
                None
            }
        }
    }

    /// The read of a member that this pass has made of the stored tensor `key`.
    pub(crate) fn cached_read(
        &self,
        pass: PassId,
        member: usize,
        key: u64,
    ) -> Option<Arc<dyn Any + Send + Sync>> {
        let cached = self.reads.get(member)?.as_ref()?;
        ((cached.pass, cached.key) == (pass, key)).then(|| Arc::clone(&cached.read))
    }

    /// Keeps a read for later ones.
    pub(crate) fn cache_read(
        &mut self,
        pass: PassId,
        member: usize,
        key: u64,
        read: Arc<dyn Any + Send + Sync>,
    ) {
        if self.reads.len() <= member {
            self.reads.resize(member + 1, None);
        }
        self.reads[member] = Some(CachedRead { pass, key, read });
    }

    /// Forgets the reads of a pass.
    pub(crate) fn forget_reads(&mut self) {
        self.reads.clear();
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    /// A group in each state of its gradients but `Reducing`, which needs a communicator.
    fn states() -> [Grads; 3] {
        [
            Grads::Idle,
            Grads::Collecting(vec![None]),
            Grads::Reduced(vec![None]),
        ]
    }

    fn refused(mut grads: Grads, transition: impl FnOnce(&mut Grads)) -> bool {
        catch_unwind(AssertUnwindSafe(|| transition(&mut grads))).is_err()
    }

    #[test]
    fn gradients_go_from_state_to_state_in_one_order_only() {
        let refusals =
            |transition: fn(&mut Grads)| states().map(|state| refused(state, transition));
        assert_eq!(
            refusals(|grads| drop(grads.collect(1, 0).take())),
            [false, false, true]
        );
        assert_eq!(
            refusals(|grads| drop(grads.take_collected(1))),
            [false, false, true]
        );
        assert_eq!(
            refusals(|grads| drop(grads.take_reduction())),
            [true, true, true]
        );
        assert_eq!(
            refusals(|grads| drop(grads.take_reduced())),
            [false, true, false]
        );
    }
}
