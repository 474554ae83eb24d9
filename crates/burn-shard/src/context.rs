//! What a rank's part of a wrapped module never changes: its group, strategy and plan, and where its
//! buffers come from.

use std::sync::Arc;

use burn_shard_comm::{DType, ProcessGroup};

use crate::ShardingStrategy;
use crate::buffer::{Buffer, Pool};
use crate::flat::{Flat, FlatTensor, Memory};
use crate::host::HostTensor;
use crate::memory::{Ledger, MemoryKind};
use crate::plan::Plan;

/// See the module documentation.
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) group: ProcessGroup,
    pub(crate) memory: Memory,
    pub(crate) strategy: ShardingStrategy,
    pub(crate) plan: Plan,
    pub(crate) ledger: Arc<Ledger>,
    pub(crate) pool: Arc<Pool>,
}

impl Context {
    pub(crate) fn new(
        group: ProcessGroup,
        memory: Memory,
        strategy: ShardingStrategy,
        plan: Plan,
    ) -> Self {
        let ledger = Arc::new(Ledger::default());
        let pool = Pool::new(Arc::clone(&ledger));
        pool.set_cap_bytes(idle_bytes(&plan, strategy));
        Self {
            group,
            memory,
            strategy,
            plan,
            ledger,
            pool,
        }
    }

    pub(crate) fn rank(&self) -> usize {
        self.group.rank()
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

    /// A tensor of zeros of the parameter's dtype.
    pub(crate) fn zeros(&self, kind: MemoryKind, index: usize, shape: &[usize]) -> HostTensor {
        let dtype = self.plan.params[index].dtype;
        let bytes = shape.iter().product::<usize>() * dtype.size_bytes();
        HostTensor::view(self.pool.zeros(kind, bytes).freeze(), 0, shape, dtype)
    }
}

/// How much a rank keeps for the next step: the reduced gradients, which are all alive at the end of
/// backward anyway, and what one group leaves behind for the next.
fn idle_bytes(plan: &Plan, strategy: ShardingStrategy) -> usize {
    if !strategy.shards_gradients() {
        return 0;
    }
    let bytes = |numel: usize, dtype: DType| numel * dtype.size_bytes();
    let shards: usize = plan
        .groups
        .iter()
        .map(|g| bytes(g.layout.shard_len, g.dtype))
        .sum();
    let largest = plan
        .groups
        .iter()
        .map(|g| bytes(g.layout.full_len, g.dtype))
        .max();
    shards + largest.unwrap_or(0)
}
