//! Optimizer state to and from Burn's own optimizers: training goes on, in bits, on the other side.

#![allow(clippy::unwrap_used, reason = "a test ends at the first error")]

mod common;

use std::collections::BTreeMap;

use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{
    AdamConfig, AdamWConfig, GradientsParams, ModuleOptimizer, OptimizerRecord, RmsPropConfig,
    SgdConfig,
};
use burn::prelude::*;
use burn::tensor::Bytes;
use burn::tensor::activation::gelu;
use burn_pack::Reader;
use burn_shard::{
    ElementwiseConfig, Error, Oss, ProcessGroup, ShardConfig, ShardedModule, ShardingStrategy,
};
use common::{bits, device};

/// Matrices that ZeRO-3 shards, of lengths that two and three ranks do not divide, and vectors.
#[derive(Module, Debug)]
struct Net {
    first: Linear,
    second: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        Self {
            first: LinearConfig::new(129, 257).init(device),
            second: LinearConfig::new(257, 3).init(device),
        }
    }

    /// Every rank has this loss, so that the mean over two ranks is what one rank alone has: x + x halved is x.
    fn loss(&self, step: usize, device: &Device) -> Tensor<1> {
        let values: Vec<f32> = (0..4 * 129)
            .map(|i| ((i * 7 + step * 13) % 31) as f32 / 31.0 - 0.4)
            .collect();
        let x = Tensor::<2>::from_data(TensorData::new(values, [4, 129]), device);
        let y = self.second.forward(gelu(self.first.forward(x)));
        y.square().mean()
    }
}

fn plain_steps(
    mut net: Net,
    optimizer: &mut ModuleOptimizer,
    steps: std::ops::Range<usize>,
) -> Net {
    for step in steps {
        let loss = net.loss(step, &device());
        let grads = GradientsParams::from_grads(loss.backward(), &net);
        net = optimizer.step(0.01, net, grads);
    }
    net
}

fn sharded_steps(
    mut model: ShardedModule<Net>,
    optimizer: &mut Oss,
    steps: std::ops::Range<usize>,
) -> ShardedModule<Net> {
    for step in steps {
        let loss = model.loss(step, &device());
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(0.01, model, grads);
    }
    model
}

/// The bits of all parameters.
fn parameters(net: &Net) -> Vec<u32> {
    #[derive(Default)]
    struct Collect(Vec<u32>);
    impl ModuleVisitor for Collect {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0.extend(bits(param.val()));
        }
    }
    let mut collect = Collect::default();
    net.visit(&mut collect);
    collect.0
}

/// Everything in a record, in an order.
fn contents(record: OptimizerRecord) -> (BTreeMap<String, Vec<u8>>, String) {
    let reader = Reader::from_bytes(record.into_bytes().unwrap()).unwrap();
    let rest = format!("{:?} {:?}", reader.scalars(), reader.metadata());
    let tensors = reader.into_tensors().unwrap().into_iter().map(|tensor| {
        let (name, dtype, shape, id, bytes) = tensor.into_parts().unwrap();
        let name = format!("{name} {dtype:?} {:?} {id:?}", shape.to_vec());
        (name, bytes.to_vec())
    });
    (tensors.collect(), rest)
}

fn copy(record: &[u8]) -> OptimizerRecord {
    OptimizerRecord::from_bytes(Bytes::from_bytes_vec(record.to_vec())).unwrap()
}

fn both_ways<C: ElementwiseConfig + Clone + Sync>(
    name: &str,
    config: &C,
    plain: impl Fn() -> ModuleOptimizer + Sync,
) {
    let start = Net::new(&device());
    let mut reference = plain();
    let half_way = plain_steps(start.clone(), &mut reference, 0..4);
    let half_record = reference.to_record().into_bytes().unwrap().to_vec();
    let end = plain_steps(half_way.clone(), &mut reference, 4..8);
    let expected = (parameters(&end), contents(reference.to_record()));

    for strategy in ShardingStrategy::ALL {
        for shard_ranks in [None, Some(1)] {
            let sharding = ShardConfig::new(strategy).with_shard_ranks(shard_ranks);
            let said = format!("{name}, {strategy}, {shard_ranks:?}");
            // Out of sharded training after four steps.
            let out = ProcessGroup::spawn(2, |group| {
                let model = ShardedModule::new(start.clone(), sharding.clone(), &group).unwrap();
                let mut optimizer = Oss::new(config.clone(), &group).unwrap();
                let model = sharded_steps(model, &mut optimizer, 0..4);
                let record = optimizer.to_record(&model).unwrap();
                let record = record.map(|record| record.into_bytes().unwrap().to_vec());
                (model.unsharded().train(), record)
            });
            let mut out = out.unwrap().into_iter();
            let (net, record) = out.next().unwrap();
            assert!(out.all(|(_, record)| record.is_none()), "{said}");
            let record = record.unwrap();
            assert_eq!(
                contents(copy(&record)),
                contents(copy(&half_record)),
                "{said}"
            );
            let mut optimizer = plain().load_record(copy(&record));
            let net = plain_steps(net, &mut optimizer, 4..8);
            assert!(parameters(&net) == expected.0, "{said}");
            assert_eq!(contents(optimizer.to_record()), expected.1, "{said}");

            // Into sharded training after four plain steps.
            let results = ProcessGroup::spawn(2, |group| {
                let model = ShardedModule::new(half_way.clone(), sharding.clone(), &group).unwrap();
                let mut optimizer = Oss::new(config.clone(), &group).unwrap();
                optimizer.load_record(&model, copy(&half_record)).unwrap();
                let model = sharded_steps(model, &mut optimizer, 4..8);
                let record = optimizer.to_record(&model).unwrap();
                let record = record.map(|record| record.into_bytes().unwrap().to_vec());
                (parameters(&model.unsharded()), record)
            });
            for (rank, (parameters, record)) in results.unwrap().into_iter().enumerate() {
                assert!(parameters == expected.0, "{said}, rank {rank}");
                if let Some(record) = record {
                    assert_eq!(contents(copy(&record)), expected.1, "{said}");
                }
            }
        }
    }
}

#[test]
fn training_goes_on_between_sharded_and_plain_optimizers() {
    let momentum = || SgdConfig::new().with_momentum(Some(MomentumConfig::new()));
    both_ways("momentum", &momentum(), || momentum().init());
    both_ways("SGD", &SgdConfig::new(), || SgdConfig::new().init());
    both_ways("Adam", &AdamConfig::new(), || AdamConfig::new().init());
    both_ways("AdamW", &AdamWConfig::new(), || AdamWConfig::new().init());
    // Without a kernel of ours.
    let amsgrad = || AdamConfig::new().with_amsgrad(true);
    both_ways("amsgrad", &amsgrad(), || amsgrad().init());
    both_ways("RMSProp", &RmsPropConfig::new(), || {
        RmsPropConfig::new().init()
    });
}

/// The module was made anew, as after a restart: its ids are others, its paths the same.
#[test]
fn parameters_are_found_by_their_paths() {
    let mut adam = AdamConfig::new().init();
    let net = plain_steps(Net::new(&device()), &mut adam, 0..3);
    let record = adam.to_record().into_bytes().unwrap().to_vec();
    let expected = contents(adam.to_record()).0;
    let found = ProcessGroup::spawn(3, |group| {
        let other = Net::new(&device()).load_record(net.clone().into_record());
        let other = Net {
            first: Linear {
                weight: Param::initialized(burn::module::ParamId::new(), other.first.weight.val()),
                ..other.first
            },
            ..other
        };
        let model = ShardedModule::new(other, ShardingStrategy::Full, &group).unwrap();
        let mut optimizer = Oss::new(AdamConfig::new(), &group).unwrap();
        optimizer.load_record(&model, copy(&record)).unwrap();
        let record = optimizer.to_record(&model).unwrap();
        record.map(|record| contents(record).0.into_values().collect::<Vec<_>>())
    });
    let mut found = found.unwrap().remove(0).unwrap();
    let mut expected: Vec<_> = expected.into_values().collect();
    found.sort_unstable();
    expected.sort_unstable();
    assert!(found == expected);
}

#[test]
fn what_does_not_fit_is_refused_on_all_ranks_and_changes_nothing() {
    /// Another architecture.
    #[derive(Module, Debug)]
    struct Other {
        first: Linear,
        third: Linear,
    }
    let mut adam = AdamConfig::new().init();
    plain_steps(Net::new(&device()), &mut adam, 0..1);
    let record = adam.to_record().into_bytes().unwrap().to_vec();
    let results = ProcessGroup::spawn(2, |group| {
        let linear = |from, to| LinearConfig::new(from, to).init(&device());
        let renamed = Other {
            first: linear(129, 257),
            third: linear(257, 3),
        };
        let renamed = ShardedModule::new(renamed, ShardingStrategy::Gradients, &group).unwrap();
        let mut oss = Oss::new(AdamConfig::new(), &group).unwrap();
        let unknown = oss.load_record(&renamed, copy(&record)).unwrap_err();
        assert!(oss.state_of("first.weight").tensors.is_empty());

        let resized = Net {
            first: linear(128, 257),
            second: linear(257, 3),
        };
        let resized = ShardedModule::new(resized, ShardingStrategy::Full, &group).unwrap();
        let mut reshaped = Oss::new(AdamConfig::new(), &group).unwrap();
        let shape = reshaped.load_record(&resized, copy(&record)).unwrap_err();

        let net = ShardedModule::new(Net::new(&device()), ShardingStrategy::Full, &group).unwrap();
        let mut sgd = Oss::new(SgdConfig::new(), &group).unwrap();
        let optimizer = sgd.load_record(&net, copy(&record)).unwrap_err();

        // One rank was given nothing.
        let own = match group.rank() {
            0 => copy(&record),
            _ => AdamConfig::new().init().to_record(),
        };
        let mut drifting = Oss::new(AdamConfig::new(), &group).unwrap();
        let drift = drifting.load_record(&net, own).unwrap_err();
        assert!(drifting.state_of("first.weight").tensors.is_empty());

        // The state of another module.
        let mut oss = Oss::new(AdamConfig::new(), &group).unwrap();
        let net = sharded_steps(net, &mut oss, 0..1);
        let elsewhere = oss.to_record(&renamed).unwrap_err();
        drop(net);
        (unknown, shape, optimizer, drift, elsewhere)
    });
    for (rank, refused) in results.unwrap().into_iter().enumerate() {
        let (unknown, shape, optimizer, drift, elsewhere) = refused;
        assert!(
            matches!(&unknown, Error::UnknownState { parameter, .. } if parameter.starts_with("second.")),
            "{unknown}"
        );
        let said = shape.to_string();
        assert!(matches!(shape, Error::StateShape { .. }), "{said}");
        assert!(
            said.contains("`first.weight` as f32 of shape [129, 257]"),
            "{said}"
        );
        assert!(
            matches!(optimizer, Error::OtherOptimizer { .. }),
            "{optimizer}"
        );
        assert!(
            matches!(drift, Error::OtherRecord { other, .. } if other == 1 - rank),
            "{drift}"
        );
        assert!(
            matches!(elsewhere, Error::OtherModule { .. }),
            "{elsewhere}"
        );
    }
}

#[test]
fn an_optimizer_that_has_made_no_step_has_an_empty_record() {
    ProcessGroup::spawn(2, |group| {
        let net = ShardedModule::new(Net::new(&device()), ShardingStrategy::Full, &group).unwrap();
        let optimizer = Oss::new(AdamConfig::new(), &group).unwrap();
        let record = optimizer.to_record(&net).unwrap();
        assert_eq!(
            record.map(|record| record.len()),
            (group.rank() == 0).then_some(0)
        );
    })
    .unwrap();
}
