//! A plain stack of layers whose sizes divide evenly, for tests that count.

#![allow(dead_code, unreachable_pub, reason = "each test uses a part of it")]

use burn::module::Module;
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::prelude::*;
use burn::tensor::activation::gelu;
use burn_shard::{Oss, ShardedModule};

#[derive(Module, Debug)]
pub struct Mlp {
    pub layers: Vec<Linear>,
}

impl Mlp {
    pub fn new(depth: usize, width: usize, device: &Device) -> Self {
        let layer = |_| LinearConfig::new(width, width).init(device);
        Self {
            layers: (0..depth).map(layer).collect(),
        }
    }

    pub fn forward(&self, mut x: Tensor<2>) -> Tensor<2> {
        for layer in &self.layers {
            x = gelu(layer.forward(x));
        }
        x
    }
}

/// Linear, then layer norm.
#[derive(Module, Debug)]
pub struct Block {
    pub linear: Linear,
    pub norm: LayerNorm,
}

#[derive(Module, Debug)]
pub struct Blocks {
    pub blocks: Vec<Block>,
}

impl Blocks {
    pub fn new(depth: usize, width: usize, device: &Device) -> Self {
        let block = |_| Block {
            linear: LinearConfig::new(width, width).init(device),
            norm: LayerNormConfig::new(width).init(device),
        };
        Self {
            blocks: (0..depth).map(block).collect(),
        }
    }

    pub fn forward(&self, mut x: Tensor<2>) -> Tensor<2> {
        for block in &self.blocks {
            x = gelu(block.norm.forward(block.linear.forward(x)));
        }
        x
    }
}

/// Deterministic, different per rank.
pub fn input(rows: usize, width: usize, rank: usize, device: &Device) -> Tensor<2> {
    let value = |i: usize| ((i * 7 + rank * 3) % 11) as f32 / 11.0 - 0.5;
    let data: Vec<f32> = (0..rows * width).map(value).collect();
    Tensor::from_data(TensorData::new(data, [rows, width]), device)
}

/// One step of training on the mean of the squared output.
pub fn step<M: Module>(
    model: ShardedModule<M>,
    oss: &mut Oss,
    loss: impl FnOnce(&M) -> Tensor<1>,
) -> ShardedModule<M> {
    let loss = loss(&model);
    let grads = GradientsParams::from_grads(loss.backward(), &model);
    oss.step(1e-3, model, grads)
}
