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

fn train(group: &ProcessGroup) -> Result<(), Error> {
    let device = Device::flex().autodiff();
    let mut model = ShardedModule::new(Mlp::new(&device), ShardingStrategy::Full, group)?;
    let mut optimizer = Oss::new(AdamWConfig::new(), group)?;
    for step in 0..100 {
        // Each rank has data of its own.
        let batch = Tensor::random([32, 64], Distribution::Default, &device);
        let loss = model.loss(batch);
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(1e-3, model, gradients);
        if group.rank() == 0 && step % 20 == 0 {
            println!("step {step}: loss {}", loss.into_scalar::<f32>());
        }
    }
    Ok(())
}

fn main() -> Result<(), Error> {
    let ranks = ProcessGroup::spawn(4, |group| train(&group))?;
    ranks.into_iter().collect()
}
