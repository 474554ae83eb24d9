//! Four ranks as threads train one model, of which each keeps a quarter.
#![allow(clippy::print_stdout, reason = "an example shows what it computes")]

use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::prelude::*;
use burn::tensor::{Distribution, activation::gelu};
use burn_shard::{Error, Oss, ProcessGroup, ShardedModule, ShardingStrategy};

#[derive(Module, Debug)]
struct Mlp {
    hidden: Linear,
    output: Linear,
}

impl Mlp {
    fn new(device: &Device) -> Self {
        Self {
            hidden: LinearConfig::new(64, 512).init(device),
            output: LinearConfig::new(512, 1).init(device),
        }
    }

    /// How far the network is from adding up its inputs.
    fn loss(&self, x: Tensor<2>) -> Tensor<1> {
        let sum = x.clone().sum_dim(1);
        (self.output.forward(gelu(self.hidden.forward(x))) - sum)
            .square()
            .mean()
    }
}

pub(crate) fn train(group: &ProcessGroup) -> Result<Vec<f32>, Error> {
    let device = Device::flex().autodiff();
    let mut model = ShardedModule::new(Mlp::new(&device), ShardingStrategy::Full, group)?;
    let mut optimizer = Oss::new(AdamWConfig::new(), group)?;
    let mut losses = Vec::new();
    for _ in 0..100 {
        // Each rank has data of its own.
        let batch = Tensor::random([32, 64], Distribution::Default, &device);
        let loss = model.loss(batch);
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(1e-3, model, gradients);
        losses.push(loss.into_scalar::<f32>());
    }
    println!("rank {} holds\n{}", group.rank(), model.memory());
    Ok(losses)
}

fn main() -> Result<(), Error> {
    let ranks = ProcessGroup::spawn(4, |group| train(&group))?;
    for (rank, losses) in ranks.into_iter().enumerate() {
        let losses = losses?;
        println!("rank {rank}: loss from {} to {}", losses[0], losses[99]);
    }
    Ok(())
}
