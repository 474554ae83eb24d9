//! Model-state bytes that live on this rank, counted by kind: what every run reports.
//!
//! Each buffer of this crate enters the ledger when it is allocated and leaves it when its last
//! reader drops it, so the figures are of what lives, not of what a formula says. Buffers on a device
//! tell nobody when they go: the ledger looks for those that are gone before it counts.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

#[cfg(feature = "cubecl")]
use cubecl_server::memory_management::WeakMemoryBinding;
#[cfg(feature = "cubecl")]
use parking_lot::Mutex;

use crate::ShardingStrategy;

/// What a buffer is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MemoryKind {
    /// Stored parameters: full ones, or this rank's shards under [`ShardingStrategy::Full`].
    Parameters,
    /// Gradients that wait for their reduction, and reduced ones until the optimizer used them.
    Gradients,
    /// Moments and velocities of fused steps. What a stock optimizer keeps (other dtypes, options
    /// without a kernel) are Burn's own tensors and not counted.
    OptimizerState,
    /// Parameters gathered for use under [`ShardingStrategy::Full`].
    Unsharded,
    /// Buffers kept for the next gather or reduction, and scratch of collectives.
    Staging,
}

impl MemoryKind {
    /// All kinds, in the order of a report.
    pub const ALL: [Self; 5] = [
        Self::Parameters,
        Self::Gradients,
        Self::OptimizerState,
        Self::Unsharded,
        Self::Staging,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Parameters => "parameters",
            Self::Gradients => "gradients",
            Self::OptimizerState => "optimizer state",
            Self::Unsharded => "unsharded",
            Self::Staging => "staging",
        }
    }
}

/// Live and peak bytes of one [`MemoryKind`] on one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryUse {
    /// Bytes alive now.
    pub live_bytes: usize,
    /// Most bytes alive at once since the module was wrapped or the peak was reset.
    pub peak_bytes: usize,
}

/// What this rank's model state takes, by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryReport {
    kinds: [MemoryUse; 5],
    total: MemoryUse,
}

impl MemoryReport {
    /// Bytes of one kind.
    #[must_use]
    pub fn of(&self, kind: MemoryKind) -> MemoryUse {
        self.kinds[kind as usize]
    }

    /// All kinds together. The peak is the peak of the sum, not the sum of the peaks.
    #[must_use]
    pub fn total(&self) -> MemoryUse {
        self.total
    }
}

impl fmt::Display for MemoryReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for kind in MemoryKind::ALL {
            let MemoryUse {
                live_bytes,
                peak_bytes,
            } = self.of(kind);
            writeln!(
                f,
                "{:<16} {live_bytes:>14} B live {peak_bytes:>14} B peak",
                kind.name()
            )?;
        }
        let MemoryUse {
            live_bytes,
            peak_bytes,
        } = self.total;
        write!(
            f,
            "{:<16} {live_bytes:>14} B live {peak_bytes:>14} B peak",
            "total"
        )
    }
}

/// Model-state bytes per rank as the ZeRO paper counts them: parameters, gradients and two moments,
/// all of `element_bytes`, without padding and without what is gathered for a moment.
///
/// # References
///
/// <https://arxiv.org/abs/1910.02054>, figure 1.
///
/// # Examples
///
/// A model of 7.5 billion parameters on 64 ranks, in `f32`:
///
/// ```
/// use burn_shard::{ShardingStrategy, model_state_bytes};
///
/// let gib = |strategy| model_state_bytes(strategy, 7_500_000_000, 64, 4) >> 30;
/// assert_eq!(gib(ShardingStrategy::Replicated), 111);
/// assert_eq!(gib(ShardingStrategy::Full), 1);
/// ```
#[doc(alias = "estimate_zero3_model_states_mem_needs_all_live")]
#[must_use]
pub fn model_state_bytes(
    strategy: ShardingStrategy,
    numel: usize,
    world_size: usize,
    element_bytes: usize,
) -> usize {
    let full = numel * element_bytes;
    let part = full.div_ceil(world_size);
    let parameters = if strategy.shards_parameters() {
        part
    } else {
        full
    };
    let gradients = if strategy.shards_gradients() {
        part
    } else {
        full
    };
    let moments = 2 * if strategy.shards_optimizer() {
        part
    } else {
        full
    };
    parameters + gradients + moments
}

#[derive(Debug, Default)]
struct Counter {
    live: AtomicUsize,
    peak: AtomicUsize,
}

impl Counter {
    fn add(&self, bytes: usize) {
        let live = self.live.fetch_add(bytes, Relaxed) + bytes;
        self.peak.fetch_max(live, Relaxed);
    }

    fn read(&self) -> MemoryUse {
        MemoryUse {
            live_bytes: self.live.load(Relaxed),
            peak_bytes: self.peak.load(Relaxed),
        }
    }
}

/// One rank's counters.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    kinds: [Counter; 5],
    total: Counter,
    #[cfg(feature = "cubecl")]
    watched: Mutex<Vec<Watched>>,
}

/// A buffer on a device.
#[cfg(feature = "cubecl")]
#[derive(Debug)]
struct Watched {
    kind: MemoryKind,
    bytes: usize,
    buffer: WeakMemoryBinding,
}

impl Ledger {
    /// Counts a buffer on a device until it is gone.
    #[cfg(feature = "cubecl")]
    pub(crate) fn watch(&self, kind: MemoryKind, bytes: usize, buffer: WeakMemoryBinding) {
        self.add(kind, bytes);
        self.watched.lock().push(Watched {
            kind,
            bytes,
            buffer,
        });
    }

    /// Takes out what is gone.
    fn sweep(&self) {
        #[cfg(feature = "cubecl")]
        self.watched.lock().retain(|watched| {
            let alive = watched.buffer.upgrade().is_some();
            if !alive {
                self.sub(watched.kind, watched.bytes);
            }
            alive
        });
    }

    pub(crate) fn add(&self, kind: MemoryKind, bytes: usize) {
        self.sweep();
        self.kinds[kind as usize].add(bytes);
        self.total.add(bytes);
    }

    pub(crate) fn sub(&self, kind: MemoryKind, bytes: usize) {
        self.kinds[kind as usize].live.fetch_sub(bytes, Relaxed);
        self.total.live.fetch_sub(bytes, Relaxed);
    }

    pub(crate) fn report(&self) -> MemoryReport {
        self.sweep();
        MemoryReport {
            kinds: std::array::from_fn(|i| self.kinds[i].read()),
            total: self.total.read(),
        }
    }

    pub(crate) fn reset_peak(&self) {
        self.sweep();
        for counter in self.kinds.iter().chain([&self.total]) {
            counter.peak.store(counter.live.load(Relaxed), Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_formula_is_the_papers() {
        let p = 1000;
        let bytes = |strategy| model_state_bytes(strategy, p, 4, 4);
        assert_eq!(bytes(ShardingStrategy::Replicated), 16 * p);
        assert_eq!(bytes(ShardingStrategy::OptimizerState), 8 * p + 8 * p / 4);
        assert_eq!(bytes(ShardingStrategy::Gradients), 4 * p + 12 * p / 4);
        assert_eq!(bytes(ShardingStrategy::Full), 16 * p / 4);
    }

    #[test]
    fn the_total_peak_is_the_peak_of_the_sum() {
        let ledger = Ledger::default();
        ledger.add(MemoryKind::Gradients, 10);
        ledger.sub(MemoryKind::Gradients, 10);
        ledger.add(MemoryKind::Unsharded, 7);
        let report = ledger.report();
        assert_eq!(report.of(MemoryKind::Gradients).peak_bytes, 10);
        assert_eq!(
            report.total(),
            MemoryUse {
                live_bytes: 7,
                peak_bytes: 10
            }
        );
        ledger.reset_peak();
        assert_eq!(ledger.report().total().peak_bytes, 7);
    }
}
