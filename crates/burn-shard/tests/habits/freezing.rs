//! Freezing and thawing after wrapping, and modules in which nothing is trainable.

use burn::module::{Module, ParamGroup};
use burn::optim::GradientsParams;
use burn_shard::{Error, ShardedModule, ShardingStrategy};

use crate::common::{device, values};
use crate::pair::{Net, Pair, assert_says, bits_of, for_all, outcome, small_groups, spawn, x};

/// Applies `change` to both modules of a pair.
fn both(mut pair: Pair<Net>, change: impl Fn(ParamGroup) -> Change) -> Pair<Net> {
    let group = || ParamGroup::from_predicate("second");
    pair.model = change(group()).of(pair.model);
    pair.plain = change(group()).of(pair.plain);
    pair.compare();
    pair
}

/// The ways in which Burn freezes and thaws a part of a module, or all of it.
enum Change {
    Freeze(ParamGroup),
    Thaw(ParamGroup),
    Gradients(ParamGroup, Tracked),
    All(Tracked),
}

#[derive(Clone, Copy)]
enum Tracked {
    On,
    Off,
}

impl Change {
    fn of<M: Module>(self, module: M) -> M {
        match self {
            Self::Freeze(group) => module.freeze_group(group),
            Self::Thaw(group) => module.unfreeze_group(group),
            Self::Gradients(group, tracked) => {
                module.set_require_grad_group(group, matches!(tracked, Tracked::On))
            }
            Self::All(Tracked::Off) => module.no_grad(),
            Self::All(Tracked::On) => module.set_require_grad(true),
        }
    }
}

#[test]
fn a_layer_frozen_between_steps_has_no_gradient_and_trains_on_when_thawed() {
    for_all(|group, strategy| {
        let mut pair = Pair::new(Net::new(&device()), small_groups(strategy), group);
        pair = pair.step(|net| net.loss(x(group, 0)));
        pair = both(pair, Change::Freeze);
        let before = values(&pair.plain);
        for step in 1..3 {
            pair = pair.step(|net| net.loss(x(group, step)));
        }
        let after = values(&pair.model.unsharded());
        for path in ["second.weight", "second.bias"] {
            assert_eq!(bits_of(&before, path), bits_of(&after, path));
        }
        // Its momentum is from before.
        pair = both(pair, Change::Thaw);
        for step in 3..5 {
            pair = pair.step(|net| net.loss(x(group, step)));
        }
        assert_ne!(
            bits_of(&before, "second.weight"),
            bits_of(&values(&pair.plain), "second.weight")
        );
    });
}

#[test]
fn a_layer_wrapped_frozen_trains_from_when_it_is_thawed() {
    for_all(|group, strategy| {
        let mut net = Net::new(&device());
        let _read = values(&net);
        net.second = net.second.freeze();
        let mut pair = Pair::new(net, small_groups(strategy), group);
        pair = pair.step(|net| net.loss(x(group, 0)));
        let before = values(&pair.plain);
        pair = both(pair, Change::Thaw);
        for step in 1..4 {
            pair = pair.step(|net| net.loss(x(group, step)));
        }
        assert_ne!(
            bits_of(&before, "second.weight"),
            bits_of(&values(&pair.plain), "second.weight")
        );
    });
}

#[test]
fn gradients_switched_off_and_on_by_group_equal_the_plain_module() {
    for_all(|group, strategy| {
        let mut pair = Pair::new(Net::new(&device()), small_groups(strategy), group);
        for (step, tracked) in [Tracked::On, Tracked::Off, Tracked::On]
            .into_iter()
            .enumerate()
        {
            pair = both(pair, |group| Change::Gradients(group, tracked));
            pair = pair.step(|net| net.loss(x(group, step)));
        }
    });
}

/// Burn refuses such a backward, for the loss depends on nothing that is tracked.
#[test]
fn with_all_of_it_frozen_backward_is_refused_as_burn_does_and_it_trains_on_when_thawed() {
    for_all(|group, strategy| {
        let mut pair = Pair::new(Net::new(&device()), small_groups(strategy), group);
        pair = pair.step(|net| net.loss(x(group, 0)));
        let before = values(&pair.plain);
        pair = both(pair, |_| Change::All(Tracked::Off));
        for loss in [pair.model.loss(x(group, 1)), pair.plain.loss(x(group, 1))] {
            let message = outcome(|| loss.backward());
            let message = message
                .map(|_| ())
                .expect_err("there is nothing to differentiate");
            assert_says(&message, &["track"]);
        }
        pair.model = pair.oss.step(0.1, pair.model, GradientsParams::new());
        assert_eq!(values(&pair.model.unsharded()), before);
        pair = both(pair, |_| Change::All(Tracked::On));
        for step in 2..4 {
            pair = pair.step(|net| net.loss(x(group, step)));
        }
    });
}

#[test]
fn a_layer_frozen_on_one_rank_only_is_named_on_all_ranks() {
    for strategy in ShardingStrategy::ALL {
        for frozen in [0, 1] {
            let messages = spawn(2, |group| {
                let pair = Pair::new(Net::new(&device()), small_groups(strategy), group);
                let mut pair = pair.step(|net| net.loss(x(group, 0)));
                outcome(|| {
                    if group.rank() == frozen {
                        let second = ParamGroup::from_predicate("second");
                        pair.model = pair.model.freeze_group(second);
                    }
                    let loss = pair.model.loss(x(group, 1));
                    let grads = GradientsParams::from_grads(loss.backward(), &pair.model);
                    pair.oss.step(0.1, pair.model, grads)
                })
                .map(|_| ())
            });
            for message in messages {
                let message = message.expect_err(&format!("{strategy}: it should be refused"));
                assert_says(&message, &["second.", "frozen", &format!("rank {frozen}")]);
            }
        }
    }
}

#[test]
fn a_module_in_which_nothing_is_trainable_is_refused() {
    for strategy in ShardingStrategy::ALL {
        for read in ["read", "unread"] {
            for wrapped in spawn(2, |group| {
                let net = Net::new(&device());
                if read == "read" {
                    let _read = values(&net);
                }
                ShardedModule::new(net.freeze(), small_groups(strategy), group).map(|_| ())
            }) {
                let error =
                    wrapped.expect_err(&format!("{strategy}, {read}: nothing is trainable"));
                assert_says(&error.to_string(), &["trainable", "unfreeze"]);
            }
        }
    }
}

/// `to_device` of Burn makes parameters that are no leaves, and get no gradient.
#[test]
fn a_module_that_to_device_has_made_untrainable_is_refused_with_the_way_out() {
    for strategy in ShardingStrategy::ALL {
        for wrapped in spawn(1, |group| {
            let device = device();
            let net = Net::new(&device);
            let _read = values(&net);
            ShardedModule::new(net.to_device(&device), strategy, group).map(|_| ())
        }) {
            let error = wrapped.expect_err(&format!("{strategy}: nothing is trainable"));
            assert_says(&error.to_string(), &["trainable", "fork"]);
        }
    }
}

#[test]
fn the_advice_of_the_error_about_several_devices_can_be_trained() {
    let error = Error::SeveralDevices { rank: 0, count: 2 };
    assert_says(&error.to_string(), &["fork"]);
    for_all(|group, strategy| {
        let device = device();
        let net = Net::new(&device);
        let _read = values(&net);
        let mut pair = Pair::new(net.fork(&device), small_groups(strategy), group);
        for step in 0..2 {
            pair = pair.step(|net| net.loss(x(group, step)));
        }
    });
}
