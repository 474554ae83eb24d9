//! Gradients through checkpointed blocks are those of the plain run, to the last bit.

mod common;

use burn::module::Module;
use burn::nn::{
    BatchNorm, BatchNormConfig, Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear,
    LinearConfig,
};
use burn::tensor::activation::{gelu, softmax};
use burn::tensor::{Bool, DType, Device, Distribution, Int, Tensor};
use burn_shard_recompute::checkpoint;

use common::{Bits, alone, bits, cast, devices, gradients, grads_of};

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
        let x = x + self
            .out
            .forward(softmax(scores, 2).matmul(self.value.forward(h)));
        // The norm is used twice on purpose.
        let h = self.norm.forward(x.clone());
        x + self.down.forward(gelu(self.up.forward(h)))
    }
}

fn input<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D> {
    Tensor::random(shape, Distribution::Normal(0.0, 1.0), device).require_grad()
}

fn linear(from: usize, to: usize, device: &Device) -> Linear {
    LinearConfig::new(from, to).init(device)
}

/// The mean square, a loss whose gradient differs by element.
fn loss<const D: usize>(tensor: Tensor<D>) -> Tensor<1> {
    tensor.powi_scalar(2).mean()
}

#[test]
fn a_stack_of_layers_gives_the_plain_gradients() {
    let _alone = alone();
    for device in devices() {
        for dtype in [DType::F32, DType::BF16] {
            let layers: Vec<_> = (0..3).map(|_| Layer::new(6, &device)).collect();
            let layers = cast(layers, dtype);
            let x = input([2, 5, 6], &device)
                .set_require_grad(false)
                .cast(dtype)
                .require_grad();
            let ids = Tensor::<1, Int>::arange(0..50, &device);
            let mask = ids.reshape([2, 5, 5]).remainder_scalar(3).equal_elem(1);
            let run = |checkpointed: bool| {
                let mut h = x.clone();
                for layer in &layers {
                    let mask = Some(mask.clone());
                    h = match checkpointed {
                        true => {
                            checkpoint(layer, (h, mask), |layer, (h, mask)| layer.forward(h, mask))
                        }
                        false => layer.forward(h, mask),
                    };
                }
                let loss = loss(h);
                (bits(loss.clone()), grads_of(loss, &layers, &[&x]))
            };
            let (plain, checkpointed) = (run(false), run(true));
            assert_eq!(plain.1.len(), 3 * 14 + 1);
            assert!(plain.1.iter().all(Option::is_some));
            assert_eq!(plain, checkpointed, "{dtype:?} on {device:?}");
        }
    }
}

/// Inputs and outputs of several ranks; `h` is used inside, and outside before and after the block.
fn several(
    device: &Device,
    call: impl Fn(&(Linear, Linear), (Tensor<2>, Vec<Tensor<3>>)) -> (Tensor<3>, [Tensor<1>; 2]),
) -> Vec<Option<Bits>> {
    device.seed(3);
    let block = (linear(4, 4, device), linear(4, 4, device));
    let x = input([3, 4], device);
    let h = x.clone().exp();
    let wide = input([1, 3, 4], device);
    let (cube, [row, unused]) = call(&block, (h.clone(), vec![wide.clone(), wide.clone()]));
    drop(unused);
    let loss = loss(cube * h.clone().unsqueeze()) + loss(row) + loss(h * 0.3);
    grads_of(loss, &block, &[&x.unsqueeze(), &wide])
}

fn several_forward(
    block: &(Linear, Linear),
    (h, wide): (Tensor<2>, Vec<Tensor<3>>),
) -> (Tensor<3>, [Tensor<1>; 2]) {
    let a = block.0.forward(h.clone());
    let b = block.1.forward(h.clone() + a.clone()) * h.clone();
    let cube = wide
        .into_iter()
        .fold(b.unsqueeze::<3>(), |sum, wide| sum * wide);
    let row = (a + h).sum_dim(0).squeeze_dim(0);
    (cube, [row.clone(), row * 2.0])
}

#[test]
fn inputs_and_outputs_of_several_ranks_give_the_plain_gradients() {
    let _alone = alone();
    for device in devices() {
        let plain = several(&device, several_forward);
        let checkpointed = several(&device, |block, inputs| {
            checkpoint(block, inputs, several_forward)
        });
        assert!(plain[..4].iter().all(Option::is_some));
        assert_eq!(plain, checkpointed);
    }
}

#[test]
fn a_parameter_used_several_times_inside_and_outside_is_summed_in_the_plain_order() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    // A bias would be summed up by the views that Burn makes of it, after everything else.
    let tied = LinearConfig::new(8, 8).with_bias(false).init(&device);
    let block = (tied.clone(), tied.clone());
    let x = input([16, 8], &device);
    let run = |checkpointed: bool| {
        let h = tied.forward(x.clone()).tanh();
        let inside = |block: &(Linear, Linear), h: Tensor<2>| {
            let h = block.0.forward(h).tanh();
            let h = block.1.forward(h).tanh();
            block.0.forward(h).tanh()
        };
        let h = match checkpointed {
            true => checkpoint(&block, h, inside),
            false => inside(&block, h),
        };
        let h = tied.forward(tied.forward(h).tanh());
        grads_of(loss(h), &tied, &[&x])
    };
    assert_eq!(run(false), run(true));
}

#[test]
fn a_block_used_twice_gives_the_plain_gradients() {
    let _alone = alone();
    for device in devices() {
        let layer = Layer::new(6, &device);
        let x = input([2, 5, 6], &device);
        let run = |checkpointed: bool| {
            let mut h = x.clone();
            for _ in 0..2 {
                h = match checkpointed {
                    true => checkpoint(&layer, h, |layer, h| layer.forward(h, None)),
                    false => layer.forward(h, None),
                };
            }
            grads_of(loss(h), &layer, &[&x])
        };
        assert_eq!(run(false), run(true));
    }
}

#[test]
fn nested_checkpoints_give_the_plain_gradients() {
    let _alone = alone();
    for device in devices() {
        let layers: Vec<_> = (0..4).map(|_| Layer::new(6, &device)).collect();
        let x = input([2, 5, 6], &device);
        let plain = {
            let h = layers
                .iter()
                .fold(x.clone(), |h, layer| layer.forward(h, None));
            grads_of(loss(h), &layers, &[&x])
        };
        let checkpointed = {
            let h = layers.chunks(2).fold(x.clone(), |h, pair| {
                checkpoint(&pair.to_vec(), h, |pair, h| {
                    pair.iter().fold(h, |h, layer| {
                        checkpoint(layer, h, |layer, h| layer.forward(h, None))
                    })
                })
            });
            grads_of(loss(h), &layers, &[&x])
        };
        assert_eq!(plain, checkpointed);
    }
}

#[test]
fn frozen_parameters_have_no_gradient_and_parameters_alone_have_one() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    let block = (linear(4, 4, &device).no_grad(), linear(4, 4, &device));
    let x = input([3, 4], &device).set_require_grad(false);
    let forward = |block: &(Linear, Linear), x| block.1.forward(block.0.forward(x)).tanh();
    let plain = grads_of(loss(forward(&block, x.clone())), &block, &[&x]);
    let y = checkpoint(&block, x.clone(), forward);
    let checkpointed = grads_of(loss(y), &block, &[&x]);
    let has: Vec<_> = plain.iter().map(Option::is_some).collect();
    assert_eq!(has, [false, false, true, true, false]);
    assert_eq!(plain, checkpointed);
}

#[test]
fn a_parameter_that_the_block_does_not_use_has_no_gradient() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    let block = (linear(4, 4, &device), linear(4, 1, &device));
    let y = checkpoint(&block, input([3, 4], &device), |block, x| {
        block.0.forward(x)
    });
    let grads = gradients(&loss(y).backward(), &block);
    let has: Vec<_> = grads.iter().map(Option::is_some).collect();
    assert_eq!(has, [true, true, false, false]);
}

#[test]
fn ids_go_in_as_inputs_or_captured_and_tied_embeddings_get_the_plain_gradient() {
    let _alone = alone();
    for device in devices() {
        let embedding: Embedding = EmbeddingConfig::new(7, 4).init(&device);
        let ids = Tensor::<2, Int>::from_ints([[1, 5, 1], [0, 6, 5]], &device);
        let run = |checkpointed: bool| {
            let (other, scale) = (ids.clone(), 0.5);
            let forward = move |embedding: &Embedding, ids: Tensor<2, Int>| {
                embedding.forward(ids) + embedding.forward(other.clone()) * scale
            };
            let h = match checkpointed {
                true => checkpoint(&embedding, ids.clone(), forward),
                false => forward(&embedding, ids.clone()),
            };
            let logits = h.matmul(embedding.weight.val().transpose().unsqueeze());
            grads_of::<1>(loss(logits), &embedding, &[])
        };
        assert_eq!(run(false), run(true));
    }
}

#[test]
fn running_statistics_count_a_batch_once() {
    let _alone = alone();
    for device in devices() {
        let inputs: Vec<_> = (0..3).map(|_| input([8, 3], &device)).collect();
        let run = |checkpointed: bool| {
            let block: BatchNorm = BatchNormConfig::new(3).init(&device);
            let mut all = Vec::new();
            for x in &inputs {
                let y = match checkpointed {
                    true => checkpoint(&block, x.clone(), |block, x| block.forward(x)),
                    false => block.forward(x.clone()),
                };
                all.extend(grads_of(loss(y.exp()), &block, &[x]));
            }
            let block = block.valid();
            all.push(Some(bits(block.running_mean.value())));
            all.push(Some(bits(block.running_var.value())));
            all
        };
        assert_eq!(run(false), run(true));
    }
}

#[test]
fn running_statistics_in_nested_checkpoints_count_a_batch_once() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    let inputs: Vec<_> = (0..3).map(|_| input([8, 3], &device)).collect();
    let run = |checkpointed: bool| {
        let block: BatchNorm = BatchNormConfig::new(3).init(&device);
        for x in &inputs {
            let y = match checkpointed {
                true => checkpoint(&block, x.clone(), |block, x| {
                    checkpoint(block, x, |block, x| block.forward(x))
                }),
                false => block.forward(x.clone()),
            };
            loss(y).backward();
        }
        bits(block.valid().running_mean.value())
    };
    assert_eq!(run(false), run(true));
}

#[test]
fn a_block_without_gradients_runs_plainly() {
    let _alone = alone();
    let device = Device::flex();
    let block = linear(4, 4, &device);
    let x = Tensor::<2>::ones([3, 4], &device);
    let y = checkpoint(&block, x.clone(), |block, x| block.forward(x));
    assert!(!y.is_autodiff());
    assert_eq!(bits(y), bits(block.forward(x)));
}

#[test]
fn an_output_may_be_an_input() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    let block = linear(4, 4, &device);
    let x = input([3, 4], &device);
    let forward = |block: &Linear, x: Tensor<2>| (x.clone(), block.forward(x));
    let run = |(same, y): (Tensor<2>, Tensor<2>)| grads_of(loss(y * same), &block, &[&x]);
    assert_eq!(
        run(forward(&block, x.clone())),
        run(checkpoint(&block, x.clone(), forward))
    );
}

#[test]
#[should_panic(expected = "closure captured one")]
fn a_captured_tracked_tensor_is_refused() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    let block = linear(4, 4, &device);
    let captured = input([3, 4], &device);
    let _ = checkpoint(&block, captured.clone(), move |block, x| {
        block.forward(x) + captured.clone()
    });
}
