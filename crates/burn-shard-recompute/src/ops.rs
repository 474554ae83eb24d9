//! The autodiff operations of a checkpoint.
//!
//! On the tape a checkpointed block is
//!
//! ```text
//! token -> join(input) -> join(input) -> .. -> recompute -> gate -> output
//!                                                               -> output
//! ```
//!
//! Burn's operations have a fixed number of parents and one output, so inputs are joined one by one, and
//! each output is a node of its own. Backward runs the deepest step first: `output` puts its gradient
//! aside, `recompute` then runs the block again with all of them, and registers gradients under the
//! nodes of inputs and parameters. Outputs that no loss depends on are not visited. The recomputed block
//! has a graph of its own, whose outputs are joined likewise; `start` at its end stands for the loss.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, TensorMetadata, backend_extension, flex::Flex};
use burn::tensor::{DType, Shape};
use parking_lot::Mutex;

/// A tensor of a backend that the code passing it on does not know.
pub(crate) type Parcel = Box<dyn Any + Send>;

/// Where a tensor's gradient is registered.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub(crate) node: NodeId,
    shape: Shape,
    dtype: DType,
    device: Arc<dyn Any + Send + Sync>,
}

/// What an operation tells its caller.
pub(crate) struct Told<T>(Arc<Mutex<Vec<T>>>);

impl<T> Clone for Told<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T> Default for Told<T> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

impl<T> fmt::Debug for Told<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Told")
    }
}

impl<T> Told<T> {
    fn tell(&self, what: T) {
        self.0.lock().push(what);
    }

    pub(crate) fn take(&self) -> Vec<T> {
        std::mem::take(&mut *self.0.lock())
    }
}

/// Runs a block again: from the gradients of its outputs and what was summed up before for each place
/// where it adds a gradient, to the new sums.
pub(crate) type Rerun =
    Box<dyn FnOnce(Vec<Option<Parcel>>, Vec<Option<Parcel>>) -> Vec<Option<Parcel>> + Send>;

/// A checkpointed block on the tape.
pub(crate) struct Job {
    /// Where gradients go, each place once.
    places: Vec<Place>,
    /// Gradients of the outputs, as they come.
    grads: Mutex<Vec<Option<Parcel>>>,
    rerun: Mutex<Option<Rerun>>,
}

impl fmt::Debug for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Job({} places)", self.places.len())
    }
}

impl Job {
    pub(crate) fn new(places: Vec<Place>, outputs: usize, rerun: Rerun) -> Arc<Self> {
        Arc::new(Self {
            places,
            grads: Mutex::new((0..outputs).map(|_| None).collect()),
            rerun: Mutex::new(Some(rerun)),
        })
    }
}

/// What the backward of a recomputed block starts from: gradients, by node, in this order.
#[derive(Clone, Debug)]
pub(crate) struct Seeds(Arc<Mutex<Vec<(NodeId, Parcel)>>>);

impl Seeds {
    pub(crate) fn new(seeds: Vec<(NodeId, Parcel)>) -> Self {
        Self(Arc::new(Mutex::new(seeds)))
    }
}

/// Operations this crate adds to Burn's backends. Not for users: `checkpoint` calls them.
#[doc(hidden)]
#[backend_extension(Flex, Cube: cfg(feature = "cubecl"), Autodiff)]
pub(crate) trait RecomputeOps: Backend {
    /// Identity; tells where the gradient of `tensor` is registered.
    fn locate(tensor: FloatTensor<Self>, told: Told<Place>) -> FloatTensor<Self>;
    /// `chain`, with `tensor` among its ancestors.
    fn join(chain: FloatTensor<Self>, tensor: FloatTensor<Self>) -> FloatTensor<Self>;
    /// `chain`; its backward step runs the block again.
    fn recompute(chain: FloatTensor<Self>, job: Arc<Job>) -> FloatTensor<Self>;
    /// `chain`; keeps the node of `recompute` from being known to anybody else.
    fn gate(chain: FloatTensor<Self>) -> FloatTensor<Self>;
    /// `tensor` as output `number` of the block behind `gate`.
    fn output(
        gate: FloatTensor<Self>,
        tensor: FloatTensor<Self>,
        job: Arc<Job>,
        number: usize,
    ) -> FloatTensor<Self>;
    /// `chain`, whose backward starts from `seeds`.
    fn start(chain: FloatTensor<Self>, seeds: Seeds) -> FloatTensor<Self>;
    /// Identity on a tensor without autodiff; tells the tensor of the backend.
    fn unpack(tensor: FloatTensor<Self>, told: Told<Parcel>) -> FloatTensor<Self>;
}

macro_rules! without_graph {
    ($backend:ty) => {
        impl RecomputeOps for $backend {
            fn locate(tensor: FloatTensor<Self>, _told: Told<Place>) -> FloatTensor<Self> {
                tensor
            }

            fn join(chain: FloatTensor<Self>, _tensor: FloatTensor<Self>) -> FloatTensor<Self> {
                chain
            }

            fn recompute(chain: FloatTensor<Self>, _job: Arc<Job>) -> FloatTensor<Self> {
                chain
            }

            fn gate(chain: FloatTensor<Self>) -> FloatTensor<Self> {
                chain
            }

            fn output(
                _gate: FloatTensor<Self>,
                tensor: FloatTensor<Self>,
                _job: Arc<Job>,
                _number: usize,
            ) -> FloatTensor<Self> {
                tensor
            }

            fn start(chain: FloatTensor<Self>, _seeds: Seeds) -> FloatTensor<Self> {
                chain
            }

            fn unpack(tensor: FloatTensor<Self>, told: Told<Parcel>) -> FloatTensor<Self> {
                told.tell(Box::new(tensor.clone()));
                tensor
            }
        }
    };
}

without_graph!(Flex);
#[cfg(feature = "cubecl")]
without_graph!(burn_cubecl::Cube);

fn open<B: Backend>(parcel: Parcel) -> FloatTensor<B> {
    let tensor = parcel.downcast::<FloatTensor<B>>();
    *tensor.expect("a block should stay on the backend of its inputs")
}

/// Step of a node that only connects others.
#[derive(Debug)]
struct Connect;

impl<B: Backend, const N: usize> Backward<B, N> for Connect {
    type State = ();

    fn backward(self, _: Ops<(), N>, _: &mut Gradients, _: &mut Checkpointer) {}
}

/// Step of [`RecomputeOps::recompute`].
#[derive(Debug)]
struct Recompute;

impl<B: Backend> Backward<B, 1> for Recompute {
    type State = Arc<Job>;

    fn backward(self, ops: Ops<Arc<Job>, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let job = ops.state;
        let rerun = job.rerun.lock().take();
        let rerun = rerun.expect("Burn should run a backward step once");
        let outputs = std::mem::take(&mut *job.grads.lock());

        // Gradients of later uses are here already. Burn takes a gradient out of the container by the node
        // of its tensor; this step's own node, which has no gradient, lends itself to that.
        let mut node = ops.node;
        let earlier = job.places.iter().map(|place| {
            let lent = Arc::get_mut(&mut node).expect("only this step should know its node");
            lent.id = place.node;
            // Adding minus zero changes no number; without an earlier gradient it is alone.
            if place.shape.num_elements() == 1 {
                return None;
            }
            let device = place.device.downcast_ref::<B::Device>();
            let device = device.expect("a block should stay on the backend of its inputs");
            let dims = vec![1; place.shape.num_dims()];
            let nothing = B::float_full(
                Shape::from(dims),
                (-0.0f32).into(),
                device,
                place.dtype.into(),
            );
            grads.register::<B>(place.node, nothing);
            let sum = grads.consume::<B>(&node);
            (sum.shape() == place.shape).then(|| Box::new(sum) as Parcel)
        });
        let earlier = earlier.collect();

        let sums = rerun(outputs, earlier);
        for (place, sum) in job.places.iter().zip(sums) {
            if let Some(sum) = sum {
                grads.register::<B>(place.node, open::<B>(sum));
            }
        }
    }
}

/// Step of [`RecomputeOps::output`].
#[derive(Debug)]
struct Output;

impl<B: Backend> Backward<B, 1> for Output {
    type State = (Arc<Job>, usize);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let grad = grads.consume::<B>(&ops.node);
        let (job, number) = ops.state;
        job.grads.lock()[number] = Some(Box::new(grad));
    }
}

/// Step of [`RecomputeOps::start`].
#[derive(Debug)]
struct Start;

impl<B: Backend> Backward<B, 1> for Start {
    type State = Seeds;

    fn backward(self, ops: Ops<Seeds, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        for (node, seed) in ops.state.0.lock().drain(..) {
            grads.register::<B>(node, open::<B>(seed));
        }
    }
}

impl<B: RecomputeOps, C: CheckpointStrategy> RecomputeOps for Autodiff<B, C> {
    fn locate(tensor: FloatTensor<Self>, told: Told<Place>) -> FloatTensor<Self> {
        told.tell(Place {
            node: tensor.id(),
            shape: tensor.shape(),
            dtype: tensor.dtype(),
            device: Arc::new(tensor.device()),
        });
        tensor
    }

    fn join(chain: FloatTensor<Self>, tensor: FloatTensor<Self>) -> FloatTensor<Self> {
        let guards = [chain.node(), tensor.node()];
        let prep = Backward::<B, 2>::prepare::<C>(Connect, guards);
        prep.compute_bound().stateless(chain.into_primitive())
    }

    fn recompute(chain: FloatTensor<Self>, job: Arc<Job>) -> FloatTensor<Self> {
        let (primitive, guard) = chain.into_parts();
        let prep = Backward::<B, 1>::prepare::<C>(Recompute, [guard]);
        match prep.compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(job, primitive),
            OpsKind::UnTracked(prep) => prep.finish(primitive),
        }
    }

    fn gate(chain: FloatTensor<Self>) -> FloatTensor<Self> {
        let (primitive, guard) = chain.into_parts();
        let prep = Backward::<B, 1>::prepare::<C>(Connect, [guard]);
        prep.compute_bound().stateless(primitive)
    }

    fn output(
        gate: FloatTensor<Self>,
        tensor: FloatTensor<Self>,
        job: Arc<Job>,
        number: usize,
    ) -> FloatTensor<Self> {
        let prep = Backward::<B, 1>::prepare::<C>(Output, [gate.node()]);
        match prep.compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish((job, number), tensor.into_primitive()),
            OpsKind::UnTracked(prep) => prep.finish(tensor.into_primitive()),
        }
    }

    fn start(chain: FloatTensor<Self>, seeds: Seeds) -> FloatTensor<Self> {
        let (primitive, guard) = chain.into_parts();
        let prep = Backward::<B, 1>::prepare::<C>(Start, [guard]);
        match prep.compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(seeds, primitive),
            OpsKind::UnTracked(prep) => prep.finish(primitive),
        }
    }

    fn unpack(tensor: FloatTensor<Self>, _told: Told<Parcel>) -> FloatTensor<Self> {
        tensor
    }
}
