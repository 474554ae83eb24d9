//! One optimizer step: this rank's elements in place, then the all-gather.

use std::ops::Range;
use std::sync::Arc;

use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::{Module, ParamId};
use burn::optim::GradientsParams;

use super::StepError;
use super::clip::{Control, Verdict};
use super::config::Method;
use super::host_step;
use super::state::{State, elements};
use crate::module::bind::{Detached, Storage, detach};
use crate::module::sharded_module::ModuleParts;
use crate::plan::layout::{MemberLayout, ParamSpec};
use crate::runtime::collective_io::CollectiveInput;
use crate::runtime::engine::Engine;
use crate::runtime::instance::Instance;
use crate::storage::flat::{Flat, FlatTensor};
use crate::{Error, ShardedModule};

/// How a step is made.
pub(super) struct Step<'a> {
    pub(super) methods: &'a [Method],
    pub(super) lr: &'a ModuleLearningRate,
    pub(super) control: Control,
}

impl Step<'_> {
    pub(super) fn run<M: Module>(
        &self,
        state: &mut State,
        module: ShardedModule<M>,
        mut gradients: GradientsParams,
    ) -> Result<(ShardedModule<M>, Verdict), StepError<M>> {
        let Self {
            methods,
            lr,
            control,
        } = self;
        let ModuleParts {
            inner,
            graph,
            instance,
        } = module.into_parts();
        let engine = &graph.engine;
        graph.close_pass();
        engine.reshard();
        instance.forget_flats();
        // What is mapped now is the value to come; its history is known once its gradients are.
        let (skeleton, mut detached) = detach(engine, inner, &mut gradients);
        let job = |(param, spec): (&mut Detached, &ParamSpec)| {
            param.gradient.take().map(|gradient| Job {
                id: param.id,
                lr: lr.lr_from_param(param.id, Some(&spec.path)),
                gradient,
            })
        };
        let mut jobs: Vec<Option<Job>> = detached
            .iter_mut()
            .zip(&engine.plan().params)
            .map(job)
            .collect();
        drop(gradients);
        let mut storage = Storage::pack(engine, detached);
        let judged = check(engine, &jobs).and_then(|()| control.judge(engine, &jobs));
        let mut history = instance.history.clone();
        let factor = judged.as_ref().ok().and_then(|verdict| verdict.factor);
        if factor.is_none() {
            jobs.fill_with(|| None);
        } else {
            let stepped = jobs.iter().enumerate();
            let stepped = stepped.filter_map(|(index, job)| Some((index, job.as_ref()?.lr)));
            let stepped: Vec<(usize, f64)> = stepped.collect();
            history = history.after_step(&stepped, engine.plan());
        }
        let instance = engine.new_instance(history);
        let result = judged.and_then(|verdict| {
            for (group, flat) in storage.flats.iter_mut().enumerate() {
                let step = GroupStep {
                    engine,
                    instance: &instance,
                    methods,
                    factor: factor.unwrap_or(1.0),
                    group,
                };
                step.run(state, flat, &mut jobs)?;
            }
            Ok(verdict)
        });
        let engine = Arc::clone(engine);
        let inner = storage.bind(&engine, skeleton);
        let module = ShardedModule::from_parts(graph, inner);
        let result = result.and_then(|verdict| engine.start_gathers(&instance).map(|()| verdict));
        match result {
            Ok(verdict) => Ok((module, verdict)),
            Err(error) => Err(StepError::new(module, error)),
        }
    }
}

/// By what a parameter is stepped.
pub(super) fn method_of<'a>(methods: &'a [Method], id: ParamId, path: &str) -> &'a Method {
    let matches = |method: &&Method| method.group.matches(&id, Some(path));
    let method = methods.iter().rfind(matches);
    method.expect("the first method should match every parameter")
}

/// A parameter to step.
pub(super) struct Job {
    id: ParamId,
    pub(super) lr: f64,
    pub(super) gradient: FlatTensor,
}

/// What this rank steps of a parameter.
pub(super) struct Owned {
    /// Elements of the group's flat buffer of stored tensors.
    pub(super) stored: Range<usize>,
    /// Elements of the gradient as it came out of backward.
    pub(super) gradient: Range<usize>,
    /// Elements of the group's moments.
    pub(super) moments: Range<usize>,
}

impl Owned {
    pub(super) fn of(engine: &Engine, index: usize) -> Self {
        let place = engine.plan().place[index];
        let group = &engine.plan().groups[place.group];
        let member = &group.layout.members[place.member];
        let strategy = group.strategy;
        let owned = engine.stepped(index);
        let len = owned.len();
        let start = if group.shards_parameters() {
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
        let spec = &engine.plan().params[index];
        let shape = spec.shard_shape(engine.plan().world_size);
        let expected = if engine.plan().group_of(index).strategy.shards_gradients() {
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
                strategy: engine.context.config.strategy.to_string(),
            });
        }
    }
    Ok(())
}

/// The step of one group of parameters.
pub(super) struct GroupStep<'a> {
    pub(super) engine: &'a Arc<Engine>,
    /// The value that the step makes.
    instance: &'a Instance,
    methods: &'a [Method],
    /// What gradients are multiplied by.
    pub(super) factor: f32,
    pub(super) group: usize,
}

impl GroupStep<'_> {
    /// Steps the members that have a gradient, and gathers them.
    fn run(
        &self,
        state: &mut State,
        flat: &mut Flat,
        jobs: &mut [Option<Job>],
    ) -> Result<(), Error> {
        let group = &self.engine.plan().groups[self.group];
        let stepped: Vec<usize> = group
            .members
            .iter()
            .copied()
            .filter(|&index| jobs[index].is_some())
            .collect();
        if stepped.is_empty() {
            return Ok(());
        }
        match flat {
            Flat::Host(bytes) => host_step::run(self, state, bytes, jobs, &stepped),
            #[cfg(feature = "cubecl")]
            Flat::Device(flat) => super::device_step::run(self, state, flat, jobs, &stepped),
        }
    }

    /// By what a parameter is stepped.
    pub(super) fn method(&self, index: usize, job: &Job) -> &Method {
        let path = self.engine.plan().params[index].path.as_str();
        method_of(self.methods, job.id, path)
    }

    /// The gradient times the factor.
    pub(super) fn scaled(&self, gradient: FlatTensor) -> FlatTensor {
        if self.factor == 1.0 {
            gradient
        } else {
            gradient.scaled(self.factor.into())
        }
    }

    /// What the gather of the stepped `members` reads: this rank's `shards`.
    pub(super) fn gathered_from(
        &self,
        shards: &Flat,
        members: &[usize],
    ) -> Result<CollectiveInput, Error> {
        let group = &self.engine.plan().groups[self.group];
        let shards = self.engine.context.readable(shards);
        let tensors = members
            .iter()
            .map(|&index| {
                let member = self.layout(index);
                let shape = [member.shard_numel];
                let shard = shards.view(member.shard_offset, &shape, group.dtype);
                (member.shard_numel, Some(shard))
            })
            .collect();
        let context = &self.engine.context;
        let purpose = context.purpose(self.instance, "gather after a step", members);
        context.input(group.dtype, purpose, tensors)
    }

    /// Where the gather of the stepped `members` writes in the group's full buffer, in elements.
    pub(super) fn gathered_to(&self, members: &[usize]) -> Vec<(usize, usize)> {
        let member = |&index: &usize| (self.layout(index).full_offset, self.layout(index).numel);
        members.iter().map(member).collect()
    }

    fn layout(&self, index: usize) -> &MemberLayout {
        let group = &self.engine.plan().groups[self.group];
        &group.layout.members[self.engine.plan().place[index].member]
    }
}
