//! What a rank's part of a wrapped module works with: its process group, strategy and plan, and where
//! its buffers come from.

use std::sync::Arc;

use burn_shard_comm::{DType, ReduceOp};

use super::history::names;
use super::instance::Instance;
use super::mesh::Mesh;
use crate::plan::Plan;
use crate::purpose::Purpose;
use crate::storage::flat::{Flat, FlatTensor, Memory};
use crate::storage::host::{HostTensor, TensorSegments};
use crate::storage::ledger::{Ledger, MemoryKind};
use crate::storage::pool::{Buffer, Pool};
use crate::{Error, ShardConfig};

/// Everything that is decided when a module is wrapped, and the buffers and records that its
/// collectives share. Every part of the runtime is handed one.
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) mesh: Mesh,
    pub(crate) memory: Memory,
    pub(crate) config: ShardConfig,
    pub(crate) plan: Plan,
    pub(crate) ledger: Arc<Ledger>,
    pub(crate) pool: Arc<Pool>,
}

impl Context {
    pub(crate) fn new(mesh: Mesh, memory: Memory, config: ShardConfig, plan: Plan) -> Self {
        let ledger = Arc::new(Ledger::default());
        let pool = Pool::new(Arc::clone(&ledger));
        pool.set_cap_bytes(idle_bytes(&plan));
        Self {
            mesh,
            memory,
            config,
            plan,
            ledger,
            pool,
        }
    }

    pub(crate) fn rank(&self) -> usize {
        self.mesh.world.rank()
    }

    /// The number of this rank among those that share one copy.
    pub(crate) fn shard_rank(&self) -> usize {
        self.mesh.shard.rank()
    }

    /// The purpose of a collective that does `what` for parameters of a value of the module.
    pub(crate) fn purpose(&self, instance: &Instance, what: &str, members: &[usize]) -> Purpose {
        let mut purpose = instance.history.purpose(what, &self.plan, members);
        let params = self.plan.params.iter().enumerate();
        let frozen: Vec<usize> = params
            .filter(|(index, param)| param.trainable && instance.is_frozen(*index))
            .map(|(index, _)| index)
            .collect();
        if !frozen.is_empty() {
            purpose.text += &format!(", frozen since: {}", names(&self.plan, &frozen));
        }
        purpose
    }

    /// Returns once every rank has come to the same place in its program. For what would be right on one
    /// rank alone under some strategies and not under others.
    pub(crate) fn meet(&self, instance: &Instance, what: &'static str) -> Result<(), Error> {
        let input = Arc::new(TensorSegments {
            dtype: DType::F32,
            tensors: Vec::new(),
            purpose: self.purpose(instance, what, &[]),
        });
        let work = self
            .mesh
            .world
            .communicator()
            .all_reduce(input, ReduceOp::Sum);
        work.and_then(|mut work| work.wait())
            .map_err(|source| Error::Meet {
                rank: self.rank(),
                what,
                source,
            })
    }

    /// Puts a buffer where the module's tensors live.
    pub(crate) fn place_host(&self, kind: MemoryKind, buffer: Buffer) -> Flat {
        #[cfg(feature = "cubecl")]
        if let Some(accelerator) = self.memory.accelerator() {
            let flat = accelerator.upload(buffer.bytes());
            drop(buffer);
            flat.count(&self.ledger, kind);
            return Flat::Device(flat);
        }
        let _counted_already = kind;
        Flat::Host(buffer.freeze())
    }

    /// Puts a tensor where the module's tensors live.
    pub(crate) fn place_tensor(&self, kind: MemoryKind, tensor: HostTensor) -> FlatTensor {
        #[cfg(feature = "cubecl")]
        if let Some(accelerator) = self.memory.accelerator() {
            let flat = accelerator.upload(tensor.as_bytes());
            flat.count(&self.ledger, kind);
            return FlatTensor::Device(flat.view(0, tensor.shape(), tensor.dtype()));
        }
        let _counted_already = kind;
        FlatTensor::Host(tensor)
    }

    /// A tensor of zeros.
    pub(crate) fn zeros(&self, kind: MemoryKind, shape: &[usize], dtype: DType) -> HostTensor {
        let bytes = shape.iter().product::<usize>() * dtype.size_bytes();
        HostTensor::view(self.pool.zeros(kind, bytes).freeze(), 0, shape, dtype)
    }

    /// The elements of `flat` in another type, in the memory where they are.
    pub(crate) fn cast(&self, kind: MemoryKind, flat: &Flat, from: DType, to: DType) -> Flat {
        match flat {
            Flat::Host(bytes) => {
                let numel = bytes.len() / from.size_bytes();
                let mut buffer = self.pool.take(kind, numel * to.size_bytes());
                crate::storage::cast::cast_bytes(bytes, from, buffer.bytes_mut(), to);
                Flat::Host(buffer.freeze())
            }
            #[cfg(feature = "cubecl")]
            Flat::Device(flat) => {
                let cast = flat.cast(from, to);
                cast.count(&self.ledger, kind);
                Flat::Device(cast)
            }
        }
    }
}

/// How much a rank keeps for the next step: the reduced gradients, which are all alive at the end of
/// backward anyway, and what one group leaves behind for the next.
fn idle_bytes(plan: &Plan) -> usize {
    let sharded = plan
        .groups
        .iter()
        .filter(|group| group.strategy.shards_gradients());
    let shards = sharded
        .clone()
        .map(|group| group.layout.shard_len * group.dtype.size_bytes());
    let largest = sharded
        .map(|group| group.layout.full_len * group.dtype.size_bytes())
        .max();
    shards.sum::<usize>() + largest.unwrap_or(0)
}
