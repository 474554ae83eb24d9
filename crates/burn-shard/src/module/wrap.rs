//! Wrapping: rank 0's parameters and buffers reach every rank, which keeps its part.

use std::sync::Arc;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{Bool, Bytes, Int, Tensor, TensorData};
use burn_shard_comm::{DType, Error as CommError, ProcessGroup, SegmentLayout, Segments};

use super::bind::{AutodiffState, Storage};
use super::inspect::inspect;
use super::path::Path;
use crate::autodiff::graph::Graph;
use crate::autodiff::reparam::attach;
use crate::error::agreed;
use crate::plan::Plan;
use crate::purpose::Purpose;
use crate::runtime::engine::Engine;
use crate::runtime::mesh::{Mesh, copies};
use crate::storage::flat::{Memory, from_flat, to_flat};
use crate::storage::host::{HostTensor, PiecesMut, TensorSegments};
use crate::storage::ledger::MemoryKind;
use crate::storage::pool::Buffer;
use crate::{Error, ShardConfig};

/// Plans, distributes and attaches. Every rank calls it with the same kind of module.
pub(crate) fn wrap<M: Module>(
    module: M,
    config: ShardConfig,
    group: &ProcessGroup,
) -> Result<(Arc<Graph>, M), Error> {
    let rank = group.rank();
    // A rank that cannot go on tells the others, instead of leaving them in the next collective.
    let (memory, plan) = agreed(group, check(&module, &config, group))?;
    plan.agree(&config, group)?;

    let mesh = Mesh::new(group, config.shard_ranks)?;
    let engine = Engine::new(mesh, memory, config, plan);
    let mut distribute = Distribute {
        engine: &engine,
        path: Path::default(),
        flats: engine.plan().groups.iter().map(|_| None).collect(),
        states: engine.plan().params.iter().map(|_| None).collect(),
        error: None,
    };
    if holds_buffers(&module, &engine) {
        // Running statistics keep their latest update aside; `valid` is what makes them take it.
        // Left aside, it would later replace what rank 0 sends.
        drop(module.valid());
    }
    let skeleton = module.map(&mut distribute);
    let Distribute {
        flats,
        states,
        error,
        ..
    } = distribute;
    if let Some(error) = error {
        return Err(error);
    }
    if states.iter().flatten().all(AutodiffState::is_frozen) {
        return Err(Error::NothingTrainable { rank });
    }
    let planned = "every parameter of the plan should have been met";
    let flats = flats
        .into_iter()
        .map(|flat| {
            engine
                .context
                .place_host(MemoryKind::Parameters, flat.expect(planned))
        })
        .collect();
    let states = states
        .into_iter()
        .map(|state| state.expect(planned))
        .collect();
    let module = Storage::new(flats, states).bind(&engine, skeleton);
    engine.context.ledger.reset_peak();
    let graph = Graph::new(engine);
    let module = attach(&graph, module);
    Ok((graph, module))
}

/// Whether the module shows visitors more float tensors than the plan has parameters.
fn holds_buffers<M: Module>(module: &M, engine: &Engine) -> bool {
    struct Count(usize);
    impl ModuleVisitor for Count {
        fn visit_float<const D: usize>(&mut self, _param: &Param<Tensor<D>>) {
            self.0 += 1;
        }
    }
    let mut count = Count(0);
    module.visit(&mut count);
    count.0 > engine.plan().params.len()
}

/// What this rank can refuse by itself.
fn check<M: Module>(
    module: &M,
    config: &ShardConfig,
    group: &ProcessGroup,
) -> Result<(Memory, Plan), Error> {
    let devices = module.devices();
    if devices.len() > 1 {
        return Err(Error::SeveralDevices {
            rank: group.rank(),
            count: devices.len(),
        });
    }
    let memory = match devices.first() {
        None => Memory::Host,
        Some(device) => Memory::of(device).ok_or_else(|| Error::UnsupportedBackend {
            rank: group.rank(),
            device: format!("{device:?}"),
        })?,
    };
    #[cfg(feature = "nccl")]
    let memory = memory.reached_by(group)?;
    let params = inspect(module, group.rank())?;
    let copies = copies(group.rank(), group.world_size(), config.shard_ranks)?;
    let shard_ranks = group.world_size() / copies;
    let plan = Plan::new(params, config, memory.alignment(), shard_ranks)?;
    Ok((memory, plan))
}

struct Distribute<'a> {
    engine: &'a Engine,
    path: Path,
    flats: Vec<Option<Buffer>>,
    states: Vec<Option<AutodiffState>>,
    error: Option<Error>,
}

impl Distribute<'_> {
    /// Rank 0's value of `tensor`, on every rank.
    fn broadcast(&mut self, mut tensor: HostTensor) -> HostTensor {
        if let Err(error) = self.try_broadcast(&mut tensor) {
            self.error.get_or_insert(error.into());
        }
        tensor
    }

    fn try_broadcast(&self, tensor: &mut HostTensor) -> Result<(), CommError> {
        let (dtype, numel) = (tensor.dtype(), tensor.numel());
        let communicator = self.engine.context.mesh.world.communicator();
        let layout = SegmentLayout {
            dtype,
            numels: vec![numel],
        };
        if self.engine.rank() == 0 {
            let input: Arc<dyn Segments> = Arc::new(TensorSegments {
                dtype,
                tensors: vec![(numel, Some(tensor.clone()))],
                purpose: Purpose::default(),
            });
            return communicator.broadcast(Some(input), layout, 0)?.wait();
        }
        let work = communicator.broadcast(None, layout, 0)?;
        let pieces = vec![tensor.as_bytes_mut()];
        work.finish(&mut PiecesMut { dtype, pieces })
    }

    fn broadcast_data(&mut self, data: TensorData) -> TensorData {
        let (bytes, shape, dtype) = data.into_parts();
        let mut bytes = bytes.to_vec();
        if self.error.is_none()
            && let Err(error) = self.engine.context.mesh.world.broadcast(&mut bytes, 0)
        {
            self.error = Some(error.into());
        }
        TensorData::from_bytes(Bytes::from_bytes_vec(bytes), shape, dtype)
    }

    /// Copies this rank's part of `full` into the flat buffer of its group.
    fn store(&mut self, index: usize, full: &HostTensor) {
        let engine = self.engine;
        let place = engine.plan().place[index];
        let group = &engine.plan().groups[place.group];
        let size = group.dtype.size_bytes();
        let flat = self.flats[place.group].get_or_insert_with(|| {
            let bytes = group.stored_len() * size;
            engine.context.pool.zeros(MemoryKind::Parameters, bytes)
        });
        let (offset, _) = group.stored_slot(place.member);
        let part = engine.stored(index);
        let part = &full.as_bytes()[part.start * size..part.end * size];
        flat.bytes_mut()[offset * size..offset * size + part.len()].copy_from_slice(part);
    }

    /// Refuses buffers where parameters are read in another type: Burn mixes no types in an operation.
    fn check_buffer(&mut self, dtype: DType) {
        let mixed = self.engine.context.config.mixed_precision;
        if let Some(param) = mixed
            .map(|mixed| mixed.param.dtype())
            .filter(|&param| param != dtype)
        {
            self.error.get_or_insert(Error::BufferPrecision {
                rank: self.engine.rank(),
                path: self.path.join(),
                dtype,
                param,
            });
        }
    }

    /// Whether a parameter turned out as it was planned.
    fn check(&mut self, index: usize, shape: &[usize], found: DType) -> bool {
        let spec = &self.engine.plan().params[index];
        if spec.shape != shape {
            self.error.get_or_insert(Error::ShapeChanged {
                rank: self.engine.rank(),
                path: spec.path.clone(),
                planned: spec.shape.clone(),
                found: shape.to_vec(),
            });
            return false;
        }
        if spec.dtype == found {
            return true;
        }
        self.error.get_or_insert(Error::DTypeChanged {
            rank: self.engine.rank(),
            path: spec.path.clone(),
            planned: format!("{:?}", spec.dtype),
            found: format!("{found:?}"),
        });
        false
    }
}

impl ModuleMapper for Distribute<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.enter(name);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.exit();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if self.error.is_some() {
            return param;
        }
        let index = self.engine.plan().find(&self.path.join());
        let (id, tensor, mapper) = param.consume();
        let shape = tensor.shape();
        let state = AutodiffState::of(&tensor);
        let device = tensor.clone().without_autodiff().device();
        let own = to_flat(tensor).into_host();
        let Some(index) = index else {
            // A buffer, such as a running mean: the same on every rank.
            self.check_buffer(own.dtype());
            let value = self.broadcast(own);
            let context = &self.engine.context;
            let value = context.place_tensor(MemoryKind::Parameters, value);
            return Param::from_mapped_value(id, state.lift(from_flat(value)), mapper);
        };
        if self.check(index, shape.as_slice(), own.dtype()) {
            let full = self.broadcast(own);
            if self.error.is_none() {
                self.store(index, &full);
                self.states[index] = Some(state);
            }
        }
        Param::from_mapped_value(id, Tensor::<D>::zeros([0; D], &device), mapper)
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        param.map(|tensor| {
            let device = tensor.device();
            let data = self.broadcast_data(tensor.into_data());
            let dtype = data.dtype();
            Tensor::from_data(data, (&device, dtype))
        })
    }

    fn map_bool<const D: usize>(
        &mut self,
        param: Param<Tensor<D, Bool>>,
    ) -> Param<Tensor<D, Bool>> {
        param.map(|tensor| {
            let device = tensor.device();
            let data = self.broadcast_data(tensor.into_data());
            let dtype = data.dtype();
            Tensor::from_data(data, (&device, dtype))
        })
    }
}
