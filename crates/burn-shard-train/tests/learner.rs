//! Training through Burn's `Learner` ends with the parameters of plain data parallel, and ends for all ranks.

#![allow(clippy::unwrap_used, reason = "a test ends at the first error")]

mod common;

use std::time::Duration;

use burn::grad_clipping::GradientClippingConfig;
use burn::module::Module;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamConfig, GradientsAccumulator, GradientsParams, ModuleOptimizer, SgdConfig};
use burn_shard::{
    ElementwiseConfig, GradientNormClipping, ProcessGroup, ShardConfig, ShardingStrategy,
};
use burn_shard_train::ShardedTraining;
use burn_train::{
    ExecutionStrategy, Learner, LearningResult, SupervisedTraining, TrainingStrategy,
};
use common::oracle::{Bits, average, distance, values};
use common::{Event, LR, Losses, Net, Run, Watch, as_processes, device, loader};

const STRATEGIES: [ShardingStrategy; 4] = [
    ShardingStrategy::Replicated,
    ShardingStrategy::OptimizerState,
    ShardingStrategy::Gradients,
    ShardingStrategy::Full,
];

/// Parameters as small as these are sharded only in groups as small as that.
fn cut(strategy: ShardingStrategy) -> ShardConfig {
    ShardConfig::new(strategy).with_group_cap_bytes(64)
}

fn adam() -> (AdamConfig, ModuleOptimizer) {
    let config = AdamConfig::new();
    (config.clone(), config.init())
}

fn momentum() -> (SgdConfig, ModuleOptimizer) {
    let config = SgdConfig::new().with_momentum(Some(MomentumConfig::new()));
    (config.clone(), config.init())
}

fn single(run: &Run, model: &Net, optimizer: ModuleOptimizer) -> Bits {
    let strategy = ExecutionStrategy::SingleDevice(device());
    values(&run.launch(model, optimizer, strategy.into()).model)
}

fn ends_well(result: LearningResult<Net>) -> Bits {
    assert!(result.error.is_none(), "{:?}", result.error);
    assert!(result.interrupted.is_none());
    values(&result.model)
}

/// Plain data parallel with a loop of its own: whole gradients, averaged, and a stock optimizer on each rank.
fn plain_data_parallel(run: &Run, model: &Net, init: ModuleOptimizer, ranks: usize) -> Bits {
    let each = run.train.len() / ranks;
    let accumulation = run.accumulation.unwrap_or(1);
    let trained = ProcessGroup::spawn(ranks, |group| {
        let mut model = model.clone().fork(&device());
        let mut optimizer = init.clone();
        let own = run.train[group.rank() * each..][..each].to_vec();
        let loader = loader(own, run.batch, Event::Nothing).to_device(&device());
        for _ in 0..run.epochs {
            let batches: Vec<_> = loader.iter().map(Result::unwrap).collect();
            for micro_batches in batches.chunks(accumulation) {
                let mut gradients = GradientsAccumulator::new();
                for batch in micro_batches {
                    let loss = model.compare(batch.clone()).loss;
                    let own = GradientsParams::from_grads(loss.backward(), &model);
                    gradients.accumulate(&model, average(own, &model, &group));
                }
                model = optimizer.step(LR, model, gradients.grads());
            }
        }
        values(&model)
    });
    trained.unwrap().remove(0)
}

fn every_strategy_is_plain_data_parallel<C: ElementwiseConfig + Clone + Sync>(
    what: &str,
    optimizer: &(C, ModuleOptimizer),
) {
    let model = Net::new();
    // 27 items: 2 ranks have 13 each and drop 1; 4 have 6 and drop 3; their last batches have 1 and 2.
    let run = Run::new(27, 9, 3);
    for ranks in [1, 2, 4] {
        let expected = plain_data_parallel(&run, &model, optimizer.1.clone(), ranks);
        assert_ne!(values(&model), expected);
        if ranks == 1 {
            let burns = single(&run, &model, optimizer.1.clone());
            assert_eq!(burns, expected, "{what}, the oracle");
        }
        for strategy in STRATEGIES {
            let result = run.in_threads(&model, cut(strategy), optimizer.clone(), ranks);
            let what = format!("{what}, {strategy}, {ranks} ranks");
            assert_eq!(ends_well(result), expected, "{what}");
        }
    }
}

#[test]
fn every_strategy_has_the_bits_of_plain_data_parallel_with_adam() {
    every_strategy_is_plain_data_parallel("Adam", &adam());
}

#[test]
fn every_strategy_has_the_bits_of_plain_data_parallel_with_momentum() {
    every_strategy_is_plain_data_parallel("momentum", &momentum());
}

/// 24 steps of SGD with momentum 0.9. Two ways to add up a mean of 8 gradients differ by at most 8 units of 2^-24
/// of the largest term, which is below 16 here (twice an error below 8, times an activation or input of at most 1
/// and a weight of that size); a velocity adds up at most 10 of them, and each step moves by 0.05 of it:
/// 24 * 0.05 * 10 * 16 * 8 * 2^-24 < 1e-4.
const BOUND: f32 = 1e-4;

#[test]
fn two_ranks_are_near_burns_single_device_on_the_same_global_batches() {
    let model = Net::new();
    let sharded = Run::new(32, 8, 6);
    let result = sharded.in_threads(&model, cut(ShardingStrategy::Full), momentum(), 2);
    let mut whole = sharded.clone();
    // The batches of both ranks, one beside the other.
    let step = |step: usize| (step * 4..step * 4 + 4).chain(16 + step * 4..16 + step * 4 + 4);
    (whole.train, whole.batch) = ((0..4).flat_map(step).collect(), 8);
    let expected = single(&whole, &model, momentum().1);
    let distance = distance(&ends_well(result), &expected);
    assert!(distance < BOUND, "{distance}");
}

#[test]
fn ranks_that_are_processes_have_the_bits_of_threads() {
    let model = Net::new();
    let run = Run::new(27, 7, 2);
    for strategy in STRATEGIES {
        let expected = ends_well(run.in_threads(&model, cut(strategy), adam(), 3));
        let ranks = as_processes(3, |group| {
            let sharded = ShardedTraining::process(cut(strategy), adam().0, &group, device());
            ends_well(run.launch(&model, adam().1, sharded.into()))
        });
        for rank in ranks {
            assert_eq!(rank, expected, "{strategy}");
        }
    }
}

#[test]
fn accumulated_gradients_are_summed_as_burn_does() {
    let model = Net::new();
    let mut run = Run::new(40, 8, 3);
    // 1 rank has 10 micro-batches, 2 ranks 5 each: the last step has one micro-batch alone.
    run.accumulation = Some(2);
    let expected = single(&run, &model, adam().1);
    let result = run.in_threads(&model, cut(ShardingStrategy::Replicated), adam(), 1);
    assert_eq!(ends_well(result), expected, "Burn's own");
    let without = Run::new(40, 8, 3).in_threads(&model, cut(ShardingStrategy::Full), adam(), 1);
    assert_ne!(ends_well(without), expected);

    let first = ends_well(run.in_threads(&model, cut(STRATEGIES[0]), momentum(), 2));
    for strategy in STRATEGIES {
        let bits = ends_well(run.in_threads(&model, cut(strategy), momentum(), 2));
        assert_eq!(bits, first, "{strategy}");
    }
    // There each micro-batch is averaged before they are summed, here it is the other way round.
    let expected = plain_data_parallel(&run, &model, momentum().1, 2);
    let distance = distance(&first, &expected);
    assert!(distance < BOUND, "{distance}");
}

#[test]
fn gradients_are_clipped_by_the_norm_of_all() {
    let model = Net::new();
    let run = Run::new(16, 4, 2);
    let clipped = |norm: f32| {
        let sgd = SgdConfig::new();
        let devices = vec![device(); 2];
        let sharded = ShardedTraining::threads(cut(ShardingStrategy::Full), sgd.clone(), devices)
            .with_norm_clipping(GradientNormClipping::new(norm.into()));
        ends_well(run.launch(&model, sgd.init(), sharded.into()))
    };
    // 4 steps, each of which moves no parameter by more than the norm times the learning rate of 0.05.
    let moved = distance(&clipped(1e-3), &values(&model));
    assert!(moved > 0.0 && moved <= 4.0 * 0.05 * 1e-3 * 1.001, "{moved}");
    assert!(distance(&clipped(1e6), &values(&model)) > 1e-2);
}

#[test]
fn metrics_are_of_every_item_of_all_ranks_once() {
    let model = Net::new();
    let mut run = Run::new(12, 7, 1);
    (run.batch, run.valid_batch) = (1, 1);
    // At a learning rate of 0, all ranks measure the model that is given, one item at a time.
    let measured = |strategy: TrainingStrategy<Net>| {
        let mut run = run.clone();
        run.watch = Watch::until(usize::MAX);
        let (train, valid) = (Losses::default(), Losses::default());
        let learner = Learner::new(model.clone(), SgdConfig::new().init(), 0.0);
        let result = run
            .training()
            .metric_train(train.clone())
            .metric_valid(valid.clone())
            .with_training_strategy(strategy)
            .launch(learner);
        assert!(result.error.is_none(), "{:?}", result.error);
        let means = run.watch.losses.lock().unwrap()[0];
        (train.sorted(), valid.sorted(), means)
    };
    let one = ExecutionStrategy::SingleDevice(device());
    let (train, valid, means) = measured(one.into());
    assert_eq!((train.len(), valid.len()), (12, 7));
    // 3 ranks validate 2, 2 and 3 items; of 12 ranks, 5 have none.
    for ranks in [3, 6, 12] {
        for strategy in STRATEGIES {
            let devices = vec![device(); ranks];
            let sharded = ShardedTraining::threads(cut(strategy), SgdConfig::new(), devices)
                .with_deadline(Duration::from_secs(20));
            let (own_train, own_valid, own_means) = measured(sharded.into());
            assert_eq!(own_train, train, "{strategy}, {ranks} ranks");
            assert_eq!(own_valid, valid, "{strategy}, {ranks} ranks");
            // The same dozen doubles, added up in another order.
            assert!((own_means.0 - means.0).abs() < 1e-12);
            assert!((own_means.1 - means.1).abs() < 1e-12);
        }
    }
}

#[test]
fn rank_0_stops_all_ranks_early() {
    let model = Net::new();
    let mut run = Run::new(16, 4, 2);
    let expected = ends_well(run.in_threads(&model, cut(ShardingStrategy::Full), adam(), 2));
    run.epochs = 50;
    run.watch = Watch::until(2);
    let threads = ends_well(run.in_threads(&model, cut(ShardingStrategy::Full), adam(), 2));
    assert_eq!(threads, expected, "threads");
    let ranks = as_processes(2, |group| {
        let mut run = run.clone();
        // Rank 1 would never stop by itself.
        run.watch = Watch::until(if group.rank() == 0 { 2 } else { usize::MAX });
        let sharded =
            ShardedTraining::process(cut(ShardingStrategy::Full), adam().0, &group, device());
        ends_well(run.launch(&model, adam().1, sharded.into()))
    });
    for rank in ranks {
        assert_eq!(rank, expected, "processes");
    }
}

#[test]
fn an_interruption_of_one_rank_ends_all() {
    let model = Net::new();
    for strategy in STRATEGIES {
        let mut run = Run::new(32, 4, 1000);
        // Item 24 is in the third batch of rank 1.
        run.event = Event::Interrupt(24, run.interrupter.clone());
        let result = run.in_threads(&model, cut(strategy), adam(), 2);
        let reason = result.interrupted.unwrap().reason.unwrap();
        assert_eq!(reason, "the test says so");

        let reasons = as_processes(2, |group| {
            let mut run = Run::new(32, 4, 1000);
            run.event = Event::Interrupt(24, run.interrupter.clone());
            let sharded = ShardedTraining::process(cut(strategy), adam().0, &group, device());
            let result = run.launch(&model, adam().1, sharded.into());
            assert!(result.error.is_none());
            result.interrupted.unwrap().reason.unwrap()
        });
        assert_eq!(reasons, ["rank 1 was interrupted", "the test says so"]);
    }
}

#[test]
fn a_rank_that_fails_ends_all_and_is_named() {
    let model = Net::new();
    let strategy = ShardingStrategy::Full;
    // An interrupter belongs to one process.
    let unreadable = || {
        let mut run = Run::new(32, 4, 1000);
        run.event = Event::Unreadable(24);
        run
    };
    let result = unreadable().in_threads(&model, cut(strategy), adam(), 2);
    let error = result.error.unwrap().to_string();
    assert!(error.contains("item 24 is unreadable"), "{error}");

    let errors = as_processes(2, |group| {
        let sharded = ShardedTraining::process(cut(strategy), adam().0, &group, device());
        let result = unreadable().launch(&model, adam().1, sharded.into());
        result.error.unwrap().to_string()
    });
    assert!(
        errors[0].contains("rank 1 stopped because of an error"),
        "{errors:?}"
    );
    assert!(errors[1].contains("item 24 is unreadable"), "{errors:?}");

    let mut panics = Run::new(32, 4, 1000);
    panics.event = Event::Panic(24);
    let error = panics
        .in_threads(&model, cut(strategy), adam(), 2)
        .error
        .unwrap();
    let error = error.to_string();
    assert!(
        error.contains("rank 1") && error.contains("item 24 panics"),
        "{error}"
    );

    // One validation item for two ranks: rank 0 has none, and needs it to take part.
    let mut filler = Run::new(32, 1, 1000);
    filler.valid_event = Event::Unreadable(100);
    let error = filler
        .in_threads(&model, cut(strategy), adam(), 2)
        .error
        .unwrap();
    assert!(
        error.to_string().contains("item 100 is unreadable"),
        "{error}"
    );
}

#[test]
fn what_cannot_be_done_is_refused_by_name() {
    let model = Net::new();
    let refused = |training: SupervisedTraining<Net>, ranks: usize| {
        let devices = vec![device(); ranks];
        let sharded = ShardedTraining::threads(cut(ShardingStrategy::Full), adam().0, devices);
        let learner = Learner::new(model.clone(), adam().1, LR);
        let result = training
            .with_training_strategy(sharded.into())
            .launch(learner);
        assert_eq!(values(&result.model), values(&model));
        result.error.unwrap().to_string()
    };
    let directory = tempfile::tempdir().unwrap();
    let train = loader((0..8).collect(), 4, Event::Nothing);
    let saving = SupervisedTraining::new(directory.path(), train.clone(), train)
        .with_application_logger(None)
        .with_default_checkpointers();
    for training in [saving, Run::new(8, 4, 2).training().checkpoint(1)] {
        let error = refused(training, 2);
        assert!(error.contains("checkpointers"), "{error}");
    }
    let error = refused(Run::new(3, 4, 1).training(), 4);
    assert!(error.contains("3 items for 4 ranks"), "{error}");
    let error = refused(Run::new(3, 4, 1).training(), 0);
    assert!(error.contains("no device"), "{error}");
    // An optimizer that cannot step shards.
    let clips = AdamConfig::new().with_grad_clipping(Some(GradientClippingConfig::Norm(1.0)));
    let result =
        Run::new(8, 4, 1).in_threads(&model, cut(ShardingStrategy::Full), (clips, adam().1), 2);
    let error = result.error.unwrap().to_string();
    assert!(error.contains("norm"), "{error}");
}

#[test]
fn processes_with_other_data_are_refused() {
    let model = Net::new();
    let errors = as_processes(2, |group| {
        let run = Run::new(16 + group.rank(), 4, 1);
        let sharded =
            ShardedTraining::process(cut(ShardingStrategy::Full), adam().0, &group, device());
        let result = run.launch(&model, adam().1, sharded.into());
        result.error.unwrap().to_string()
    });
    assert!(
        errors[0].contains("rank 0 has 16 training items, and rank 1 has 17"),
        "{errors:?}"
    );
    assert!(
        errors[1].contains("rank 1 has 17 training items, and rank 0 has 16"),
        "{errors:?}"
    );
}
