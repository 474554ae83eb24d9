//! The public function, and what it leaves on the tape.

use burn::backend::Dispatch;
use burn::module::Module;
use burn::tensor::{Device, Tensor};

use crate::leaves::{Buffers, Cut, FindTracked, Regrow, join, locate};
use crate::ops::{Job, Parcel, RecomputeOps, Seeds};
use crate::random::{self, Random, Replay};
use crate::scope::{self, Callbacks, Phase, Scope};
use crate::tensors::{TensorMapper, Tensors};
use std::sync::Arc;

/// Runs `forward(block, inputs)` without keeping its activations; backward runs it again.
pub fn checkpoint<M, I, O, F>(block: &M, inputs: I, forward: F) -> O
where
    M: Module + 'static,
    I: Tensors + Clone + Send + 'static,
    O: Tensors,
    F: Fn(&M, I) -> O + Send + 'static,
{
    checkpoint_with(Random::Replay, block, inputs, forward)
}

/// [`checkpoint`], with a choice about random numbers.
pub fn checkpoint_with<M, I, O, F>(random: Random, block: &M, inputs: I, forward: F) -> O
where
    M: Module + 'static,
    I: Tensors + Clone + Send + 'static,
    O: Tensors,
    F: Fn(&M, I) -> O + Send + 'static,
{
    let mut tracked = FindTracked::default();
    let inputs = inputs.map_tensors(&mut tracked);
    block.visit(&mut tracked);
    let Some(device) = tracked.device else {
        return untracked(random, block, inputs, forward);
    };

    let mut cut = Cut::new(Tensor::zeros([1], &device).require_grad());
    let block = block.clone().map(&mut cut);
    let buffers = cut.untracked;
    let inputs = inputs.map_tensors(&mut cut);

    let scope = Scope::enter(Phase::Forward);
    let run = || forward(&block, inputs.clone());
    let (outputs, replay) = match random {
        Random::Replay => {
            let (outputs, replay) = random::record(&device, run);
            (outputs, Some(replay))
        }
        Random::Ignore => (run(), None),
    };
    let callbacks = scope.leave();

    let mut count = CountOutputs(0);
    let outputs = outputs.map_tensors(&mut count);
    let places = cut.places.clone();
    let rerun = Rerun {
        slots: std::mem::take(&mut cut.slots),
        places: places.len(),
        block,
        inputs,
        forward,
        buffers,
        replay,
        device,
        callbacks,
    };
    let job = Job::new(
        places,
        count.0,
        Box::new(|grads, earlier| rerun.run(grads, earlier)),
    );
    let chain = cut.into_chain().into_dispatch();
    let gate = Dispatch::gate(Dispatch::recompute(chain, Arc::clone(&job)));
    outputs.map_tensors(&mut Attach {
        gate: Tensor::from_dispatch(gate),
        job,
        next: 0,
    })
}

/// Without gradients there is nothing to recompute. But inside a checkpointed block, the forward of
/// which is untracked, the same random numbers have to be drawn as in its recomputation.
fn untracked<M, I, O, F>(random: Random, block: &M, inputs: I, forward: F) -> O
where
    M: Module,
    I: Tensors,
    O: Tensors,
    F: Fn(&M, I) -> O,
{
    let mut any = AnyDevice(None);
    let inputs = inputs.map_tensors(&mut any);
    let device = any.0.or_else(|| block.devices().into_iter().next());
    match (random, scope::phase(), device) {
        (Random::Replay, Some(_), Some(device)) => {
            random::seeded(&device, || forward(block, inputs))
        }
        _ => forward(block, inputs),
    }
}

struct AnyDevice(Option<Device>);

impl TensorMapper for AnyDevice {
    fn map<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        self.0.get_or_insert_with(|| tensor.device());
        tensor
    }
}

/// Counts float outputs, and refuses tracked ones.
struct CountOutputs(usize);

impl TensorMapper for CountOutputs {
    fn map<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        assert!(
            !tensor.is_tracked(),
            "a checkpointed block returned a tracked tensor, so its closure captured one, whose gradient would \
             be lost (pass tensors as inputs, and modules as part of the block: a tuple of modules is one)"
        );
        self.0 += 1;
        tensor
    }
}

/// Puts the outputs on the tape.
struct Attach {
    gate: Tensor<1>,
    job: Arc<Job>,
    next: usize,
}

impl TensorMapper for Attach {
    fn map<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        let number = self.next;
        self.next += 1;
        let gate = self.gate.clone().into_dispatch();
        let job = Arc::clone(&self.job);
        Tensor::from_dispatch(Dispatch::output(gate, tensor.into_dispatch(), job, number))
    }
}

/// A block that will run again in backward.
struct Rerun<M, I, F> {
    slots: Vec<Option<usize>>,
    places: usize,
    block: M,
    inputs: I,
    forward: F,
    /// Whether the block may have running statistics.
    buffers: bool,
    replay: Option<Replay>,
    device: Device,
    callbacks: Callbacks,
}

impl<M, I, F> Rerun<M, I, F> {
    /// From the gradients of the outputs, and what was summed up so far for each place, to the new sums.
    fn run<O>(self, grads: Vec<Option<Parcel>>, earlier: Vec<Option<Parcel>>) -> Vec<Option<Parcel>>
    where
        M: Module,
        I: Tensors,
        O: Tensors,
        F: Fn(&M, I) -> O,
    {
        let scope = Scope::enter(Phase::Recompute);
        let buffers = self.buffers.then(|| Buffers::save(&self.block));
        let mut regrow = Regrow::new(&self.slots, self.places);
        let block = self.block.clone().map(&mut regrow);
        let inputs = self.inputs.map_tensors(&mut regrow);

        let outputs = match self.replay {
            Some(replay) => random::replay(&self.device, replay, || (self.forward)(&block, inputs)),
            None => (self.forward)(&block, inputs),
        };
        if let Some(buffers) = buffers {
            buffers.restore(self.block);
        }
        drop(block);

        // Earlier sums first: then what this block adds comes in the order it would have come in.
        let places = regrow.places().zip(earlier);
        let seeds = places.filter_map(|(place, sum)| Some((place?.node, sum?)));
        let mut collect = CollectOutputs {
            grads: grads.into_iter(),
            seeds: seeds.collect(),
            chain: Tensor::zeros([1], &self.device),
        };
        outputs.map_tensors(&mut collect);
        assert!(
            collect.grads.next().is_none(),
            "a checkpointed block returned fewer tensors in backward than in forward"
        );
        let CollectOutputs { seeds, chain, .. } = collect;
        if !chain.is_tracked() {
            return Vec::new();
        }
        let start = Dispatch::start(chain.into_dispatch(), Seeds::new(seeds));
        let mut grads = Tensor::<1>::from_dispatch(start).backward();
        let sums = regrow.take_gradients(&mut grads);
        drop(scope);
        drop(self.callbacks);
        sums
    }
}

/// Joins the recomputed outputs that have a gradient, and assigns it to them.
struct CollectOutputs {
    grads: std::vec::IntoIter<Option<Parcel>>,
    seeds: Vec<(burn::backend::autodiff::NodeId, Parcel)>,
    chain: Tensor<1>,
}

impl TensorMapper for CollectOutputs {
    fn map<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        let grad = self.grads.next();
        let grad = grad.expect("a checkpointed block should return as many tensors in backward");
        if let Some(grad) = grad
            && tensor.is_tracked()
        {
            self.seeds.push((locate(tensor.clone()).node, grad));
            self.chain = join(self.chain.clone(), tensor.clone());
        }
        tensor
    }
}
