//! Sharded checkpoints of modules and optimizers: what was saved by any number of ranks under any strategy
//! trains on under any other, bit for bit.

#![allow(clippy::unwrap_used, reason = "a test ends at the first error")]

mod common;

use std::path::Path;

use burn::module::{Module, Param, ParamGroup};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{
    AdaGradConfig, AdamConfig, AdamWConfig, GradientsParams, RmsPropConfig, SgdConfig,
};
use burn::prelude::*;
use burn::tensor::{DType, TensorData};
use burn_shard::checkpoint::{Checkpoint, CheckpointError, Checkpoints};
use burn_shard::{
    ElementwiseConfig, Error, MixedPrecision, Oss, ProcessGroup, ShardConfig, ShardedModule,
    ShardingStrategy,
};
use common::{Batch, Bits, OddNet, assert_bits, device, values};
use serde_json::json;

/// How many batches a step has. They are the same before and after on the same number of ranks, so that
/// bits can be equal.
const BATCHES: usize = 2;

fn small_groups(strategy: ShardingStrategy) -> ShardConfig {
    ShardConfig::new(strategy).with_group_cap_bytes(400)
}

/// One step on all batches, by whichever ranks there are: the gradient is that of the sum of losses,
/// scaled so that the mean over ranks is the same for each number of them that divides `BATCHES`.
fn step(model: ShardedModule<OddNet>, oss: &mut Oss, step: usize) -> ShardedModule<OddNet> {
    let (rank, ranks) = (model.group().rank(), model.group().world_size());
    let batch = |of| Batch::new(of % BATCHES, step, ShardingStrategy::Full);
    let loss = if ranks <= BATCHES {
        let own = (0..BATCHES).filter(|of| of % ranks == rank);
        let losses = own.map(|of| model.loss(&batch(of), &device()));
        losses.reduce(|a, b| a + b).unwrap() * (ranks as f64 / BATCHES as f64)
    } else {
        model.loss(&batch(rank), &device())
    };
    let grads = GradientsParams::from_grads(loss.backward(), &model);
    oss.step(0.05, model, grads)
}

fn wrapped<C: ElementwiseConfig>(
    group: &ProcessGroup,
    config: ShardConfig,
    optimizer: &C,
) -> (ShardedModule<OddNet>, Oss) {
    let model = ShardedModule::new(OddNet::new(&device()), config, group).unwrap();
    let text = serde_json::to_string(optimizer).unwrap();
    (
        model,
        Oss::new(serde_json::from_str::<C>(&text).unwrap(), group).unwrap(),
    )
}

/// State of the optimizer by path and name, of all ranks, with what is whole on every rank once.
fn all_state(oss: &Oss, model: &ShardedModule<OddNet>) -> Vec<(String, Vec<u32>)> {
    let group = model.group();
    let mut all = Vec::new();
    for spec in model.params() {
        let state = oss.state_of(&spec.path);
        let mut names: Vec<String> = state.tensors.iter().map(|(name, _)| name.clone()).collect();
        names.sort();
        let names = group.all_gather_bytes(names.join("\n").as_bytes()).unwrap();
        let names = String::from_utf8(names.into_iter().max_by_key(Vec::len).unwrap()).unwrap();
        for name in names.lines() {
            let own = state.tensors.iter().find(|(own, _)| own == name);
            let own: Vec<f32> = own
                .map(|(_, data)| data.iter().collect())
                .unwrap_or_default();
            let bytes: Vec<u8> = own.iter().flat_map(|x| x.to_bits().to_le_bytes()).collect();
            let ranks = group.all_gather_bytes(&bytes).unwrap();
            let whole = ranks[0].len() == spec.numel() * 4;
            let bytes = if whole {
                ranks[0].clone()
            } else {
                ranks.concat()
            };
            let word = |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().unwrap());
            all.push((
                format!("{}.{name}", spec.path),
                bytes.chunks(4).map(word).collect(),
            ));
        }
    }
    all
}

type State = (Bits, Bits);

fn state(model: &ShardedModule<OddNet>, oss: &Oss) -> State {
    (values(&model.unsharded()), all_state(oss, model))
}

/// Trains three steps and saves; what it saved, and what two steps more make of it.
fn save<C: ElementwiseConfig + Sync>(
    root: &Path,
    ranks: usize,
    config: &ShardConfig,
    optimizer: &C,
) -> (State, State) {
    let mut states = ProcessGroup::spawn(ranks, |group| {
        let (mut model, mut oss) = wrapped(&group, config.clone(), optimizer);
        for at in 0..3 {
            model = step(model, &mut oss, at);
        }
        let checkpoints = Checkpoints::new(root, &group);
        let published = checkpoints
            .save(3, &model, &oss, &json!({ "epoch": 7 }))
            .unwrap();
        assert_eq!(published.step, 3);
        let saved = state(&model, &oss);
        for at in 3..5 {
            model = step(model, &mut oss, at);
        }
        (saved, state(&model, &oss))
    })
    .unwrap();
    states.remove(0)
}

/// Loads into a new module, and trains two steps on.
fn load<C: ElementwiseConfig + Sync>(
    root: &Path,
    ranks: usize,
    config: &ShardConfig,
    optimizer: &C,
) -> (State, State) {
    let mut states = ProcessGroup::spawn(ranks, |group| {
        let (model, mut oss) = wrapped(&group, config.clone(), optimizer);
        let loaded = Checkpoints::new(root, &group)
            .load(model, &mut oss)
            .unwrap();
        assert_eq!((loaded.step, loaded.user), (3, json!({ "epoch": 7 })));
        let mut model = loaded.model;
        let found = state(&model, &oss);
        for at in 3..5 {
            model = step(model, &mut oss, at);
        }
        (found, state(&model, &oss))
    })
    .unwrap();
    states.remove(0)
}

fn assert_state(what: &str, actual: &State, expected: &State) {
    assert_bits(&format!("{what}: parameters"), 3, &actual.0, &expected.0);
    assert_bits(&format!("{what}: optimizer"), 3, &actual.1, &expected.1);
}

fn survives<C: ElementwiseConfig + Sync>(optimizer: &C, worlds: &[(usize, usize)]) {
    for &(before, after) in worlds {
        for from in ShardingStrategy::ALL {
            let root = tempfile::tempdir().unwrap();
            let (saved, went_on) = save(root.path(), before, &small_groups(from), optimizer);
            for to in ShardingStrategy::ALL {
                let what = format!("{from} on {before} to {to} on {after}");
                let config = ShardConfig::new(to).with_group_cap_bytes(900);
                let (found, continued) = load(root.path(), after, &config, optimizer);
                assert_state(&what, &found, &saved);
                // One rank runs both batches in one forward, which reads a parameter so often that
                // `Full` adds up its gradients in another order.
                if before == after && before > 1 {
                    assert_state(&format!("{what}, continued"), &continued, &went_on);
                }
            }
        }
    }
}

#[test]
fn adam_goes_on_from_any_strategy_and_number_of_ranks_to_any_other() {
    survives(
        &AdamConfig::new(),
        &[(1, 1), (2, 2), (2, 3), (3, 2), (1, 4), (4, 1)],
    );
}

#[test]
fn momentum_and_optimizers_without_a_kernel_go_on_too() {
    let momentum = MomentumConfig::new().with_momentum(0.9);
    survives(
        &SgdConfig::new().with_momentum(Some(momentum)),
        &[(2, 2), (2, 3)],
    );
    survives(&SgdConfig::new(), &[(2, 2)]);
    survives(&RmsPropConfig::new(), &[(2, 2), (3, 2)]);
    survives(&AdaGradConfig::new(), &[(2, 2)]);
    survives(&AdamConfig::new().with_amsgrad(true), &[(2, 2), (2, 1)]);
}

/// Parameters of three types, of which a kernel steps one.
#[derive(Module, Debug)]
struct Types {
    single: Param<Tensor<2>>,
    double: Param<Tensor<2>>,
    half: Param<Tensor<2>>,
}

impl Types {
    fn new() -> Self {
        let of = |dtype: DType| {
            let data: Vec<f32> = (0..35).map(|i| (i * 7 % 11) as f32 / 11.0 - 0.5).collect();
            let data = TensorData::new(data, [5, 7]).convert_dtype(dtype);
            Param::from_tensor(Tensor::from_data(data, (&device(), dtype)))
        };
        Self {
            single: of(DType::F32),
            double: of(DType::F64),
            half: of(DType::BF16),
        }
    }

    fn loss(&self, rank: usize) -> Tensor<1> {
        let x = Tensor::<2>::full([3, 5], 0.1 + rank as f32, &device());
        let single = x.clone().matmul(self.single.val());
        let double = x.clone().cast(DType::F64).matmul(self.double.val());
        let half = x.cast(DType::BF16).matmul(self.half.val());
        (single + double.cast(DType::F32) + half.cast(DType::F32) - 1.0)
            .powi_scalar(2)
            .mean()
    }
}

/// Their values come back. Burn makes the state of an optimizer without a kernel in the default type of its
/// device, which is another here.
#[test]
fn parameters_of_every_float_type_come_back_and_state_in_another_type_is_refused() {
    let momentum = || SgdConfig::new().with_momentum(Some(MomentumConfig::new()));
    for strategy in ShardingStrategy::ALL {
        let root = tempfile::tempdir().unwrap();
        ProcessGroup::spawn(2, |group| {
            let wrapped = || ShardedModule::new(Types::new(), strategy, &group).unwrap();
            let all = |model: &ShardedModule<Types>| {
                let full = model.unsharded();
                let all = [full.single, full.double, full.half].map(|p| p.val().into_data());
                all.map(|data| (data.dtype(), data.as_bytes().to_vec()))
            };
            let train = |mut model: ShardedModule<Types>, mut oss: Oss| {
                for _ in 0..2 {
                    let grads = model.loss(group.rank()).backward();
                    let grads = GradientsParams::from_grads(grads, &model);
                    model = oss.step(0.05, model, grads);
                }
                (model, oss)
            };
            let checkpoints = Checkpoints::new(root.path(), &group);
            let plain = || Oss::new(SgdConfig::new(), &group).unwrap();
            let (model, oss) = train(wrapped(), plain());
            checkpoints.save(2, &model, &oss, &json!(null)).unwrap();
            let loaded = checkpoints.load(wrapped(), &mut plain()).unwrap().model;
            assert_eq!(all(&loaded), all(&model), "{strategy}");
            let types = all(&model).map(|(dtype, _)| dtype);
            assert_eq!(types, [DType::F32, DType::F64, DType::BF16]);

            let with_momentum = || Oss::new(momentum(), &group).unwrap();
            let (model, oss) = train(wrapped(), with_momentum());
            checkpoints.save(3, &model, &oss, &json!(null)).unwrap();
            let error = checkpoints
                .load(wrapped(), &mut with_momentum())
                .unwrap_err();
            let Error::OptimizerStateType {
                path,
                saved,
                restored,
                ..
            } = error
            else {
                panic!("{error}");
            };
            assert_eq!(
                (path.as_str(), saved, restored),
                ("double", DType::F64, DType::F32)
            );
        })
        .unwrap();
    }
}

#[test]
fn parameters_of_one_group_go_on_with_and_without_momentum() {
    let momentum = || SgdConfig::new().with_momentum(Some(MomentumConfig::new()));
    let optimizer = |group: &ProcessGroup| {
        let plain = Oss::new(SgdConfig::new(), group).unwrap();
        let weights = ParamGroup::from_predicate("weight");
        plain.with_group(weights, momentum()).unwrap()
    };
    for strategy in ShardingStrategy::ALL {
        let root = tempfile::tempdir().unwrap();
        ProcessGroup::spawn(2, |group| {
            let wrapped = || ShardedModule::new(OddNet::new(&device()), strategy, &group).unwrap();
            let checkpoints = Checkpoints::new(root.path(), &group);
            let mut oss = optimizer(&group);
            let model = step(wrapped(), &mut oss, 0);
            checkpoints.save(1, &model, &oss, &json!(null)).unwrap();
            let roles = |path| oss.state_of(path).tensors.len();
            let params = model.params();
            let with = params.iter().filter(|param| roles(&param.path) == 1);
            let with: Vec<_> = with.map(|param| param.path.as_str()).collect();
            assert!(with.iter().all(|path| path.ends_with("weight")), "{with:?}");
            assert!((1..params.len()).contains(&with.len()), "{with:?}");

            let mut restored = optimizer(&group);
            let loaded = checkpoints.load(wrapped(), &mut restored).unwrap();
            let expected = state(&step(model, &mut oss, 1), &oss);
            let found = state(&step(loaded.model, &mut restored, 1), &restored);
            assert_state(&strategy.to_string(), &found, &expected);
        })
        .unwrap();
    }
}

/// Steps go on between, in the buffers that were saved.
/// A checkpoint has no place for them, and leaving them out would lose them.
#[test]
fn a_save_between_micro_batches_is_refused_and_changes_nothing() {
    for strategy in ShardingStrategy::ALL {
        let root = tempfile::tempdir().unwrap();
        ProcessGroup::spawn(2, |group| {
            let (model, mut oss) = wrapped(&group, small_groups(strategy), &AdamConfig::new());
            let checkpoints = Checkpoints::new(root.path(), &group);
            let backward = |model: &ShardedModule<OddNet>, i| {
                let batch = Batch::new(group.rank(), i, strategy);
                model.loss(&batch, &device()).backward()
            };
            {
                let _no_sync = model.no_sync();
                backward(&model, 0);
            }
            let refused = checkpoints.save(1, &model, &oss, &json!({})).unwrap_err();
            assert!(matches!(refused, Error::Unreduced { .. }), "{refused}");
            let gradients = GradientsParams::from_grads(backward(&model, 1), &model);
            let model = oss.step(0.01, model, gradients);
            checkpoints.save(1, &model, &oss, &json!({})).unwrap();
        })
        .unwrap();
    }
}

#[test]
fn a_save_in_the_background_is_of_the_step_at_which_it_began() {
    for strategy in ShardingStrategy::ALL {
        let root = tempfile::tempdir().unwrap();
        ProcessGroup::spawn(2, |group| {
            let checkpoints = Checkpoints::new(root.path(), &group);
            let config = || small_groups(strategy);
            let (mut model, mut oss) = wrapped(&group, config(), &AdamConfig::new());
            model = step(model, &mut oss, 0);
            let saved = state(&model, &oss);
            let mut pending = checkpoints
                .begin_save(1, &model, &oss, &json!("first"))
                .unwrap();
            assert_eq!(pending.step(), 1);
            // Nobody sees it before it is finished.
            let none = Checkpoint::open(root.path());
            assert!(matches!(none, Err(CheckpointError::NoCheckpoint { .. })));
            for at in 1..3 {
                model = step(model, &mut oss, at);
            }
            while !pending.is_ready().unwrap() {
                std::thread::yield_now();
            }
            assert!(pending.is_ready().unwrap());
            assert_eq!(pending.finish().unwrap().step, 1);

            let (new, mut restored) = wrapped(&group, config(), &AdamConfig::new());
            let loaded = checkpoints.load(new, &mut restored).unwrap();
            assert_eq!(loaded.user, json!("first"));
            assert_state(
                &strategy.to_string(),
                &state(&loaded.model, &restored),
                &saved,
            );
        })
        .unwrap();
    }
}

#[test]
fn a_save_in_the_background_that_fails_or_is_dropped_leaves_the_one_before() {
    let (root, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    ProcessGroup::spawn(2, |group| {
        let checkpoints = Checkpoints::new(root.path(), &group);
        let newest = || Checkpoint::open(root.path()).unwrap().manifest().step;
        let config = small_groups(ShardingStrategy::Full);
        let (mut model, mut oss) = wrapped(&group, config, &AdamConfig::new());
        model = step(model, &mut oss, 0);
        let user = json!(null);
        checkpoints.save(1, &model, &oss, &user).unwrap();

        // Rank 1 does not see the directory.
        let roots = [root.path(), elsewhere.path()];
        let apart = Checkpoints::new(roots[group.rank()], &group);
        let pending = apart.begin_save(2, &model, &oss, &user).unwrap();
        let error = pending.finish().unwrap_err().to_string();
        assert!(error.contains("rank 1"), "{error}");
        assert_eq!(newest(), 1);
        model = step(model, &mut oss, 1);

        drop(checkpoints.begin_save(3, &model, &oss, &user).unwrap());
        group.barrier().unwrap();
        assert_eq!(newest(), 1);

        // The second has to wait for the first, and the first does not mind.
        let first = checkpoints.begin_save(4, &model, &oss, &user).unwrap();
        let second = checkpoints.begin_save(5, &model, &oss, &user);
        let error = second.unwrap_err().to_string();
        assert!(error.contains("saving"), "{error}");
        assert_eq!(first.finish().unwrap().step, 4);
        checkpoints.save(5, &model, &oss, &user).unwrap();
        assert_eq!(newest(), 5);
    })
    .unwrap();
}

#[test]
fn f32_masters_go_from_mixed_precision_to_full_and_back() {
    let mixed =
        |strategy| small_groups(strategy).with_mixed_precision(Some(MixedPrecision::bf16()));
    for from in ShardingStrategy::ALL {
        let root = tempfile::tempdir().unwrap();
        let (saved, went_on) = save(root.path(), 2, &mixed(from), &AdamWConfig::new());
        for to in ShardingStrategy::ALL {
            let what = format!("{from} to {to}");
            let (found, continued) = load(root.path(), 2, &mixed(to), &AdamWConfig::new());
            assert_state(&what, &found, &saved);
            assert_state(&what, &continued, &went_on);
            let (found, _) = load(root.path(), 2, &small_groups(to), &AdamWConfig::new());
            assert_state(&what, &found, &saved);
        }
    }
}

#[derive(Module, Debug)]
struct WithBuffers {
    linear: Linear,
    norm: BatchNorm,
}

impl WithBuffers {
    fn new(device: &Device) -> Self {
        Self {
            linear: LinearConfig::new(5, 7).init(device),
            norm: BatchNormConfig::new(7).init(device),
        }
    }

    fn loss(&self, rank: usize) -> Tensor<1> {
        let x = Tensor::<2>::ones([3, 5], &device()) * (rank as f64 + 1.0);
        let x = self.linear.forward(x).reshape([3, 7, 1]);
        self.norm.forward(x).powi_scalar(3).mean()
    }
}

#[test]
fn running_statistics_are_those_of_rank_0() {
    for strategy in ShardingStrategy::ALL {
        let root = tempfile::tempdir().unwrap();
        let trained = ProcessGroup::spawn(2, |group| {
            let module = WithBuffers::new(&device());
            let mut model = ShardedModule::new(module, strategy, &group).unwrap();
            let mut oss = Oss::new(AdamConfig::new(), &group).unwrap();
            for _ in 0..3 {
                let grads = model.loss(group.rank()).backward();
                let grads = GradientsParams::from_grads(grads, &model);
                model = oss.step(0.1, model, grads);
            }
            let checkpoints = Checkpoints::new(root.path(), &group);
            checkpoints.save(1, &model, &oss, &json!(null)).unwrap();
            values(&model.unsharded())
        })
        .unwrap();
        assert_ne!(trained[0], trained[1], "statistics are each rank's own");
        for loaded in ProcessGroup::spawn(3, |group| {
            let module = WithBuffers::new(&device());
            let model = ShardedModule::new(module, strategy, &group).unwrap();
            let mut oss = Oss::new(AdamConfig::new(), &group).unwrap();
            let loaded = Checkpoints::new(root.path(), &group)
                .load(model, &mut oss)
                .unwrap();
            values(&loaded.model.unsharded())
        })
        .unwrap()
        {
            assert_bits(&format!("{strategy}"), 1, &loaded, &trained[0]);
        }
    }
}

#[test]
fn what_does_not_fit_is_refused_on_all_ranks_and_changes_nothing() {
    let root = tempfile::tempdir().unwrap();
    let config = small_groups(ShardingStrategy::Gradients);
    drop(save(root.path(), 2, &config, &AdamConfig::new()));
    ProcessGroup::spawn(2, |group| {
        let checkpoints = Checkpoints::new(root.path(), &group);
        // Another optimizer.
        let (model, mut oss) = wrapped(&group, config.clone(), &SgdConfig::new());
        let error = checkpoints.load(model, &mut oss).unwrap_err();
        assert!(matches!(error, Error::OtherOptimizer { .. }), "{error:?}");
        // Another module.
        let linear = LinearConfig::new(3, 3).init(&device());
        let other = ShardedModule::<Linear>::new(linear, config.clone(), &group).unwrap();
        let mut oss = Oss::new(AdamConfig::new(), &group).unwrap();
        let error = checkpoints.load(other, &mut oss).unwrap_err();
        assert!(error.to_string().contains("weight"), "{error}");
        // None at all.
        let (model, mut oss) = wrapped(&group, config.clone(), &AdamConfig::new());
        let nowhere = Checkpoints::new(root.path().join("nowhere"), &group);
        assert!(nowhere.load(model, &mut oss).is_err());
        // The group is as usable as before.
        group.barrier().unwrap();
    })
    .unwrap();
}

/// A file where the directory of checkpoints should be: rank 0 fails, and every rank is told.
#[test]
fn a_save_that_rank_0_cannot_begin_fails_on_all_ranks_and_training_goes_on() {
    let root = tempfile::tempdir().unwrap();
    let file = root.path().join("file");
    std::fs::write(&file, "no directory").unwrap();
    ProcessGroup::spawn(3, |group| {
        let config = small_groups(ShardingStrategy::Full);
        let (mut model, mut oss) = wrapped(&group, config, &AdamConfig::new());
        model = step(model, &mut oss, 0);
        let error = Checkpoints::new(&file, &group).save(1, &model, &oss, &json!(null));
        assert!(matches!(error, Err(Error::Checkpoint(_))), "{error:?}");
        drop(step(model, &mut oss, 1));
    })
    .unwrap();
}
