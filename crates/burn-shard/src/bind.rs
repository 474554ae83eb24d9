//! Takes a module's tensors out into flat buffers, and puts views of flat buffers into it.

use std::collections::HashMap;
use std::sync::Arc;

use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{Device, GradientCheckpointingStrategy, Tensor};

use crate::attach::Path;
use crate::engine::Engine;
use crate::flat::{Flat, FlatTensor, from_flat, to_flat};
use crate::layout::MemberLayout;
use crate::memory::MemoryKind;
use crate::plan::Group;

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
        index: engine.plan.index(),
        path: Path::default(),
        gradients,
        detached: engine.plan.params.iter().map(|_| None).collect(),
    };
    let skeleton = module.map(&mut detach);
    let detached = detach
        .detached
        .into_iter()
        .map(|param| param.expect("every parameter of the plan should still be in the module"))
        .collect();
    (skeleton, detached)
}

struct Detach<'a> {
    index: Arc<HashMap<String, usize>>,
    path: Path,
    gradients: &'a mut GradientsParams,
    detached: Vec<Option<Detached>>,
}

impl ModuleMapper for Detach<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.enter(name);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.exit();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(&index) = self.index.get(&self.path.join()) else {
            return param;
        };
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
    skeleton.map(&mut Bind {
        index: engine.plan.index(),
        path: Path::default(),
        tensors: tensors.into_iter().map(Some).collect(),
    })
}

struct Bind {
    index: Arc<HashMap<String, usize>>,
    path: Path,
    tensors: Vec<Option<(FlatTensor, AutodiffState)>>,
}

impl ModuleMapper for Bind {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.enter(name);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.exit();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(&index) = self.index.get(&self.path.join()) else {
            return param;
        };
        let Some((tensor, state)) = self.tensors[index].take() else {
            return param;
        };
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

/// Where a member's stored tensor lies in its group's flat buffer: offset and elements.
pub(crate) fn stored(group: &Group, member: &MemberLayout) -> (usize, usize) {
    if group.strategy.shards_parameters() {
        (member.shard_offset, member.shard_numel)
    } else {
        (member.full_offset, member.numel)
    }
}

/// Elements of a group's flat buffer of stored tensors.
pub(crate) fn stored_len(group: &Group) -> usize {
    if group.strategy.shards_parameters() {
        group.layout.shard_len
    } else {
        group.layout.full_len
    }
}

impl Storage {
    pub(crate) fn new(flats: Vec<Flat>, states: Vec<AutodiffState>) -> Self {
        Self { flats, states }
    }

    /// Collects detached tensors into flat buffers. Those that lie in one already are not moved.
    pub(crate) fn pack(engine: &Engine, detached: Vec<Detached>) -> Self {
        let flats = engine
            .plan
            .groups
            .iter()
            .map(|group| pack_group(engine, group, &detached));
        Self {
            flats: flats.collect(),
            states: detached.into_iter().map(|d| d.state).collect(),
        }
    }

    /// Puts views of the buffers into a skeleton.
    pub(crate) fn bind<M: Module>(self, engine: &Engine, skeleton: M) -> M {
        let tensors = engine
            .plan
            .place
            .iter()
            .zip(&engine.plan.params)
            .zip(self.states);
        let views = tensors.map(|((place, param), state)| {
            let group = &engine.plan.groups[place.group];
            let (offset, _) = stored(group, &group.layout.members[place.member]);
            let shape = if group.strategy.shards_parameters() {
                param.shard_shape(engine.plan.world_size)
            } else {
                param.shape.clone()
            };
            let flat = &self.flats[place.group];
            (flat.view(offset, &shape, group.dtype), state)
        });
        let views = views.collect();
        drop(self.flats);
        bind(engine, skeleton, views)
    }
}

fn pack_group(engine: &Engine, group: &Group, detached: &[Detached]) -> Flat {
    let len = stored_len(group);
    let flat_of = |(member, &index): (&MemberLayout, &usize)| {
        detached[index].tensor.flat(stored(group, member).0, len)
    };
    let mut flats = group.layout.members.iter().zip(&group.members).map(flat_of);
    if let Some(Some(first)) = flats.next()
        && flats.all(|flat| flat.is_some_and(|flat| first.is(&flat)))
    {
        return first;
    }
    let size = group.dtype.size_bytes();
    let mut buffer = engine.pool.zeros(MemoryKind::Parameters, len * size);
    for (member, &index) in group.layout.members.iter().zip(&group.members) {
        let (offset, numel) = stored(group, member);
        let tensor = &detached[index].tensor;
        assert_eq!(
            (tensor.numel(), tensor.dtype()),
            (numel, group.dtype),
            "rank {}: parameter `{}` changed its length or dtype (a sharded module can only be \
             loaded from records of its own strategy, world size and dtype)",
            engine.rank(),
            engine.plan.params[index].path,
        );
        let tensor = tensor.clone().into_host();
        buffer.bytes_mut()[offset * size..(offset + numel) * size]
            .copy_from_slice(tensor.as_bytes());
    }
    engine.place_host(MemoryKind::Parameters, buffer)
}
