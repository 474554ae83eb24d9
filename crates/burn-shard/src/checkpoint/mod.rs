//! Sharded checkpoints: every rank writes what it owns, and any number of ranks loads it again, under any
//! strategy, bit for bit. The files and what makes them safe are `burn_shard_checkpoint`'s; here is which
//! tensors go into them.
//!
//! | tensor | name | written by |
//! |---|---|---|
//! | parameter (the master weights) | its module path | every rank, its part |
//! | optimizer state | `role/path`, in Burn's names: `momentum.moment_1/..` | every rank, its part |
//! | buffers, integers, booleans | `buffer/path` | rank 0 |

mod buffers;
mod load;
mod pending;
mod save;

use std::fmt;
use std::path::PathBuf;

use burn::module::Module;
pub use burn_shard_checkpoint::{Checkpoint, Error as CheckpointError, Keep, Published, Renames};
use burn_shard_comm::{DType, ProcessGroup};
pub use pending::PendingSave;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::agreed;
use crate::oss::OptimizerScalars;
use crate::storage::host::burn_dtype;
use crate::{Error, Oss, ShardedModule};

/// The directory in which the ranks of a process group keep the checkpoints of a run.
///
/// # Examples
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::optim::AdamConfig;
/// use burn::prelude::*;
/// use burn_shard::checkpoint::Checkpoints;
/// use burn_shard::{Oss, ProcessGroup, ShardedModule, ShardingStrategy};
/// use serde_json::json;
///
/// let root = tempfile::tempdir().unwrap();
/// // Two ranks save, three load.
/// for (ranks, strategy) in [(2, ShardingStrategy::Full), (3, ShardingStrategy::Gradients)] {
///     ProcessGroup::spawn(ranks, |group| {
///         let device = Device::flex().autodiff();
///         let model = LinearConfig::new(8, 4).init(&device);
///         let mut model = ShardedModule::new(model, strategy, &group).unwrap();
///         let mut optimizer = Oss::new(AdamConfig::new(), &group).unwrap();
///         let checkpoints = Checkpoints::new(root.path(), &group);
///         if ranks == 3 {
///             let loaded = checkpoints.load(model, &mut optimizer).unwrap();
///             assert_eq!((loaded.step, &loaded.user), (100, &json!({ "epoch": 7 })));
///             model = loaded.model;
///         }
///         checkpoints.save(100, &model, &optimizer, &json!({ "epoch": 7 })).unwrap();
///     })
///     .unwrap();
/// }
/// ```
#[derive(Clone, Debug)]
pub struct Checkpoints {
    root: PathBuf,
    group: ProcessGroup,
    keep: Keep,
    renames: Renames,
}

/// What [`Checkpoints::load`] ends with on each rank.
pub struct Loaded<M> {
    /// The module with the parameters and buffers of the checkpoint.
    pub model: ShardedModule<M>,
    /// The step at which it was saved.
    pub step: u64,
    /// What the caller saved beside it.
    pub user: Value,
}

impl<M> fmt::Debug for Loaded<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Loaded")
            .field("step", &self.step)
            .field("user", &self.user)
            .finish_non_exhaustive()
    }
}

/// What this crate keeps in the manifest beside tensors.
#[derive(Debug, Serialize, Deserialize)]
struct State {
    optimizer: OptimizerScalars,
    user: Value,
}

impl Checkpoints {
    /// Checkpoints below `root`, which all ranks see: a directory shared by all machines.
    #[must_use]
    pub fn new(root: impl Into<PathBuf>, group: &ProcessGroup) -> Self {
        Self {
            root: root.into(),
            group: group.clone(),
            keep: Keep::ALL,
            renames: Renames::new(),
        }
    }

    /// Which older checkpoints stay when a new one is published.
    #[must_use]
    pub fn with_keep(mut self, keep: Keep) -> Self {
        self.keep = keep;
        self
    }

    /// Rules by which paths of a checkpoint become those of the module that is loaded.
    #[must_use]
    pub fn with_renames(mut self, renames: Renames) -> Self {
        self.renames = renames;
        self
    }

    /// Saves module and optimizer after `step`, with `user` (of rank 0) beside them. A collective: every
    /// rank writes a file of its own at the same time, nothing is gathered. The checkpoint is there
    /// completely, on every rank's word, or not at all.
    ///
    /// # Errors
    ///
    /// Every rank has an error: what any of them could not write ([`Error::Checkpoint`]), [`Error::Unreduced`] between
    /// micro-batches under `no_sync`, or a failure of the communicator. Earlier checkpoints are untouched then, and training may go on.
    pub fn save<M: Module>(
        &self,
        step: u64,
        model: &ShardedModule<M>,
        optimizer: &Oss,
        user: &Value,
    ) -> Result<Published, Error> {
        self.begin_save(step, model, optimizer, user)?.finish()
    }

    /// Begins to save module and optimizer as they are now, with `user` (of rank 0) beside them, and returns once
    /// this rank's part is copied: a thread writes it while training goes on. A collective, as
    /// [`PendingSave::finish`], which publishes the checkpoint, and [`PendingSave::is_ready`] are.
    ///
    /// One save at a time: finish it before the next begins. The copy is as large as the rank's shards and their
    /// optimizer state, in host memory until it is written. PyTorch's counterpart is `async_save`.
    ///
    /// ```
    /// # use burn::nn::LinearConfig;
    /// # use burn::optim::AdamConfig;
    /// # use burn::prelude::*;
    /// # use burn_shard::checkpoint::{Checkpoints, PendingSave};
    /// # use burn_shard::{Oss, ProcessGroup, ShardedModule, ShardingStrategy};
    /// # use serde_json::json;
    /// # let root = tempfile::tempdir().unwrap();
    /// # ProcessGroup::spawn(2, |group| {
    /// # let model = LinearConfig::new(8, 4).init(&Device::flex().autodiff());
    /// # let model = ShardedModule::new(model, ShardingStrategy::Full, &group)?;
    /// # let optimizer = Oss::new(AdamConfig::new(), &group)?;
    /// # let checkpoints = Checkpoints::new(root.path(), &group);
    /// let mut pending: Option<PendingSave> = None;
    /// for step in 0..6 {
    ///     // .. one step of training ..
    ///     if step % 2 == 0 {
    ///         if let Some(pending) = pending.take() {
    ///             pending.finish()?;
    ///         }
    ///         pending = Some(checkpoints.begin_save(step, &model, &optimizer, &json!({}))?);
    ///     }
    /// }
    /// if let Some(pending) = pending {
    ///     assert_eq!(pending.finish()?.step, 4);
    /// }
    /// # Ok::<(), burn_shard::Error>(())
    /// # }).unwrap().into_iter().collect::<Result<(), _>>().unwrap();
    /// ```
    ///
    /// # Errors
    ///
    /// Every rank has an error: rank 0 cannot begin ([`Error::Checkpoint`]; another save is under way, for
    /// one), [`Error::Unreduced`] between micro-batches under `no_sync`, or a failure of the communicator. What a rank cannot write is an error of
    /// [`PendingSave::finish`].
    pub fn begin_save<M: Module>(
        &self,
        step: u64,
        model: &ShardedModule<M>,
        optimizer: &Oss,
        user: &Value,
    ) -> Result<PendingSave, Error> {
        save::Save {
            checkpoints: self,
            step,
            model,
            optimizer,
        }
        .begin(user)
    }

    /// Loads the newest checkpoint into a module of the same structure and its new optimizer. Every rank
    /// reads what it keeps, and nothing else. Bit for bit what was saved, whatever the number of ranks and
    /// the strategy were.
    ///
    /// # Errors
    ///
    /// Every rank has the same error: no checkpoint, a damaged one, one of another module
    /// ([`Error::Checkpoint`]), an optimizer of another kind ([`Error::OtherOptimizer`]).
    pub fn load<M: Module>(
        &self,
        model: ShardedModule<M>,
        optimizer: &mut Oss,
    ) -> Result<Loaded<M>, Error> {
        let opened = Checkpoint::open(&self.root).map_err(Error::from);
        let prepared = opened.and_then(|checkpoint| {
            load::Load::prepare(checkpoint, &self.renames, &model, optimizer)
        });
        let prepared = agreed(&self.group, prepared)?;
        Ok(prepared.apply(model, optimizer))
    }
}

/// The checkpoint's name of a parameter's element type.
fn stored_type(dtype: DType) -> burn_shard_checkpoint::DType {
    buffers::stored_type(burn_dtype(dtype))
}
