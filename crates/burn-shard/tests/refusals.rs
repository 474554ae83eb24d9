//! What is refused, on which ranks, and what the message says; and that nothing ever hangs.

#![allow(clippy::unwrap_used, reason = "a test ends at the first error")]

mod common;
#[path = "common/mlp.rs"]
mod mlp;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use burn::grad_clipping::GradientClippingConfig;
use burn::module::{Lora, Module, Param, ParamId};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamConfig, GradientsParams, SgdConfig};
use burn::prelude::*;
use burn_shard::{
    CommError, Error, Local, Oss, ProcessGroup, ShardConfig, ShardedModule, ShardingStrategy,
};
use mlp::{Mlp, input};

fn device() -> Device {
    Device::flex().autodiff()
}

/// Runs `f` on each rank and returns what it says, all within the deadline.
fn spawn<T: Send>(world_size: usize, f: impl Fn(&ProcessGroup) -> T + Sync) -> Vec<T> {
    Local::new(world_size)
        .deadline(Duration::from_secs(20))
        .spawn(|group| f(&group))
        .unwrap()
}

fn text_of(payload: &(dyn std::any::Any + Send)) -> String {
    let text = payload.downcast_ref::<String>().cloned();
    text.unwrap_or_else(|| (*payload.downcast_ref::<&str>().unwrap()).to_owned())
}

/// The text with which `f` panics.
#[track_caller]
fn panic_of<T>(f: impl FnOnce() -> T) -> String {
    match catch_unwind(AssertUnwindSafe(f)) {
        Ok(_) => panic!("it should have been refused"),
        Err(payload) => text_of(&*payload),
    }
}

#[track_caller]
fn assert_says(message: &str, parts: &[&str]) {
    for part in parts {
        assert!(message.contains(part), "`{part}` should be in: {message}");
    }
}

#[derive(Module, Debug)]
struct Two {
    first: Linear,
    second: Linear,
}

impl Two {
    fn new(second_width: usize, device: &Device) -> Self {
        Self {
            first: LinearConfig::new(4, 4).init(device),
            second: LinearConfig::new(4, second_width).init(device),
        }
    }
}

#[test]
fn a_parameter_under_two_paths_is_refused_by_both_names() {
    for strategy in ShardingStrategy::ALL {
        for error in spawn(2, |group| {
            let first: Linear = LinearConfig::new(4, 4).init(&device());
            let second = first.clone();
            ShardedModule::new(Two { first, second }, strategy, group).unwrap_err()
        }) {
            assert!(matches!(error, Error::SharedParameter { .. }), "{error:?}");
            assert_says(&error.to_string(), &["`first.weight`", "`second.weight`"]);
        }
    }
}

#[test]
fn lora_before_wrapping_is_refused() {
    for strategy in ShardingStrategy::ALL {
        for error in spawn(2, |group| {
            let module = Two::new(4, &device()).apply_lora(Lora::new(2, 4.0));
            ShardedModule::new(module, strategy, group).unwrap_err()
        }) {
            assert!(
                matches!(error, Error::AlreadyReparameterized { .. }),
                "{error:?}"
            );
            assert_says(&error.to_string(), &["`first.weight`", "materialize"]);
        }
    }
}

#[test]
fn lora_after_wrapping_is_refused() {
    for strategy in ShardingStrategy::ALL {
        for message in spawn(1, |group| {
            let model = ShardedModule::new(Two::new(4, &device()), strategy, group).unwrap();
            panic_of(|| model.apply_lora(Lora::new(2, 4.0)))
        }) {
            assert_says(&message, &["LoRA", "rank 0"]);
        }
    }
}

#[test]
fn a_module_wrapped_twice_is_refused() {
    for message in spawn(1, |group| {
        let strategy = ShardingStrategy::Full;
        let model = ShardedModule::new(Two::new(4, &device()), strategy, group).unwrap();
        ShardedModule::new(model, strategy, group)
            .unwrap_err()
            .to_string()
    }) {
        assert_says(&message, &["`first.weight`", "`shard`", "cannot nest"]);
    }
}

#[test]
fn ranks_with_different_shapes_all_name_the_parameter() {
    for error in spawn(3, |group| {
        let width = if group.rank() == 1 { 5 } else { 4 };
        let module = Two::new(width, &device());
        ShardedModule::new(module, ShardingStrategy::Full, group).unwrap_err()
    }) {
        assert!(
            matches!(error, Error::PlanMismatch { other: 1, .. }),
            "{error:?}"
        );
        assert_says(&error.to_string(), &["second.weight", "[4, 4]", "[4, 5]"]);
    }
}

#[test]
fn ranks_with_different_modules_all_name_the_parameter() {
    for error in spawn(2, |group| {
        let device = device();
        let strategy = ShardingStrategy::Gradients;
        if group.rank() == 0 {
            ShardedModule::new(Mlp::new(2, 4, &device), strategy, group).unwrap_err()
        } else {
            ShardedModule::new(Two::new(4, &device), strategy, group).unwrap_err()
        }
    }) {
        assert!(matches!(error, Error::PlanMismatch { .. }), "{error:?}");
        assert_says(
            &error.to_string(),
            &[
                "rank 0 has",
                "layers.0.weight",
                "rank 1 has",
                "first.weight",
            ],
        );
    }
}

#[test]
fn a_parameter_frozen_on_one_rank_only_is_named_on_all() {
    for error in spawn(2, |group| {
        let mut module = Two::new(4, &device());
        if group.rank() == 1 {
            // Burn tells whether a parameter is frozen only once it is initialized.
            let _initialized = (
                module.second.weight.val(),
                module.second.bias.clone().unwrap().val(),
            );
            module.second = module.second.freeze();
        }
        ShardedModule::new(module, ShardingStrategy::Full, group).unwrap_err()
    }) {
        assert!(matches!(error, Error::PlanMismatch { .. }), "{error:?}");
        assert_says(&error.to_string(), &["second.weight", "frozen"]);
    }
}

/// The plan cannot know; the first reduction does.
#[test]
fn a_parameter_frozen_on_one_rank_before_it_was_initialized_fails_the_first_backward_on_all() {
    for strategy in ShardingStrategy::ALL {
        for message in spawn(2, |group| {
            let device = device();
            let mut module = Two::new(4, &device);
            if group.rank() == 1 {
                module.second = module.second.freeze();
            }
            let model = ShardedModule::new(module, strategy, group).unwrap();
            let x = input(2, 4, 0, &device);
            let loss = model.second.forward(model.first.forward(x)).mean();
            panic_of(|| loss.backward())
        }) {
            assert_says(
                &message,
                &["reducing the gradients", "disagree", "rank 1: "],
            );
        }
    }
}

#[test]
fn ranks_with_different_strategies_all_name_them() {
    for error in spawn(2, |group| {
        let strategy = [ShardingStrategy::Gradients, ShardingStrategy::Full][group.rank()];
        ShardedModule::new(Two::new(4, &device()), strategy, group).unwrap_err()
    }) {
        assert!(matches!(error, Error::PlanMismatch { .. }), "{error:?}");
        assert_says(&error.to_string(), &["strategy zero2", "strategy zero3"]);
    }
}

#[test]
fn ranks_with_different_group_caps_are_told() {
    for error in spawn(2, |group| {
        let config = ShardConfig::new(ShardingStrategy::Full);
        let config = config.with_group_cap_bytes([1, 1 << 20][group.rank()]);
        ShardedModule::new(Two::new(4, &device()), config, group).unwrap_err()
    }) {
        assert!(matches!(error, Error::PlanMismatch { .. }), "{error:?}");
    }
}

#[test]
fn when_one_rank_refuses_the_others_are_told_and_the_group_stays_usable() {
    for (rank, error) in spawn(3, |group| {
        let device = device();
        let mut module = Two::new(4, &device);
        if group.rank() == 2 {
            module.second = module.first.clone();
        }
        let error = ShardedModule::new(module, ShardingStrategy::Full, group).unwrap_err();
        let module = Two::new(4, &device);
        ShardedModule::new(module, ShardingStrategy::Full, group).unwrap();
        error
    })
    .into_iter()
    .enumerate()
    {
        if rank == 2 {
            assert!(matches!(error, Error::SharedParameter { .. }), "{error:?}");
        } else {
            assert!(
                matches!(error, Error::OtherRankRefused { other: 2, .. }),
                "{error:?}"
            );
            assert_says(&error.to_string(), &["rank 2", "`second.weight`"]);
        }
    }
}

#[derive(Module, Debug)]
struct Nothing {
    counts: Param<Tensor<1, Int>>,
}

#[test]
fn a_module_without_parameters_is_refused() {
    for error in spawn(2, |group| {
        let counts = Tensor::from_ints([1, 2], &device());
        let counts = Param::initialized(ParamId::new(), counts);
        ShardedModule::new(Nothing { counts }, ShardingStrategy::Full, group).unwrap_err()
    }) {
        assert!(matches!(error, Error::NoParameters { .. }), "{error:?}");
    }
}

/// A model of the strategy, and its gradients of one backward.
fn trained_once(
    strategy: ShardingStrategy,
    group: &ProcessGroup,
) -> (ShardedModule<Mlp>, GradientsParams) {
    let device = device();
    let config = ShardConfig::new(strategy).with_group_cap_bytes(300);
    let model = ShardedModule::new(Mlp::new(3, 8, &device), config, group).unwrap();
    let loss = model.forward(input(2, 8, group.rank(), &device)).mean();
    let grads = GradientsParams::from_grads(loss.backward(), &model);
    (model, grads)
}

#[test]
fn a_stock_optimizer_under_zero1_or_zero2_is_refused_with_the_way_out() {
    for strategy in [
        ShardingStrategy::OptimizerState,
        ShardingStrategy::Gradients,
    ] {
        for message in spawn(2, |group| {
            let (model, grads) = trained_once(strategy, group);
            panic_of(|| AdamConfig::new().init().step(0.1, model, grads))
        }) {
            assert_says(
                &message,
                &["burn_shard::Oss", "zero3", &strategy.to_string()],
            );
        }
    }
}

#[test]
fn clipping_by_norm_is_refused() {
    for error in spawn(1, |group| {
        let clipping = Some(GradientClippingConfig::Norm(1.0));
        let config = AdamConfig::new().with_grad_clipping(clipping.clone());
        let error = Oss::new(config, group).unwrap_err();
        let oss = Oss::new(SgdConfig::new(), group).unwrap();
        let config = SgdConfig::new().with_gradient_clipping(clipping);
        let group_error = oss
            .with_group(burn::module::ParamGroup::all(), config)
            .unwrap_err();
        assert!(matches!(group_error, Error::NormClipping));
        error
    }) {
        assert!(matches!(error, Error::NormClipping), "{error:?}");
        assert_says(&error.to_string(), &["with_norm_clipping", "by value"]);
    }
}

#[test]
fn gradients_of_the_wrong_length_are_refused_and_the_module_is_given_back_unchanged() {
    for strategy in ShardingStrategy::ALL {
        spawn(2, |group| {
            let (model, mut grads) = trained_once(strategy, group);
            let before = common::values(&*model);
            let mut oss = Oss::new(SgdConfig::new(), group).unwrap();
            let id = model.layers[1].weight.id;
            grads.remove::<2>(id).unwrap();
            grads.register(id, Tensor::<2>::ones([3, 3], &Device::flex()));
            let failed = oss.try_step(0.1, model, grads).unwrap_err();
            assert!(
                matches!(failed.error, Error::GradientLength { found: 9, .. }),
                "{:?}",
                failed.error
            );
            assert_says(
                &failed.to_string(),
                &["`layers.1.weight`", &strategy.to_string()],
            );
            assert_eq!(common::values(&**failed.module), before);
            // Everything goes on as if nothing had been tried.
            let model = *failed.module;
            let loss = model.forward(input(2, 8, group.rank(), &device())).mean();
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            assert_ne!(common::values(&*oss.step(0.1, model, grads)), before);
        });
    }
}

#[test]
fn gradients_of_a_plain_copy_of_the_module_are_refused_where_gradients_are_sharded() {
    for strategy in [ShardingStrategy::Gradients, ShardingStrategy::Full] {
        spawn(2, |group| {
            let (model, _) = trained_once(strategy, group);
            let plain = model.unsharded().train();
            let loss = plain.forward(input(2, 8, 0, &device())).mean();
            let grads = GradientsParams::from_grads(loss.backward(), &plain);
            let mut oss = Oss::new(SgdConfig::new(), group).unwrap();
            let failed = oss.try_step(0.1, model, grads).unwrap_err();
            assert!(matches!(failed.error, Error::GradientLength { .. }));
        });
    }
}

#[test]
fn an_optimizer_of_another_module_is_refused() {
    spawn(2, |group| {
        let (model, grads) = trained_once(ShardingStrategy::Gradients, group);
        let mut oss = Oss::new(SgdConfig::new(), group).unwrap();
        let _model = oss.step(0.1, model, grads);
        let (other, grads) = trained_once(ShardingStrategy::Gradients, group);
        let failed = oss.try_step(0.1, other, grads).unwrap_err();
        assert!(matches!(failed.error, Error::OtherModule { .. }));
    });
}

#[test]
fn an_optimizer_of_another_group_is_refused() {
    spawn(2, |group| {
        let alone = Local::new(1).groups().remove(0);
        let (model, grads) = trained_once(ShardingStrategy::Gradients, group);
        let mut oss = Oss::new(SgdConfig::new(), &alone).unwrap();
        let failed = oss.try_step(0.1, model, grads).unwrap_err();
        let expected = Error::OtherGroup {
            optimizer_rank: 0,
            optimizer_world_size: 1,
            module_rank: group.rank(),
            module_world_size: 2,
        };
        assert_eq!(failed.to_string(), expected.to_string());
    });
}

#[test]
fn under_zero3_ranks_that_read_different_parameters_are_told_which() {
    // Also if all lengths are the same, or ranks would compute with each other's layers.
    for width in [6, 4] {
        let started = Instant::now();
        let messages = spawn(2, |group| {
            let device = device();
            let config = ShardConfig::new(ShardingStrategy::Full).with_group_cap_bytes(100);
            let model = ShardedModule::new(Two::new(width, &device), config, group).unwrap();
            panic_of(|| {
                let x = input(2, 4, 0, &device);
                if group.rank() == 0 {
                    model.first.forward(x)
                } else {
                    model.second.forward(x)
                }
            })
        });
        for (message, own) in messages.iter().zip(["`first.weight`", "`second.weight`"]) {
            assert_says(message, &[own, "disagree", "read the same parameters"]);
        }
        assert!(started.elapsed() < Duration::from_secs(10));
    }
}

#[test]
fn a_rank_that_panics_in_the_middle_of_backward_ends_all_with_its_own_words() {
    for strategy in ShardingStrategy::ALL {
        let started = Instant::now();
        let error = Local::new(3)
            .deadline(Duration::from_secs(60))
            .spawn(|group| {
                let (model, _) = trained_once(strategy, &group);
                let x = input(2, 8, group.rank(), &device());
                let loss = model.forward(x).mean();
                if group.rank() == 1 {
                    // The others are in backward by now, waiting for this rank.
                    std::thread::sleep(Duration::from_millis(50));
                    panic!("rank 1 has had enough");
                }
                let _grads = loss.backward();
            })
            .unwrap_err();
        let CommError::RankPanicked { rank: 1, message } = &error else {
            panic!("{strategy}: {error:?}")
        };
        assert_eq!(message, "rank 1 has had enough");
        assert!(started.elapsed() < Duration::from_secs(10), "{strategy}");
    }
}

#[test]
fn a_rank_that_stops_is_named_by_the_others_within_the_deadline() {
    for strategy in ShardingStrategy::ALL {
        let started = Instant::now();
        let messages = spawn(3, |group| {
            let (model, _) = trained_once(strategy, group);
            let x = input(2, 8, group.rank(), &device());
            let loss = model.forward(x).mean();
            group.barrier().unwrap();
            group.set_deadline(Duration::from_millis(200));
            if group.rank() == 1 {
                std::thread::sleep(Duration::from_millis(1500));
                return String::new();
            }
            panic_of(|| loss.backward())
        });
        assert!(started.elapsed() < Duration::from_secs(10), "{strategy}");
        // The first to give up names the missing rank; the other hears of it from the group.
        for rank in [0, 2] {
            assert_says(&messages[rank], &["waited", "for ranks [1]"]);
        }
    }
}

#[test]
fn after_a_failure_every_later_use_says_why_instead_of_hanging() {
    for strategy in ShardingStrategy::ALL {
        spawn(2, |group| {
            let (model, grads) = trained_once(strategy, group);
            let mut oss = Oss::new(SgdConfig::new(), group).unwrap();
            group.barrier().unwrap();
            group.abort("the disk is full");
            if strategy == ShardingStrategy::Full {
                let x = input(2, 8, 0, &device());
                let message = panic_of(|| model.forward(x));
                assert_says(&message, &["the disk is full"]);
            } else if strategy != ShardingStrategy::Replicated {
                let failed = oss.try_step(0.1, model, grads).unwrap_err();
                assert_says(&failed.to_string(), &["the disk is full"]);
            }
        });
    }
}
