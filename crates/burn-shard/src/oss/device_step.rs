//! The step on a device: in buffers laid out alike, one launch per run of parameters that share
//! everything but their place.
//!
//! Parameters, gradients and moments of a group are all laid out as its shards (or, where state is not
//! sharded, as its full parameters), so that one kernel walks all of them by one index. Under
//! [`Full`](crate::ShardingStrategy::Full) the module's own buffer is stepped in place; where
//! parameters are stored whole but stepped in part, this rank's part is copied out first.

use std::ops::Range;

use burn::grad_clipping::GradientClipping;
use burn_shard_comm::DType;
use burn_shard_kernels::cube::{
    AdamBuffers, SgdBuffers, StepControl, adam_step, adamw_step, sgd_step,
};
use burn_shard_kernels::merge_ranges;

use super::config::{Fused, Method};
use super::state::{ParamState, State, moment_bytes};
use super::step::{GroupStep, Job, Owned};
use crate::Error;
use crate::plan::layout::ALIGN_BYTES;
use crate::runtime::collective_io::OutputBuffer;
use crate::runtime::engine::Engine;
use crate::storage::device::{DeviceFlat, DeviceTensor};
use crate::storage::flat::{Flat, FlatTensor, from_flat, to_flat};
use crate::storage::ledger::MemoryKind;

/// Steps the members `stepped` of a group, and gathers them.
pub(super) fn run(
    step: &GroupStep<'_>,
    state: &mut State,
    flat: &mut DeviceFlat,
    jobs: &mut [Option<Job>],
    stepped: &[usize],
) -> Result<(), Error> {
    let engine = step.engine;
    let group = &engine.plan().groups[step.group];
    let gathers = group.gathers_after_step();
    let params = if gathers {
        own_shards(step, flat, stepped)?
    } else {
        make_unique(engine, flat);
        flat.clone()
    };
    let mut runs = Vec::new();
    let mut gradients = Vec::new();
    for &index in stepped {
        let job = jobs[index]
            .take()
            .expect("only parameters with a gradient are stepped");
        let (method, lr) = (step.method(index, &job), job.lr);
        let owned = Owned::of(engine, index);
        let param_state = &mut state.params[index];
        match method.fused {
            Some(fused) if group.dtype == DType::F32 => {
                let gradient = step.scaled(job.gradient);
                let gradient = clipped(gradient, method).part(owned.gradient);
                gradients.push((owned.moments.start, gradient));
                param_state.time += 1;
                param_state.fused = Some(fused);
                runs.push(Run {
                    elements: vec![owned.moments],
                    fused,
                    lr,
                    time: param_state.time,
                });
            }
            _ => {
                let gradient = step.scaled(job.gradient).into_device().part(owned.gradient);
                stock(method, lr, &params, owned.moments, gradient, param_state)?;
            }
        }
    }
    if !runs.is_empty() {
        // Padding is stepped with its neighbours, which leaves zeros as they are.
        let grads = params.accelerator().zeros(params.len_bytes());
        grads.pack(group.dtype, &gradients)?;
        let align = engine.plan().align_bytes.max(ALIGN_BYTES) / group.dtype.size_bytes();
        for mut run in merged(runs) {
            if run.keeps_zeros() {
                run.elements = merge_ranges(&run.elements, align);
            }
            launch(step, state, &params, &grads, &run)?;
        }
    }
    if gathers {
        gather(step, flat, &Flat::Device(params), stepped)?;
    }
    Ok(())
}

/// A clone of the module shares the buffer and must keep its values.
fn make_unique(engine: &Engine, flat: &mut DeviceFlat) {
    if flat.make_unique() {
        flat.count(&engine.context.ledger, MemoryKind::Parameters);
    }
}

/// Every rank's `flat`, the full buffer, ends with all ranks' elements of `stepped`, of which `shards` are
/// this rank's.
fn gather(
    step: &GroupStep<'_>,
    flat: &mut DeviceFlat,
    shards: &Flat,
    stepped: &[usize],
) -> Result<(), Error> {
    let engine = step.engine;
    let group = &engine.plan().groups[step.group];
    let input = step.gathered_from(shards, stepped)?;
    let mut full = if engine.context.memory.is_reached() {
        // In place: members that were not stepped keep their values.
        make_unique(engine, flat);
        OutputBuffer::Device(flat.clone())
    } else {
        let len = flat.len_bytes();
        let mut full = engine.context.pool.zeros(MemoryKind::Staging, len);
        if stepped.len() < group.members.len() {
            full.bytes_mut().copy_from_slice(&flat.download()[..len]);
        }
        OutputBuffer::Host(full)
    };
    let ranges = step.gathered_to(stepped);
    let numels: Vec<usize> = ranges.iter().map(|&(_, numel)| numel).collect();
    let communicator = engine.context.mesh.shard.communicator();
    let work = communicator.all_gather(input.segments(), &numels)?;
    let mut output = engine
        .context
        .output(group.dtype, vec![(&mut full, ranges)])?;
    work.finish(&mut *output)?;
    drop(output);
    if let Flat::Device(placed) = engine.context.commit(MemoryKind::Parameters, full) {
        *flat = placed;
    }
    Ok(())
}

/// Parameters stepped by one launch.
struct Run {
    elements: Vec<Range<usize>>,
    fused: Fused,
    lr: f64,
    time: usize,
}

impl Run {
    /// Whether a step of zeros leaves zeros.
    fn keeps_zeros(&self) -> bool {
        match self.fused {
            Fused::Adam(hyper) | Fused::AdamW(hyper) => hyper.epsilon != 0.0,
            Fused::Sgd(_) => true,
        }
    }
}

/// One run for all parameters that share kernel, hyper-parameters, learning rate and time.
fn merged(runs: Vec<Run>) -> Vec<Run> {
    let mut merged: Vec<Run> = Vec::new();
    for run in runs {
        let same = |other: &&mut Run| {
            other.fused == run.fused && other.lr == run.lr && other.time == run.time
        };
        match merged.iter_mut().find(same) {
            Some(other) => other.elements.extend(run.elements),
            None => merged.push(run),
        }
    }
    merged
}

fn launch(
    step: &GroupStep<'_>,
    state: &mut State,
    params: &DeviceFlat,
    grads: &DeviceFlat,
    run: &Run,
) -> Result<(), Error> {
    let engine = step.engine;
    let client = params.accelerator().client();
    let bytes = moment_bytes(engine, step.group);
    let moments = &mut state.groups[step.group];
    let (param, grad) = (params.buffer(DType::F32)?, grads.buffer(DType::F32)?);
    let control = StepControl::default();
    match run.fused {
        Fused::Adam(hyper) | Fused::AdamW(hyper) => {
            let first = moments.first_on_device(engine, bytes).buffer(DType::F32)?;
            let second = moments.second_on_device(engine, bytes).buffer(DType::F32)?;
            let buffers = AdamBuffers {
                param: &param,
                grad: &grad,
                moment_1: &first,
                moment_2: &second,
                copy: None,
            };
            let step = if matches!(run.fused, Fused::Adam(_)) {
                adam_step
            } else {
                adamw_step
            };
            let (time, lr) = (run.time, run.lr);
            step(client, &buffers, &control, &run.elements, time, lr, &hyper)?;
        }
        Fused::Sgd(hyper) => {
            let velocity = hyper
                .momentum
                .map(|_| moments.first_on_device(engine, bytes).buffer(DType::F32))
                .transpose()?;
            let buffers = SgdBuffers {
                param: &param,
                grad: &grad,
                velocity: velocity.as_ref(),
                copy: None,
            };
            let (time, lr) = (run.time, run.lr);
            sgd_step(client, &buffers, &control, &run.elements, time, lr, &hyper)?;
        }
    }
    Ok(())
}

/// Burn's own step, on the one-dimensional shard.
fn stock(
    method: &Method,
    lr: f64,
    params: &DeviceFlat,
    elements: Range<usize>,
    gradient: DeviceTensor,
    state: &mut ParamState,
) -> Result<(), Error> {
    state.time += 1;
    state.fused = None;
    if elements.is_empty() {
        return Ok(());
    }
    // A part may begin where Burn's kernels cannot: copied, it is a buffer of its own.
    let (dtype, shape) = (gradient.dtype(), [gradient.numel()]);
    let own = params.accelerator().empty(shape[0] * dtype.size_bytes());
    own.pack(dtype, &[(0, gradient)])?;
    let gradient = FlatTensor::Device(own.view(0, &shape, dtype));
    let param = FlatTensor::Device(params.view(elements.start, &shape, dtype));
    let stepped = method.step_stock(lr, param, gradient, state);
    params.pack(dtype, &[(elements.start, stepped.into_device())])
}

/// The gradient, clipped by value if the method says so.
fn clipped(gradient: FlatTensor, method: &Method) -> DeviceTensor {
    let Some(threshold) = method.clip_value else {
        return gradient.into_device();
    };
    let numel = gradient.numel();
    let flat = gradient.into_device().reshaped(&[numel]);
    let tensor = from_flat::<1>(FlatTensor::Device(flat));
    to_flat(GradientClipping::Value(threshold).clip_gradient(tensor)).into_device()
}

/// A buffer laid out as the group's shards, with this rank's part of each of `members`.
fn own_shards(
    step: &GroupStep<'_>,
    flat: &DeviceFlat,
    members: &[usize],
) -> Result<DeviceFlat, Error> {
    let engine = step.engine;
    let group = &engine.plan().groups[step.group];
    // Padding is stepped too, and has to be zeros.
    let shards = flat
        .accelerator()
        .zeros(group.layout.shard_len * group.dtype.size_bytes());
    let parts: Vec<(usize, DeviceTensor)> = members
        .iter()
        .map(|&index| {
            let owned = Owned::of(engine, index);
            let whole = flat.view(0, &[group.layout.full_len], group.dtype);
            (owned.moments.start, whole.part(owned.stored))
        })
        .collect();
    shards.pack(group.dtype, &parts)?;
    Ok(shards)
}
