//! One optimizer step: this rank's elements in place, then the all-gather.

use std::ops::Range;
use std::sync::Arc;

use burn::grad_clipping::GradientClipping;
use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::{Module, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{Bytes, Tensor};
use burn_shard_comm::DType;
use burn_shard_kernels::{adam_step, adamw_step, sgd_step};

use super::StepError;
use super::config::{Fused, Method};
use super::state::{Moments, ParamState, State, elements, moment_bytes};
use crate::bind::{Storage, detach, from_host, stored_len, to_host};
use crate::engine::Engine;
use crate::host::{HostTensor, TensorSegments, pieces_mut};
use crate::memory::MemoryKind;
use crate::{Error, ShardedModule};

pub(super) fn step<M: Module>(
    methods: &[Method],
    state: &mut State,
    lr: &ModuleLearningRate,
    module: ShardedModule<M>,
    mut gradients: GradientsParams,
) -> Result<ShardedModule<M>, StepError<M>> {
    let (engine, inner) = module.into_parts();
    engine.reshard();
    let _instance = engine.new_instance();
    let (skeleton, mut detached) = detach(&engine, inner, &mut gradients);
    let mut jobs = detached
        .iter_mut()
        .map(|param| {
            param.gradient.take().map(|gradient| Job {
                id: param.id,
                gradient,
            })
        })
        .collect::<Vec<_>>();
    drop(gradients);
    let mut storage = Storage::pack(&engine, detached);
    let mut result = check(&engine, &jobs);
    for group in 0..engine.plan.groups.len() {
        if result.is_ok() {
            let flat = &mut storage.flats[group];
            let mut step = GroupStep {
                engine: &engine,
                methods,
                lr,
                group,
            };
            result = step.run(state, flat, &mut jobs);
        }
    }
    let module = ShardedModule::from_parts(Arc::clone(&engine), storage.bind(&engine, skeleton));
    match result {
        Ok(()) => Ok(module),
        Err(error) => Err(StepError::new(module, error)),
    }
}

/// A parameter to step.
struct Job {
    id: ParamId,
    gradient: HostTensor,
}

/// What this rank steps of a parameter.
struct Owned {
    /// Elements of the group's flat buffer of stored tensors.
    stored: Range<usize>,
    /// Elements of the gradient as it came out of backward.
    gradient: Range<usize>,
    /// Elements of the group's moments.
    moments: Range<usize>,
}

impl Owned {
    fn of(engine: &Engine, index: usize) -> Self {
        let place = engine.plan.place[index];
        let group = &engine.plan.groups[place.group];
        let member = &group.layout.members[place.member];
        let strategy = group.strategy;
        let owned = if strategy.shards_optimizer() {
            member.owned(engine.rank())
        } else {
            0..member.numel
        };
        let len = owned.len();
        let start = if strategy.shards_parameters() {
            member.shard_offset
        } else {
            member.full_offset + owned.start
        };
        let gradient = if strategy.shards_gradients() {
            0..len
        } else {
            owned
        };
        Self {
            stored: start..start + len,
            gradient,
            moments: elements(engine, index),
        }
    }
}

/// Refuses gradients that are not those of this module's backward.
fn check(engine: &Engine, jobs: &[Option<Job>]) -> Result<(), Error> {
    for (index, job) in jobs.iter().enumerate() {
        let Some(job) = job else { continue };
        let spec = &engine.plan.params[index];
        let shape = spec.shard_shape(engine.plan.world_size);
        let expected = if engine.plan.strategy_of(index).shards_gradients() {
            shape.iter().product()
        } else {
            spec.numel()
        };
        if job.gradient.numel() != expected || job.gradient.dtype() != spec.dtype {
            return Err(Error::GradientLength {
                rank: engine.rank(),
                path: spec.path.clone(),
                expected,
                found: job.gradient.numel(),
                strategy: engine.strategy.to_string(),
            });
        }
    }
    Ok(())
}

struct GroupStep<'a> {
    engine: &'a Arc<Engine>,
    methods: &'a [Method],
    lr: &'a ModuleLearningRate,
    group: usize,
}

impl GroupStep<'_> {
    /// Steps the members that have a gradient, and gathers them.
    fn run(
        &mut self,
        state: &mut State,
        flat: &mut Arc<Bytes>,
        jobs: &mut [Option<Job>],
    ) -> Result<(), Error> {
        let group = &self.engine.plan.groups[self.group];
        let stepped: Vec<usize> = group
            .members
            .iter()
            .copied()
            .filter(|&index| jobs[index].is_some())
            .collect();
        if stepped.is_empty() {
            return Ok(());
        }
        if Arc::get_mut(flat).is_none() {
            // A clone of the module shares the buffer and must keep its values.
            let len = stored_len(group) * group.dtype.size_bytes();
            let mut copy = self.engine.pool.zeros(MemoryKind::Parameters, len);
            copy.bytes_mut().copy_from_slice(&flat[..len]);
            *flat = copy.freeze();
        }
        let bytes: &mut [u8] = Arc::get_mut(flat).expect("the buffer should be ours alone");
        for &index in &stepped {
            let job = jobs[index]
                .take()
                .expect("only parameters with a gradient are stepped");
            let moments = &mut state.groups[self.group];
            self.step_param(index, job, bytes, &mut state.params[index], moments)?;
        }
        if group.strategy.gathers_after_step() {
            self.all_gather(bytes, &stepped)?;
        }
        Ok(())
    }

    fn step_param(
        &self,
        index: usize,
        job: Job,
        bytes: &mut [u8],
        state: &mut ParamState,
        moments: &mut Moments,
    ) -> Result<(), Error> {
        let spec = &self.engine.plan.params[index];
        let path = Some(spec.path.as_str());
        let lr = self.lr.lr_from_param(job.id, path);
        let method = self
            .methods
            .iter()
            .rfind(|method| method.group.matches(&job.id, path));
        let method = method.expect("the first method should match every parameter");
        let owned = Owned::of(self.engine, index);
        match method.fused {
            Some(fused) if spec.dtype == DType::F32 => self.step_fused(
                fused,
                method.clip_value,
                lr,
                &owned,
                job,
                bytes,
                state,
                moments,
            ),
            _ => {
                self.step_stock(method, lr, &owned, &job, bytes, state);
                Ok(())
            }
        }
    }

    #[allow(
        clippy::too_many_arguments,
        reason = "the parts of one parameter's step"
    )]
    fn step_fused(
        &self,
        fused: Fused,
        clip_value: Option<f32>,
        lr: f64,
        owned: &Owned,
        mut job: Job,
        bytes: &mut [u8],
        state: &mut ParamState,
        moments: &mut Moments,
    ) -> Result<(), Error> {
        if let Some(threshold) = clip_value {
            for value in bytemuck::cast_slice_mut::<u8, f32>(job.gradient.as_bytes_mut()) {
                *value = clip(*value, threshold);
            }
        }
        let param = &mut bytemuck::cast_slice_mut::<u8, f32>(bytes)[owned.stored.clone()];
        let gradient: &[f32] = bytemuck::cast_slice(job.gradient.as_bytes());
        let gradient = &gradient[owned.gradient.clone()];
        let moment_bytes = moment_bytes(self.engine, self.group);
        let time = state.time + 1;
        match fused {
            Fused::Adam(hyper) | Fused::AdamW(hyper) => {
                let (first, second) = moments.both(self.engine, moment_bytes);
                let first = &mut bytemuck::cast_slice_mut(first.bytes_mut())[owned.moments.clone()];
                let second =
                    &mut bytemuck::cast_slice_mut(second.bytes_mut())[owned.moments.clone()];
                let step = if matches!(fused, Fused::Adam(_)) {
                    adam_step
                } else {
                    adamw_step
                };
                step(param, gradient, first, second, time, lr, &hyper)?;
            }
            Fused::Sgd(hyper) => {
                let velocity = hyper.momentum.map(|_| {
                    let first = moments.first(self.engine, moment_bytes).bytes_mut();
                    &mut bytemuck::cast_slice_mut(first)[owned.moments.clone()]
                });
                sgd_step(param, gradient, velocity, time, lr, &hyper)?;
            }
        }
        state.time = time;
        state.fused = Some(fused);
        Ok(())
    }

    /// Burn's own step, on the one-dimensional shard.
    fn step_stock(
        &self,
        method: &Method,
        lr: f64,
        owned: &Owned,
        job: &Job,
        bytes: &mut [u8],
        state: &mut ParamState,
    ) {
        state.time += 1;
        state.fused = None;
        if owned.stored.is_empty() {
            return;
        }
        let dtype = job.gradient.dtype();
        let size = dtype.size_bytes();
        let range = owned.stored.start * size..owned.stored.end * size;
        let param = HostTensor::copied(&bytes[range.clone()], dtype);
        let gradient = &job.gradient.as_bytes();
        let gradient = &gradient[owned.gradient.start * size..owned.gradient.end * size];
        let gradient = from_host::<1>(HostTensor::copied(gradient, dtype));
        let gradient = match method.clip_value {
            Some(threshold) => GradientClipping::Value(threshold).clip_gradient(gradient),
            None => gradient,
        };
        let param = from_host::<1>(param).into_bridge();
        let stock = state.stock.take().map(|(_, stock)| stock);
        let (param, stock) = method
            .stock
            .step_dyn(1, lr, param, gradient.into_bridge(), stock);
        state.stock = stock.map(|stock| (Arc::clone(&method.stock), stock));
        bytes[range].copy_from_slice(to_host(Tensor::<1>::from_bridge(param)).as_bytes());
    }

    /// Every rank ends with all ranks' stepped elements of `members`.
    fn all_gather(&self, bytes: &mut [u8], members: &[usize]) -> Result<(), Error> {
        let engine = self.engine;
        let group = &engine.plan.groups[self.group];
        let size = group.dtype.size_bytes();
        let layout = |index: usize| &group.layout.members[engine.plan.place[index].member];
        // The others read from a copy: the buffer itself is being written.
        let len = group.layout.shard_len * size;
        let mut shards = engine.pool.take(MemoryKind::Staging, len);
        for &index in members {
            let member = layout(index);
            let from = (member.full_offset + engine.rank() * member.shard_numel) * size;
            let to = member.shard_offset * size;
            let len = member.shard_numel * size;
            shards.bytes_mut()[to..to + len].copy_from_slice(&bytes[from..from + len]);
        }
        let shards = shards.freeze();
        let tensors = members
            .iter()
            .map(|&index| {
                let member = layout(index);
                let (offset, shape) = (member.shard_offset, [member.shard_numel]);
                let shard = HostTensor::view(Arc::clone(&shards), offset, &shape, group.dtype);
                (member.shard_numel, Some(shard))
            })
            .collect();
        let input = Arc::new(TensorSegments {
            dtype: group.dtype,
            tensors,
            label: engine.plan.label(self.group),
        });
        let ranges = members
            .iter()
            .map(|&index| (layout(index).full_offset, layout(index).numel));
        let mut output = pieces_mut(bytes, group.dtype, ranges);
        engine.group.communicator().all_gather(input, &mut output)?;
        Ok(())
    }
}

/// Burn's clipping by value: a NaN stays one.
fn clip(value: f32, threshold: f32) -> f32 {
    if value > threshold {
        threshold
    } else if value < -threshold {
        -threshold
    } else {
        value
    }
}
