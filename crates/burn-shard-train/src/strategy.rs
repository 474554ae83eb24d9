//! The training strategy, and where its ranks are.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use burn::prelude::Device;
use burn_shard::{ElementwiseConfig, GradientNormClipping, Local, ProcessGroup, ShardConfig};
use burn_train::{
    Interrupter, Learner, LearnerModel, SupervisedLearningStrategy,
    SupervisedTrainingEventProcessor, TrainLoader, TrainingComponents, TrainingStrategy,
    ValidLoader,
};
use parking_lot::Mutex;

use crate::Error;
use crate::board::{Board, Outputs, outputs_of};
use crate::rank::{Rank, Settings};
use crate::shares::{self, Share, Totals};

/// Sharded data-parallel training of a Burn [`Learner`]; see the documentation of this crate for what it does
/// with each part of `SupervisedTraining`.
///
/// `C` is the configuration of the optimizer, which has to be the one that the `Learner`'s optimizer was made
/// with: a `Learner` does not show its own.
#[doc(alias = "FSDP")]
#[doc(alias = "DDP")]
#[derive(Clone)]
pub struct ShardedTraining<C> {
    config: ShardConfig,
    optimizer: C,
    clipping: Option<GradientNormClipping>,
    ranks: Ranks,
}

#[derive(Clone)]
enum Ranks {
    Threads {
        devices: Vec<Device>,
        deadline: Option<Duration>,
    },
    Process {
        group: ProcessGroup,
        device: Device,
    },
}

impl<C: ElementwiseConfig> ShardedTraining<C> {
    /// One rank for each of `devices`, all of them threads of this process. On a CPU, name its device once for
    /// each rank.
    ///
    /// `config` is a [`ShardingStrategy`](burn_shard::ShardingStrategy) or a [`ShardConfig`].
    #[must_use]
    pub fn threads(config: impl Into<ShardConfig>, optimizer: C, devices: Vec<Device>) -> Self {
        Self {
            config: config.into(),
            optimizer,
            clipping: None,
            ranks: Ranks::Threads {
                devices,
                deadline: None,
            },
        }
    }

    /// This process as one rank of `group`, for example [`ProcessGroup::from_env`]. Every process launches the
    /// same training, with the loaders of all data; each trains on its part of it.
    ///
    /// If several ranks write to one directory, rank 0 alone writes metrics, and the logs of all go to one file:
    /// turn the application logger off, or give each rank a directory of its own.
    #[must_use]
    pub fn process(
        config: impl Into<ShardConfig>,
        optimizer: C,
        group: &ProcessGroup,
        device: Device,
    ) -> Self {
        Self {
            config: config.into(),
            optimizer,
            clipping: None,
            ranks: Ranks::Process {
                group: group.clone(),
                device,
            },
        }
    }

    /// Clips gradients by the norm of all of them together, as
    /// [`Oss::with_norm_clipping`](burn_shard::Oss::with_norm_clipping) does.
    #[must_use]
    pub fn with_norm_clipping(mut self, clipping: GradientNormClipping) -> Self {
        self.clipping = Some(clipping);
        self
    }

    /// How long ranks that are threads wait for each other; five minutes without this call. A process group
    /// has a deadline of its own, and keeps it.
    #[must_use]
    pub fn with_deadline(mut self, each: Duration) -> Self {
        if let Ranks::Threads { deadline, .. } = &mut self.ranks {
            *deadline = Some(each);
        }
        self
    }

    fn world_size(&self) -> usize {
        match &self.ranks {
            Ranks::Threads { devices, .. } => devices.len(),
            Ranks::Process { group, .. } => group.world_size(),
        }
    }
}

impl<M, C> From<ShardedTraining<C>> for TrainingStrategy<M>
where
    M: LearnerModel,
    C: ElementwiseConfig + Clone + Sync,
{
    fn from(strategy: ShardedTraining<C>) -> Self {
        #[allow(
            clippy::arc_with_non_send_sync,
            reason = "Burn asks for an Arc and uses it in one thread"
        )]
        Self::Custom(Arc::new(strategy))
    }
}

impl<M, C> SupervisedLearningStrategy<M> for ShardedTraining<C>
where
    M: LearnerModel,
    C: ElementwiseConfig + Clone + Sync,
{
    fn fit(
        &self,
        components: TrainingComponents<M>,
        mut learner: Learner<M>,
        train: TrainLoader<M>,
        valid: ValidLoader<M>,
        starting_epoch: usize,
    ) -> (M, SupervisedTrainingEventProcessor<M>) {
        // In host memory, since a learner cannot give its model away; with autodiff, which tells trained
        // parameters from frozen ones.
        learner.fork(&Device::flex().autodiff());
        let saves = components.checkpointer.is_some() || components.checkpoint.is_some();
        let interrupter = components.interrupter;
        let settings = Settings {
            config: &self.config,
            optimizer: &self.optimizer,
            clipping: self.clipping,
            accumulation: components.grad_accumulation.unwrap_or(1),
            epochs: starting_epoch..=components.num_epochs,
        };
        let local_ranks = match &self.ranks {
            Ranks::Threads { devices, .. } => devices.len(),
            Ranks::Process { .. } => 1,
        };
        let (outputs, inboxes) = outputs_of::<M>(local_ranks);
        let mut board = Board {
            processor: components.event_processor,
            early_stopping: components.early_stopping,
            store: components.event_store,
            interrupter: interrupter.clone(),
            train: inboxes.0,
            valid: inboxes.1,
            totals: Totals::default(),
        };
        let trained = self.prepare(saves, &train, &valid).and_then(|shares| {
            let parts = Parts {
                learner: learner.clone(),
                shares,
                outputs,
                interrupter: interrupter.clone(),
            };
            match &self.ranks {
                Ranks::Threads { devices, deadline } => {
                    in_threads(devices, *deadline, parts, &mut board, &settings)
                }
                Ranks::Process { group, device } => {
                    in_process(group, device, parts, &mut board, &settings)
                }
            }
        });
        let model = trained.unwrap_or_else(|(rank, error)| {
            interrupter.fail(error.into_training_error(rank));
            learner.model()
        });
        (model, board.processor)
    }
}

/// What the ranks of this process begin with.
struct Parts<M: LearnerModel> {
    learner: Learner<M>,
    /// The parts of all ranks, in rank order.
    shares: Vec<Share<M>>,
    /// Where the ranks of this process send what they measure.
    outputs: Vec<Outputs<M>>,
    interrupter: Interrupter,
}

/// Trains ranks as threads; the model of rank 0, or the first rank with an error.
fn in_threads<M: LearnerModel, C: ElementwiseConfig + Clone + Sync>(
    devices: &[Device],
    deadline: Option<Duration>,
    parts: Parts<M>,
    board: &mut Board<M>,
    settings: &Settings<'_, C>,
) -> Result<M, (usize, Error)> {
    if let Some(share) = parts.shares.first() {
        board.totals = share.totals;
    }
    let (learner, interrupter) = (parts.learner, parts.interrupter);
    let each = parts.shares.into_iter().zip(parts.outputs);
    let each: Vec<_> = each.map(|part| Some((part, learner.clone()))).collect();
    let each = Mutex::new(each);
    let board = Mutex::new(board);
    let mut local = Local::new(devices.len());
    if let Some(deadline) = deadline {
        local = local.deadline(deadline);
    }
    let trained = local.spawn(|group| {
        let rank = group.rank();
        let mut board = (rank == 0).then(|| board.lock());
        let Some(((share, outputs), learner)) = each.lock()[rank].take() else {
            unreachable!("each rank is started once")
        };
        let trained = Rank {
            group,
            device: with_autodiff(&devices[rank]),
            learner,
            share,
            interrupter: interrupter.clone(),
            board: board.as_deref_mut().map(|board| &mut **board),
            outputs: Some(outputs),
        }
        .train(settings);
        trained.map(|model| (rank == 0).then_some(model))
    });
    collect(trained)
}

/// Trains this process's rank.
fn in_process<M: LearnerModel, C: ElementwiseConfig + Clone>(
    group: &ProcessGroup,
    device: &Device,
    parts: Parts<M>,
    board: &mut Board<M>,
    settings: &Settings<'_, C>,
) -> Result<M, (usize, Error)> {
    let rank = group.rank();
    let Some(share) = parts.shares.into_iter().nth(rank) else {
        unreachable!("there is a part for each rank")
    };
    board.totals = share.own();
    let is_first = rank == 0;
    let trained = Rank {
        group: group.clone(),
        device: with_autodiff(device),
        learner: parts.learner,
        share,
        interrupter: parts.interrupter,
        board: is_first.then_some(board),
        outputs: parts.outputs.into_iter().next().filter(|_| is_first),
    }
    .train(settings);
    trained.map_err(|error| {
        // The strategy keeps the group alive: without this the others would wait for their deadline.
        group.abort(&error.to_string());
        (rank, error)
    })
}

impl<C: ElementwiseConfig> ShardedTraining<C> {
    /// The parts of the data, or why there will be no training, with the rank that says so.
    fn prepare<M: LearnerModel>(
        &self,
        saves: bool,
        train: &TrainLoader<M>,
        valid: &ValidLoader<M>,
    ) -> Result<Vec<Share<M>>, (usize, Error)> {
        let rank = match &self.ranks {
            Ranks::Threads { .. } => 0,
            Ranks::Process { group, .. } => group.rank(),
        };
        let at = |error| (rank, error);
        if self.world_size() == 0 {
            return Err(at(Error::NoDevices));
        }
        let prepared = if saves {
            Err(Error::Checkpointers)
        } else {
            shares::cut(train, valid, self.world_size())
        };
        if let Ranks::Process { group, .. } = &self.ranks {
            // All ranks are told before any begins, so that none waits for one that has refused.
            if let Err(error) = &prepared {
                group.abort(&error.to_string());
            } else {
                shares::compare(group, train.num_items(), valid.num_items()).map_err(at)?;
            }
        }
        prepared.map_err(at)
    }
}

/// The model of rank 0, or the first error of a rank.
fn collect<M>(
    trained: Result<Vec<Result<Option<M>, Error>>, burn_shard::CommError>,
) -> Result<M, (usize, Error)> {
    let ranks = trained.map_err(|error| (0, Error::Ranks(error)))?;
    let mut model = None;
    let mut failed = Vec::new();
    for (rank, result) in ranks.into_iter().enumerate() {
        match result {
            Ok(own) => model = model.or(own),
            Err(error) => failed.push((rank, error)),
        }
    }
    // What a rank found itself comes before that it missed another rank.
    let is_cause = |(_, error): &(usize, Error)| !matches!(error, Error::Ranks(_));
    let cause = failed.iter().position(is_cause).unwrap_or(0);
    match (failed.into_iter().nth(cause), model) {
        (Some(failed), _) => Err(failed),
        (None, Some(model)) => Ok(model),
        (None, None) => Err((0, Error::NoDevices)),
    }
}

fn with_autodiff(device: &Device) -> Device {
    if device.is_autodiff() {
        device.clone()
    } else {
        device.clone().autodiff()
    }
}

impl<C: fmt::Debug> fmt::Debug for ShardedTraining<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ranks = match &self.ranks {
            Ranks::Threads { devices, .. } => format!("{} threads", devices.len()),
            Ranks::Process { group, .. } => {
                format!("rank {} of {}", group.rank(), group.world_size())
            }
        };
        f.debug_struct("ShardedTraining")
            .field("config", &self.config)
            .field("optimizer", &self.optimizer)
            .field("clipping", &self.clipping)
            .field("ranks", &ranks)
            .finish()
    }
}
