//! Optimizer state as Burn's own optimizers record it: whole tensors, by the ids of parameters.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use burn::module::Module;
use burn::optim::OptimizerRecord;
use burn::store::RecordError;
use burn::tensor::{Bytes, DType, TensorData};
use burn_pack::{Reader, Scalar, Tensor, Writer};

use super::Oss;
use super::restore::{LoadedState, OptimizerScalars, ParamScalars, RestoredState};
use crate::error::agreed;
use crate::module::bind::ids;
use crate::plan::verify::{HASH_START, hash_bytes};
use crate::runtime::engine::Engine;
use crate::storage::host::burn_dtype;
use crate::{Error, ShardedModule};

/// Where Burn's records have the number of a parameter's dimensions.
const RANK_KEY: &str = "__rank";
/// Where the fused optimizers' records have the steps made, if they count them.
const TIME: &str = "momentum.time";

impl Oss {
    /// The whole state, as Burn's own optimizer of the same configuration records it: together with a record of
    /// the module, training goes on without this crate. A collective under every strategy.
    ///
    /// Rank 0 gets the record, which it may [`save`](OptimizerRecord::save), and the other ranks `None`. Parameters
    /// have the ids of rank 0's module, as in [`into_record`](Module::into_record) and
    /// [`unsharded`](ShardedModule::unsharded). It is empty before the first step.
    ///
    /// # Memory
    ///
    /// The whole state once on rank 0, beside the parameter that is gathered. A checkpoint
    /// ([`Checkpoints`](crate::checkpoint::Checkpoints)) gathers nothing.
    ///
    /// # Errors
    ///
    /// [`Error::OtherModule`] on all ranks if `model` is not the module of this optimizer, and failures of the
    /// communicator.
    ///
    /// # Examples
    ///
    /// ```
    /// # use burn::module::Module;
    /// # use burn::nn::LinearConfig;
    /// # use burn::optim::{AdamConfig, GradientsParams};
    /// # use burn::prelude::*;
    /// # use burn_shard::{Oss, ProcessGroup, ShardedModule, ShardingStrategy};
    /// # ProcessGroup::spawn(2, |group| {
    /// # let device = Device::flex().autodiff();
    /// # let model = LinearConfig::new(4, 1).init(&device);
    /// # let mut model = ShardedModule::new(model, ShardingStrategy::Full, &group).unwrap();
    /// # let mut optimizer = Oss::new(AdamConfig::new(), &group).unwrap();
    /// # let loss = model.forward(Tensor::<2>::ones([2, 4], &device)).mean();
    /// # let gradients = GradientsParams::from_grads(loss.backward(), &model);
    /// # model = optimizer.step(0.1, model, gradients);
    /// let record = optimizer.to_record(&model).unwrap();
    /// let plain = model.unsharded();
    /// if let Some(record) = record {
    ///     let optimizer = AdamConfig::new().init().load_record(record);
    ///     // `plain.train()` and `optimizer` go on alone.
    ///     # drop(optimizer);
    /// }
    /// # drop(plain);
    /// # }).unwrap();
    /// ```
    #[doc(alias = "full_optim_state_dict")]
    #[doc(alias = "consolidate_state_dict")]
    pub fn to_record<M: Module>(
        &self,
        model: &ShardedModule<M>,
    ) -> Result<Option<OptimizerRecord>, Error> {
        let engine = model.engine();
        let rank = engine.rank();
        let is_other = (self.state.as_ref()).is_some_and(|state| !state.belongs_to(engine));
        let own = if is_other {
            Err(Error::OtherModule { rank })
        } else {
            Ok(self.scalars())
        };
        let own = serde_json::to_vec(&agreed(&self.group, own)?)?;
        let mut all = OptimizerScalars::default();
        for scalars in self.group.all_gather_bytes(&own)? {
            all.merge(serde_json::from_slice(&scalars)?);
        }

        let mut out = (rank == 0).then(Collected::default);
        for (index, id) in ids(engine, model.inner()).into_iter().enumerate() {
            let spec = &engine.plan().params[index];
            let Some(scalars) = all.get(&spec.path) else {
                continue;
            };
            let own = match engine.context.mesh.is_first_copy() {
                true => self.own_state(engine, index),
                false => Vec::new(),
            };
            let own: Vec<u8> = own.into_iter().flat_map(|(_, _, bytes)| bytes).collect();
            let parts = self.group.all_gather_bytes(&own)?;
            let Some(out) = &mut out else { continue };
            let id = id.val();
            out.scalars
                .push((format!("{id}.{RANK_KEY}"), Scalar::from(spec.shape.len())));
            for (name, value) in scalars.scalars() {
                out.scalars.push((format!("{id}.{name}"), value));
            }
            out.paths.push((id.to_string(), spec.path.clone()));
            let count = scalars.roles.len();
            for (place, role) in scalars.roles.iter().enumerate() {
                let mut bytes = Vec::with_capacity(spec.numel() * spec.dtype.size_bytes());
                for part in &parts {
                    let len = part.len() / count;
                    bytes.extend_from_slice(&part[place * len..(place + 1) * len]);
                }
                out.tensors.push(Tensor::new(
                    format!("{id}.{role}"),
                    burn_dtype(spec.dtype),
                    spec.shape.clone(),
                    Some(id),
                    Bytes::from_bytes_vec(bytes),
                ));
            }
        }
        let record = out.map(|out| out.into_record());
        record
            .transpose()
            .map_err(|source| Error::OptimizerRecord { rank, source })
    }

    /// Goes on from a record of Burn's own optimizer, or of [`to_record`](Self::to_record): this rank keeps its part.
    /// Every rank gives the same record. A collective; nothing has changed if it fails.
    ///
    /// Parameters are found by the paths in the record, else by their ids, so the module may be another value
    /// than the one that was recorded. Those that the record has nothing of begin anew.
    ///
    /// # Errors
    ///
    /// On all ranks: [`Error::OptimizerRecord`], [`Error::UnknownState`] for a parameter that the module has not,
    /// [`Error::StateShape`], [`Error::OtherOptimizer`], [`Error::OptimizerStateType`]; [`Error::OtherRecord`] if ranks
    /// give different ones. Otherwise failures of the communicator.
    ///
    /// # Examples
    ///
    /// ```
    /// # use burn::nn::LinearConfig;
    /// # use burn::optim::{AdamConfig, GradientsParams, OptimizerRecord};
    /// # use burn::prelude::*;
    /// # use burn_shard::{Oss, ProcessGroup, ShardedModule, ShardingStrategy};
    /// # let device = Device::flex().autodiff();
    /// # let plain = LinearConfig::new(4, 1).init(&device);
    /// # let mut adam = AdamConfig::new().init();
    /// # let loss = plain.forward(Tensor::<2>::ones([2, 4], &device)).mean();
    /// # let gradients = GradientsParams::from_grads(loss.backward(), &plain);
    /// # let plain = adam.step(0.1, plain, gradients);
    /// // `plain` and `adam` have been trained on one device.
    /// let record = adam.to_record().into_bytes().unwrap().to_vec();
    /// ProcessGroup::spawn(2, |group| {
    ///     let model = ShardedModule::new(plain.clone(), ShardingStrategy::Full, &group).unwrap();
    ///     let mut optimizer = Oss::new(AdamConfig::new(), &group).unwrap();
    ///     let bytes = burn::tensor::Bytes::from_bytes_vec(record.clone());
    ///     let record = OptimizerRecord::from_bytes(bytes).unwrap();
    ///     optimizer.load_record(&model, record).unwrap();
    /// }).unwrap();
    /// ```
    pub fn load_record<M: Module>(
        &mut self,
        model: &ShardedModule<M>,
        record: OptimizerRecord,
    ) -> Result<(), Error> {
        let rank = self.group.rank();
        let read = self.read_record(model, record);
        let (restored, hash) = agreed(&self.group, read)?;
        let hashes = self.group.all_gather_bytes(&hash.to_le_bytes())?;
        if let Some(other) = hashes.iter().position(|other| *other != hashes[rank]) {
            return Err(Error::OtherRecord { rank, other });
        }
        self.adopt(restored);
        Ok(())
    }

    /// This rank's part of a record, and a hash of all of it.
    fn read_record<M: Module>(
        &self,
        model: &ShardedModule<M>,
        record: OptimizerRecord,
    ) -> Result<(RestoredState, u64), Error> {
        let engine = model.engine();
        let rank = engine.rank();
        let plan = engine.plan();
        let ids = ids(engine, model.inner());
        let failed = |source| Error::OptimizerRecord { rank, source };
        let reader = record
            .into_bytes()
            .and_then(|bytes| Ok(Reader::from_bytes(bytes)?));
        let reader = reader.map_err(failed)?;

        let by_id: HashMap<String, usize> = ids
            .iter()
            .enumerate()
            .map(|(index, id)| (id.val().to_string(), index))
            .collect();
        let paths = reader.metadata().clone();
        // The parameter of `id.name`, and the name.
        let place = |key: &str| {
            let (id, name) = key.split_once('.').unwrap_or((key, ""));
            let path = paths.get(id);
            let index = match path {
                Some(path) => plan.find(path),
                None => by_id.get(id).copied(),
            };
            let parameter = || path.map_or(id, String::as_str).to_owned();
            let index = index.ok_or_else(|| Error::UnknownState {
                rank,
                parameter: parameter(),
            })?;
            Ok::<_, Error>((index, name.to_owned()))
        };
        let mut hash = HASH_START;
        let mut states: BTreeMap<usize, Recorded> = BTreeMap::new();
        for (key, value) in reader.scalars() {
            let (index, name) = place(key)?;
            let state = states.entry(index).or_default();
            if name != RANK_KEY {
                hash = hash_bytes(hash, format!("{index}.{name} {value:?}").as_bytes());
                state.scalars.insert(name, *value);
            }
        }
        for tensor in reader.into_tensors().map_err(|e| failed(e.into()))? {
            let (key, dtype, shape, _, bytes) =
                tensor.into_parts().map_err(|e| failed(e.into()))?;
            let (index, role) = place(&key)?;
            let spec = &plan.params[index];
            let found = (dtype, shape.to_vec());
            let expected = (burn_dtype(spec.dtype), spec.shape.clone());
            if found != expected {
                return Err(Error::StateShape {
                    rank,
                    path: spec.path.clone(),
                    role,
                    found,
                    expected,
                });
            }
            let state = states.entry(index).or_default();
            state.tensors.insert(role, bytes.to_vec());
        }

        let mut loaded = LoadedState::default();
        loaded.params.resize_with(plan.params.len(), || None);
        for (index, Recorded { scalars, tensors }) in states {
            let size = plan.params[index].dtype.size_bytes();
            let Range { start, end } = engine.stepped(index);
            let mut own = Vec::new();
            for (role, bytes) in tensors {
                hash = hash_bytes(hash, format!("{index}.{role}").as_bytes());
                hash = hash_bytes(hash, &bytes);
                own.push((role, bytes[start * size..end * size].to_vec()));
            }
            let time = scalars.get(TIME).and_then(|&time| u64::try_from(time).ok());
            let roles = own.iter().map(|(role, _)| role.clone()).collect();
            let time = time
                .and_then(|time| usize::try_from(time).ok())
                .unwrap_or(1);
            let scalars = ParamScalars::new(time, roles, scalars);
            loaded.params[index] = Some((scalars, own));
        }
        let restored = self.restored(engine, &ids, loaded)?;
        Ok((restored, hash))
    }

    /// The elements that this rank owns of each tensor of a parameter's state: the tensor's name and type, and bytes.
    pub(crate) fn own_state(&self, engine: &Engine, index: usize) -> Vec<(String, DType, Vec<u8>)> {
        let owned = engine.owned(index);
        let own = |(role, data): (String, TensorData)| {
            let size = data.dtype().size();
            let part = if data.num_elements() == owned.len() {
                0..owned.len()
            } else {
                // Every rank has all of it.
                owned.clone()
            };
            let bytes = data.bytes()[part.start * size..part.end * size].to_vec();
            (role, data.dtype(), bytes)
        };
        let state = self.state_of(&engine.plan().params[index].path);
        state.tensors.into_iter().map(own).collect()
    }
}

/// What a record has of one parameter, by name: whole tensors, and the rest.
#[derive(Default)]
struct Recorded {
    scalars: BTreeMap<String, Scalar>,
    tensors: BTreeMap<String, Vec<u8>>,
}

/// What a record consists of.
#[derive(Default)]
struct Collected {
    tensors: Vec<Tensor>,
    scalars: Vec<(String, Scalar)>,
    paths: Vec<(String, String)>,
}

impl Collected {
    fn into_record(self) -> Result<OptimizerRecord, RecordError> {
        let mut writer = Writer::new(self.tensors);
        for (key, value) in self.scalars {
            writer = writer.with_scalar(&key, value);
        }
        for (id, path) in &self.paths {
            writer = writer.with_metadata(id, path);
        }
        OptimizerRecord::from_bytes(writer.into_bytes()?)
    }
}
