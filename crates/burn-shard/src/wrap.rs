//! Wrapping: rank 0's parameters and buffers reach every rank, which keeps its part.

use std::collections::HashMap;
use std::sync::Arc;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{Bool, Bytes, Int, Tensor, TensorData};
use burn_shard_comm::{DType, SegmentLayout, Segments};

use crate::Error;
use crate::attach::{Path, attach, inspect, note_leaves};
use crate::bind::{AutodiffState, Storage, stored, stored_len};
use crate::buffer::Buffer;
use crate::config::ShardConfig;
use crate::engine::Engine;
use crate::flat::{Memory, from_flat, to_flat};
use crate::host::{HostTensor, PiecesMut, TensorSegments};
use crate::memory::MemoryKind;
use crate::plan::Plan;

/// Plans, distributes and attaches. Every rank calls it with the same kind of module.
pub(crate) fn wrap<M: Module>(
    module: M,
    config: &ShardConfig,
    group: &burn_shard_comm::ProcessGroup,
) -> Result<(Arc<Engine>, M), Error> {
    let rank = group.rank();
    let checked = check(&module, config, group);
    // A rank that cannot go on tells the others, instead of leaving them in the next collective.
    let refusals = group.all_gather_bytes(
        checked
            .as_ref()
            .err()
            .map(ToString::to_string)
            .unwrap_or_default()
            .as_bytes(),
    )?;
    let (memory, plan) = checked?;
    if let Some(other) = refusals.iter().position(|message| !message.is_empty()) {
        let message = String::from_utf8_lossy(&refusals[other]).into_owned();
        return Err(Error::OtherRankRefused {
            rank,
            other,
            message,
        });
    }
    plan.agree(&config.strategy.to_string(), group)?;

    let engine = Engine::new(group.clone(), memory, config.strategy, plan);
    let mut distribute = Distribute {
        engine: &engine,
        index: engine.plan.index(),
        path: Path::default(),
        flats: engine.plan.groups.iter().map(|_| None).collect(),
        states: engine.plan.params.iter().map(|_| None).collect(),
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
    let planned = "every parameter of the plan should have been met";
    let flats = flats
        .into_iter()
        .map(|flat| engine.place_host(MemoryKind::Parameters, flat.expect(planned)))
        .collect();
    let states = states
        .into_iter()
        .map(|state| state.expect(planned))
        .collect();
    let module = Storage::new(flats, states).bind(&engine, skeleton);
    let module = attach(&engine, module);
    note_leaves(&engine, &module);
    engine.ledger.reset_peak();
    Ok((engine, module))
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
    count.0 > engine.plan.params.len()
}

/// What this rank can refuse by itself.
fn check<M: Module>(
    module: &M,
    config: &ShardConfig,
    group: &burn_shard_comm::ProcessGroup,
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
    let plan = Plan::new(
        params,
        config.strategy,
        config.group_cap_bytes,
        memory.alignment(),
        group.world_size(),
    )?;
    Ok((memory, plan))
}

struct Distribute<'a> {
    engine: &'a Arc<Engine>,
    index: Arc<HashMap<String, usize>>,
    path: Path,
    flats: Vec<Option<Buffer>>,
    states: Vec<Option<AutodiffState>>,
    error: Option<Error>,
}

impl Distribute<'_> {
    /// Rank 0's value of `tensor`, on every rank.
    fn broadcast(&mut self, mut tensor: HostTensor) -> HostTensor {
        let numel = tensor.numel();
        let layout = SegmentLayout {
            dtype: tensor.dtype(),
            numels: vec![numel],
        };
        let communicator = self.engine.group.communicator();
        let result = if self.engine.rank() == 0 {
            let tensors = vec![(numel, Some(tensor.clone()))];
            let input: Arc<dyn Segments> = Arc::new(TensorSegments {
                dtype: tensor.dtype(),
                tensors,
                label: 0,
            });
            communicator
                .broadcast(Some(input), layout, 0)
                .and_then(|mut work| work.wait())
        } else {
            let dtype = tensor.dtype();
            let mut output = PiecesMut {
                dtype,
                pieces: vec![tensor.as_bytes_mut()],
            };
            communicator
                .broadcast(None, layout, 0)
                .and_then(|work| work.finish(&mut output))
        };
        if let Err(error) = result {
            self.error.get_or_insert(error.into());
        }
        tensor
    }

    fn broadcast_data(&mut self, data: TensorData) -> TensorData {
        let (bytes, shape, dtype) = data.into_parts();
        let mut bytes = bytes.to_vec();
        if self.error.is_none()
            && let Err(error) = self.engine.group.broadcast(&mut bytes, 0)
        {
            self.error = Some(error.into());
        }
        TensorData::from_bytes(Bytes::from_bytes_vec(bytes), shape, dtype)
    }

    /// Copies this rank's part of `full` into the flat buffer of its group.
    fn store(&mut self, index: usize, full: &HostTensor) {
        let engine = self.engine;
        let place = engine.plan.place[index];
        let group = &engine.plan.groups[place.group];
        let member = &group.layout.members[place.member];
        let size = group.dtype.size_bytes();
        let flat = self.flats[place.group].get_or_insert_with(|| {
            engine
                .pool
                .zeros(MemoryKind::Parameters, stored_len(group) * size)
        });
        let (offset, _) = stored(group, member);
        let part = if group.strategy.shards_parameters() {
            member.owned(engine.rank())
        } else {
            0..member.numel
        };
        let part = &full.as_bytes()[part.start * size..part.end * size];
        flat.bytes_mut()[offset * size..offset * size + part.len()].copy_from_slice(part);
    }

    fn check_dtype(&mut self, index: usize, found: DType) -> bool {
        let spec = &self.engine.plan.params[index];
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
        let index = self.index.get(&self.path.join()).copied();
        let (id, tensor, mapper) = param.consume();
        let state = AutodiffState::of(&tensor);
        let device = tensor.clone().without_autodiff().device();
        let own = to_flat(tensor).into_host();
        let Some(index) = index else {
            // A buffer, such as a running mean: the same on every rank.
            let value = self.broadcast(own);
            let value = self.engine.place_tensor(MemoryKind::Parameters, value);
            return Param::from_mapped_value(id, state.lift(from_flat(value)), mapper);
        };
        if self.check_dtype(index, own.dtype()) {
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
