//! Plain data parallel: whole gradients, averaged by one `all_reduce` each.

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::prelude::*;
use burn_shard::{ProcessGroup, ReduceOp};

/// Bits of every parameter, in the order of the module.
pub type Bits = Vec<Vec<u32>>;

struct Values(Bits);

impl ModuleVisitor for Values {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let values = param.val().into_data();
        self.0
            .push(values.iter::<f32>().map(f32::to_bits).collect());
    }
}

pub fn values<M: Module>(module: &M) -> Bits {
    let mut values = Values(Vec::new());
    module.visit(&mut values);
    values.0
}

struct Average<'a> {
    group: &'a ProcessGroup,
    gradients: &'a mut GradientsParams,
}

impl ModuleVisitor for Average<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let gradient = self.gradients.remove::<D>(param.id).unwrap();
        let (shape, device) = (gradient.dims(), gradient.device());
        let mut values: Vec<f32> = gradient.into_data().iter().collect();
        self.group.all_reduce(&mut values, ReduceOp::Mean).unwrap();
        let data = TensorData::new(values, shape);
        let averaged = Tensor::<D>::from_data(data, &device);
        self.gradients.register(param.id, averaged);
    }
}

pub fn average<M: Module>(
    mut own: GradientsParams,
    model: &M,
    group: &ProcessGroup,
) -> GradientsParams {
    model.visit(&mut Average {
        group,
        gradients: &mut own,
    });
    own
}

/// The largest difference of two modules' parameters.
pub fn distance(one: &Bits, other: &Bits) -> f32 {
    let floats = |bits: &Bits| {
        bits.concat()
            .into_iter()
            .map(f32::from_bits)
            .collect::<Vec<_>>()
    };
    let (one, other) = (floats(one), floats(other));
    assert_eq!(one.len(), other.len());
    let pairs = one.into_iter().zip(other);
    pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}
