//! Parameter groups, learning rates by group, schedules and clipping equal Burn's own, bit for bit.

#![allow(clippy::unwrap_used, reason = "a test ends at the first error")]

mod common;

use burn::grad_clipping::{GradientClipping, GradientClippingConfig};
use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::lr_scheduler::linear::LinearLrSchedulerConfig;
use burn::lr_scheduler::module_lr_scheduler::{ModuleLrScheduler, ModuleLrSchedulerConfig};
use burn::module::ParamGroup;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{
    AdamConfig, AdamWConfig, GradientsParams, LionConfig, ModuleOptimizer, SgdConfig,
};
use burn_shard::{Oss, ProcessGroup, ShardConfig, ShardedModule, ShardingStrategy};
use common::{Batch, OddNet, assert_bits, device, plain_dp_gradients, values};

const STEPS: usize = 6;

/// Trains by the library and by the oracle; parameters have equal bits after every step.
fn compare(
    group: &ProcessGroup,
    strategy: ShardingStrategy,
    oss: impl FnOnce(&ProcessGroup) -> Oss,
    stock: impl FnOnce() -> ModuleOptimizer,
    schedule: impl Fn() -> ModuleLrScheduler,
) {
    let device = device();
    let config = ShardConfig::new(strategy).with_group_cap_bytes(400);
    let mut model = ShardedModule::new(OddNet::new(&device), config, group).unwrap();
    let mut plain = burn::module::Module::train(model.unsharded());
    let (mut oss, mut stock) = (oss(group), stock());
    let (mut lr, mut plain_lr) = (schedule(), schedule());
    let start = values(&plain);
    for step in 0..STEPS {
        let batch = Batch::new(group.rank(), step, strategy);
        let loss = model.loss(&batch, &device);
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        model = oss.step(lr.step(), model, grads);
        let plain_loss = plain.loss(&batch, &device);
        let grads = plain_dp_gradients(&plain_loss, &plain, group);
        plain = stock.step(plain_lr.step(), plain, grads);
        let full = model.unsharded();
        assert_bits(
            &format!("{strategy}"),
            step,
            &values(&full),
            &values(&plain),
        );
    }
    assert_ne!(start, values(&plain));
}

fn for_all(check: impl Fn(&ProcessGroup, ShardingStrategy) + Sync) {
    for world_size in [1, 2, 3] {
        for strategy in ShardingStrategy::ALL {
            ProcessGroup::spawn(world_size, |group| check(&group, strategy)).unwrap();
        }
    }
}

fn biases_and_norms() -> ParamGroup {
    ParamGroup::from_any_predicates(vec!["bias", "norm"])
}

fn decayed() -> AdamWConfig {
    AdamWConfig::new().with_weight_decay(0.3)
}

fn undecayed() -> AdamWConfig {
    AdamWConfig::new().with_weight_decay(0.0)
}

#[test]
fn weight_decay_by_group_equals_the_stock_optimizer() {
    for_all(|group, strategy| {
        compare(
            group,
            strategy,
            |group| {
                Oss::new(decayed(), group)
                    .unwrap()
                    .with_group(biases_and_norms(), undecayed())
                    .unwrap()
            },
            || {
                decayed()
                    .init()
                    .with_group(biases_and_norms(), undecayed().build(), None)
            },
            || ModuleLrScheduler::new(0.01),
        );
    });
}

/// Fused and stock steps within one communication group, and a later group that wins over an
/// earlier one.
#[test]
fn several_optimizers_in_one_model_equal_the_stock_optimizer() {
    let momentum = || SgdConfig::new().with_momentum(Some(MomentumConfig::new()));
    let twice = || ParamGroup::from_predicate("twice");
    let weights = || ParamGroup::from_regex(r"^(twice|narrow|input)\.weight$").unwrap();
    for_all(|group, strategy| {
        compare(
            group,
            strategy,
            |group| {
                Oss::new(AdamConfig::new(), group)
                    .unwrap()
                    .with_group(twice(), momentum())
                    .unwrap()
                    .with_group(weights(), LionConfig::new())
                    .unwrap()
            },
            || {
                AdamConfig::new()
                    .init()
                    .with_group(twice(), momentum().build(), None)
                    .with_group(weights(), LionConfig::new().build(), None)
            },
            || ModuleLrScheduler::new(0.003),
        );
    });
}

#[test]
fn learning_rates_and_schedules_by_group_equal_the_stock_optimizer() {
    let schedule = || {
        ModuleLrSchedulerConfig::new(CosineAnnealingLrSchedulerConfig::new(0.01, 5).into())
            .with_group(
                biases_and_norms(),
                LinearLrSchedulerConfig::new(0.2, 0.05, 4),
            )
            .init()
            .unwrap()
    };
    for_all(|group, strategy| {
        let optimizer = || decayed();
        compare(
            group,
            strategy,
            |group| Oss::new(optimizer(), group).unwrap(),
            || optimizer().init(),
            schedule,
        );
    });
}

/// A threshold that most gradients of this model exceed.
const THRESHOLD: f32 = 0.002;

#[test]
fn clipping_by_value_equals_the_stock_optimizer() {
    let clipping = || Some(GradientClippingConfig::Value(THRESHOLD));
    for_all(|group, strategy| {
        // In a fused kernel.
        let sgd = || SgdConfig::new().with_gradient_clipping(clipping());
        compare(
            group,
            strategy,
            |group| Oss::new(sgd(), group).unwrap(),
            || sgd().init(),
            || ModuleLrScheduler::new(0.5),
        );
        // On Burn's own step, and for one group only.
        let lion = || LionConfig::new().with_grad_clipping(clipping());
        compare(
            group,
            strategy,
            |group| {
                Oss::new(SgdConfig::new(), group)
                    .unwrap()
                    .with_group(biases_and_norms(), lion())
                    .unwrap()
            },
            || {
                let clipping = GradientClipping::Value(THRESHOLD);
                SgdConfig::new().init().with_group(
                    biases_and_norms(),
                    LionConfig::new().build(),
                    Some(clipping),
                )
            },
            || ModuleLrScheduler::new(0.01),
        );
    });
}

#[test]
fn clipping_and_groups_change_the_parameters_that_are_compared_here() {
    ProcessGroup::spawn(1, |group| {
        let device = device();
        let module = OddNet::new(&device);
        let run = |oss: Oss| {
            let (mut oss, strategy) = (oss, ShardingStrategy::Full);
            let model = ShardedModule::new(module.clone(), strategy, &group).unwrap();
            let loss = model.loss(&Batch::new(0, 0, strategy), &device);
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            values(&oss.step(0.5, model, grads))
        };
        let new = |config| Oss::new(config, &group).unwrap();
        let clipping = Some(GradientClippingConfig::Value(THRESHOLD));
        let clipped = SgdConfig::new().with_gradient_clipping(clipping);
        assert_ne!(run(new(SgdConfig::new())), run(new(clipped)));
        let grouped = Oss::new(decayed(), &group).unwrap();
        let grouped = grouped.with_group(biases_and_norms(), undecayed()).unwrap();
        assert_ne!(run(Oss::new(decayed(), &group).unwrap()), run(grouped));
    })
    .unwrap();
}
