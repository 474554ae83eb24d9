//! How reads of parameters reach the engine: Burn's reparameterization, on every parameter.

use std::collections::HashMap;
use std::sync::Arc;

use burn::backend::Dispatch;
use burn::module::{
    Module, ModuleMapper, ModuleVisitor, Param, ParamId, Reparameterization, Reparameterizer,
};
use burn::tensor::{DType as BurnDType, Device, Tensor};

use crate::Error;
use crate::engine::Engine;
use crate::host::dtype_of;
use crate::instance::Instance;
use crate::layout::ParamSpec;
use crate::ops::{Hook, ShardOps};

/// The reparameterization of one parameter: it has no state of its own.
#[derive(Clone, Debug)]
pub(crate) struct Shard {
    hook: Hook,
}

impl Reparameterization for Shard {
    const NAME: &'static str = "shard";

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        let hook = &self.hook;
        let sharded = hook.engine.plan.strategy_of(hook.index).shards_parameters();
        let full = match (sharded, base.is_autodiff()) {
            (false, false) => return base,
            (false, true) if !base.is_require_grad() => return base,
            (false, true) => {
                let (anchor, begin) = hook.engine.tokens(hook, &base.device());
                Dispatch::watch(
                    base.into_dispatch(),
                    anchor.into_dispatch(),
                    begin.into_dispatch(),
                    hook.clone(),
                )
            }
            (true, true) => {
                let (anchor, begin) = hook.engine.tokens(hook, &base.device());
                Dispatch::unshard(
                    base.into_dispatch(),
                    anchor.into_dispatch(),
                    begin.into_dispatch(),
                    hook.clone(),
                )
            }
            (true, false) => {
                let shard = base.into_dispatch();
                Dispatch::unshard(shard.clone(), shard.clone(), shard, hook.clone())
            }
        };
        Tensor::from_dispatch(full)
    }
}

impl Shard {
    /// The same for the value of the module that is being made.
    fn renewed(mut self) -> Self {
        self.hook.instance = self.hook.engine.instance();
        self
    }
}

impl Module for Shard {
    fn collect_devices(&self, devices: Vec<Device>) -> Vec<Device> {
        devices
    }

    fn fork(self, _device: &Device) -> Self {
        self.renewed()
    }

    fn to_device(self, _device: &Device) -> Self {
        self.renewed()
    }

    fn train(self) -> Self {
        self.renewed()
    }

    fn valid(&self) -> Self {
        self.clone()
    }

    fn materialize(self) -> Self {
        self
    }

    fn visit<V: ModuleVisitor>(&self, _visitor: &mut V) {}

    fn map<M: ModuleMapper>(self, _mapper: &mut M) -> Self {
        self.renewed()
    }
}

/// Attaches [`Shard`] to each parameter of the plan.
struct Attach {
    engine: Arc<Engine>,
    instance: Arc<Instance>,
    index: Arc<HashMap<String, usize>>,
}

impl Reparameterizer for Attach {
    type Reparam = Shard;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<Shard>) {
        let shard = self.index.get(path).map(|&index| Shard {
            hook: Hook {
                engine: Arc::clone(&self.engine),
                instance: Arc::clone(&self.instance),
                index,
            },
        });
        (param, shard)
    }
}

/// Makes every read of the module's parameters go through `engine`.
pub(crate) fn attach<M: Module>(engine: &Arc<Engine>, module: M) -> M {
    module.apply_reparameterization(Attach {
        engine: Arc::clone(engine),
        instance: engine.instance(),
        index: engine.plan.index(),
    })
}

/// Tells the current instance under which nodes the module's gradients are registered.
pub(crate) fn note_leaves<M: Module>(engine: &Arc<Engine>, module: &M) {
    let index = engine.plan.index();
    let instance = engine.instance();
    module.visit(&mut NoteLeaves {
        engine,
        instance,
        index,
        path: Path::default(),
    });
}

struct NoteLeaves<'a> {
    engine: &'a Arc<Engine>,
    instance: Arc<Instance>,
    index: Arc<HashMap<String, usize>>,
    path: Path,
}

impl ModuleVisitor for NoteLeaves<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.enter(name);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.exit();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(&index) = self.index.get(&self.path.join()) else {
            return;
        };
        let base = param.base();
        if base.is_require_grad() {
            let hook = Hook {
                engine: Arc::clone(self.engine),
                instance: Arc::clone(&self.instance),
                index,
            };
            let _noted = Dispatch::note_leaf(base.into_dispatch(), hook);
        }
    }
}

/// Module path while a module is traversed.
#[derive(Debug, Default)]
pub(crate) struct Path(Vec<String>);

impl Path {
    pub(crate) fn enter(&mut self, name: &str) {
        self.0.push(name.to_owned());
    }

    pub(crate) fn exit(&mut self) {
        self.0.pop();
    }

    pub(crate) fn join(&self) -> String {
        self.0.join(".")
    }
}

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
            shape: param.lazy_shape().as_slice().to_vec(),
            dtype,
            trainable: is_trainable(param),
        });
    }
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
