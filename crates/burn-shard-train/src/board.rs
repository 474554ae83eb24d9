//! Where rank 0 shows what the ranks measured, and decides whether to stop early.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use burn::data::dataloader::Progress;
use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn_train::metric::store::EventStoreClient;
use burn_train::{
    CloneEarlyStoppingStrategy, EventProcessorTraining, InferenceStep, Interrupter, LearnerEvent,
    LearnerModel, SupervisedTrainingEventProcessor, TrainStep, TrainingItem,
};

use crate::shares::Totals;

/// What a rank measured in one turn.
pub(crate) struct Seen<T> {
    pub(crate) output: T,
    /// Items this rank has processed in this split and epoch.
    pub(crate) items: usize,
    pub(crate) turn: usize,
    pub(crate) lr: Option<ModuleLearningRate>,
}

/// Where a rank sends what it measured; only ranks that share a process with rank 0 do.
pub(crate) struct Outputs<M: LearnerModel> {
    pub(crate) train: Sender<Seen<<M as TrainStep>::Output>>,
    pub(crate) valid: Sender<Seen<<M as InferenceStep>::Output>>,
}

/// The outputs of all ranks that share a process, on their way to rank 0.
pub(crate) struct Inbox<T> {
    ranks: Vec<Receiver<Seen<T>>>,
    /// Items that each rank has processed.
    items: Vec<usize>,
}

/// The inboxes of both splits.
pub(crate) type Inboxes<M> = (
    Inbox<<M as TrainStep>::Output>,
    Inbox<<M as InferenceStep>::Output>,
);

/// The ways of `ranks` ranks to rank 0, and where they end.
pub(crate) fn outputs_of<M: LearnerModel>(ranks: usize) -> (Vec<Outputs<M>>, Inboxes<M>) {
    let (train, train_inbox) = Inbox::new(ranks);
    let (valid, valid_inbox) = Inbox::new(ranks);
    let outputs = train.into_iter().zip(valid);
    let outputs = outputs.map(|(train, valid)| Outputs { train, valid });
    (outputs.collect(), (train_inbox, valid_inbox))
}

impl<T> Inbox<T> {
    /// One sender for each rank.
    fn new(ranks: usize) -> (Vec<Sender<Seen<T>>>, Self) {
        let (senders, receivers) = (0..ranks).map(|_| channel()).unzip();
        let inbox = Self {
            ranks: receivers,
            items: vec![0; ranks],
        };
        (senders, inbox)
    }

    /// At most one output of each rank, in rank order: after ranks have met, all have sent those of the turn
    /// before, and some may have sent those of the next.
    fn turn(&mut self, total: usize) -> Vec<TrainingItem<T>> {
        let mut shown = Vec::new();
        for (rank, receiver) in self.ranks.iter().enumerate() {
            let Ok(seen) = receiver.try_recv() else {
                continue;
            };
            self.items[rank] = seen.items;
            let items = self.items.iter().sum();
            let progress = Progress::new(items, total, Some("items".to_owned()));
            let turn = Some(seen.turn);
            shown.push(TrainingItem::new(seen.output, progress, turn, seen.lr));
        }
        shown
    }

    fn begin(&mut self) {
        self.items.fill(0);
    }
}

/// The event processor and what goes with it; rank 0 has it.
pub(crate) struct Board<M: LearnerModel> {
    pub(crate) processor: SupervisedTrainingEventProcessor<M>,
    pub(crate) early_stopping: Option<Box<dyn CloneEarlyStoppingStrategy>>,
    pub(crate) store: Arc<EventStoreClient>,
    pub(crate) interrupter: Interrupter,
    pub(crate) train: Inbox<<M as TrainStep>::Output>,
    pub(crate) valid: Inbox<<M as InferenceStep>::Output>,
    /// The items that are shown: of all ranks that share a process.
    pub(crate) totals: Totals,
}

impl<M: LearnerModel> Board<M> {
    pub(crate) fn begin_train(&mut self, epoch: usize) {
        self.train.begin();
        let start = LearnerEvent::StartSplit {
            epoch_number: epoch,
            total_items: self.totals.train,
        };
        self.interrupter
            .fail_on_error(self.processor.process_train(start));
    }

    pub(crate) fn show_train(&mut self) {
        for item in self.train.turn(self.totals.train) {
            let event = LearnerEvent::ProcessedItem(item);
            self.interrupter
                .fail_on_error(self.processor.process_train(event));
        }
    }

    pub(crate) fn end_train(&mut self, epoch: usize) {
        let end = LearnerEvent::EndSplit(epoch);
        self.interrupter
            .fail_on_error(self.processor.process_train(end));
    }

    pub(crate) fn begin_valid(&mut self, epoch: usize) {
        self.valid.begin();
        let start = LearnerEvent::StartSplit {
            epoch_number: epoch,
            total_items: self.totals.valid,
        };
        self.interrupter
            .fail_on_error(self.processor.process_valid(start));
    }

    pub(crate) fn show_valid(&mut self) {
        for item in self.valid.turn(self.totals.valid) {
            let event = LearnerEvent::ProcessedItem(item);
            self.interrupter
                .fail_on_error(self.processor.process_valid(event));
        }
    }

    pub(crate) fn end_epoch(&mut self, epoch: usize) {
        let end = LearnerEvent::EndSplit(epoch);
        self.interrupter
            .fail_on_error(self.processor.process_valid(end));
        let end = LearnerEvent::EndEpoch(epoch);
        self.interrupter
            .fail_on_error(self.processor.process_train(end));
    }

    /// Whether this epoch is the last one because training no longer gets better.
    pub(crate) fn stops_early(&mut self, epoch: usize) -> bool {
        let Some(strategy) = &mut self.early_stopping else {
            return false;
        };
        // Metrics are computed on a thread of their own; the decision needs those of this epoch.
        self.interrupter.fail_on_error(self.processor.flush());
        strategy.should_stop(epoch, &self.store)
    }
}
