//! Gradients through checkpointed blocks are those of the plain run, to the last bit.

mod common;

use burn::module::{Module, Param};
use burn::nn::{
    BatchNorm, BatchNormConfig, Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear,
    LinearConfig,
};
use burn::tensor::activation::{gelu, softmax};
use burn::tensor::{Bool, DType, Device, Distribution, Int, Tensor};
use burn_shard_recompute::{Random, checkpoint, checkpoint_with};

use common::{bits, devices, gradients, grads_of};

/// A pre-norm transformer layer of one head.
#[derive(Module, Debug)]
struct Layer {
    norm: LayerNorm,
    query: Linear,
    key: Linear,
    value: Linear,
    out: Linear,
    up: Linear,
    down: Linear,
}

impl Layer {
    fn new(width: usize, device: &Device) -> Self {
        let linear = |from, to| LinearConfig::new(from, to).init(device);
        Self {
            norm: LayerNormConfig::new(width).init(device),
            query: linear(width, width),
            key: linear(width, width),
            value: linear(width, width),
            out: linear(width, width),
            up: linear(width, 3 * width),
            down: linear(3 * width, width),
        }
    }

    fn forward(&self, x: Tensor<3>, mask: Option<Tensor<3, Bool>>) -> Tensor<3> {
        let h = self.norm.forward(x.clone());
        let query = self.query.forward(h.clone());
        let mut scores = query.matmul(self.key.forward(h.clone()).swap_dims(1, 2));
        if let Some(mask) = mask {
            scores = scores.mask_fill(mask, -1e4);
        }
        let x = x + self.out.forward(softmax(scores, 2).matmul(self.value.forward(h)));
        // The norm is used twice on purpose.
        let h = self.norm.forward(x.clone());
        x + self.down.forward(gelu(self.up.forward(h)))
    }
}

fn input(device: &Device) -> Tensor<3> {
    Tensor::random([2, 5, 6], Distribution::Normal(0.0, 1.0), device)
}

fn layers(count: usize, device: &Device) -> Vec<Layer> {
    (0..count).map(|_| Layer::new(6, device)).collect()
}

#[test]
fn a_stack_of_layers_gives_the_plain_gradients() {
    for device in devices() {
        for dtype in [DType::F32, DType::BF16] {
            let layers = layers(3, &device).cast(dtype);
            let x = input(&device).cast(dtype).detach().require_grad();
            let ids = Tensor::<2, Int>::arange(0..25, &device);
            let mask = (ids.reshape([1, 5, 5]).remainder_scalar(3)).equal_elem(1).repeat_dim(0, 2);
            let run = |checkpointed: bool| {
                let mut h = x.clone();
                for layer in &layers {
                    let mask = Some(mask.clone());
                    h = match checkpointed {
                        true => checkpoint(layer, (h, mask), |layer, (h, mask)| layer.forward(h, mask)),
                        false => layer.forward(h, mask),
                    };
                }
                let loss = h.powi_scalar(2).mean();
                (bits(loss.clone()), grads_of(loss, &layers, &[&x]))
            };
            let (plain, checkpointed) = (run(false), run(true));
            assert_eq!(plain.1.len(), 3 * 14 + 1);
            assert_eq!(plain, checkpointed, "{dtype:?} on {device:?}");
        }
    }
}
