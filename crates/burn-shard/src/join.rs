//! Ranks with different numbers of batches, and means over samples instead of ranks.

use std::fmt;
use std::iter::FusedIterator;

use burn_shard_comm::ProcessGroup;

use crate::Error;

/// Batches of this rank for as long as any rank has some, after `Join` of PyTorch.
///
/// Every rank of a process group makes one of its own batches, and all of them end after the same number of
/// turns: that of the rank with the most batches. A rank without more batches gets its last one again, so
/// that it takes part in every collective of forward, backward and step under every strategy, and a
/// [`loss_factor`](Turn::loss_factor) of 0, so that it adds nothing to gradients.
///
/// Multiply each loss by its factor. The averaged gradient is then that of the mean over the ranks that had
/// a batch; with [`with_weights`](Self::with_weights), of the mean over samples or tokens, whatever their number
/// on each rank. Without it a rank with few samples would count as much as one with many.
///
/// A turn is a small all-gather (16 bytes of each rank). Layers that keep statistics of what they see, such as
/// batch normalization, see a repeated batch once more.
///
/// # Examples
///
/// ```
/// # use burn::nn::LinearConfig;
/// # use burn::optim::{GradientsParams, SgdConfig};
/// # use burn::prelude::*;
/// # use burn_shard::{Join, Oss, ProcessGroup, ShardedModule, ShardingStrategy, Turn};
/// # ProcessGroup::spawn(2, |group| {
/// # let device = Device::flex().autodiff();
/// # let model = LinearConfig::new(4, 1).init(&device);
/// # let mut model = ShardedModule::new(model, ShardingStrategy::Full, &group).unwrap();
/// # let mut optimizer = Oss::new(SgdConfig::new(), &group).unwrap();
/// # let batches = (1..=3 + group.rank()).map(|rows| Tensor::<2>::ones([rows, 4], &device));
/// for turn in Join::new(batches, &group).with_weights(|batch| batch.dims()[0] as f64) {
///     let Turn { batch, loss_factor, .. } = turn?;
///     let loss = model.forward(batch).square().mean() * loss_factor;
///     let gradients = GradientsParams::from_grads(loss.backward(), &model);
///     model = optimizer.step(0.1, model, gradients);
/// }
/// # Ok::<(), burn_shard::Error>(())
/// # }).unwrap().into_iter().collect::<Result<(), _>>().unwrap();
/// ```
///
/// For the mean of a metric, hand its [`weight`](Turn::weight) to [`ProcessGroup::mean`].
#[doc(alias = "uneven")]
pub struct Join<I: Iterator> {
    batches: I,
    group: ProcessGroup,
    weigh: Weigh<I::Item>,
    /// What this rank repeats once it has no more batches.
    last: Option<I::Item>,
    is_over: bool,
}

/// What a batch weighs.
type Weigh<T> = Box<dyn Fn(&T) -> f64>;

/// One batch, and what it counts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Turn<T> {
    /// This rank's batch: its last one again if there are no more.
    pub batch: T,
    /// What it weighs; 0 if it is repeated.
    pub weight: f64,
    /// What the loss is to be multiplied by: `weight * world_size / sum of all ranks' weights`. 0 on every
    /// rank if that sum is 0.
    pub loss_factor: f64,
}

impl<I> Join<I>
where
    I: Iterator,
    I::Item: Clone,
{
    /// The batches of this rank; every batch weighs 1. Nothing is sent yet.
    #[must_use]
    pub fn new(batches: impl IntoIterator<IntoIter = I>, group: &ProcessGroup) -> Self {
        Self {
            batches: batches.into_iter(),
            group: group.clone(),
            weigh: Box::new(|_| 1.0),
            last: None,
            is_over: false,
        }
    }

    /// What a batch weighs, for example its number of samples or of tokens that are not masked.
    #[must_use]
    pub fn with_weights(mut self, weigh: impl Fn(&I::Item) -> f64 + 'static) -> Self {
        self.weigh = Box::new(weigh);
        self
    }

    /// What a rank runs that has no batch at all. Any batch of the right shape.
    #[must_use]
    pub fn with_filler(mut self, batch: I::Item) -> Self {
        self.last.get_or_insert(batch);
        self
    }

    fn turn(&mut self) -> Result<Option<Turn<I::Item>>, Error> {
        let own = self.batches.next();
        let weight = own.as_ref().map_or(0.0, &self.weigh);
        let state = match (&own, &self.last) {
            (Some(_), _) => HAS_BATCH,
            (None, Some(_)) => REPEATS,
            (None, None) => HAS_NONE,
        };
        let ranks = self.group.world_size();
        let mut all = vec![0.0; 2 * ranks];
        self.group.all_gather(&[state, weight], &mut all)?;
        let all: Vec<(f64, f64)> = all.chunks(2).map(|rank| (rank[0], rank[1])).collect();

        if all.iter().all(|&(state, _)| state != HAS_BATCH) {
            return Ok(None);
        }
        let rank = self.group.rank();
        if let Some(other) = all.iter().position(|&(state, _)| state == HAS_NONE) {
            return Err(Error::NoBatch { rank, other });
        }
        let is_wrong = |weight: f64| !(weight.is_finite() && weight >= 0.0);
        if let Some(other) = all.iter().position(|&(_, weight)| is_wrong(weight)) {
            let weight = all[other].1;
            return Err(Error::BatchWeight {
                rank,
                other,
                weight,
            });
        }
        let sum: f64 = all.iter().map(|&(_, weight)| weight).sum();
        #[allow(clippy::cast_precision_loss, reason = "ranks are few")]
        let loss_factor = if sum == 0.0 {
            0.0
        } else {
            weight * ranks as f64 / sum
        };
        let batch = own.or_else(|| self.last.take());
        self.last.clone_from(&batch);
        Ok(batch.map(|batch| Turn {
            batch,
            weight,
            loss_factor,
        }))
    }
}

/// What a rank tells the others before each turn.
const HAS_BATCH: f64 = 0.0;
const REPEATS: f64 = 1.0;
const HAS_NONE: f64 = 2.0;

impl<I> Iterator for Join<I>
where
    I: Iterator,
    I::Item: Clone,
{
    /// The error is the same on every rank, [`Error::NoBatch`] or [`Error::BatchWeight`], or a failure of the
    /// communicator. It is the last item.
    type Item = Result<Turn<I::Item>, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.is_over {
            return None;
        }
        let turn = self.turn().transpose();
        self.is_over = !matches!(turn, Some(Ok(_)));
        turn
    }
}

impl<I> FusedIterator for Join<I>
where
    I: Iterator,
    I::Item: Clone,
{
}

impl<I: Iterator> fmt::Debug for Join<I> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Join")
            .field("group", &self.group)
            .field("is_over", &self.is_over)
            .finish_non_exhaustive()
    }
}
