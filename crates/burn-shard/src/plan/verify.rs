//! Checks that all ranks have the same plan, before anything else is sent.

use std::fmt::Write as _;

use burn_shard_comm::ProcessGroup;

use super::Plan;
use crate::{Error, ParamSpec, ShardConfig};

impl Plan {
    /// Compares the plan with every other rank's.
    ///
    /// # Errors
    ///
    /// [`Error::PlanMismatch`] on every rank, naming the first parameter that differs.
    pub(crate) fn agree(&self, config: &ShardConfig, group: &ProcessGroup) -> Result<(), Error> {
        let lines = self.describe(config);
        let hashes = group.all_gather_bytes(&fnv1a(&lines).to_le_bytes())?;
        let Some(other) = hashes.iter().position(|hash| hash != &hashes[0]) else {
            return Ok(());
        };
        let texts = group.all_gather_bytes(lines.join("\n").as_bytes())?;
        let text = |rank: usize| String::from_utf8_lossy(&texts[rank]).into_owned();
        let (zero, other_text) = (text(0), text(other));
        let mut ours = zero.lines();
        let mut theirs = other_text.lines();
        loop {
            match (ours.next(), theirs.next()) {
                (Some(a), Some(b)) if a == b => {}
                (a, b) => {
                    return Err(Error::PlanMismatch {
                        rank: group.rank(),
                        on_rank_0: a.unwrap_or("nothing more").to_owned(),
                        other,
                        on_other: b.unwrap_or("nothing more").to_owned(),
                    });
                }
            }
        }
    }

    /// One line per fact that all ranks must share, in plan order.
    fn describe(&self, config: &ShardConfig) -> Vec<String> {
        let mut lines = vec![format!(
            "strategy {}, prefetch {}, {} ranks per copy, alignment {}{}",
            config.strategy,
            config.prefetch,
            self.world_size,
            self.align_bytes,
            if config.defer_gather {
                ", gather deferred"
            } else {
                ""
            },
        )];
        for (param, place) in self.params.iter().zip(&self.place) {
            let ParamSpec {
                path,
                dtype,
                shape,
                trainable,
            } = param;
            let group = &self.groups[place.group];
            let mut line = format!("parameter {path} {dtype:?} {shape:?}");
            write!(line, " in group {} ({})", place.group, group.strategy)
                .expect("writing to a string should succeed");
            if group.is_mixed() || group.reduce != group.dtype {
                write!(
                    line,
                    ", used in {}, reduced in {}",
                    group.compute, group.reduce
                )
                .expect("writing to a string should succeed");
            }
            if !trainable {
                line.push_str(", frozen");
            }
            lines.push(line);
        }
        lines
    }
}

/// 64-bit FNV-1a over lines; the same on every platform and toolchain.
fn fnv1a(lines: &[String]) -> u64 {
    let newline = |hash, line: &String| hash_bytes(hash_bytes(hash, line.as_bytes()), b"\n");
    lines.iter().fold(HASH_START, newline)
}

/// The hash of nothing, to be continued by [`hash_bytes`].
pub(crate) const HASH_START: u64 = 0xcbf2_9ce4_8422_2325;

/// Continues a 64-bit FNV-1a hash.
pub(crate) fn hash_bytes(hash: u64, bytes: &[u8]) -> u64 {
    bytes.iter().fold(hash, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ShardingStrategy;

    fn zero2() -> ShardConfig {
        ShardConfig::new(ShardingStrategy::Gradients)
    }

    fn spec(path: &str, numel: usize) -> ParamSpec {
        ParamSpec::f32(path, &[numel])
    }

    #[test]
    fn ranks_that_differ_are_told_the_first_difference() {
        let messages = ProcessGroup::spawn(3, |group| {
            let numel = if group.rank() == 2 { 8 } else { 7 };
            let params = vec![spec("a", 3), spec("b.weight", numel), spec("c", 1)];
            let plan = Plan::new(params, &zero2(), 1, 3).unwrap();
            plan.agree(&zero2(), &group).unwrap_err().to_string()
        })
        .unwrap();
        for message in messages {
            assert!(message.contains("b.weight F32 [7]"), "{message}");
            assert!(message.contains("b.weight F32 [8]"), "{message}");
            assert!(message.contains("rank 2"), "{message}");
        }
    }

    #[test]
    fn equal_plans_agree() {
        ProcessGroup::spawn(3, |group| {
            let plan = Plan::new(vec![spec("a", 3), spec("b", 9)], &zero2(), 1, 3).unwrap();
            plan.agree(&zero2(), &group).unwrap();
        })
        .unwrap();
    }
}
