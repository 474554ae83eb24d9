//! What can go wrong outside a collective.

use burn::store::RecordError;
use burn_shard_comm::ProcessGroup;

/// Errors of this crate. Messages name the rank, the parameter path and the way out.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A collective failed; the process group is poisoned.
    #[error(transparent)]
    Comm(#[from] burn_shard_comm::Error),

    /// Gathering a group of parameters failed.
    #[error(
        "rank {rank}: gathering the group of `{path}`: {source} (under strategy zero3 every rank has \
         to read the same parameters in the same order)"
    )]
    Gather {
        /// This rank.
        rank: usize,
        /// The parameter that was read.
        path: String,
        /// What failed.
        source: burn_shard_comm::Error,
    },

    /// Reducing the gradients of a group of parameters failed.
    #[error(
        "rank {rank}: reducing the gradients of the group of `{path}`: {source} (every rank has to \
         run the same backward passes)"
    )]
    Reduce {
        /// This rank.
        rank: usize,
        /// First parameter of the group.
        path: String,
        /// What failed.
        source: burn_shard_comm::Error,
    },

    /// Something that all ranks have to do together was not done by all of them.
    #[error(
        "rank {rank}: {what}: {source} (every rank has to call it, whatever the strategy, also those that \
         do not use the result)"
    )]
    Meet {
        /// This rank.
        rank: usize,
        /// What it was doing.
        what: &'static str,
        /// What failed.
        source: burn_shard_comm::Error,
    },

    /// No such strategy.
    #[error("unknown sharding strategy `{name}` (use ddp, zero1, zero2 or zero3)")]
    UnknownStrategy {
        /// What was asked for.
        name: String,
    },

    /// The module has nothing to shard.
    #[error("rank {rank}: the module has no floating-point parameter to shard")]
    NoParameters {
        /// This rank.
        rank: usize,
    },

    /// The module is on a backend that this build cannot shard on.
    #[error(
        "rank {rank}: the module is on {device}, and this build shards modules on the flex backend \
         (features `wgpu` and `cuda` add CubeCL's)"
    )]
    UnsupportedBackend {
        /// This rank.
        rank: usize,
        /// Burn's name of the device.
        device: String,
    },

    /// The group's communicator works on the memory of another device than the module's.
    #[error(
        "rank {rank}: the module is on {device}, but the group's communicator works on number {reached} \
         (build the module on the device that the group was made for)"
    )]
    OtherDevice {
        /// This rank.
        rank: usize,
        /// Burn's name of the module's device.
        device: String,
        /// Number of the communicator's device.
        reached: usize,
    },

    /// Memory of the device could not be handed to the communicator.
    #[error("rank {rank}: the device did not say where its buffers are: {message}")]
    DeviceMemory {
        /// This rank.
        rank: usize,
        /// What it said instead.
        message: String,
    },

    /// A shape whose bytes overflow the address space.
    #[error("parameter `{path}`: its size in bytes overflows")]
    TooLarge {
        /// Module path.
        path: String,
    },

    /// Ranks wrapped different modules, or the same one differently.
    #[error(
        "rank {rank}: ranks disagree on the model: rank 0 has [{on_rank_0}], rank {other} has \
         [{on_other}] (build the same module with the same configuration on every rank)"
    )]
    PlanMismatch {
        /// This rank.
        rank: usize,
        /// The first differing line of rank 0's plan.
        on_rank_0: String,
        /// The first rank that differs from rank 0.
        other: usize,
        /// The line in its place in the plan of rank `other`.
        on_other: String,
    },

    /// Another rank could not wrap its module.
    #[error("rank {rank}: rank {other} could not wrap its module: {message}")]
    OtherRankRefused {
        /// This rank.
        rank: usize,
        /// The first rank that refused.
        other: usize,
        /// What it said.
        message: String,
    },

    /// One parameter is reachable by two module paths.
    #[error(
        "rank {rank}: parameters `{first}` and `{second}` are the same parameter (Burn's optimizers \
         update only one of them; keep one, and read it twice in forward instead)"
    )]
    SharedParameter {
        /// This rank.
        rank: usize,
        /// Path at which it was met first.
        first: String,
        /// Path at which it was met again.
        second: String,
    },

    /// A parameter carries a reparameterization (`LoRA`, or another sharding) already.
    #[error(
        "rank {rank}: parameter `{path}` has a reparameterization (`{name}`) already; Burn cannot \
         nest them (wrap the module before, or call `materialize` first)"
    )]
    AlreadyReparameterized {
        /// This rank.
        rank: usize,
        /// Module path.
        path: String,
        /// Name of the reparameterization found.
        name: String,
    },

    /// The module is on an autodiff device, and nothing of it would be trained.
    #[error(
        "rank {rank}: no parameter of the module is trainable, so that training would change nothing \
         (move a module onto an autodiff device with `fork`, not `to_device`; unfreeze what is to be \
         trained; for inference wrap `module.valid()`)"
    )]
    NothingTrainable {
        /// This rank.
        rank: usize,
    },

    /// Gradients that were accumulated without being reduced are left when the optimizer steps, or a checkpoint is
    /// saved, which would lose them.
    #[error(
        "rank {rank}: gradients of backward passes under `no_sync` have not been reduced (run the last \
         backward before a step or a save outside of it, or drop them with `discard_accumulated`)"
    )]
    Unreduced {
        /// This rank.
        rank: usize,
    },

    /// The norm of all gradients is infinite or not a number.
    #[error(
        "rank {rank}: the norm of all gradients is {norm}, so that a step would spoil every parameter (lower \
         the learning rate, or leave such steps out by `NonFinite::Skip`)"
    )]
    NonFiniteGradients {
        /// This rank.
        rank: usize,
        /// The norm, the same on every rank.
        norm: f64,
    },

    /// A number of ranks per copy that does not divide the number of ranks.
    #[error(
        "rank {rank}: {world_size} ranks cannot form copies of {shard_ranks} ranks each (choose `shard_ranks` so \
         that it divides the world size)"
    )]
    ShardRanks {
        /// This rank.
        rank: usize,
        /// Number of ranks.
        world_size: usize,
        /// Ranks per copy that were asked for.
        shard_ranks: usize,
    },

    /// A checkpoint could not be written or read.
    #[error(transparent)]
    Checkpoint(#[from] burn_shard_checkpoint::Error),

    /// A checkpoint that was not written by this crate, or by another version of it.
    #[error(
        "the checkpoint has no state that this version understands: {source} (load its tensors with \
         burn_shard_checkpoint)"
    )]
    ForeignCheckpoint {
        /// What is wrong with it.
        source: serde_json::Error,
    },

    /// The checkpoint has the state of another optimizer.
    #[error(
        "rank {rank}: the checkpoint has {found:?} as the optimizer's state of `{path}`, which this optimizer \
         does not keep (make it of the configuration that was saved)"
    )]
    OtherOptimizer {
        /// This rank.
        rank: usize,
        /// Module path.
        path: String,
        /// Names of the state found.
        found: Vec<String>,
    },

    /// A record of an optimizer could not be written or read.
    #[error("rank {rank}: the optimizer's record: {source}")]
    OptimizerRecord {
        /// This rank.
        rank: usize,
        /// What Burn said.
        source: RecordError,
    },

    /// A record of an optimizer has the state of a parameter that the module has not.
    #[error(
        "rank {rank}: the optimizer's record has the state of `{parameter}`, which the module does not have (load \
         it beside the module that it was recorded with)"
    )]
    UnknownState {
        /// This rank.
        rank: usize,
        /// Its path in the record, or its id if the record has no path.
        parameter: String,
    },

    /// A record of an optimizer has state of another size or type than the parameter's.
    #[error(
        "rank {rank}: the optimizer's record has {role} of `{path}` as {} of shape {:?}, and the parameter is \
         {} of shape {:?} (load it beside the module that it was recorded with)",
        found.0.name(), found.1, expected.0.name(), expected.1
    )]
    StateShape {
        /// This rank.
        rank: usize,
        /// Module path.
        path: String,
        /// Name of the state's tensor.
        role: String,
        /// Type and shape in the record.
        found: (burn::tensor::DType, Vec<usize>),
        /// Type and shape of the parameter.
        expected: (burn::tensor::DType, Vec<usize>),
    },

    /// Ranks were given different records of an optimizer.
    #[error(
        "rank {rank}: rank {other} loads another record of the optimizer (give every rank the same file)"
    )]
    OtherRecord {
        /// This rank.
        rank: usize,
        /// A rank whose record is another one.
        other: usize,
    },

    /// Burn cannot give an optimizer without a kernel its state back in the parameter's type.
    #[error(
        "rank {rank}: the optimizer's state of `{path}` was saved in {saved:?}, and Burn restores it in {restored:?}, the \
         default of its device (choose that type for the device by `Device::configure`, or load the parameters \
         alone and begin with a new optimizer)"
    )]
    OptimizerStateType {
        /// This rank.
        rank: usize,
        /// Module path.
        path: String,
        /// Type of the parameter, and of its state.
        saved: burn::tensor::DType,
        /// Type in which Burn makes the state.
        restored: burn::tensor::DType,
    },

    /// A running statistic beside parameters that are used in another type.
    #[error(
        "rank {rank}: `{path}` is a buffer of the module, which Burn keeps in {dtype} and does not mix with \
         activations in {param} (train the layer in f32: drop `mixed_precision`)"
    )]
    BufferPrecision {
        /// This rank.
        rank: usize,
        /// Module path of the buffer.
        path: String,
        /// Type of the buffer.
        dtype: burn_shard_comm::DType,
        /// Type in which parameters are read.
        param: burn_shard_comm::DType,
    },

    /// An element type that cannot be communicated.
    #[error("rank {rank}: parameter `{path}` has dtype {dtype}, which cannot be sharded")]
    UnsupportedDType {
        /// This rank.
        rank: usize,
        /// Module path.
        path: String,
        /// Burn's name of the dtype.
        dtype: String,
    },

    /// A lazily initialized parameter turned out to have another dtype than its device's default.
    #[error(
        "rank {rank}: parameter `{path}` was planned as {planned} and initialized as {found} \
         (read it once before wrapping, so that its dtype is known)"
    )]
    DTypeChanged {
        /// This rank.
        rank: usize,
        /// Module path.
        path: String,
        /// The dtype in the plan.
        planned: String,
        /// The dtype found.
        found: String,
    },

    /// A lazily initialized parameter turned out to have another shape than it said.
    #[error(
        "rank {rank}: parameter `{path}` was planned with shape {planned:?} and initialized with \
         {found:?} (read it once before wrapping, so that its shape is known)"
    )]
    ShapeChanged {
        /// This rank.
        rank: usize,
        /// Module path.
        path: String,
        /// The shape in the plan.
        planned: Vec<usize>,
        /// The shape found.
        found: Vec<usize>,
    },

    /// Parameters on more than one device.
    #[error(
        "rank {rank}: the module's parameters lie on {count} devices; each rank trains on one \
         (move the module with `fork` before wrapping it)"
    )]
    SeveralDevices {
        /// This rank.
        rank: usize,
        /// Number of devices found.
        count: usize,
    },

    /// The optimizer does not belong to the module's process group.
    #[error(
        "the optimizer was made for rank {optimizer_rank} of {optimizer_world_size}, the module for \
         rank {module_rank} of {module_world_size} (pass the same process group to both)"
    )]
    OtherGroup {
        /// Rank of the optimizer's group.
        optimizer_rank: usize,
        /// Size of the optimizer's group.
        optimizer_world_size: usize,
        /// Rank of the module's group.
        module_rank: usize,
        /// Size of the module's group.
        module_world_size: usize,
    },

    /// The optimizer has state of another module.
    #[error(
        "rank {rank}: the optimizer has the state of another module (make one `Oss` per wrapped \
         module)"
    )]
    OtherModule {
        /// This rank.
        rank: usize,
    },

    /// A gradient whose length is neither the shard's nor the parameter's.
    #[error(
        "rank {rank}: the gradient of `{path}` has {found} elements, expected {expected} under \
         strategy {strategy} (pass the gradients of this module's own backward)"
    )]
    GradientLength {
        /// This rank.
        rank: usize,
        /// Module path.
        path: String,
        /// Elements expected.
        expected: usize,
        /// Elements found.
        found: usize,
        /// Name of the strategy.
        strategy: String,
    },

    /// A rank has no batch at all, while others have some.
    #[error(
        "rank {rank}: rank {other} has no batch at all, so that it could not take part (give each rank at \
         least one, or what to run instead by `Join::with_filler`)"
    )]
    NoBatch {
        /// This rank.
        rank: usize,
        /// The first rank without a batch.
        other: usize,
    },

    /// A batch that weighs less than nothing, or no number.
    #[error(
        "rank {rank}: a batch of rank {other} weighs {weight} (weights are finite and at least 0, such as \
         numbers of samples)"
    )]
    BatchWeight {
        /// This rank.
        rank: usize,
        /// The first rank with such a batch.
        other: usize,
        /// What it weighs.
        weight: f64,
    },

    /// Clipping by the norm of one tensor, which no rank can see whole.
    #[error(
        "gradient clipping by the norm of each tensor looks at whole tensors, and a rank has only its shards \
         (clip by the norm of all of them with `Oss::with_norm_clipping`, or by value)"
    )]
    NormClipping,

    /// A hyper-parameter that a fused step cannot use.
    #[error("optimizer step: {0}")]
    Step(#[from] burn_shard_kernels::Error),

    /// An optimizer configuration that could not be read.
    #[error("optimizer configuration: {0}")]
    Config(#[from] serde_json::Error),
}

/// This rank's result, if every rank has one: what one rank refuses, no rank goes on with. A collective.
///
/// # Errors
///
/// This rank's own error, [`Error::OtherRankRefused`] with that of the first rank that has one, or a failure of
/// the communicator.
pub(crate) fn agreed<T>(group: &ProcessGroup, result: Result<T, Error>) -> Result<T, Error> {
    let refusal = result.as_ref().err().map(ToString::to_string);
    let refusals = group.all_gather_bytes(refusal.unwrap_or_default().as_bytes())?;
    let own = result?;
    match refusals.iter().position(|message| !message.is_empty()) {
        None => Ok(own),
        Some(other) => Err(Error::OtherRankRefused {
            rank: group.rank(),
            other,
            message: String::from_utf8_lossy(&refusals[other]).into_owned(),
        }),
    }
}

/// Ends this rank where Burn's signatures leave no room for an error: inside forward, backward and
/// optimizer steps. `ProcessGroup::spawn` reports it, and the other ranks get an error.
#[track_caller]
pub(crate) fn or_panic<T>(result: Result<T, Error>) -> T {
    result.unwrap_or_else(|error| panic!("{error}"))
}
