//! The training loop of one rank.

use std::ops::RangeInclusive;

use burn::data::dataset::DatasetError;
use burn::module::Module;
use burn::prelude::Device;
use burn_shard::{
    ElementwiseConfig, GradientNormClipping, Oss, ProcessGroup, ShardConfig, ShardedModule,
};
use burn_train::{InferenceStep, Interrupter, Learner, LearnerModel, TrainStep};

use crate::Error;
use crate::board::{Board, Outputs, Seen};
use crate::shares::Share;

/// What a rank tells the others before each turn. The highest code of any rank decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
enum Code {
    /// It has a batch.
    Batch,
    /// It has a batch, the last one of this epoch.
    LastBatch,
    /// It has no more batches. After an epoch: training no longer gets better.
    Over,
    /// It was interrupted.
    Interrupted,
    /// It was interrupted by an error.
    Failed,
}

/// All codes, by number.
const CODES: [Code; 5] = [
    Code::Batch,
    Code::LastBatch,
    Code::Over,
    Code::Interrupted,
    Code::Failed,
];

/// Whether training goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum After {
    GoOn,
    Stop,
}

/// What all ranks have in common.
pub(crate) struct Settings<'a, C> {
    pub(crate) config: &'a ShardConfig,
    pub(crate) optimizer: &'a C,
    pub(crate) clipping: Option<GradientNormClipping>,
    /// Micro-batches of one step.
    pub(crate) accumulation: usize,
    pub(crate) epochs: RangeInclusive<usize>,
}

/// One rank, before it trains.
pub(crate) struct Rank<'a, M: LearnerModel> {
    pub(crate) group: ProcessGroup,
    pub(crate) device: Device,
    /// For the model it begins with, and for learning rates.
    pub(crate) learner: Learner<M>,
    pub(crate) share: Share<M>,
    pub(crate) interrupter: Interrupter,
    /// Rank 0 has it.
    pub(crate) board: Option<&'a mut Board<M>>,
    /// Ranks that share a process with rank 0 have it.
    pub(crate) outputs: Option<Outputs<M>>,
}

impl<M: LearnerModel> Rank<'_, M> {
    /// Trains, and returns the module with its full parameters, as every rank does.
    pub(crate) fn train<C>(mut self, settings: &Settings<'_, C>) -> Result<M, Error>
    where
        C: ElementwiseConfig + Clone,
    {
        let rank = self.group.rank();
        let wrong = |source| Error::Rank { rank, source };
        let module = self.learner.model().fork(&self.device);
        let mut model =
            ShardedModule::new(module, settings.config.clone(), &self.group).map_err(wrong)?;
        let mut optimizer = Oss::new(settings.optimizer.clone(), &self.group).map_err(wrong)?;
        if let Some(clipping) = settings.clipping {
            optimizer = optimizer.with_norm_clipping(clipping);
        }
        self.share.train = self.share.train.to_device(&self.device);
        let plain = self.device.clone().inner();
        for valid in [&mut self.share.valid, &mut self.share.filler] {
            *valid = valid.take().map(|loader| loader.to_device(&plain));
        }

        for epoch in settings.epochs.clone() {
            if let Some(board) = &mut self.board {
                board.begin_train(epoch);
            }
            let after;
            (model, after) = self.train_epoch(model, &mut optimizer, settings.accumulation)?;
            if let Some(board) = &mut self.board {
                board.end_train(epoch);
            }
            if after == After::Stop {
                break;
            }
            if let Some(board) = &mut self.board {
                board.begin_valid(epoch);
            }
            let after = self.validate(&model.valid())?;
            let mut code = Code::Batch;
            if let Some(board) = &mut self.board {
                board.end_epoch(epoch);
                if after == After::GoOn && board.stops_early(epoch) {
                    code = Code::Over;
                }
            }
            // What the others said decides, not this rank's interrupter, which may change in between.
            if after == After::Stop || self.agree(code)?.iter().any(|&code| code >= Code::Over) {
                break;
            }
        }
        Ok(model.unsharded())
    }

    fn train_epoch(
        &mut self,
        mut model: ShardedModule<M>,
        optimizer: &mut Oss,
        accumulation: usize,
    ) -> Result<(ShardedModule<M>, After), Error> {
        let loader = self.share.train.clone();
        let mut batches = loader.iter();
        let mut accumulated = 0;
        let mut turn = 0;
        let after = loop {
            let (code, batch) = self.receive(batches.next());
            let progress = batches.progress();
            let is_last = code == Code::Batch && progress.is_completed();
            let codes = self.agree(if is_last { Code::LastBatch } else { code })?;
            if let Some(board) = &mut self.board {
                board.show_train();
            }
            if is_stopped(&codes) {
                break After::Stop;
            }
            let Some(batch) = batch.filter(|_| !codes.contains(&Code::Over)) else {
                break After::GoOn;
            };
            turn += 1;
            accumulated += 1;
            let output = if accumulated < accumulation && !codes.contains(&Code::LastBatch) {
                let _no_sync = model.no_sync();
                TrainStep::step(&*model, batch).item
            } else {
                let output = TrainStep::step(&*model, batch);
                self.learner.lr_step();
                let rank = self.group.rank();
                model = optimizer
                    .try_step(self.learner.lr_current(), model, output.grads)
                    .map_err(|failed| Error::Rank {
                        rank,
                        source: failed.error,
                    })?;
                accumulated = 0;
                output.item
            };
            if let Some(outputs) = &self.outputs {
                // Nobody listens where rank 0 has ended, which the next meeting tells.
                drop(outputs.train.send(Seen {
                    output,
                    items: progress.items_processed,
                    turn,
                    lr: Some(self.learner.lr_current()),
                }));
            }
        };
        if accumulated > 0 {
            model.discard_accumulated();
        }
        Ok((model, after))
    }

    /// Every item once. All ranks run as many forwards, since those are collectives under ZeRO-3.
    fn validate(&mut self, model: &ShardedModule<M>) -> Result<After, Error> {
        let (loader, filler) = (self.share.valid.clone(), self.share.filler.clone());
        let mut batches = loader.as_ref().map(|loader| loader.iter());
        let mut turn = 0;
        loop {
            let next = batches.as_mut().and_then(|batches| batches.next());
            let (code, batch) = self.receive(next);
            let codes = self.agree(code)?;
            if let Some(board) = &mut self.board {
                board.show_valid();
            }
            if is_stopped(&codes) {
                return Ok(After::Stop);
            }
            if codes.iter().all(|&code| code == Code::Over) {
                return Ok(After::GoOn);
            }
            turn += 1;
            let Some(batch) = batch else {
                let filler = filler.as_ref().and_then(|filler| filler.iter().next());
                // The others are in a forward already: without an item, this rank has to leave them.
                let (_, filler) = self.receive(filler);
                let filler = filler.ok_or(Error::NoFiller {
                    rank: self.group.rank(),
                })?;
                drop(InferenceStep::step(&**model, filler));
                continue;
            };
            let output = InferenceStep::step(&**model, batch);
            if let (Some(outputs), Some(batches)) = (&self.outputs, &batches) {
                drop(outputs.valid.send(Seen {
                    output,
                    items: batches.progress().items_processed,
                    turn,
                    lr: None,
                }));
            }
        }
    }

    /// What a loader gave, and how the others are told.
    fn receive<T>(&self, next: Option<Result<T, DatasetError>>) -> (Code, Option<T>) {
        match next {
            Some(Ok(batch)) => (Code::Batch, Some(batch)),
            Some(Err(error)) => {
                self.interrupter.fail(error);
                (Code::Failed, None)
            }
            None => (Code::Over, None),
        }
    }

    /// The codes of all ranks, the same on every rank. An interruption of one interrupts all.
    fn agree(&self, code: Code) -> Result<Vec<Code>, Error> {
        let own = if self.interrupter.error().is_some() {
            Code::Failed
        } else if self.interrupter.should_stop() {
            Code::Interrupted
        } else {
            code
        };
        let mut codes = vec![0_u8; self.group.world_size()];
        self.group.all_gather(&[own as u8], &mut codes)?;
        let codes: Vec<Code> = codes.into_iter().map(decode).collect();
        if own < Code::Interrupted && !self.interrupter.should_stop() {
            let first = |code| codes.iter().position(|&other| other == code);
            if let Some(rank) = first(Code::Failed) {
                let error = Error::Other { rank };
                self.interrupter.fail(error.into_training_error(rank));
            } else if let Some(rank) = first(Code::Interrupted) {
                let reason = format!("rank {rank} was interrupted");
                self.interrupter.stop(Some(&reason));
            }
        }
        Ok(codes)
    }
}

fn is_stopped(codes: &[Code]) -> bool {
    codes.iter().any(|&code| code >= Code::Interrupted)
}

fn decode(code: u8) -> Code {
    CODES
        .get(usize::from(code))
        .copied()
        .unwrap_or(Code::Failed)
}
