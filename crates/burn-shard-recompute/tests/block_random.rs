//! The recomputation of a block draws the random numbers of its forward, or says that it could not.

mod common;

use std::sync::mpsc;
use std::sync::{Arc, Mutex};
use std::thread;

use burn::module::Module;
use burn::nn::{Dropout, DropoutConfig, Linear, LinearConfig};
use burn::tensor::{Device, Distribution, Tensor};
use burn_shard_recompute::{Random, checkpoint, checkpoint_with, seeded};

use common::{alone, bits, devices, grads_of};

#[derive(Module, Debug)]
struct Noisy {
    linear: Linear,
    dropout: Dropout,
}

impl Noisy {
    fn new(device: &Device) -> Self {
        let linear = LinearConfig::new(16, 16).init(device);
        // Parameters are drawn when they are first read: not among the numbers compared.
        linear.weight.val();
        linear.bias.as_ref().map(|bias| bias.val());
        let dropout = DropoutConfig::new(0.5).init();
        Self { linear, dropout }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.dropout.forward(self.linear.forward(x)).tanh()
    }
}

fn input(device: &Device) -> Tensor<2> {
    Tensor::ones([4, 16], device).require_grad()
}

fn loss(y: Tensor<2>) -> Tensor<1> {
    y.powi_scalar(2).mean()
}

#[test]
fn dropout_in_checkpoints_gives_the_gradients_of_a_run_that_drew_the_same() {
    let _alone = alone();
    for device in devices() {
        let blocks = [
            Noisy::new(&device),
            Noisy::new(&device),
            Noisy::new(&device),
        ];
        let blocks = blocks.to_vec();
        let x = input(&device);
        let run = |checkpointed: bool| {
            device.seed(11);
            let mut h = x.clone();
            for block in &blocks {
                h = match checkpointed {
                    true => checkpoint(block, h, |block, h| block.forward(h)),
                    false => seeded(&device, || block.forward(h)),
                };
            }
            let after = bits(Tensor::<1>::random([4], Distribution::Default, &device));
            (after, grads_of(loss(h), &blocks, &[&x]))
        };
        let (plain, checkpointed) = (run(false), run(true));
        assert!(plain.1.iter().all(Option::is_some));
        assert_eq!(plain, checkpointed);
    }
}

#[test]
fn dropout_in_nested_checkpoints_gives_the_gradients_of_a_run_that_drew_the_same() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    let blocks = vec![Noisy::new(&device), Noisy::new(&device)];
    let x = input(&device);
    device.seed(11);
    let h = seeded(&device, || {
        blocks
            .iter()
            .fold(x.clone(), |h, block| seeded(&device, || block.forward(h)))
    });
    let plain = grads_of(loss(h), &blocks, &[&x]);
    device.seed(11);
    let h = checkpoint(&blocks, x.clone(), |blocks, h| {
        blocks.iter().fold(h, |h, block| {
            checkpoint(block, h, |block, h| block.forward(h))
        })
    });
    assert_eq!(plain, grads_of(loss(h), &blocks, &[&x]));
}

#[test]
fn a_seeded_run_repeats() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    let block = Noisy::new(&device);
    let x = input(&device);
    let run = || {
        device.seed(5);
        let h = checkpoint(&block, x.clone(), |block, h| block.forward(h));
        let grads = grads_of(loss(h), &block, &[&x]);
        (
            grads,
            bits(Tensor::<1>::random([4], Distribution::Default, &device)),
        )
    };
    assert_eq!(run(), run());
}

#[test]
fn blocks_in_a_row_draw_different_numbers() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    let dropout = DropoutConfig::new(0.5).init();
    let x = Tensor::<1>::ones([64], &device).require_grad();
    let run = || checkpoint(&dropout, x.clone(), |dropout, x| dropout.forward(x));
    assert_ne!(bits(run()), bits(run()));
}

#[test]
#[should_panic(expected = "did not draw those of its forward")]
fn a_block_that_draws_while_another_thread_draws_is_refused() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    let block = Noisy::new(&device);
    let elsewhere = device.clone();
    let h = checkpoint(&block, input(&device), move |block, h| {
        let device = elsewhere.clone();
        let draw = || drop(Tensor::<1>::random([3], Distribution::Default, &device).into_data());
        // In forward and recomputation alike, but other amounts.
        let times = if burn_shard_recompute::scope::phase()
            .is_some_and(|phase| phase == burn_shard_recompute::scope::Phase::Forward)
        {
            1
        } else {
            2
        };
        thread::scope(|scope| {
            scope.spawn(|| (0..times).for_each(|_| draw()));
        });
        block.forward(h)
    });
    loss(h).backward();
}

#[test]
fn blocks_that_draw_nothing_run_in_many_threads() {
    let _alone = alone();
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let device = Device::flex().autodiff();
                let block = LinearConfig::new(8, 8).init(&device);
                let x = Tensor::<2>::ones([4, 8], &device).require_grad();
                let plain = grads_of(loss(block.forward(x.clone())), &block, &[&x]);
                for _ in 0..20 {
                    let y = checkpoint(&block, x.clone(), |block: &Linear, x| block.forward(x));
                    assert_eq!(plain, grads_of(loss(y), &block, &[&x]));
                }
            });
        }
    });
}

#[test]
#[should_panic(expected = "did not draw those of its forward")]
fn blocks_that_draw_in_two_threads_at_once_are_refused() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    let block = Noisy::new(&device);
    let (sender, receiver) = mpsc::channel();
    let receiver = Arc::new(Mutex::new(receiver));
    let other = device.clone();
    let h = checkpoint(&block, input(&device), move |block, h| {
        // Another thread runs a block of its own meanwhile, in the forward only.
        let (device, sender) = (other.clone(), sender.clone());
        thread::spawn(move || sender.send(seeded(&device, || 1)));
        receiver.lock().unwrap().recv().unwrap();
        block.forward(h)
    });
    loss(h).backward();
}

#[test]
fn without_replay_the_generator_is_left_alone() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    let block = LinearConfig::new(16, 16).init(&device);
    let next = |checkpointed: bool| {
        device.seed(2);
        if checkpointed {
            let forward = |block: &Linear, x| block.forward(x);
            let y = checkpoint_with(Random::Ignore, &block, input(&device), forward);
            loss(y).backward();
        }
        bits(Tensor::<1>::random([4], Distribution::Default, &device))
    };
    block.weight.val();
    if let Some(bias) = &block.bias {
        bias.val();
    }
    assert_eq!(next(false), next(true));
}
