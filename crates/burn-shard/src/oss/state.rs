//! Optimizer state of this rank's shards.

use std::ops::Range;
use std::sync::{Arc, Weak};

use burn::optim::{DynOptimizer, DynState, StateSink};
use burn::tensor::TensorData;
#[cfg(feature = "cubecl")]
use burn_shard_comm::DType;

use crate::plan::Place;
use crate::runtime::engine::Engine;
#[cfg(feature = "cubecl")]
use crate::storage::device::DeviceFlat;
#[cfg(feature = "cubecl")]
use crate::storage::flat::FlatTensor;
use crate::storage::ledger::MemoryKind;
use crate::storage::pool::Buffer;

use super::config::Fused;

/// Where Burn's records have the state of SGD, Adam and `AdamW`.
const PREFIX: &str = "momentum";

/// State of every parameter of one module, on one rank.
#[derive(Debug)]
pub(super) struct State {
    /// The module it belongs to. Weak: an optimizer keeps no module alive.
    engine: Weak<Engine>,
    pub(super) params: Vec<ParamState>,
    pub(super) groups: Vec<Moments>,
}

/// State of one parameter.
#[derive(Clone, Default)]
pub(super) struct ParamState {
    /// Steps made.
    pub(super) time: usize,
    /// Which kernel made them, if one did.
    pub(super) fused: Option<Fused>,
    /// A stock optimizer and its state.
    pub(super) stock: Option<(Arc<dyn DynOptimizer>, DynState)>,
}

impl std::fmt::Debug for ParamState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ParamState")
            .field("time", &self.time)
            .finish_non_exhaustive()
    }
}

/// First and second moments (or the velocity, and nothing) of a group, laid out as its shards.
#[derive(Debug, Default)]
pub(super) struct Moments {
    first: Option<Moment>,
    second: Option<Moment>,
}

/// One moment of a group, where the module's tensors are.
#[derive(Debug)]
enum Moment {
    Host(Buffer),
    #[cfg(feature = "cubecl")]
    Device(DeviceFlat),
}

impl Moment {
    fn zeros(engine: &Engine, bytes: usize) -> Self {
        #[cfg(feature = "cubecl")]
        if let Some(accelerator) = engine.context.memory.accelerator() {
            let flat = accelerator.zeros(bytes);
            flat.count(&engine.context.ledger, MemoryKind::OptimizerState);
            return Self::Device(flat);
        }
        Self::Host(engine.context.pool.zeros(MemoryKind::OptimizerState, bytes))
    }

    fn of(engine: &Engine, buffer: Buffer) -> Self {
        #[cfg(feature = "cubecl")]
        if let Some(accelerator) = engine.context.memory.accelerator() {
            let flat = accelerator.upload(buffer.bytes());
            flat.count(&engine.context.ledger, MemoryKind::OptimizerState);
            return Self::Device(flat);
        }
        let _where_it_is = engine;
        Self::Host(buffer)
    }

    /// Some of its elements.
    fn read(&self, range: Range<usize>) -> Vec<f32> {
        match self {
            Self::Host(buffer) => bytemuck::cast_slice(buffer.bytes())[range].to_vec(),
            #[cfg(feature = "cubecl")]
            Self::Device(flat) => {
                let part = flat.view(range.start, &[range.len()], DType::F32);
                bytemuck::pod_collect_to_vec(FlatTensor::Device(part).into_host().as_bytes())
            }
        }
    }

    fn host(&mut self) -> &mut Buffer {
        match self {
            Self::Host(buffer) => buffer,
            #[cfg(feature = "cubecl")]
            Self::Device(_) => unreachable!("moments are where the module's tensors are"),
        }
    }

    #[cfg(feature = "cubecl")]
    fn device(&self) -> &DeviceFlat {
        match self {
            Self::Device(flat) => flat,
            Self::Host(_) => unreachable!("moments are where the module's tensors are"),
        }
    }
}

impl State {
    pub(super) fn new(engine: &Arc<Engine>) -> Self {
        Self {
            engine: Arc::downgrade(engine),
            params: vec![ParamState::default(); engine.plan().params.len()],
            groups: engine
                .plan()
                .groups
                .iter()
                .map(|_| Moments::default())
                .collect(),
        }
    }

    pub(super) fn belongs_to(&self, engine: &Arc<Engine>) -> bool {
        std::ptr::eq(self.engine.as_ptr(), Arc::as_ptr(engine))
    }

    /// What Burn's record of the same optimizer would hold of this rank's elements.
    pub(super) fn describe(&self, path: &str) -> StateSink {
        let mut sink = self.scalars(path);
        let Some((engine, index)) = self.find(path) else {
            return sink;
        };
        let range = elements(&engine, index);
        for (name, moment) in self.moments(&engine, index) {
            let data = TensorData::new(moment.read(range.clone()), [range.len()]);
            sink.push_tensor(PREFIX, name, data);
        }
        sink
    }

    /// The names of the tensors that [`describe`](Self::describe) gives, and the scalars beside them.
    pub(super) fn roles(&self, path: &str) -> (Vec<String>, StateSink) {
        let sink = self.scalars(path);
        let stock = sink.tensors.iter().map(|(name, _)| name.clone());
        let fused = self.find(path).map(|(engine, index)| {
            let moments = self.moments(&engine, index);
            roles(&moments.map(|(name, _)| name).collect::<Vec<_>>())
        });
        (stock.chain(fused.unwrap_or_default()).collect(), sink)
    }

    /// What a stock optimizer holds, or the scalars of a fused one.
    fn scalars(&self, path: &str) -> StateSink {
        let mut sink = StateSink::default();
        let Some((_, index)) = self.find(path) else {
            return sink;
        };
        let state = &self.params[index];
        match (&state.stock, state.fused) {
            (Some((stock, stock_state)), _) => stock.state_flatten("", stock_state, &mut sink),
            (None, Some(Fused::Adam(_) | Fused::AdamW(_))) => {
                sink.push_scalar(PREFIX, "time", (state.time as u64).into());
            }
            (None, Some(Fused::Sgd(_)) | None) => {}
        }
        sink
    }

    /// What a kernel keeps of a parameter, by its names. Another parameter of the group may have more.
    fn moments(
        &self,
        engine: &Engine,
        index: usize,
    ) -> impl Iterator<Item = (&'static str, &Moment)> {
        let group = &self.groups[engine.plan().place[index].group];
        let fused = self.params[index].fused;
        let names = fused.as_ref().map_or(&[][..], Fused::moments);
        let kept = [group.first.as_ref(), group.second.as_ref()];
        names
            .iter()
            .zip(kept)
            .filter_map(|(&name, moment)| Some((name, moment?)))
    }

    /// The module's engine, while the module lives.
    pub(super) fn engine(&self) -> Option<Arc<Engine>> {
        self.engine.upgrade()
    }

    fn find(&self, path: &str) -> Option<(Arc<Engine>, usize)> {
        let engine = self.engine.upgrade()?;
        let index = engine.plan().find(path)?;
        Some((engine, index))
    }

    pub(super) fn is_fused(&self, path: &str) -> Option<bool> {
        let (_, index) = self.find(path)?;
        let state = &self.params[index];
        (state.time > 0).then_some(state.fused.is_some())
    }
}

impl Moments {
    /// Replaces both by what is in host memory.
    pub(super) fn set(&mut self, engine: &Engine, first: Option<Buffer>, second: Option<Buffer>) {
        self.first = first.map(|buffer| Moment::of(engine, buffer));
        self.second = second.map(|buffer| Moment::of(engine, buffer));
    }

    pub(super) fn first(&mut self, engine: &Engine, bytes: usize) -> &mut Buffer {
        let zeros = || Moment::zeros(engine, bytes);
        self.first.get_or_insert_with(zeros).host()
    }

    pub(super) fn both(&mut self, engine: &Engine, bytes: usize) -> (&mut Buffer, &mut Buffer) {
        let zeros = || Moment::zeros(engine, bytes);
        (
            self.first.get_or_insert_with(zeros).host(),
            self.second.get_or_insert_with(zeros).host(),
        )
    }

    #[cfg(feature = "cubecl")]
    pub(super) fn first_on_device(&mut self, engine: &Engine, bytes: usize) -> DeviceFlat {
        let zeros = || Moment::zeros(engine, bytes);
        self.first.get_or_insert_with(zeros).device().clone()
    }

    #[cfg(feature = "cubecl")]
    pub(super) fn second_on_device(&mut self, engine: &Engine, bytes: usize) -> DeviceFlat {
        let zeros = || Moment::zeros(engine, bytes);
        self.second.get_or_insert_with(zeros).device().clone()
    }
}

/// How Burn's records call moments of these names.
pub(super) fn roles(moments: &[&str]) -> Vec<String> {
    let role = |name| format!("{PREFIX}.{name}");
    moments.iter().map(role).collect()
}

/// Where the state of this rank's elements of a parameter lies in its group's moments.
pub(super) fn elements(engine: &Engine, index: usize) -> Range<usize> {
    let Place { group, member } = engine.plan().place[index];
    let group = &engine.plan().groups[group];
    let member = &group.layout.members[member];
    if group.strategy.shards_optimizer() {
        member.shard_offset..member.shard_offset + engine.owned(index).len()
    } else {
        member.full_offset..member.full_offset + member.numel
    }
}

/// Bytes of one moment of a group.
pub(super) fn moment_bytes(engine: &Engine, group: usize) -> usize {
    let group = &engine.plan().groups[group];
    let elements = if group.strategy.shards_optimizer() {
        group.layout.shard_len
    } else {
        group.layout.full_len
    };
    elements * group.dtype.size_bytes()
}
