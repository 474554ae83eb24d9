//! Optimizer state as checkpoints have it: tensors by parameter and role, and scalars beside them.

use std::cell::LazyCell;
use std::collections::BTreeMap;
use std::sync::Arc;

use burn::module::ParamId;
use burn::optim::StateSource;
use burn::tensor::{Bytes, Device, TensorData};
use burn_pack::Scalar;
use burn_shard_checkpoint::Renames;
use burn_shard_comm::DType;
use serde::{Deserialize, Serialize};

use super::Oss;
use super::config::Method;
use super::state::{ParamState, State, elements, moment_bytes, roles};
use crate::Error;
use crate::runtime::engine::Engine;
use crate::storage::flat::from_flat;
use crate::storage::host::burn_dtype;
use crate::storage::ledger::MemoryKind;
use crate::storage::pool::Buffer;

/// What an optimizer's state is beside its tensors, by the paths of parameters that have been stepped.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct OptimizerScalars(BTreeMap<String, ParamScalars>);

impl OptimizerScalars {
    /// What belongs to the parameter that was saved at `path`.
    pub(super) fn get(&self, path: &str) -> Option<&ParamScalars> {
        self.0.get(path)
    }

    /// Takes what `other` knows of parameters of which this has nothing: a rank that owns nothing of a parameter
    /// knows no names.
    pub(super) fn merge(&mut self, other: Self) {
        for (path, scalars) in other.0 {
            let own = self.0.entry(path).or_insert_with(|| scalars.clone());
            if own.roles.is_empty() {
                *own = scalars;
            }
        }
    }
}

/// What the state of one parameter is beside its tensors.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct ParamScalars {
    /// Steps made.
    time: usize,
    /// Names of the tensors.
    pub(crate) roles: Vec<String>,
    scalars: BTreeMap<String, ScalarValue>,
}

impl ParamScalars {
    pub(super) fn new(time: usize, roles: Vec<String>, scalars: BTreeMap<String, Scalar>) -> Self {
        let scalars = scalars.into_iter().map(|(name, s)| (name, s.into()));
        Self {
            time,
            roles,
            scalars: scalars.collect(),
        }
    }

    /// By Burn's names.
    pub(super) fn scalars(&self) -> impl Iterator<Item = (&str, Scalar)> {
        self.scalars
            .iter()
            .map(|(name, &value)| (name.as_str(), value.into()))
    }
}

/// A [`Scalar`] that serde knows.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum ScalarValue {
    Int(i64),
    UInt(u64),
    Float(f64),
    Bool(bool),
}

/// By parameter: scalars, and tensors of this rank's part by their names.
#[derive(Debug, Default)]
pub(crate) struct LoadedState {
    pub(crate) params: Vec<Option<(ParamScalars, Vec<LoadedTensor>)>>,
}

/// A tensor's name, and this rank's elements of it in the parameter's type.
pub(crate) type LoadedTensor = (String, Vec<u8>);

/// State that an optimizer can go on from.
#[derive(Debug)]
pub(crate) struct RestoredState(State);

impl OptimizerScalars {
    /// What belongs to the parameter that a module has at `path`.
    pub(crate) fn of(&self, renames: &Renames, path: &str) -> Option<&ParamScalars> {
        self.0
            .iter()
            .find(|(saved, _)| renames.apply(saved) == path)
            .map(|(_, scalars)| scalars)
    }

    /// Names of the tensors that were saved for the parameter that a module has at `path`.
    pub(crate) fn roles(&self, renames: &Renames, path: &str) -> impl Iterator<Item = String> {
        let scalars = self.of(renames, path);
        scalars
            .map(|scalars| scalars.roles.clone())
            .unwrap_or_default()
            .into_iter()
    }
}

impl Oss {
    /// The state beside its tensors.
    pub(crate) fn scalars(&self) -> OptimizerScalars {
        let Some((state, engine)) = self.state.as_ref().and_then(|s| s.engine().map(|e| (s, e)))
        else {
            return OptimizerScalars::default();
        };
        let stepped = engine.plan().params.iter().zip(&state.params);
        let stepped = stepped.filter(|(_, param)| param.time > 0);
        let scalars = stepped.map(|(spec, param)| {
            let (roles, sink) = state.roles(&spec.path);
            let scalars = ParamScalars::new(param.time, roles, sink.scalars.into_iter().collect());
            (spec.path.clone(), scalars)
        });
        OptimizerScalars(scalars.collect())
    }

    /// The state that `loaded` is for this optimizer.
    ///
    /// # Errors
    ///
    /// [`Error::OtherOptimizer`], [`Error::OptimizerStateType`].
    pub(crate) fn restored(
        &self,
        engine: &Arc<Engine>,
        ids: &[ParamId],
        loaded: LoadedState,
    ) -> Result<RestoredState, Error> {
        let mut state = State::new(engine);
        let plan = engine.plan();
        let device = LazyCell::new(|| device_of(engine));
        // By group and moment.
        let mut moments: Vec<[Option<Buffer>; 2]> = Vec::new();
        moments.resize_with(plan.groups.len(), || [None, None]);
        for (index, (param, id)) in loaded.params.into_iter().zip(ids).enumerate() {
            let Some((scalars, tensors)) = param else {
                continue;
            };
            let path = plan.params[index].path.as_str();
            let method = super::step::method_of(&self.methods, *id, path);
            let group = plan.place[index].group;
            let other = || Error::OtherOptimizer {
                rank: engine.rank(),
                path: path.to_owned(),
                found: scalars.roles.clone(),
            };
            let fused = method
                .fused
                .filter(|_| plan.groups[group].dtype == DType::F32);
            state.params[index].time = scalars.time;
            let Some(fused) = fused else {
                let values = tensors.into_iter();
                let state = &mut state.params[index];
                let dtype = plan.groups[group].dtype;
                stock(&device, method, &scalars, (values, dtype), state).ok_or_else(other)?;
                // Burn made its tensors in the default type of the device: in another, steps would go on with
                // other digits.
                let (saved, restored) = (burn_dtype(dtype), device.settings().float_dtype.into());
                if state.stock.is_some() && !scalars.roles.is_empty() && saved != restored {
                    return Err(Error::OptimizerStateType {
                        rank: engine.rank(),
                        path: path.to_owned(),
                        saved,
                        restored,
                    });
                }
                continue;
            };
            if scalars.roles != roles(fused.moments()) {
                return Err(other());
            }
            state.params[index].fused = Some(fused);
            for (moment, (_, bytes)) in moments[group].iter_mut().zip(tensors) {
                let buffer = moment.get_or_insert_with(|| {
                    let bytes = moment_bytes(engine, group);
                    engine.context.pool.zeros(MemoryKind::OptimizerState, bytes)
                });
                let size = plan.groups[group].dtype.size_bytes();
                let range = elements(engine, index);
                buffer.bytes_mut()[range.start * size..range.end * size].copy_from_slice(&bytes);
            }
        }
        for (group, [first, second]) in state.groups.iter_mut().zip(moments) {
            group.set(engine, first, second);
        }
        Ok(RestoredState(state))
    }

    /// Goes on from what was restored.
    pub(crate) fn adopt(&mut self, restored: RestoredState) {
        self.state = Some(restored.0);
    }
}

/// Gives a stock optimizer its state back; `None` if it is another optimizer's.
fn stock(
    device: &Device,
    method: &Method,
    scalars: &ParamScalars,
    (tensors, dtype): (impl Iterator<Item = LoadedTensor>, DType),
    state: &mut ParamState,
) -> Option<()> {
    let named = scalars.scalars();
    let mut source = StateSource::new(named.map(|(name, s)| (name.to_owned(), s)).collect());
    let mut empty = true;
    for (name, bytes) in tensors {
        empty &= bytes.is_empty();
        let shape = [bytes.len() / dtype.size_bytes()];
        let bytes = Bytes::from_bytes_vec(bytes);
        source.insert_tensor(
            name,
            TensorData::from_bytes(bytes, shape, burn_dtype(dtype)),
        );
    }
    if empty && !scalars.roles.is_empty() {
        // This rank owns nothing of the parameter.
        return Some(());
    }
    let restored = method.stock.state_unflatten(1, "", &mut source, device)?;
    state.stock = Some((Arc::clone(&method.stock), restored));
    Some(())
}

/// Where the module's tensors are.
fn device_of(engine: &Engine) -> Device {
    let one = engine.context.zeros(MemoryKind::Staging, &[1], DType::F32);
    let one = engine.context.place_tensor(MemoryKind::Staging, one);
    from_flat::<1>(one).device()
}

impl From<Scalar> for ScalarValue {
    fn from(scalar: Scalar) -> Self {
        match scalar {
            Scalar::Int(value) => Self::Int(value),
            Scalar::UInt(value) => Self::UInt(value),
            Scalar::Float(value) => Self::Float(value),
            Scalar::Bool(value) => Self::Bool(value),
        }
    }
}

impl From<ScalarValue> for Scalar {
    fn from(value: ScalarValue) -> Self {
        match value {
            ScalarValue::Int(value) => Self::Int(value),
            ScalarValue::UInt(value) => Self::UInt(value),
            ScalarValue::Float(value) => Self::Float(value),
            ScalarValue::Bool(value) => Self::Bool(value),
        }
    }
}
