//! One row of the table: a module, how it is used, and how it is compared with the plain one.

use std::any::type_name;
use std::collections::BTreeSet;

use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{GradientsParams, SgdConfig};
use burn::prelude::*;
use burn_shard::{MemoryKind, Oss, ProcessGroup, ShardConfig, ShardedModule, ShardingStrategy};

use crate::common::{
    assert_bits, assert_near, bits, device, gathered_gradients, gradients, plain_dp_gradients,
    values,
};
use crate::fill::{Fill, noise};

const STEPS: usize = 3;

/// Features that go into the linear layer in front of a layer without parameters.
const BEFORE: usize = 130;

/// Where the inputs of a forward come from: the same for both modules, different per rank and step.
pub(crate) struct Draw {
    pub(crate) device: Device,
    seed: u64,
}

impl Draw {
    fn new(group: &ProcessGroup, step: usize, device: Device) -> Self {
        let seed = 1 + (group.rank() * 100 + step) as u64;
        Self { device, seed }
    }

    /// Floats in (-1, 1).
    pub(crate) fn x<const D: usize>(&self, shape: [usize; D]) -> Tensor<D> {
        let data = TensorData::new(noise(self.seed, shape.iter().product()), shape);
        Tensor::from_data(data, &self.device)
    }

    /// Integers below `end`.
    pub(crate) fn tokens<const D: usize>(&self, shape: [usize; D], end: usize) -> Tensor<D, Int> {
        let tokens: Vec<i64> = noise(self.seed, shape.iter().product())
            .iter()
            .map(|x| ((x + 1.0) / 2.0 * end as f32) as i64 % end as i64)
            .collect();
        Tensor::from_data(TensorData::new(tokens, shape), &self.device)
    }
}

pub(crate) fn flat<const D: usize>(tensor: Tensor<D>) -> Tensor<1> {
    let numel = tensor.shape().num_elements();
    tensor.reshape([numel])
}

/// How a module comes to be wrapped.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Made {
    /// With values that the test has put in, the same on all ranks.
    Filled,
    /// Never read: its parameters are initialized by wrapping.
    Unread,
    /// Read once before wrapping, with other values on each rank.
    Read,
}

type Check = dyn Fn(&ProcessGroup, &ShardConfig, Made) + Send + Sync;

/// A use of one module, compared with plain data parallel by [`Row::check`].
pub(crate) struct Row {
    pub(crate) name: &'static str,
    /// Names of the types of `burn::nn` in it.
    pub(crate) types: BTreeSet<String>,
    pub(crate) check: Box<Check>,
}

/// A module and a forward that gives all its outputs, flattened.
pub(crate) fn row<M: Module + 'static>(
    name: &'static str,
    make: impl Fn(&Device) -> M + Send + Sync + 'static,
    forward: impl Fn(&M, &Draw) -> Tensor<1> + Send + Sync + 'static,
) -> Row {
    let types = types_of(&make(&Device::flex()));
    let check = move |group: &ProcessGroup, config: &ShardConfig, made: Made| {
        compare(group, config, made, &make, &forward);
    };
    Row {
        name,
        types,
        check: Box::new(check),
    }
}

/// A layer without parameters, behind a linear layer whose gradient goes through it. The first axis of
/// `shape` has to be 2.
pub(crate) fn after<L: Module + 'static, const D: usize>(
    name: &'static str,
    make: impl Fn(&Device) -> L + Send + Sync + 'static,
    shape: [usize; D],
    forward: impl Fn(&L, Tensor<D>) -> Tensor<1> + Send + Sync + 'static,
) -> Row {
    let features = shape[1..].iter().product();
    row(
        name,
        move |device| {
            (
                LinearConfig::new(BEFORE, features).init(device),
                make(device),
            )
        },
        move |(before, layer): &(Linear, L), draw| {
            let x = before.forward(draw.x([shape[0], BEFORE]));
            forward(layer, x.reshape(shape))
        },
    )
}

/// Trains a module by the library and by the oracle, and compares outputs, gradients and parameters.
fn compare<M: Module>(
    group: &ProcessGroup,
    config: &ShardConfig,
    made: Made,
    make: &impl Fn(&Device) -> M,
    forward: &impl Fn(&M, &Draw) -> Tensor<1>,
) {
    let device = device();
    // Made twice: clones of a module share their running statistics.
    let (mut module, mut plain) = (make(&device), make(&device));
    if made == Made::Filled {
        module = module.map(&mut Fill::default());
        plain = plain.map(&mut Fill::default());
    }
    if made == Made::Read {
        let _read = values(&module);
    }
    let mut model = ShardedModule::new(module, config.clone(), group).unwrap();
    assert_is_sharded(&model);
    if made != Made::Filled {
        plain = plain.map(&mut Fill::with(values(&model.unsharded())));
    }
    assert_bits("wrapping", 0, &values(&model.unsharded()), &values(&plain));
    let planned: Vec<_> = model.params().iter().map(|p| p.shape.clone()).collect();
    assert_eq!(planned, trainable_shapes(&plain), "shapes in the plan");

    let sgd = || SgdConfig::new().with_momentum(Some(MomentumConfig::new().with_momentum(0.9)));
    let mut oss = Oss::new(sgd(), group).unwrap();
    let mut stock = sgd().init();
    for step in 0..STEPS {
        let draw = Draw::new(group, step, device.clone());
        let (own, expected) = (forward(&model, &draw), forward(&plain, &draw));
        let compare = if adds_up_in_parts(&model) {
            assert_near
        } else {
            assert_bits
        };
        let output = |tensor: &Tensor<1>| vec![(String::new(), bits(tensor.clone()))];
        compare("output", step, &output(&own), &output(&expected));
        let loss = |output: Tensor<1>| (output.clone() * draw.x(output.dims())).mean();
        let grads = GradientsParams::from_grads(loss(own).backward(), &model);
        let plain_grads = plain_dp_gradients(&loss(expected), &plain, group);
        compare(
            "gradients",
            step,
            &gathered_gradients(&model, &grads),
            &gradients(&plain, &plain_grads),
        );
        model = oss.step(0.1, model, grads);
        plain = stock.step(0.1, plain, plain_grads);
        compare(
            "parameters",
            step,
            &values(&model.unsharded()),
            // Which makes running statistics take their latest update.
            &values(&plain.valid()),
        );
    }
    let draw = Draw::new(group, STEPS, Device::flex());
    let (own, expected) = (
        forward(&model.valid(), &draw),
        forward(&plain.valid(), &draw),
    );
    let compare = if adds_up_in_parts(&model) {
        assert_near
    } else {
        assert_bits
    };
    let output = |tensor: Tensor<1>| vec![(String::new(), bits(tensor))];
    compare("output of `valid`", STEPS, &output(own), &output(expected));
}

/// Whether gradients of one parameter are added up in another order than Burn's: its group is gathered anew
/// for each step of a sequence, and each of these reads has a sum of its own.
fn adds_up_in_parts<M: Module>(model: &ShardedModule<M>) -> bool {
    let is_recurrent = type_name::<M>().contains("::rnn::");
    is_recurrent && model.strategy() == ShardingStrategy::Full && model.groups().len() > 1
}

/// A table in which nothing is sharded would show nothing.
fn assert_is_sharded<M: Module>(model: &ShardedModule<M>) {
    let world_size = model.group().world_size();
    let is_vector = |p: &burn_shard::ParamSpec| p.shape.len() <= 1;
    if model.strategy() == ShardingStrategy::Full
        && world_size > 1
        // Vectors stay whole: norms ask the stored one for its length.
        && !model.params().iter().all(is_vector)
    {
        let bytes = |vectors: bool| -> usize {
            let params = model.params().iter().filter(|p| is_vector(p) == vectors);
            params.map(|p| p.numel() * 4).sum()
        };
        let (vectors, matrices) = (bytes(true), bytes(false));
        let stored = model.memory().of(MemoryKind::Parameters).live_bytes;
        assert!(
            (stored - vectors) * 4 < matrices * 3,
            "{stored} bytes are on one of {world_size} ranks, of {matrices} of matrices and {vectors} of vectors"
        );
    }
}

/// Shapes of what is no buffer.
fn trainable_shapes<M: Module>(module: &M) -> Vec<Vec<usize>> {
    struct Shapes(Vec<Vec<usize>>);
    impl ModuleVisitor for Shapes {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if param.val().is_require_grad() {
                self.0.push(param.val().dims().to_vec());
            }
        }
    }
    let mut shapes = Shapes(Vec::new());
    module.visit(&mut shapes);
    shapes.0
}

/// Types of `burn::nn` that the module's own type names, or that a visitor is shown in it.
fn types_of<M: Module>(module: &M) -> BTreeSet<String> {
    struct Containers(BTreeSet<String>);
    impl ModuleVisitor for Containers {
        fn enter_module(&mut self, _name: &str, container_type: &str) {
            if let Some((_, name)) = container_type.split_once(':') {
                self.0.insert(name.to_owned());
            }
        }
    }
    let mut containers = Containers(BTreeSet::new());
    module.visit(&mut containers);
    let named = type_name::<M>()
        .split(|c: char| !(c.is_alphanumeric() || "_:".contains(c)))
        .filter(|path| path.starts_with("burn_nn::"))
        .filter_map(|path| path.rsplit("::").next());
    containers.0.extend(named.map(ToOwned::to_owned));
    containers.0
}
