//! Values for the parameters of a module.

#![allow(dead_code, unreachable_pub, reason = "each test uses a part of it")]
#![allow(clippy::cast_precision_loss, reason = "small numbers")]

use burn::module::{ModuleMapper, Param};
use burn::prelude::*;

use crate::common::Bits;

/// Numbers in (-1, 1) that look random.
pub fn noise(seed: u64, len: usize) -> Vec<f32> {
    let number = |i: usize| {
        let mut z = (seed << 32 | i as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z >> 41) as f32 / (1u64 << 22) as f32 - 1.0
    };
    (0..len).map(number).collect()
}

/// Puts values into parameters and buffers: the given ones, or others that depend on the path.
#[derive(Default)]
pub struct Fill {
    path: Vec<String>,
    values: Option<Bits>,
}

impl Fill {
    /// Fills with the values of another module, by path.
    pub fn with(values: Bits) -> Self {
        Self {
            path: Vec::new(),
            values: Some(values),
        }
    }

    fn values(&self, numel: usize) -> Vec<f32> {
        let path = self.path.join(".");
        if let Some(values) = &self.values {
            let found = values.iter().find(|(p, _)| *p == path);
            let (_, bits) = found.unwrap_or_else(|| panic!("no values of {path}"));
            return bits.iter().map(|&bits| f32::from_bits(bits)).collect();
        }
        let seed = path
            .bytes()
            .fold(7, |seed, byte| seed * 31 % 9973 + u64::from(byte));
        let is_variance = path.contains("running_var");
        let value = |x: f32| if is_variance { 1.5 + x } else { x / 8.0 };
        noise(seed, numel).into_iter().map(value).collect()
    }
}

impl ModuleMapper for Fill {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, tensor, mapper) = param.consume();
        let shape = tensor.dims();
        let data = TensorData::new(self.values(shape.iter().product()), shape);
        let value = Tensor::<D>::from_data(data, &tensor.device());
        let value = value.set_require_grad(tensor.is_require_grad());
        Param::from_mapped_value(id, value, mapper)
    }
}
