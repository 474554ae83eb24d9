//! What one rank does and another does not: named on all ranks, with the usual cause, under every strategy
//! alike; never an exchange of values, and never replicas that drift apart.

use burn::module::{Module, Param, ParamId};
use burn::nn::Linear;
use burn::optim::{GradientsParams, SgdConfig};
use burn::prelude::*;
use burn_shard::{Oss, ProcessGroup, ShardConfig, ShardedModule, ShardingStrategy};

use crate::common::{Bits, assert_bits, device, values};
use crate::pair::{WIDTH, assert_says, outcome, small_groups, spawn, x, x_on};

/// Two layers of one shape: a collective of one has the length of the other's.
#[derive(Module, Debug)]
struct Two {
    a: Linear,
    b: Linear,
}

impl Two {
    fn new(device: &Device) -> Self {
        // The same values every time, so that runs can be compared.
        let linear = |seed| Linear {
            weight: Param::from_tensor(x_on(device, seed, 0).repeat_dim(0, WIDTH / 3)),
            bias: None,
        };
        Self {
            a: linear(3),
            b: linear(4),
        }
    }

    fn loss(&self, x: Tensor<2>) -> Tensor<1> {
        (self.b.forward(self.a.forward(x)) - 1.0)
            .powi_scalar(2)
            .mean()
    }
}

fn wrapped(config: impl Into<ShardConfig>, group: &ProcessGroup) -> (ShardedModule<Two>, Oss) {
    let model = ShardedModule::new(Two::new(&device()), config, group).unwrap();
    (model, Oss::new(SgdConfig::new(), group).unwrap())
}

fn backward(model: &ShardedModule<Two>, step: usize) -> GradientsParams {
    let loss = model.loss(x(model.group(), step));
    GradientsParams::from_grads(loss.backward(), model)
}

/// One whole step, of what an unknowing rank does meanwhile.
fn trained(model: ShardedModule<Two>, oss: &mut Oss, step: usize) -> ShardedModule<Two> {
    let grads = backward(&model, step);
    oss.step(0.1, model, grads)
}

/// What every rank says of something that only some do, under each strategy: it is an error on all ranks,
/// at the latest in the step after it.
fn refused_on_all_ranks(
    parts: &[&str],
    different: impl Fn(ShardedModule<Two>, &mut Oss, &ProcessGroup) -> ShardedModule<Two> + Sync,
) {
    let mut failures = Vec::new();
    for strategy in ShardingStrategy::ALL {
        // Both layers in one group, and in one each.
        let one_group = ("one group", ShardConfig::new(strategy));
        for (groups, config) in [one_group, ("two groups", small_groups(strategy))] {
            let messages = spawn(2, |group| {
                let (model, mut oss) = wrapped(config.clone(), group);
                let model = trained(model, &mut oss, 0);
                outcome(|| {
                    let model = different(model, &mut oss, group);
                    let _model = trained(model, &mut oss, 2);
                })
            });
            failures.extend(unnamed(&format!("{strategy}, {groups}"), messages, parts));
        }
    }
    assert!(
        failures.is_empty(),
        "{parts:?} should be in:\n{}",
        failures.join("\n")
    );
}

/// The ranks whose message is missing, or misses one of `parts`.
fn unnamed<T>(what: &str, messages: Vec<Result<T, String>>, parts: &[&str]) -> Vec<String> {
    let named = |message: &String| parts.iter().all(|part| message.contains(part));
    let ranks = messages.into_iter().enumerate();
    let failures = ranks.filter_map(|(rank, outcome)| match outcome {
        Ok(_) => Some(format!("{what}, rank {rank}: nothing was said")),
        Err(message) if named(&message) => None,
        Err(message) => Some(format!("{what}, rank {rank}: {message}")),
    });
    failures.collect()
}

fn leave_out(grads: &mut GradientsParams, id: ParamId) {
    grads.remove::<2>(id).unwrap();
}

#[test]
fn gradients_left_out_crosswise_are_an_error_that_names_both_paths() {
    refused_on_all_ranks(&["a.weight", "b.weight"], |model, oss, group| {
        let mut grads = backward(&model, 1);
        let ids = [model.a.weight.id, model.b.weight.id];
        leave_out(&mut grads, ids[group.rank()]);
        oss.step(0.1, model, grads)
    });
}

#[test]
fn a_gradient_left_out_on_one_rank_is_an_error_that_names_it() {
    refused_on_all_ranks(&["b.weight"], |model, oss, group| {
        let mut grads = backward(&model, 1);
        if group.rank() == 1 {
            leave_out(&mut grads, model.b.weight.id);
        }
        oss.step(0.1, model, grads)
    });
}

#[test]
fn all_gradients_left_out_on_one_rank_are_an_error() {
    refused_on_all_ranks(&["a.weight"], |model, oss, group| {
        let mut grads = backward(&model, 1);
        if group.rank() == 1 {
            grads = GradientsParams::new();
        }
        oss.step(0.1, model, grads)
    });
}

#[test]
fn a_step_that_only_one_rank_makes_is_an_error() {
    refused_on_all_ranks(&["step"], |model, oss, group| {
        let grads = backward(&model, 1);
        if group.rank() == 0 {
            let mut again = GradientsParams::new();
            for id in [model.a.weight.id, model.b.weight.id] {
                again.register(id, grads.get::<2>(id).unwrap());
            }
            let model = oss.step(0.1, model, grads);
            return oss.step(0.1, model, again);
        }
        oss.step(0.1, model, grads)
    });
}

#[test]
fn a_step_that_one_rank_leaves_out_is_an_error() {
    refused_on_all_ranks(&["step"], |model, oss, group| {
        let grads = backward(&model, 1);
        if group.rank() == 0 {
            return model;
        }
        oss.step(0.1, model, grads)
    });
}

#[test]
fn another_learning_rate_on_one_rank_is_an_error() {
    refused_on_all_ranks(&["learning rate", "0.1", "0.2"], |model, oss, group| {
        let grads = backward(&model, 1);
        oss.step([0.1, 0.2][group.rank()], model, grads)
    });
}

/// Where a group's communicator is busy with one module, another's collective is not taken for it.
#[test]
fn two_modules_of_one_shape_that_ranks_differentiate_in_different_order_are_an_error() {
    let mut failures = Vec::new();
    for strategy in ShardingStrategy::ALL {
        let messages = spawn(2, |group| {
            let ((a, mut a_oss), (b, mut b_oss)) = (
                wrapped(small_groups(strategy), group),
                wrapped(small_groups(strategy), group),
            );
            outcome(|| {
                let (a_loss, b_loss) = (a.loss(x(group, 0)), b.loss(x(group, 0)));
                let grads = if group.rank() == 0 {
                    let a_grads = a_loss.backward();
                    (a_grads, b_loss.backward())
                } else {
                    let b_grads = b_loss.backward();
                    (a_loss.backward(), b_grads)
                };
                let a_grads = GradientsParams::from_grads(grads.0, &a);
                let b_grads = GradientsParams::from_grads(grads.1, &b);
                let _models = (a_oss.step(0.1, a, a_grads), b_oss.step(0.1, b, b_grads));
            })
        });
        failures.extend(unnamed(&strategy.to_string(), messages, &["module "]));
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

type Outcomes = Vec<Result<Bits, String>>;

/// What every rank ends with, under each strategy, where rank 0 alone does something and all train on.
fn outcomes(only_rank_0: impl Fn(&ShardedModule<Two>) + Sync) -> Vec<(ShardingStrategy, Outcomes)> {
    let outcomes_of = |strategy| {
        let outcomes = spawn(2, |group| {
            let (model, mut oss) = wrapped(small_groups(strategy), group);
            let model = trained(model, &mut oss, 0);
            outcome(|| {
                if group.rank() == 0 {
                    only_rank_0(&model);
                }
                let model = trained(model, &mut oss, 1);
                values(&model.unsharded())
            })
        });
        (strategy, outcomes)
    };
    ShardingStrategy::ALL.map(outcomes_of).into()
}

/// All ranks have the right values, or all say what is wrong.
fn right_or_refused_on_all_ranks(outcomes: &[(ShardingStrategy, Outcomes)], parts: &[&str]) {
    let mut right = outcomes.iter().flat_map(|(_, outcomes)| outcomes).flatten();
    let right = right.next().cloned().unwrap_or_default();
    for (strategy, outcomes) in outcomes {
        let refused = outcomes.iter().any(Result::is_err);
        for (rank, outcome) in outcomes.iter().enumerate() {
            let what = format!("{strategy}, rank {rank}");
            match outcome {
                Ok(_) if refused => panic!("{what}: goes on, and another rank does not"),
                Ok(values) => assert_bits(&what, 1, values, &right),
                Err(message) => assert_says(&format!("{what}: {message}"), parts),
            }
        }
    }
}

#[test]
fn unsharding_on_rank_0_alone_is_right_or_names_the_usual_cause_on_all_ranks() {
    let outcomes = outcomes(|model| {
        let _full = model.unsharded();
    });
    right_or_refused_on_all_ranks(&outcomes, &["unsharded", "every rank"]);
}

/// Or a program breaks when nothing but its strategy is changed.
#[test]
fn unsharding_on_rank_0_alone_is_refused_under_every_strategy_or_under_none() {
    let outcomes = outcomes(|model| {
        let _full = model.unsharded();
    });
    let refused = outcomes.iter().map(|(strategy, outcomes)| {
        let refused = outcomes.iter().any(Result::is_err);
        (strategy.to_string(), refused)
    });
    let refused: Vec<_> = refused.collect();
    assert!(
        refused.iter().all(|(_, r)| *r == refused[0].1),
        "{refused:?}"
    );
}

#[test]
fn validating_on_rank_0_alone_is_right_or_names_the_usual_cause_on_all_ranks() {
    let outcomes = outcomes(|model| {
        let _loss = model.valid().loss(x_on(&Device::flex(), 0, 5));
    });
    right_or_refused_on_all_ranks(&outcomes, &["every rank"]);
}

#[test]
fn a_forward_on_rank_0_alone_is_right_or_names_the_usual_cause_on_all_ranks() {
    let outcomes = outcomes(|model| {
        let _loss = model.loss(x_on(&device(), 0, 5));
    });
    right_or_refused_on_all_ranks(&outcomes, &["every rank"]);
}
