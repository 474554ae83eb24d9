//! Equality with plain data parallel, bit for bit, of modules, groups and world sizes drawn at random.

#![allow(clippy::unwrap_used, reason = "a test ends at the first error")]

mod common;
#[path = "common/fill.rs"]
mod fill;
#[path = "common/pair.rs"]
mod pair;

use burn::module::Module;
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig, LinearLayout};
use burn::prelude::*;
use burn::tensor::activation::gelu;
use burn_shard::{ProcessGroup, ShardConfig, ShardingStrategy};
use common::{device, values};
use fill::noise;
use pair::{Pair, spawn};
use proptest::prelude::*;
use proptest::sample::select;

const STEPS: usize = 3;

/// A layer, and what comes after it.
#[derive(Clone, Debug)]
struct LayerSpec {
    width: usize,
    bias: bool,
    column_major: bool,
    norm: bool,
    frozen: bool,
    /// Applied once more, if it is square.
    twice: bool,
}

#[derive(Clone, Debug)]
struct Case {
    input: usize,
    layers: Vec<LayerSpec>,
    strategy: ShardingStrategy,
    world_size: usize,
    group_cap_bytes: usize,
    rows: usize,
    read_before_wrapping: bool,
}

fn layers() -> impl Strategy<Value = Vec<LayerSpec>> {
    let layer = (1..40usize, any::<[bool; 5]>());
    let layer = layer.prop_map(
        |(width, [bias, column_major, norm, frozen, twice])| LayerSpec {
            width,
            bias,
            column_major,
            norm,
            frozen,
            twice,
        },
    );
    proptest::collection::vec(layer, 1..6)
}

fn cases(read_before_wrapping: impl Strategy<Value = bool>) -> impl Strategy<Value = Case> {
    let group = (
        select(ShardingStrategy::ALL.to_vec()),
        1..5usize,
        select(vec![1, 64, 400, 4 << 10, 25 << 20]),
    );
    let module = (1..20usize, layers(), 1..4usize, read_before_wrapping);
    (group, module).prop_map(|((strategy, world_size, group_cap_bytes), module)| {
        let (input, mut layers, rows, read_before_wrapping) = module;
        // Something has to be trained.
        layers[0].frozen = false;
        Case {
            input,
            layers,
            strategy,
            world_size,
            group_cap_bytes,
            rows,
            read_before_wrapping,
        }
    })
}

#[derive(Module, Debug)]
struct Block {
    linear: Linear,
    norm: Option<LayerNorm>,
    #[module(skip)]
    twice: bool,
}

#[derive(Module, Debug)]
struct Net {
    blocks: Vec<Block>,
}

impl Net {
    fn new(case: &Case, device: &Device) -> Self {
        let mut width = case.input;
        let block = |spec: &LayerSpec| {
            let layout = [LinearLayout::Row, LinearLayout::Col][usize::from(spec.column_major)];
            let linear = LinearConfig::new(width, spec.width).with_bias(spec.bias);
            let block = Block {
                linear: linear.with_layout(layout).init(device),
                norm: spec
                    .norm
                    .then(|| LayerNormConfig::new(spec.width).init(device)),
                twice: spec.twice && width == spec.width,
            };
            width = spec.width;
            if case.read_before_wrapping {
                let _read = values(&block);
            }
            if spec.frozen { block.freeze() } else { block }
        };
        Self {
            blocks: case.layers.iter().map(block).collect(),
        }
    }

    fn loss(&self, mut x: Tensor<2>) -> Tensor<1> {
        for block in &self.blocks {
            x = block.linear.forward(x);
            if block.twice {
                x = block.linear.forward(gelu(x));
            }
            x = gelu(x);
            if let Some(norm) = &block.norm {
                x = norm.forward(x);
            }
        }
        (x - 0.5).powi_scalar(2).mean()
    }
}

fn train(case: &Case, group: &ProcessGroup) {
    let device = device();
    let config = ShardConfig::new(case.strategy).with_group_cap_bytes(case.group_cap_bytes);
    let mut pair = Pair::new(Net::new(case, &device), config, group);
    for step in 0..STEPS {
        let seed = (1 + group.rank() * STEPS + step) as u64;
        let x = TensorData::new(noise(seed, case.rows * case.input), [case.rows, case.input]);
        let x = Tensor::from_data(x, &device);
        pair = pair.step(|net| net.loss(x.clone()));
    }
}

fn config() -> ProptestConfig {
    ProptestConfig {
        cases: 256,
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn any_module_read_before_wrapping_equals_plain_data_parallel(case in cases(Just(true))) {
        spawn(case.world_size, |group| train(&case, group));
    }

    #[test]
    fn any_module_initialized_by_wrapping_equals_plain_data_parallel(case in cases(Just(false))) {
        spawn(case.world_size, |group| train(&case, group));
    }
}
