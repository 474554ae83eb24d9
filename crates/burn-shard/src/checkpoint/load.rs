//! Loading: everything is read before anything is changed.

use std::sync::Arc;

use burn::module::Module;
use burn_shard_checkpoint::{Checkpoint, DTypePolicy, Renames, Resolution, TensorName, Wanted};

use super::{Loaded, State, stored_type};
use crate::module::bind::ids;
use crate::module::buffers::{self, Buffer};
use crate::oss::{LoadedState, RestoredState};
use crate::runtime::engine::Engine;
use crate::storage::ledger::MemoryKind;
use crate::storage::pool;
use crate::{Error, Oss, ShardedModule};

/// A checkpoint that this rank has read and not used yet.
pub(super) struct Load {
    step: u64,
    user: serde_json::Value,
    /// By group: what is stored.
    flats: Vec<pool::Buffer>,
    optimizer: RestoredState,
    buffers: Vec<Buffer>,
}

/// A checkpoint and where its tensors are wanted.
struct Source<'a> {
    checkpoint: &'a Checkpoint,
    resolution: Resolution,
    engine: &'a Arc<Engine>,
}

impl Load {
    /// Reads this rank's part.
    pub(super) fn prepare<M: Module>(
        checkpoint: Checkpoint,
        renames: &Renames,
        model: &ShardedModule<M>,
        optimizer: &Oss,
    ) -> Result<Self, Error> {
        let engine = model.engine();
        let manifest = checkpoint.manifest();
        let state: State = serde_json::from_value(manifest.description.user.clone())
            .map_err(|source| Error::ForeignCheckpoint { source })?;
        let buffers = buffers::collect(engine.plan(), model.inner());
        let mut wanted: Vec<Wanted> = buffers.iter().map(Buffer::wanted).collect();
        for spec in &engine.plan().params {
            wanted.push(Wanted {
                name: TensorName::parameter(spec.path.clone()),
                dtype: stored_type(spec.dtype),
                shape: spec.shape.clone(),
            });
            let roles = state.optimizer.roles(renames, &spec.path);
            wanted.extend(roles.map(|role| Wanted {
                name: TensorName::state(spec.path.clone(), role),
                dtype: stored_type(spec.dtype),
                shape: spec.shape.clone(),
            }));
        }
        let resolution = checkpoint
            .resolve(&wanted, renames, DTypePolicy::Cast)?
            .strict()?;
        let source = Source {
            checkpoint: &checkpoint,
            resolution,
            engine,
        };
        let buffers: Result<Vec<Buffer>, Error> = buffers
            .into_iter()
            .map(|buffer| {
                let from = source.of(&buffer.wanted().name).clone();
                buffer.loaded(&checkpoint, &from)
            })
            .collect();
        Ok(Self {
            step: manifest.step,
            flats: source.flats()?,
            optimizer: source.optimizer(&state, renames, model, optimizer)?,
            buffers: buffers?,
            user: state.user,
        })
    }

    /// Takes what was read into use.
    pub(super) fn apply<M: Module>(
        self,
        model: ShardedModule<M>,
        optimizer: &mut Oss,
    ) -> Loaded<M> {
        let engine = Arc::clone(model.engine());
        optimizer.adopt(self.optimizer);
        let place = |buffer| engine.context.place_host(MemoryKind::Parameters, buffer);
        let flats = self.flats.into_iter().map(place).collect();
        let buffers = self.buffers;
        Loaded {
            model: model.with_stored(flats, |inner| buffers::put(inner, buffers)),
            step: self.step,
            user: self.user,
        }
    }
}

impl Source<'_> {
    /// The checkpoint's tensor for one that is wanted.
    fn of(&self, wanted: &TensorName) -> &TensorName {
        let source = self.resolution.source(wanted);
        source.expect("a strict resolution should have a source of everything that is wanted")
    }

    /// What this rank stores of each group.
    fn flats(&self) -> Result<Vec<pool::Buffer>, Error> {
        let (engine, plan) = (self.engine, self.engine.plan());
        let mut flats = Vec::new();
        for spec in &plan.groups {
            let size = spec.dtype.size_bytes();
            let pool = &engine.context.pool;
            let mut flat = pool.zeros(MemoryKind::Parameters, spec.stored_len() * size);
            for (member, &index) in spec.members.iter().enumerate() {
                let range = engine.stored(index);
                let (offset, _) = spec.stored_slot(member);
                let out = &mut flat.bytes_mut()[offset * size..][..range.len() * size];
                let name = TensorName::parameter(plan.params[index].path.clone());
                let wanted = (stored_type(spec.dtype), DTypePolicy::Cast);
                let from = self.of(&name);
                self.checkpoint.read_range_as(from, range, wanted, out)?;
            }
            flats.push(flat);
        }
        Ok(flats)
    }

    /// This rank's part of the optimizer's state.
    fn optimizer<M: Module>(
        &self,
        state: &State,
        renames: &Renames,
        model: &ShardedModule<M>,
        optimizer: &Oss,
    ) -> Result<RestoredState, Error> {
        let (engine, plan) = (self.engine, self.engine.plan());
        let mut loaded = LoadedState::default();
        for (index, spec) in plan.params.iter().enumerate() {
            let Some(scalars) = state.optimizer.of(renames, &spec.path) else {
                loaded.params.push(None);
                continue;
            };
            let mut tensors = Vec::new();
            for role in &scalars.roles {
                let range = engine.stepped(index);
                let mut bytes = vec![0; range.len() * spec.dtype.size_bytes()];
                let name = TensorName::state(spec.path.clone(), role.clone());
                let wanted = (stored_type(spec.dtype), DTypePolicy::Strict);
                self.checkpoint
                    .read_range_as(self.of(&name), range, wanted, &mut bytes)?;
                tensors.push((role.clone(), bytes));
            }
            loaded.params.push(Some((scalars.clone(), tensors)));
        }
        let ids = ids(engine, model.inner());
        optimizer.restored(engine, &ids, loaded)
    }
}
