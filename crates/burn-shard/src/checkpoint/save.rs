//! Saving: prepare, write, publish, each agreed on by all ranks.

use burn::module::Module;
use burn_shard_checkpoint::{
    Description, Error as FileError, Published, TensorName, TensorPart, Writer, tell, told,
    told_by_all,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::{Checkpoints, State, stored_type};
use crate::module::buffers::{self, Buffer};
use crate::runtime::engine::Engine;
use crate::{Error, Oss, ShardedModule};

/// One save.
pub(super) struct Save<'a, M> {
    pub(super) checkpoints: &'a Checkpoints,
    pub(super) step: u64,
    pub(super) model: &'a ShardedModule<M>,
    pub(super) optimizer: &'a Oss,
}

impl<M: Module> Save<'_, M> {
    pub(super) fn run(&self, user: &Value) -> Result<Published, Error> {
        let Checkpoints {
            root, group, keep, ..
        } = self.checkpoints;
        let rank = group.rank();

        let writer = self.tell_from_rank_0(|| {
            let writer = Writer::create(root, self.step)?;
            Ok((writer.prepared().clone(), writer))
        })?;
        let (prepared, writer) = writer;
        let report =
            Writer::join(root, &prepared).and_then(|joined| joined.write_rank(rank, self.parts()));
        let reports = group.all_gather_bytes(&tell(rank, &report))?;
        let (published, _) = self.tell_from_rank_0(|| {
            let reports = told_by_all(&reports)?;
            let writer = writer.expect("rank 0 should have made the writer");
            let published = writer.publish(&reports, &self.description(user), *keep)?;
            Ok((published, ()))
        })?;
        Ok(published)
    }

    /// Does something on rank 0, of which all ranks learn the result. What only rank 0 has is returned
    /// there alone.
    fn tell_from_rank_0<T, O>(
        &self,
        act: impl FnOnce() -> Result<(T, O), FileError>,
    ) -> Result<(T, Option<O>), Error>
    where
        T: Serialize + DeserializeOwned,
    {
        let group = &self.checkpoints.group;
        if group.rank() != 0 {
            let message = group.broadcast_bytes(Vec::new(), 0)?;
            return Ok((told(&message)?, None));
        }
        let (told, own) = match act() {
            Ok((told, own)) => (Ok(told), Some(own)),
            Err(error) => (Err(error), None),
        };
        group.broadcast_bytes(tell(0, &told), 0)?;
        Ok((told?, own))
    }

    fn description(&self, user: &Value) -> Description {
        let state = State {
            optimizer: self.optimizer.scalars(),
            user: user.clone(),
        };
        let config = self.model.config();
        Description {
            strategy: config.strategy.to_string(),
            plan: format!(
                "{} parameters in {} groups of at most {} bytes",
                self.model.params().len(),
                self.model.groups().len(),
                config.group_cap_bytes
            ),
            user: serde_json::to_value(state).expect("state should be serializable"),
        }
    }

    /// What this rank writes: its elements of each parameter and of its state; rank 0 the buffers too.
    fn parts(&self) -> Vec<TensorPart<'static>> {
        let engine = self.model.engine();
        if !engine.context.mesh.is_first_copy() {
            return Vec::new();
        }
        let mut parts = parameters(engine, self.model);
        for (index, spec) in engine.plan().params.iter().enumerate() {
            let owned = owned(engine, index);
            for (role, data) in self.optimizer.state_of(&spec.path).tensors {
                let name = TensorName::state(spec.path.clone(), role);
                let size = data.dtype().size();
                let part = if data.num_elements() == owned.len() {
                    0..owned.len()
                } else {
                    // Every rank has all of it.
                    owned.clone()
                };
                let bytes = data.bytes()[part.start * size..part.end * size].to_vec();
                let dtype = super::buffers::stored_type(data.dtype());
                parts.push(TensorPart::ranges(
                    name,
                    dtype,
                    &spec.shape,
                    vec![owned.clone()],
                    bytes,
                ));
            }
        }
        if engine.rank() == 0 {
            let buffers = buffers::collect(engine.plan(), self.model.inner());
            parts.extend(buffers.into_iter().map(Buffer::part));
        }
        parts
    }
}

/// The elements of a parameter that this rank writes and keeps the state of.
pub(super) fn owned(engine: &Engine, index: usize) -> std::ops::Range<usize> {
    let plan = engine.plan();
    let place = plan.place[index];
    plan.groups[place.group].layout.members[place.member].owned(engine.shard_rank())
}

/// This rank's elements of each parameter, one flat buffer at a time.
fn parameters<M: Module>(engine: &Engine, model: &ShardedModule<M>) -> Vec<TensorPart<'static>> {
    let stored = crate::module::bind::stored(engine, model.inner());
    let plan = engine.plan();
    let part = |(index, tensor): (usize, crate::storage::flat::FlatTensor)| {
        let spec = &plan.params[index];
        let owned = owned(engine, index);
        let tensor = tensor.into_host();
        let size = spec.dtype.size_bytes();
        let from = if plan.group_of(index).shards_parameters() {
            0..owned.len()
        } else {
            owned.clone()
        };
        let bytes = tensor.as_bytes()[from.start * size..from.end * size].to_vec();
        let name = TensorName::parameter(spec.path.clone());
        TensorPart::ranges(
            name,
            stored_type(spec.dtype),
            &spec.shape,
            vec![owned],
            bytes,
        )
    };
    stored.into_iter().enumerate().map(part).collect()
}
