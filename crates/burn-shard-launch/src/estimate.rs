//! What a model takes of memory and time on some number of GPUs, by the formulas of docs/performance.md. Nothing is
//! measured.

use std::fmt;

use clap::ValueEnum;

/// Bytes of a group of parameters, as `ShardConfig` has them.
const GROUP_BYTES: f64 = (25 << 20) as f64;
/// Groups that ZeRO-3 has gathered: two in use, and one ahead.
const GATHERED_GROUPS: f64 = 3.0;
/// Ranks that share a machine.
const WITHIN: usize = 8;
/// The part of a GPU's peak that matrix multiplications reach.
const REACHED: f64 = 0.4;

/// What is sharded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Strategy {
    Replicated,
    OptimizerState,
    Gradients,
    Full,
}

impl Strategy {
    pub(crate) const ALL: [Self; 4] = [
        Self::Replicated,
        Self::OptimizerState,
        Self::Gradients,
        Self::Full,
    ];
}

impl fmt::Display for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Replicated => "ddp",
            Self::OptimizerState => "zero1",
            Self::Gradients => "zero2",
            Self::Full => "zero3",
        })
    }
}

/// The type of computation. Master weights, gradients and optimizer state are f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Precision {
    /// 32 bits, TF32 in matrix multiplications
    F32,
    /// 16 bits
    Bf16,
}

impl Precision {
    /// Bytes of an element on the wire.
    fn bytes(self) -> f64 {
        match self {
            Self::F32 => 4.0,
            Self::Bf16 => 2.0,
        }
    }
}

/// A GPU, per second.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Gpu {
    /// A100, 80 GB
    A100,
    /// H100, SXM
    H100,
    /// H200, SXM
    H200,
}

impl Gpu {
    /// Peak of the tensor cores: floating point operations.
    fn flops(self, precision: Precision) -> f64 {
        match (self, precision) {
            (Self::A100, Precision::Bf16) => 312e12,
            (Self::A100, Precision::F32) => 156e12,
            (Self::H100 | Self::H200, Precision::Bf16) => 989e12,
            (Self::H100 | Self::H200, Precision::F32) => 495e12,
        }
    }

    /// Bytes from and to memory.
    fn memory(self) -> f64 {
        match self {
            Self::A100 => 1.9e12,
            Self::H100 => 3.2e12,
            Self::H200 => 4.6e12,
        }
    }

    /// Bytes over `NVLink`, as NCCL reaches it.
    fn nvlink(self) -> f64 {
        match self {
            Self::A100 => 230e9,
            Self::H100 | Self::H200 => 370e9,
        }
    }
}

/// What is trained, on what.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Job {
    pub(crate) parameters: f64,
    pub(crate) precision: Precision,
    pub(crate) ranks: usize,
    /// Per rank and step.
    pub(crate) tokens: f64,
    pub(crate) recomputes: bool,
    pub(crate) gpu: Gpu,
    /// Bytes per second and rank between machines.
    pub(crate) network: f64,
}

/// Bytes on a rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Memory {
    pub(crate) parameters: f64,
    pub(crate) gradients: f64,
    pub(crate) optimizer: f64,
    /// Whole parameters beside the stored ones, at most.
    pub(crate) unsharded: f64,
}

impl Memory {
    pub(crate) fn together(self) -> f64 {
        self.parameters + self.gradients + self.optimizer + self.unsharded
    }
}

/// Seconds of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Time {
    pub(crate) compute: f64,
    /// What all collectives take together.
    pub(crate) communication: f64,
    /// What no computation hides of that.
    pub(crate) exposed: f64,
    /// What the optimizer takes, Adam.
    pub(crate) optimizer: f64,
}

impl Time {
    pub(crate) fn together(self) -> f64 {
        self.compute + self.exposed + self.optimizer
    }
}

impl Job {
    pub(crate) fn memory(&self, strategy: Strategy) -> Memory {
        let whole = 4.0 * self.parameters;
        let part = whole / self.ranks as f64;
        let is_mixed = self.precision != Precision::F32;
        let computed = if is_mixed {
            self.precision.bytes() * self.parameters
        } else {
            0.0
        };
        let masters = if is_mixed { part } else { whole };
        let gathered = GATHERED_GROUPS * GROUP_BYTES * self.precision.bytes() / 4.0;
        let (parameters, gradients, optimizer, unsharded) = match strategy {
            Strategy::Replicated => (whole, whole, 2.0 * whole, computed),
            Strategy::OptimizerState => (masters, whole, 2.0 * part, computed),
            Strategy::Gradients => (masters, part, 2.0 * part, computed),
            Strategy::Full => (part, part, 2.0 * part, gathered.min(whole)),
        };
        Memory {
            parameters,
            gradients,
            optimizer,
            unsharded,
        }
    }

    pub(crate) fn time(&self, strategy: Strategy) -> Time {
        let passes = if self.recomputes { 8.0 } else { 6.0 };
        let flops = self.gpu.flops(self.precision) * REACHED;
        let compute = passes * self.parameters * self.tokens / flops;
        let (set, group) = self.collective_set();
        let (forward, backward) = (compute / 3.0, 2.0 * compute / 3.0);
        let over = |seconds: f64, hidden: f64| (seconds - hidden).max(0.0);
        let (sets, exposed) = match strategy {
            Strategy::Replicated => (2.0, over(2.0 * set, backward) + 2.0 * group),
            Strategy::OptimizerState => (3.0, over(2.0 * set, backward) + 2.0 * group + set),
            Strategy::Gradients => (2.0, over(set, backward) + group + set),
            Strategy::Full => (
                3.0,
                over(set, forward) + over(2.0 * set, backward) + 2.0 * group,
            ),
        };
        let stepped = match strategy {
            Strategy::Replicated => self.parameters,
            Strategy::OptimizerState | Strategy::Gradients | Strategy::Full => {
                self.parameters / self.ranks as f64
            }
        };
        // Adam reads and writes 28 bytes of an element, and writes a copy of 16 bits.
        let copied = match self.precision {
            Precision::F32 => 0.0,
            Precision::Bf16 => 2.0,
        };
        Time {
            compute,
            communication: sets * set,
            exposed,
            optimizer: (28.0 + copied) * stepped / self.gpu.memory(),
        }
    }

    /// Seconds of an `all_gather` or `reduce_scatter` of all parameters, and of one group of them.
    fn collective_set(&self) -> (f64, f64) {
        let is_within = self.ranks <= WITHIN;
        let (bandwidth, hop) = match is_within {
            true => (self.gpu.nvlink(), 5e-6),
            false => (self.network, 15e-6),
        };
        // A ring of all ranks; beyond 64 ranks trees keep latency near a logarithm.
        let hops = (self.ranks - 1).min(64) as f64;
        let bytes = self.parameters * self.precision.bytes();
        let groups = (bytes / GROUP_BYTES).round_ties_even().max(1.0);
        let ranks = self.ranks as f64;
        let set = (ranks - 1.0) / ranks * bytes / bandwidth + groups * hops * hop;
        (set, set / groups)
    }
}

/// The sizes of a transformer that its activations depend on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Transformer {
    pub(crate) layers: f64,
    pub(crate) hidden: f64,
    pub(crate) heads: f64,
    pub(crate) sequence: f64,
    pub(crate) micro_batch: f64,
}

impl Transformer {
    /// Bytes of activations, after Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models",
    /// <https://arxiv.org/abs/2205.05198>. Recomputed: the inputs of all layers, and one layer.
    pub(crate) fn activations(self, precision: Precision, recomputes: bool) -> f64 {
        let rows = self.sequence * self.micro_batch * self.hidden;
        let width = precision.bytes() / 2.0;
        let layer = rows * (34.0 + 5.0 * self.heads * self.sequence / self.hidden) * width;
        match recomputes {
            true => self.layers * 2.0 * rows * width + layer,
            false => self.layers * layer,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;

    use super::*;

    fn job(gpu: Gpu, parameters: f64, tokens: f64, precision: Precision, ranks: usize) -> Job {
        Job {
            parameters,
            precision,
            ranks,
            tokens,
            recomputes: false,
            gpu,
            network: 25e9,
        }
    }

    /// The tables of docs/performance.md.
    fn tables() -> String {
        const MODELS: [(&str, f64, f64, Precision); 3] = [
            (
                "BERT-large, f32 (TF32), 32 x 512 tokens",
                335e6,
                32.0 * 512.0,
                Precision::F32,
            ),
            (
                "BERT-large, bf16, 32 x 512 tokens",
                335e6,
                32.0 * 512.0,
                Precision::Bf16,
            ),
            (
                "7 B, bf16, 4 x 4096 tokens",
                7e9,
                4.0 * 4096.0,
                Precision::Bf16,
            ),
        ];
        let mut text = String::new();
        for (name, parameters, tokens, precision) in MODELS {
            write!(text, "### {name}\n\n").unwrap();
            for gpu in [Gpu::A100, Gpu::H100, Gpu::H200] {
                let compute = job(gpu, parameters, tokens, precision, 2)
                    .time(Strategy::Full)
                    .compute;
                write!(
                    text,
                    "{gpu:?}: computing {:.0} ms. Communicating / of that exposed / Adam, in ms; step, in ms:\n\n\
                     | N | Replicated | OptimizerState | Gradients | Full |\n|---|---|---|---|---|\n",
                    compute * 1e3
                )
                .unwrap();
                for ranks in [2, 8, 16, 64, 256, 1024] {
                    let job = job(gpu, parameters, tokens, precision, ranks);
                    write!(text, "| {ranks} |").unwrap();
                    for strategy in Strategy::ALL {
                        let time = job.time(strategy);
                        write!(
                            text,
                            " {:.1} / {:.1} / {:.1}; **{:.0}** |",
                            1e3 * time.communication,
                            1e3 * time.exposed,
                            1e3 * time.optimizer,
                            1e3 * time.together()
                        )
                        .unwrap();
                    }
                    text.push('\n');
                }
                text.push('\n');
            }
        }
        text
    }

    #[test]
    fn the_page_has_the_tables_of_these_formulas() {
        let page = include_str!("../../../docs/performance.md");
        let tables = tables();
        assert!(
            page.contains(tables.trim()),
            "docs/performance.md should have:\n{tables}"
        );
    }

    #[test]
    fn memory_is_that_of_the_zero_paper() {
        // Figure 1 there, at 4 bytes instead of 2: 7.5 B parameters, 64 ranks.
        let job = job(Gpu::A100, 7.5e9, 1.0, Precision::F32, 64);
        let gb = Strategy::ALL.map(|strategy| {
            let memory = job.memory(strategy);
            (memory.parameters + memory.gradients + memory.optimizer) / 1e9
        });
        for (found, expected) in gb.into_iter().zip([120.0, 60.9375, 31.40625, 1.875]) {
            assert!((found - expected).abs() < 1e-9, "{gb:?}");
        }
    }

    /// BERT-large, sequence 128, micro-batch 4, f32: keeping activations took 985 MiB more than computing them again
    /// (docs/benchmarks), by what each process had allocated at most.
    #[test]
    fn activations_are_near_what_was_measured() {
        let bert = Transformer {
            layers: 24.0,
            hidden: 1024.0,
            heads: 16.0,
            sequence: 128.0,
            micro_batch: 4.0,
        };
        let kept = bert.activations(Precision::F32, false);
        let saved = (kept - bert.activations(Precision::F32, true)) / f64::from(1 << 20);
        assert!((saved / 985.0 - 1.0).abs() < 0.1, "{saved}");
    }
}
