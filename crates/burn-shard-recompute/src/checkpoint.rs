//! The public function, and what it leaves on the tape.

use std::sync::Arc;

use burn::backend::Dispatch;
use burn::backend::autodiff::NodeId;
use burn::module::Module;
use burn::tensor::{Device, Tensor};

use crate::leaves::{Buffers, Cut, FindTracked, Regrow, join, locate};
use crate::ops::{Job, Parcel, RecomputeOps, Seeds};
use crate::random::{self, Random, Replay};
use crate::scope::{self, BlockId, Callbacks, Phase, Scope};
use crate::tensors::{TensorMapper, Tensors};

/// Runs `forward(block, inputs)` without keeping its activations; backward runs it again.
///
/// The outputs are those of `forward(block, inputs)`, and so are the gradients that a backward from
/// them gives to the inputs and to the parameters of `block`; the [crate] says to which bits. Where there is
/// nothing to track (on a device without autodiff, say) this is a plain call.
///
/// `forward` runs twice, so it should do the same both times and have no effects but on its outputs. It may capture
/// anything that is `Send + 'static`: numbers, int and bool tensors, constants. Float tensors that have
/// gradients belong into `inputs`, and modules that have parameters into `block` (a tuple or a `Vec` of
/// modules is a module).
///
/// - Float outputs are tracked, even one that depends on nothing tracked. An output that the loss does not use costs nothing.
/// - Parameters that are not initialized yet are initialized, in the order of the module.
/// - Running statistics (`BatchNorm`) count a batch once. `RunningState::value` shows the
///   update earlier than without a checkpoint, after backward. Not when threads share them
///   (`Module::fork`): there updates of other threads may come in between.
/// - Random numbers are drawn again: see [`Random`].
/// - As everywhere in Burn, a forward has one backward.
///
/// # Panics
///
/// If `forward` returns a tensor that is tracked by itself, because it captured one: its gradient would
/// be lost. (Combining a captured tracked tensor with the inputs and *not* returning the result is not noticed, and
/// backward then waits for itself.) If a parameter or input is synchronized by Burn's own
/// data parallelism (`Tensor::is_distributed`). In backward, if `forward` returns another number of tensors than the first
/// time, or draws random numbers that cannot be repeated.
///
/// # Examples
///
/// Several inputs and outputs, of which one is a mask:
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::tensor::{Bool, Device, Tensor};
/// use burn_shard_recompute::checkpoint;
///
/// let device = Device::flex().autodiff();
/// let block = LinearConfig::new(4, 4).init(&device);
/// let x = Tensor::<2>::ones([3, 4], &device).require_grad();
/// let mask = Tensor::<2, Bool>::from_data([[true, false, false, false]], &device).expand([3, 4]);
/// let scale = 0.5;
/// let (y, sum) = checkpoint(&block, (x.clone(), mask), move |block, (x, mask)| {
///     let y = block.forward(x).mask_fill(mask, 0.0) * scale;
///     (y.clone(), y.sum())
/// });
/// let gradients = (y.sum() + sum).backward();
/// assert_eq!(x.grad(&gradients).unwrap().dims(), [3, 4]);
/// ```
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
///
/// # Panics
///
/// Panics as [`checkpoint`] does. Under [`Random::Ignore`] nothing is known of numbers drawn.
///
/// # Examples
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::tensor::{Device, Tensor};
/// use burn_shard_recompute::{Random, checkpoint_with};
///
/// let device = Device::flex().autodiff();
/// let block = LinearConfig::new(4, 4).init(&device);
/// let x = Tensor::<2>::ones([3, 4], &device);
/// let y = checkpoint_with(Random::Ignore, &block, x, |block, x| block.forward(x));
/// y.sum().backward();
/// ```
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

    let id = BlockId::new();
    let scope = Scope::enter(Phase::Forward, id);
    let run = || forward(&block, inputs.clone());
    let (outputs, replay) = match random {
        Random::Replay => {
            let (outputs, replay) = random::record(&device, run);
            (outputs, Some(replay))
        }
        Random::Ignore => (run(), None),
    };
    let requests = scope.leave();

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
        id,
        callbacks: requests.callbacks,
    };
    let job = Job::new(
        places,
        count.0,
        Box::new(|grads, earlier| rerun.run(grads, earlier)),
    );
    let ancestors = requests.ancestors.into_iter();
    let chain = ancestors.fold(cut.into_chain(), join).into_dispatch();
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
    id: BlockId,
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
        let scope = Scope::enter(Phase::Recompute, self.id);
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
        drop(self.callbacks);

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
        sums
    }
}

/// Joins the recomputed outputs that have a gradient, and assigns it to them.
struct CollectOutputs {
    grads: std::vec::IntoIter<Option<Parcel>>,
    seeds: Vec<(NodeId, Parcel)>,
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
