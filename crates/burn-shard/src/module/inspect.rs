//! Finds what can be sharded in a module.

use std::collections::HashMap;

use burn::module::{Module, ModuleVisitor, Param, ParamId, Reparameterization, Reparameterizer};
use burn::tensor::{DType as BurnDType, Tensor};

use super::path::Path;
use crate::storage::host::dtype_of;
use crate::{Error, ParamSpec};

/// Finds what can be sharded in a module, in traversal order.
///
/// # Errors
///
/// A parameter reachable by two paths, with a reparameterization of its own, or of a dtype that
/// cannot be communicated.
pub(crate) fn inspect<M: Module>(module: &M, rank: usize) -> Result<Vec<ParamSpec>, Error> {
    // Only real parameters keep a reparameterization; running statistics, which Burn shows to
    // visitors as parameters, lose it. So a marker tells them apart.
    let mut inspect = Inspect {
        rank,
        ..Inspect::default()
    };
    module.visit(&mut inspect);
    if let Some(error) = inspect.error {
        return Err(error);
    }
    let mut marked = Marked::default();
    module
        .clone()
        .apply_reparameterization(Mark)
        .visit(&mut marked);
    let is_param = |found: &Found| marked.paths.contains(&found.path);
    let params: Vec<Found> = inspect.found.into_iter().filter(is_param).collect();
    if params.is_empty() {
        return Err(Error::NoParameters { rank });
    }
    let mut first_path: HashMap<ParamId, String> = HashMap::new();
    params
        .into_iter()
        .map(|found| {
            if let Some(first) = first_path.insert(found.id, found.path.clone()) {
                return Err(Error::SharedParameter {
                    rank,
                    first,
                    second: found.path,
                });
            }
            let dtype = dtype_of(found.dtype).ok_or_else(|| Error::UnsupportedDType {
                rank,
                path: found.path.clone(),
                dtype: format!("{:?}", found.dtype),
            })?;
            let Found {
                path,
                shape,
                trainable,
                ..
            } = found;
            Ok(ParamSpec {
                path,
                shape,
                dtype,
                trainable,
            })
        })
        .collect()
}

#[derive(Default)]
struct Inspect {
    rank: usize,
    path: Path,
    found: Vec<Found>,
    error: Option<Error>,
}

struct Found {
    path: String,
    id: ParamId,
    shape: Vec<usize>,
    dtype: BurnDType,
    trainable: bool,
}

impl ModuleVisitor for Inspect {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        if container_type == "Reparameterization" && self.error.is_none() {
            self.error = Some(Error::AlreadyReparameterized {
                rank: self.rank,
                path: self.path.join(),
                name: name.to_owned(),
            });
        }
        self.path.enter(name);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.exit();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let dtype = if param.is_initialized() {
            param.base().dtype()
        } else {
            param.lazy_device().settings().float_dtype.into()
        };
        self.found.push(Found {
            path: self.path.join(),
            id: param.id,
            shape: stored_shape(param),
            dtype,
            trainable: is_trainable(param),
        });
    }
}

/// The shape that a parameter has, or will have once it is initialized.
fn stored_shape<const D: usize>(param: &Param<Tensor<D>>) -> Vec<usize> {
    let shape = param.lazy_shape();
    if param.is_initialized() || shape.iter().all(|&axis| axis == shape[0]) {
        return shape.as_slice().to_vec();
    }
    // Initializers may change it as loading does (`LinearLayout::Col` transposes), and do not say so.
    // What is made here has the shape only, and is gone at once.
    let zeros = Tensor::zeros(shape, &param.lazy_device());
    let loaded = param.clone().transform_for_load(zeros, param.id);
    loaded.lazy_shape().as_slice().to_vec()
}

/// Whether a parameter is to be trained, without initializing it.
fn is_trainable<const D: usize>(param: &Param<Tensor<D>>) -> bool {
    // Burn keeps the flag of an uninitialized parameter to itself.
    !param.is_initialized() || param.base().is_require_grad()
}

#[derive(Module, Debug)]
struct Marker {}

impl Reparameterization for Marker {
    const NAME: &'static str = "marker";

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        base
    }
}

struct Mark;

impl Reparameterizer for Mark {
    type Reparam = Marker;

    fn reparameterize<const D: usize>(
        &mut self,
        _path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<Marker>) {
        (param, Some(Marker {}))
    }
}

#[derive(Default)]
struct Marked {
    path: Path,
    paths: Vec<String>,
}

impl ModuleVisitor for Marked {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        if container_type == "Reparameterization" {
            self.paths.push(self.path.join());
        }
        self.path.enter(name);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.exit();
    }
}
