//! What a save consists of.

use burn::module::Module;
use burn_shard_checkpoint::{Background, Description, TensorName, TensorPart, Writer};
use serde_json::Value;

use super::pending::{PendingSave, Publication, Writing, tell_from_rank_0};
use super::{Checkpoints, State, stored_type};
use crate::error::agreed;
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
    /// Prepares a save and copies what this rank writes; the files are written by a thread.
    pub(super) fn begin(&self, user: &Value) -> Result<PendingSave, Error> {
        let Checkpoints {
            root, group, keep, ..
        } = self.checkpoints;
        let rank = group.rank();
        let saved = match self.model.engine().has_accumulated() {
            // They are no part of a checkpoint.
            true => Err(Error::Unreduced { rank }),
            false => Ok(()),
        };
        agreed(group, saved)?;
        let (prepared, writer) = tell_from_rank_0(group, || {
            let writer = Writer::create(root, self.step)?;
            Ok((writer.prepared().clone(), writer))
        })?;
        let publication = writer.map(|writer| Publication {
            writer,
            description: self.description(user),
            keep: *keep,
        });
        let (root, parts) = (root.clone(), self.parts());
        let mut background = Background::new();
        let begun =
            background.begin(move || Writer::join(root, &prepared)?.write_rank(rank, parts));
        let writing = match begun {
            Ok(()) => Writing::UnderWay(background),
            Err(error) => Writing::Over(Err(error)),
        };
        Ok(PendingSave::new(group, self.step, writing, publication))
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
            for (role, dtype, bytes) in self.optimizer.own_state(engine, index) {
                parts.push(TensorPart::ranges(
                    TensorName::state(spec.path.clone(), role),
                    super::buffers::stored_type(dtype),
                    &spec.shape,
                    vec![engine.owned(index)],
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

/// This rank's elements of each parameter, one flat buffer at a time.
fn parameters<M: Module>(engine: &Engine, model: &ShardedModule<M>) -> Vec<TensorPart<'static>> {
    let stored = crate::module::bind::stored(engine, model.inner());
    let plan = engine.plan();
    let part = |(index, tensor): (usize, crate::storage::flat::FlatTensor)| {
        let spec = &plan.params[index];
        let owned = engine.owned(index);
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
