//! The block and its inputs, cut off from the tape for the forward, and as leaves of a graph of their own
//! for the recomputation.

use std::any::Any;
use std::collections::HashMap;

use burn::backend::Dispatch;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{Device, Gradients, Tensor};

use crate::ops::{Parcel, Place, RecomputeOps, Told};
use crate::tensors::TensorMapper;

/// Where the gradient of `tensor` is registered.
pub(crate) fn locate<const D: usize>(tensor: Tensor<D>) -> Place {
    let told = Told::default();
    Dispatch::locate(tensor.into_dispatch(), told.clone());
    let place = told.take().pop();
    place.expect("a tracked tensor should have a place on the tape")
}

/// The tensor of the backend behind `tensor`, which has no autodiff.
fn unpack<const D: usize>(tensor: Tensor<D>) -> Parcel {
    let told = Told::default();
    Dispatch::unpack(tensor.into_dispatch(), told.clone());
    let parcel = told.take().pop();
    parcel.expect("a gradient should have no autodiff")
}

/// Joins `tensor` to the chain of ancestors.
pub(crate) fn join<const D: usize>(chain: Tensor<1>, tensor: Tensor<D>) -> Tensor<1> {
    Tensor::from_dispatch(Dispatch::join(
        chain.into_dispatch(),
        tensor.into_dispatch(),
    ))
}

/// Whether anything is tracked, and the device of the first such tensor.
#[derive(Default)]
pub(crate) struct FindTracked {
    pub(crate) device: Option<Device>,
}

impl TensorMapper for FindTracked {
    fn map<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        if self.device.is_none() && tensor.is_tracked() {
            self.device = Some(tensor.device());
        }
        tensor
    }
}

impl ModuleVisitor for FindTracked {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.device.is_none() {
            self.map(param.base());
        }
    }
}

/// Cuts tensors off from the tape, and writes down where their gradients go.
#[derive(Default)]
pub(crate) struct Cut {
    /// By float tensor in the order of traversal: its place, if it has a gradient.
    pub(crate) slots: Vec<Option<usize>>,
    pub(crate) places: Vec<Place>,
    by_node: HashMap<u64, usize>,
    chain: Option<Tensor<1>>,
    /// Whether there is a float tensor in the block that is not tracked: it may be a buffer.
    pub(crate) untracked: bool,
}

impl Cut {
    pub(crate) fn new(token: Tensor<1>) -> Self {
        Self {
            chain: Some(token),
            ..Self::default()
        }
    }

    pub(crate) fn into_chain(self) -> Tensor<1> {
        self.chain.expect("the chain should be put back")
    }
}

impl TensorMapper for Cut {
    fn map<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        if !tensor.is_tracked() {
            self.slots.push(None);
            self.untracked = true;
            return tensor;
        }
        assert!(
            !tensor.is_distributed(),
            "a checkpointed block was given a parameter that Burn synchronizes itself in backward \
             (Tensor::set_distributed): its gradient would not be synchronized"
        );
        let place = locate(tensor.clone());
        let next = self.places.len();
        let slot = *self.by_node.entry(place.node.value).or_insert(next);
        self.slots.push(Some(slot));
        if slot == next {
            self.places.push(place);
            // Backward has to go on above what is not a leaf.
            if !tensor.is_require_grad() {
                self.chain = self.chain.take().map(|chain| join(chain, tensor.clone()));
            }
        }
        tensor.set_require_grad(false)
    }
}

impl ModuleMapper for Cut {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if param.base().is_tracked() {
            return param.map(|tensor| TensorMapper::map(self, tensor));
        }
        TensorMapper::map(self, param.base());
        param
    }
}

/// A leaf of the recomputation's graph, of any rank.
trait Leaf {
    fn place(&self) -> Place;
    fn take_gradient(&self, grads: &mut Gradients) -> Option<Parcel>;
    fn as_any(&self) -> &dyn Any;
}

impl<const D: usize> Leaf for Tensor<D> {
    fn place(&self) -> Place {
        locate(self.clone())
    }

    fn take_gradient(&self, grads: &mut Gradients) -> Option<Parcel> {
        self.grad_remove(grads).map(unpack)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Makes leaves of what [`Cut`] cut off, in the same order of traversal.
pub(crate) struct Regrow<'a> {
    slots: std::slice::Iter<'a, Option<usize>>,
    leaves: Vec<Option<Box<dyn Leaf>>>,
}

impl<'a> Regrow<'a> {
    pub(crate) fn new(slots: &'a [Option<usize>], places: usize) -> Self {
        Self {
            slots: slots.iter(),
            leaves: (0..places).map(|_| None).collect(),
        }
    }

    /// The leaves' places, by place of the tensors they stand for.
    pub(crate) fn places(&self) -> impl Iterator<Item = Option<Place>> {
        self.leaves
            .iter()
            .map(|leaf| leaf.as_ref().map(|leaf| leaf.place()))
    }

    pub(crate) fn take_gradients(self, grads: &mut Gradients) -> Vec<Option<Parcel>> {
        let leaves = self.leaves.into_iter();
        leaves
            .map(|leaf| leaf.and_then(|leaf| leaf.take_gradient(grads)))
            .collect()
    }
}

impl TensorMapper for Regrow<'_> {
    fn map<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        let slot = self.slots.next();
        let slot = slot.expect("a checkpointed block should have the same tensors in backward");
        let Some(slot) = *slot else {
            return tensor;
        };
        let grown = self.leaves[slot].as_ref();
        if let Some(leaf) = grown.and_then(|leaf| leaf.as_any().downcast_ref::<Tensor<D>>()) {
            return leaf.clone();
        }
        // A node of its own each time.
        let leaf = tensor.set_require_grad(false).require_grad();
        self.leaves[slot] = Some(Box::new(leaf.clone()));
        leaf
    }
}

impl ModuleMapper for Regrow<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if matches!(self.slots.as_slice().first(), Some(Some(_))) {
            return param.map(|tensor| TensorMapper::map(self, tensor));
        }
        self.slots.next();
        param
    }
}

/// Running statistics of a block: they have counted the forward, and must not count its recomputation.
///
/// Burn shares them between a module and its clones, with the last update of each thread pending.
pub(crate) struct Buffers(Vec<Box<dyn Any>>);

impl Buffers {
    pub(crate) fn save<M: Module>(block: &M) -> Self {
        fold_updates(block);
        let mut save = SaveFloats(Vec::new());
        block.visit(&mut save);
        Self(save.0)
    }

    pub(crate) fn restore<M: Module>(self, block: M) {
        fold_updates(&block);
        block.map(&mut RestoreFloats(self.0.into_iter()));
    }
}

/// Has running statistics take in their pending updates, which Burn does when a module changes its mode.
fn fold_updates<M: Module>(block: &M) {
    drop(block.valid());
}

struct SaveFloats(Vec<Box<dyn Any>>);

impl ModuleVisitor for SaveFloats {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0.push(Box::new(param.base()));
    }
}

struct RestoreFloats(std::vec::IntoIter<Box<dyn Any>>);

impl ModuleMapper for RestoreFloats {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let saved = self.0.next().map(|saved| saved.downcast::<Tensor<D>>());
        match saved {
            Some(Ok(saved)) => param.map(|_| *saved),
            Some(Err(_)) | None => param,
        }
    }
}
