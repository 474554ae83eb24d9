//! The step in host memory: in place, in one pass where there is a kernel.

use std::sync::Arc;

use burn::tensor::Bytes;
use burn_shard_comm::DType;
use burn_shard_kernels::{
    AdamSlices, SgdSlices, StepControl, adam_step_with, adamw_step_with, sgd_step_with,
};

use super::config::{Fused, Method};
use super::state::{Moments, ParamState, State, moment_bytes};
use super::step::{GroupStep, Job, Owned};
use crate::Error;
use crate::storage::flat::{Flat, FlatTensor};
use crate::storage::host::{HostTensor, pieces_mut};
use crate::storage::ledger::MemoryKind;

/// Steps the members `stepped` of a group, and gathers them.
pub(super) fn run(
    step: &GroupStep<'_>,
    state: &mut State,
    flat: &mut Arc<Bytes>,
    jobs: &mut [Option<Job>],
    stepped: &[usize],
) -> Result<(), Error> {
    let engine = step.engine;
    let group = &engine.plan().groups[step.group];
    if Arc::get_mut(flat).is_none() {
        // A clone of the module shares the buffer and must keep its values.
        let len = group.stored_len() * group.dtype.size_bytes();
        let mut copy = engine.context.pool.zeros(MemoryKind::Parameters, len);
        copy.bytes_mut().copy_from_slice(&flat[..len]);
        *flat = copy.freeze();
    }
    let bytes: &mut [u8] = Arc::get_mut(flat).expect("the buffer should be ours alone");
    for &index in stepped {
        let job = jobs[index]
            .take()
            .expect("only parameters with a gradient are stepped");
        let (method, lr) = (step.method(index, &job), job.lr);
        let owned = Owned::of(engine, index);
        let fused = method.fused.filter(|_| group.dtype == DType::F32);
        // Kernels multiply as they read, unless something comes between.
        let by_kernel = fused.is_some() && method.clip_value.is_none();
        let gradient = if by_kernel {
            job.gradient
        } else {
            step.scaled(job.gradient)
        };
        let gradient = gradient.into_host();
        let param_state = &mut state.params[index];
        let moments = &mut state.groups[step.group];
        let one = OneStep {
            owned,
            gradient,
            lr,
            control: StepControl {
                clip: by_kernel.then_some(step.factor),
                ..StepControl::default()
            },
        };
        match fused {
            Some(fused) => one.fused(step, method, fused, bytes, param_state, moments)?,
            None => one.stock(method, bytes, param_state),
        }
    }
    if group.gathers_after_step() {
        // The others read from a copy: the buffer itself is being written.
        let size = group.dtype.size_bytes();
        let len = group.layout.shard_len * size;
        let mut shards = engine.context.pool.take(MemoryKind::Staging, len);
        for &index in stepped {
            let member = &group.layout.members[engine.plan().place[index].member];
            let from = (member.full_offset + engine.shard_rank() * member.shard_numel) * size;
            let to = member.shard_offset * size;
            let len = member.shard_numel * size;
            shards.bytes_mut()[to..to + len].copy_from_slice(&bytes[from..from + len]);
        }
        let input = step.gathered_from(&Flat::Host(shards.freeze()), stepped)?;
        let ranges = step.gathered_to(stepped);
        let numels: Vec<usize> = ranges.iter().map(|&(_, numel)| numel).collect();
        let communicator = engine.context.mesh.shard.communicator();
        let work = communicator.all_gather(input.segments(), &numels)?;
        work.finish(&mut pieces_mut(bytes, group.dtype, ranges.into_iter()))?;
    }
    Ok(())
}

/// The step of one parameter.
struct OneStep {
    owned: Owned,
    gradient: HostTensor,
    lr: f64,
    control: StepControl,
}

impl OneStep {
    fn fused(
        self,
        step: &GroupStep<'_>,
        method: &Method,
        fused: Fused,
        bytes: &mut [u8],
        state: &mut ParamState,
        moments: &mut Moments,
    ) -> Result<(), Error> {
        let Self {
            owned,
            mut gradient,
            lr,
            control,
        } = self;
        if let Some(threshold) = method.clip_value {
            for value in bytemuck::cast_slice_mut::<u8, f32>(gradient.as_bytes_mut()) {
                *value = clip(*value, threshold);
            }
        }
        let param = &mut bytemuck::cast_slice_mut::<u8, f32>(bytes)[owned.stored.clone()];
        let gradient: &[f32] = bytemuck::cast_slice(gradient.as_bytes());
        let gradient = &gradient[owned.gradient.clone()];
        let engine = step.engine;
        let moment_bytes = moment_bytes(engine, step.group);
        let time = state.time + 1;
        match fused {
            Fused::Adam(hyper) | Fused::AdamW(hyper) => {
                let (first, second) = moments.both(engine, moment_bytes);
                let first = &mut bytemuck::cast_slice_mut(first.bytes_mut())[owned.moments.clone()];
                let second =
                    &mut bytemuck::cast_slice_mut(second.bytes_mut())[owned.moments.clone()];
                let step = if matches!(fused, Fused::Adam(_)) {
                    adam_step_with
                } else {
                    adamw_step_with
                };
                let slices = AdamSlices {
                    param,
                    grad: gradient,
                    moment_1: first,
                    moment_2: second,
                    copy: None,
                };
                step(slices, &control, time, lr, &hyper)?;
            }
            Fused::Sgd(hyper) => {
                let velocity = hyper.momentum.map(|_| {
                    let first = moments.first(engine, moment_bytes).bytes_mut();
                    &mut bytemuck::cast_slice_mut(first)[owned.moments.clone()]
                });
                let slices = SgdSlices {
                    param,
                    grad: gradient,
                    velocity,
                    copy: None,
                };
                sgd_step_with(slices, &control, time, lr, &hyper)?;
            }
        }
        state.time = time;
        state.fused = Some(fused);
        Ok(())
    }

    /// Burn's own step, on the one-dimensional shard.
    fn stock(self, method: &Method, bytes: &mut [u8], state: &mut ParamState) {
        let Self {
            owned,
            gradient,
            lr,
            ..
        } = self;
        state.time += 1;
        state.fused = None;
        if owned.stored.is_empty() {
            return;
        }
        let dtype = gradient.dtype();
        let size = dtype.size_bytes();
        let range = owned.stored.start * size..owned.stored.end * size;
        let param = HostTensor::copied(&bytes[range.clone()], dtype);
        let gradient = &gradient.as_bytes()[owned.gradient.start * size..owned.gradient.end * size];
        let gradient = HostTensor::copied(gradient, dtype);
        let (param, gradient) = (FlatTensor::Host(param), FlatTensor::Host(gradient));
        let param = method.step_stock(lr, param, gradient, state);
        bytes[range].copy_from_slice(param.into_host().as_bytes());
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
