//! When gradients are reduced: during backward, and in one order on all ranks.

#![allow(clippy::unwrap_used, reason = "a test ends at the first error")]

#[path = "common/mlp.rs"]
mod mlp;

use std::fmt;
use std::sync::Arc;
use std::sync::Mutex;
use std::time::Duration;

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::{
    Autodiff, Backend, Dispatch, backend_extension, flex::Flex, tensor::FloatTensor,
};
use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamConfig, GradientsParams};
use burn::prelude::*;
use burn::tensor::activation::gelu;
use burn_shard::{
    CommError, Communicator, Local, Oss, ProcessGroup, ReduceOp, ShardConfig, ShardedModule,
    ShardingStrategy, Traffic,
};
use burn_shard_comm::{Call, SegmentLayout, Segments, SegmentsMut, Work};

/// What happened on one rank, in order.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Event {
    /// Backward has reached the input of this layer, so its gradients exist.
    Passed(usize),
    Gather {
        numel: usize,
    },
    /// A gather has ended, since someone waited for it.
    Received {
        numel: usize,
    },
    Reduce {
        numel: usize,
    },
    /// The one small `all_reduce` that ends a backward.
    Usage,
}

/// Shared by a rank's communicator and its model.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<Event>>>);

impl fmt::Debug for Log {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Log")
    }
}

impl Log {
    fn push(&self, event: Event) {
        self.0.lock().unwrap().push(event);
    }

    fn take(&self) -> Vec<Event> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

/// Identity whose backward step writes into the log.
#[backend_extension(Flex, Autodiff)]
trait Spy: Backend {
    fn spy(x: FloatTensor<Self>, layer: usize, log: Log) -> FloatTensor<Self>;
}

impl Spy for Flex {
    fn spy(x: FloatTensor<Self>, _layer: usize, _log: Log) -> FloatTensor<Self> {
        x
    }
}

impl<B: Spy, C: CheckpointStrategy> Spy for Autodiff<B, C> {
    fn spy(x: FloatTensor<Self>, layer: usize, log: Log) -> FloatTensor<Self> {
        #[derive(Debug)]
        struct Step;
        impl<B: Backend> Backward<B, 1> for Step {
            type State = (usize, Log);
            fn backward(
                self,
                ops: Ops<(usize, Log), 1>,
                grads: &mut Gradients,
                _: &mut Checkpointer,
            ) {
                let grad = grads.consume::<B>(&ops.node);
                let (layer, log) = ops.state;
                log.push(Event::Passed(layer));
                if let [Some(parent)] = ops.parents {
                    grads.register::<B>(parent.id, grad);
                }
            }
        }
        let (primitive, guard) = x.into_parts();
        match Step.prepare::<C>([guard]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish((layer, log), primitive),
            OpsKind::UnTracked(prep) => prep.finish(primitive),
        }
    }
}

/// Writes gathers and reductions into the log.
#[derive(Debug)]
struct Logging {
    inner: Arc<dyn Communicator>,
    log: Log,
}

impl Logging {
    fn reduction(&self, input: &dyn Segments) {
        let numel = (0..input.count()).map(|i| input.numel(i)).sum();
        let usage = input.dtype().size_bytes() == 1;
        self.log.push(if usage {
            Event::Usage
        } else {
            Event::Reduce { numel }
        });
    }
}

/// A gather that is not over.
struct Awaited {
    work: Box<dyn Work>,
    numel: usize,
    log: Log,
}

impl Work for Awaited {
    fn is_ready(&self) -> bool {
        self.work.is_ready()
    }

    fn wait(&mut self) -> Result<(), CommError> {
        self.work.wait()
    }

    fn finish(self: Box<Self>, output: &mut dyn SegmentsMut) -> Result<(), CommError> {
        let numel = self.numel;
        self.log.push(Event::Received { numel });
        self.work.finish(output)
    }
}

impl Communicator for Logging {
    fn rank(&self) -> usize {
        self.inner.rank()
    }
    fn world_size(&self) -> usize {
        self.inner.world_size()
    }
    fn deadline(&self) -> Duration {
        self.inner.deadline()
    }
    fn set_deadline(&self, deadline: Duration) {
        self.inner.set_deadline(deadline);
    }
    fn all_gather(
        &self,
        input: Arc<dyn Segments>,
        numels: &[usize],
    ) -> Result<Box<dyn Work>, CommError> {
        let numel = numels.iter().sum();
        self.log.push(Event::Gather { numel });
        let work = self.inner.all_gather(input, numels)?;
        let log = self.log.clone();
        Ok(Box::new(Awaited { work, numel, log }))
    }
    fn reduce_scatter(
        &self,
        input: Arc<dyn Segments>,
        op: ReduceOp,
    ) -> Result<Box<dyn Work>, CommError> {
        self.reduction(&*input);
        self.inner.reduce_scatter(input, op)
    }
    fn all_reduce(
        &self,
        input: Arc<dyn Segments>,
        op: ReduceOp,
    ) -> Result<Box<dyn Work>, CommError> {
        self.reduction(&*input);
        self.inner.all_reduce(input, op)
    }
    fn broadcast(
        &self,
        input: Option<Arc<dyn Segments>>,
        layout: SegmentLayout,
        root: usize,
    ) -> Result<Box<dyn Work>, CommError> {
        self.inner.broadcast(input, layout, root)
    }
    fn barrier(&self) -> Result<(), CommError> {
        self.inner.barrier()
    }
    fn announce(&self, call: Call) -> Result<Box<dyn Work>, CommError> {
        self.inner.announce(call)
    }
    fn failure(&self) -> Option<Arc<CommError>> {
        self.inner.failure()
    }
    fn abort(&self, reason: &str) {
        self.inner.abort(reason);
    }
    fn traffic(&self) -> Traffic {
        self.inner.traffic()
    }
}

const DEPTH: usize = 6;

/// Layers of different sizes, so that a collective tells whose it is; declared last to first.
#[derive(Module, Debug)]
struct Reversed {
    layers: Vec<Linear>,
}

/// Inputs of layer `layer` in the order of execution.
fn width(layer: usize) -> usize {
    32 + layer
}

/// Elements of layer `layer`.
fn numel(layer: usize) -> usize {
    width(layer) * width(layer + 1)
}

impl Reversed {
    fn new(device: &Device) -> Self {
        let layer = |i| {
            LinearConfig::new(width(i), width(i + 1))
                .with_bias(false)
                .init(device)
        };
        Self {
            layers: (0..DEPTH).rev().map(layer).collect(),
        }
    }

    /// Skips the layers that `skip` names, with something else of the same shape in their place.
    fn loss(&self, log: &Log, rank: usize, skip: &[usize], device: &Device) -> Tensor<1> {
        let mut x = mlp::input(3, width(0), rank, device).require_grad();
        for (i, layer) in self.layers.iter().rev().enumerate() {
            if i > 0 {
                x = Tensor::from_dispatch(Dispatch::spy(x.into_dispatch(), i, log.clone()));
            }
            x = if skip.contains(&i) {
                x.slice([0..3, 0..8])
                    .repeat_dim(1, width(i + 1) / 8 + 1)
                    .slice([0..3, 0..width(i + 1)])
            } else {
                gelu(layer.forward(x))
            };
        }
        x.mean()
    }
}

/// The layer whose group was reduced, or which backward has passed.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Seen {
    Passed(usize),
    Gathered(usize),
    Reduced(usize),
    End,
}

fn seen(events: Vec<Event>) -> Vec<Seen> {
    let layer = |n| (0..DEPTH).find(|&i| numel(i) == n).unwrap();
    events
        .into_iter()
        .filter_map(|event| match event {
            Event::Passed(layer) => Some(Seen::Passed(layer)),
            Event::Gather { numel } => Some(Seen::Gathered(layer(numel))),
            Event::Received { .. } => None,
            Event::Reduce { numel } => Some(Seen::Reduced(layer(numel))),
            Event::Usage => Some(Seen::End),
        })
        .collect()
}

/// Trains `steps` steps on `world_size` ranks; returns what each rank's backwards did, by step.
fn backwards(
    world_size: usize,
    strategy: impl Into<ShardConfig>,
    skip: impl Fn(usize, usize) -> Vec<usize> + Sync,
    before_forward: impl Fn(usize) + Sync,
) -> Vec<Vec<Vec<Seen>>> {
    let config: ShardConfig = strategy.into();
    logged(world_size, |group, log| {
        let rank = group.rank();
        let device = Device::flex().autodiff();
        let mut model = wrapped(&config, group, &device);
        let mut oss = Oss::new(AdamConfig::new(), group).unwrap();
        assert_eq!(model.groups().len(), DEPTH);
        let mut steps = Vec::new();
        for step in 0..3 {
            before_forward(rank);
            let loss = model.loss(log, rank, &skip(rank, step), &device);
            log.take();
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            steps.push(seen(log.take()));
            model = oss.step(1e-3, model, grads);
        }
        steps
    })
}

/// Runs ranks as threads whose collectives are logged.
fn logged<T: Send>(world_size: usize, run: impl Fn(&ProcessGroup, &Log) -> T + Sync) -> Vec<T> {
    let logs: Vec<Log> = (0..world_size).map(|_| Log::default()).collect();
    let of_rank = logs.clone();
    Local::new(world_size)
        .deadline(Duration::from_secs(60))
        .wrap(move |inner| {
            let log = of_rank[inner.rank()].clone();
            Arc::new(Logging { inner, log })
        })
        .spawn(|group: ProcessGroup| run(&group, &logs[group.rank()]))
        .unwrap()
}

/// The model with one group per layer: the largest layer fits, two of the smallest do not.
fn wrapped(config: &ShardConfig, group: &ProcessGroup, device: &Device) -> ShardedModule<Reversed> {
    let config = config.clone().with_group_cap_bytes(4 * numel(DEPTH - 1));
    ShardedModule::new(Reversed::new(device), config, group).unwrap()
}

fn nothing(_rank: usize, _step: usize) -> Vec<usize> {
    vec![]
}

fn reductions(events: &[Seen]) -> Vec<usize> {
    let layer = |event: &Seen| match event {
        Seen::Reduced(layer) => Some(*layer),
        Seen::Passed(_) | Seen::Gathered(_) | Seen::End => None,
    };
    events.iter().filter_map(layer).collect()
}

fn position(events: &[Seen], event: Seen) -> usize {
    let at = events.iter().position(|&seen| seen == event);
    at.unwrap_or_else(|| panic!("{event:?} should be in {events:?}"))
}

#[test]
fn from_the_second_step_on_a_group_is_reduced_before_backward_reaches_the_layer_below() {
    for strategy in ShardingStrategy::ALL {
        for ranks in backwards(3, strategy, nothing, |_| ()) {
            for events in &ranks[1..] {
                assert_eq!(
                    reductions(events),
                    [5, 4, 3, 2, 1, 0],
                    "{strategy}: {events:?}"
                );
                // Layer 0 is not watched: its input is the start of the graph.
                for layer in 2..DEPTH {
                    assert!(
                        position(events, Seen::Reduced(layer))
                            < position(events, Seen::Passed(layer - 1)),
                        "{strategy}: {events:?}"
                    );
                }
                assert_eq!(events.last(), Some(&Seen::End));
            }
        }
    }
}

#[test]
fn ranks_that_run_forward_one_after_the_other_reduce_during_backward_all_the_same() {
    for strategy in [
        ShardingStrategy::Replicated,
        ShardingStrategy::OptimizerState,
        ShardingStrategy::Gradients,
    ] {
        let apart = |rank: usize| std::thread::sleep(Duration::from_millis(30 * rank as u64));
        for ranks in backwards(6, strategy, nothing, apart) {
            for events in &ranks[1..] {
                // Layer 0 is not watched: its input is the start of the graph.
                for layer in 2..DEPTH {
                    assert!(
                        position(events, Seen::Reduced(layer))
                            < position(events, Seen::Passed(layer - 1)),
                        "{strategy}: {events:?}"
                    );
                }
            }
        }
    }
}

/// The fields are declared last to first, so the first guess is the worst order there is.
#[test]
fn the_first_backward_reduces_in_the_reverse_of_the_declared_order() {
    for strategy in ShardingStrategy::ALL {
        for ranks in backwards(2, strategy, nothing, |_| ()) {
            assert_eq!(reductions(&ranks[0]), [0, 1, 2, 3, 4, 5]);
        }
    }
}

#[test]
fn ranks_that_use_different_layers_reduce_all_groups_in_one_order() {
    let skip = |rank: usize, step: usize| match (rank, step) {
        (0, 1) => vec![2, 4],
        (1, 0) => vec![5],
        (1, 2) => vec![0, 1, 2, 3],
        (2, 1) => vec![0, 5],
        _ => vec![],
    };
    for strategy in [
        ShardingStrategy::Replicated,
        ShardingStrategy::OptimizerState,
        ShardingStrategy::Gradients,
    ] {
        let ranks = backwards(3, strategy, skip, |_| ());
        for step in 0..3 {
            let expected: Vec<usize> = if step == 0 {
                (0..DEPTH).collect()
            } else {
                (0..DEPTH).rev().collect()
            };
            for steps in &ranks {
                assert_eq!(reductions(&steps[step]), expected, "{strategy} step {step}");
            }
        }
    }
}

#[test]
fn the_order_is_that_of_rank_0_even_if_it_left_out_layers_at_first() {
    let skip = |rank: usize, step: usize| {
        if (rank, step) == (0, 0) {
            vec![1, 3]
        } else {
            vec![]
        }
    };
    let ranks = backwards(2, ShardingStrategy::Gradients, skip, |_| ());
    let orders: Vec<_> = ranks.iter().map(|steps| reductions(&steps[1])).collect();
    assert_eq!(orders[0], orders[1]);
    // Layers unused at that time have no place in what was observed: they are ready from the start
    // and keep the place of the first guess, at the end.
    assert_eq!(orders[0], [5, 4, 2, 0, 1, 3]);
}

#[test]
fn under_zero3_gathers_and_reduce_scatters_alternate_in_backward() {
    let config = ShardConfig::new(ShardingStrategy::Full).with_prefetch(0);
    for ranks in backwards(2, config, nothing, |_| ()) {
        for events in &ranks[1..] {
            let gathered = gathers(events);
            // The last layer read in forward is still there.
            assert_eq!(gathered, [4, 3, 2, 1, 0], "{events:?}");
            for layer in 1..DEPTH - 1 {
                let reduced = position(events, Seen::Reduced(layer + 1));
                let gather = position(events, Seen::Gathered(layer - 1));
                assert!(reduced < gather, "{events:?}");
            }
        }
    }
}

fn gathers(events: &[Seen]) -> Vec<usize> {
    let layer = |event: &Seen| match event {
        Seen::Gathered(layer) => Some(*layer),
        Seen::Passed(_) | Seen::Reduced(_) | Seen::End => None,
    };
    events.iter().filter_map(layer).collect()
}

/// So that it overlaps with the backward of the layer before.
#[test]
fn a_prefetched_gather_starts_that_many_layers_before_its_layer_is_reached() {
    for prefetch in 1..=3 {
        let config = ShardConfig::new(ShardingStrategy::Full).with_prefetch(prefetch);
        for ranks in backwards(2, config, nothing, |_| ()) {
            // The first pass has nothing to go by.
            assert_eq!(gathers(&ranks[0]), [4, 3, 2, 1, 0]);
            for events in &ranks[1..] {
                // What comes first in backward was started when forward ended.
                let expected: Vec<usize> = (0..5 - prefetch).rev().collect();
                assert_eq!(gathers(events), expected, "{events:?}");
                for layer in expected {
                    let gathered = position(events, Seen::Gathered(layer));
                    let passed = position(events, Seen::Passed(layer + prefetch));
                    assert!(gathered < passed, "{prefetch}: {events:?}");
                }
            }
        }
    }
}

/// All are under way when the step ends, and none of them has been waited for: that is left to the reads of
/// the next forward, in their own order.
#[test]
fn a_deferred_gather_is_started_by_the_step_and_awaited_by_the_forward() {
    for strategy in [
        ShardingStrategy::OptimizerState,
        ShardingStrategy::Gradients,
    ] {
        for defers in [false, true] {
            let config = ShardConfig::new(strategy).with_defer_gather(defers);
            logged(2, |group, log| {
                let (rank, device) = (group.rank(), Device::flex().autodiff());
                let model = wrapped(&config, group, &device);
                let mut oss = Oss::new(AdamConfig::new(), group).unwrap();
                let loss = model.loss(log, rank, &[], &device);
                let grads = GradientsParams::from_grads(loss.backward(), &model);
                log.take();
                let model = oss.step(1e-3, model, grads);
                let (started, received) = gathers_of(&log.take());
                assert_eq!(started.len(), DEPTH, "{strategy}");
                assert_eq!(received.len(), if defers { 0 } else { DEPTH });

                drop(model.loss(log, rank, &[], &device));
                let (started, received) = gathers_of(&log.take());
                assert!(started.is_empty(), "{strategy}");
                let expected: Vec<usize> = (0..DEPTH).map(numel).collect();
                assert_eq!(received, if defers { expected } else { vec![] });
            });
        }
    }
}

/// The elements of the gathers that were started, and of those that were awaited.
fn gathers_of(events: &[Event]) -> (Vec<usize>, Vec<usize>) {
    let started = events.iter().filter_map(|event| match event {
        Event::Gather { numel } => Some(*numel),
        Event::Passed(_) | Event::Received { .. } | Event::Reduce { .. } | Event::Usage => None,
    });
    let received = events.iter().filter_map(|event| match event {
        Event::Received { numel } => Some(*numel),
        Event::Passed(_) | Event::Gather { .. } | Event::Reduce { .. } | Event::Usage => None,
    });
    (started.collect(), received.collect())
}

#[test]
fn the_small_all_reduce_of_a_backward_comes_last_and_once() {
    for strategy in ShardingStrategy::ALL {
        for ranks in backwards(2, strategy, nothing, |_| ()) {
            for events in &ranks {
                assert_eq!(
                    events.iter().filter(|&&event| event == Seen::End).count(),
                    1
                );
                assert_eq!(events.last(), Some(&Seen::End));
            }
        }
    }
}
