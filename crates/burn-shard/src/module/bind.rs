//! Takes a module's tensors out into flat buffers, and puts views of flat buffers into it.

use burn::module::{Module, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{Device, GradientCheckpointingStrategy, Shape, Tensor};

use super::walk::{MapParam, VisitParam, map_params, visit_params};
use crate::runtime::engine::Engine;
use crate::storage::flat::{Flat, FlatTensor, from_flat, to_flat};
use crate::storage::ledger::MemoryKind;

const ALL_MET: &str = "every parameter of the plan should be in the module, once";

/// One parameter taken out of its module.
#[derive(Debug)]
pub(crate) struct Detached {
    pub(crate) id: ParamId,
    pub(crate) tensor: FlatTensor,
    pub(crate) gradient: Option<FlatTensor>,
    state: AutodiffState,
}

/// The autodiff state of a parameter's tensor, to be put onto the tensor that replaces it.
#[derive(Clone, Debug)]
pub(crate) struct AutodiffState {
    require_grad: bool,
    checkpointing: Option<GradientCheckpointingStrategy>,
}

impl AutodiffState {
    pub(crate) fn of<const D: usize>(tensor: &Tensor<D>) -> Self {
        Self {
            require_grad: tensor.is_require_grad(),
            checkpointing: tensor.gradient_checkpointing_strategy(),
        }
    }

    /// Whether it is on an autodiff device, and no gradient is wanted.
    pub(crate) fn is_frozen(&self) -> bool {
        self.checkpointing.is_some() && !self.require_grad
    }

    /// A leaf of the same kind.
    pub(crate) fn lift<const D: usize>(&self, tensor: Tensor<D>) -> Tensor<D> {
        match self.checkpointing {
            None => tensor,
            Some(strategy) => tensor
                .autodiff()
                .with_gradient_checkpointing_strategy(strategy)
                .set_require_grad(self.require_grad),
        }
    }
}

/// Takes every planned parameter out of `module`, with its gradient from `gradients`. What remains
/// is a skeleton to [`bind`] again. In plan order.
pub(crate) fn detach<M: Module>(
    engine: &Engine,
    module: M,
    gradients: &mut GradientsParams,
) -> (M, Vec<Detached>) {
    let mut detach = Detach {
        gradients,
        detached: engine.plan().params.iter().map(|_| None).collect(),
    };
    let skeleton = map_params(engine.plan(), module, &mut detach);
    let detached = detach
        .detached
        .into_iter()
        .map(|param| param.expect(ALL_MET))
        .collect();
    (skeleton, detached)
}

struct Detach<'a> {
    gradients: &'a mut GradientsParams,
    detached: Vec<Option<Detached>>,
}

impl MapParam for Detach<'_> {
    fn map_param<const D: usize>(
        &mut self,
        index: usize,
        param: Param<Tensor<D>>,
    ) -> Param<Tensor<D>> {
        let (id, tensor, mapper) = param.consume();
        let state = AutodiffState::of(&tensor);
        let placeholder = Tensor::<D>::zeros([0; D], &without_autodiff(&tensor));
        let gradient = self.gradients.remove::<D>(id).map(to_flat);
        let tensor = to_flat(tensor);
        self.detached[index] = Some(Detached {
            id,
            tensor,
            gradient,
            state,
        });
        Param::from_mapped_value(id, placeholder, mapper)
    }
}

fn without_autodiff<const D: usize>(tensor: &Tensor<D>) -> Device {
    tensor.clone().without_autodiff().device()
}

/// Puts `tensors`, one per parameter of the plan, into a skeleton made by [`detach`].
pub(crate) fn bind<M: Module>(
    engine: &Engine,
    skeleton: M,
    tensors: Vec<(FlatTensor, AutodiffState)>,
) -> M {
    let mut bind = Bind(tensors.into_iter().map(Some).collect());
    map_params(engine.plan(), skeleton, &mut bind)
}

struct Bind(Vec<Option<(FlatTensor, AutodiffState)>>);

impl MapParam for Bind {
    fn map_param<const D: usize>(
        &mut self,
        index: usize,
        param: Param<Tensor<D>>,
    ) -> Param<Tensor<D>> {
        let (tensor, state) = self.0[index].take().expect(ALL_MET);
        let (id, _, mapper) = param.consume();
        Param::from_mapped_value(id, state.lift(from_flat(tensor)), mapper)
    }
}

/// The stored tensors of a module, one flat buffer per group.
#[derive(Debug)]
pub(crate) struct Storage {
    pub(crate) flats: Vec<Flat>,
    states: Vec<AutodiffState>,
}

impl Storage {
    pub(crate) fn new(flats: Vec<Flat>, states: Vec<AutodiffState>) -> Self {
        Self { flats, states }
    }

    /// The autodiff states of parameters whose tensors are not needed.
    pub(crate) fn states(detached: Vec<Detached>) -> Vec<AutodiffState> {
        detached.into_iter().map(|param| param.state).collect()
    }

    /// Collects detached tensors into flat buffers. Those that lie in one already are not moved; of a
    /// full parameter this rank's shard is taken, where shards are stored.
    pub(crate) fn pack(engine: &Engine, detached: Vec<Detached>) -> Self {
        let groups = 0..engine.plan().groups.len();
        Self {
            flats: groups
                .map(|group| pack_group(engine, group, &detached))
                .collect(),
            states: detached.into_iter().map(|d| d.state).collect(),
        }
    }

    /// Puts views of the buffers into a skeleton.
    pub(crate) fn bind<M: Module>(self, engine: &Engine, skeleton: M) -> M {
        let plan = engine.plan();
        let views = plan.place.iter().zip(self.states).enumerate();
        let views = views.map(|(index, (place, state))| {
            let group = &plan.groups[place.group];
            let (offset, _) = group.stored_slot(place.member);
            let flat = &self.flats[place.group];
            (
                flat.view(offset, &plan.stored_shape(index), group.dtype),
                state,
            )
        });
        let views = views.collect();
        engine.instance().note_flats(&self.flats);
        drop(self.flats);
        bind(engine, skeleton, views)
    }
}

fn pack_group(engine: &Engine, group: usize, detached: &[Detached]) -> Flat {
    let plan = engine.plan();
    let spec = &plan.groups[group];
    let len = spec.stored_len();
    let flat_of = |(member, &index): (usize, &usize)| {
        detached[index].tensor.flat(spec.stored_slot(member).0, len)
    };
    let mut flats = spec.members.iter().enumerate().map(flat_of);
    if let Some(Some(first)) = flats.next()
        && flats.all(|flat| flat.is_some_and(|flat| first.is(&flat)))
    {
        return first;
    }
    let size = spec.dtype.size_bytes();
    let mut buffer = engine
        .context
        .pool
        .zeros(MemoryKind::Parameters, len * size);
    for (member, &index) in spec.members.iter().enumerate() {
        let (offset, numel) = spec.stored_slot(member);
        let tensor = &detached[index].tensor;
        let layout = &spec.layout.members[member];
        let found = (tensor.numel(), tensor.dtype());
        let part = if found == (numel, spec.dtype) {
            0..numel
        } else if found == (layout.numel, spec.dtype) {
            engine.owned(index)
        } else {
            panic!(
                "rank {}: parameter `{}` has {} elements of {} now, and its module was wrapped with {} of {} \
                 (wrap the changed module anew)",
                engine.rank(),
                plan.params[index].path,
                found.0,
                found.1,
                layout.numel,
                spec.dtype,
            );
        };
        let tensor = tensor.clone().into_host();
        let part = &tensor.as_bytes()[part.start * size..part.end * size];
        buffer.bytes_mut()[offset * size..offset * size + part.len()].copy_from_slice(part);
    }
    engine.context.place_host(MemoryKind::Parameters, buffer)
}

/// Puts the parameters of a plain module of the same structure into a wrapped module's plain module, in
/// place of what is stored. Buffers stay.
pub(crate) fn put_parameters<M: Module>(engine: &Engine, module: M, plain: M) -> M {
    let detach = |module| detach(engine, module, &mut GradientsParams::new());
    let (_, full) = detach(plain);
    let (skeleton, stored) = detach(module);
    let states = stored.into_iter().map(|param| param.state);
    let full = full.into_iter().map(|param| param.tensor);
    bind(engine, skeleton, full.zip(states).collect())
}

/// The module with parameters of the full shapes that have no elements of their own, to be shown.
pub(crate) fn with_full_shapes<M: Module>(engine: &Engine, module: M) -> M {
    struct Shapes<'a>(&'a Engine);
    impl MapParam for Shapes<'_> {
        fn map_param<const D: usize>(
            &mut self,
            index: usize,
            param: Param<Tensor<D>>,
        ) -> Param<Tensor<D>> {
            let shape = Shape::from(self.0.plan().params[index].shape.clone());
            param.map(|stored| {
                let device = without_autodiff(&stored);
                let one = Tensor::<D>::zeros([1; D], &device);
                one.expand(shape)
            })
        }
    }
    map_params(engine.plan(), module, &mut Shapes(engine))
}

/// The stored tensors of a module, in plan order.
pub(crate) fn stored<M: Module>(engine: &Engine, module: &M) -> Vec<FlatTensor> {
    visit(engine, module)
        .into_iter()
        .map(|(_, tensor)| tensor)
        .collect()
}

/// The ids of a module's parameters, in plan order.
pub(crate) fn ids<M: Module>(engine: &Engine, module: &M) -> Vec<ParamId> {
    visit(engine, module)
        .into_iter()
        .map(|(id, _)| id)
        .collect()
}

fn visit<M: Module>(engine: &Engine, module: &M) -> Vec<(ParamId, FlatTensor)> {
    struct Visit(Vec<Option<(ParamId, FlatTensor)>>);
    impl VisitParam for Visit {
        fn visit_param<const D: usize>(&mut self, index: usize, param: &Param<Tensor<D>>) {
            self.0[index] = Some((param.id, to_flat(param.base())));
        }
    }
    let mut visit = Visit(engine.plan().params.iter().map(|_| None).collect());
    visit_params(engine.plan(), module, &mut visit);
    visit
        .0
        .into_iter()
        .map(|found| found.expect(ALL_MET))
        .collect()
}
