//! Every public layer of `burn::nn`, in sizes that are really sharded: outputs, gradients and parameters
//! have the bits of plain data parallel, under every strategy, also where parameters are initialized by
//! wrapping.
//!
//! The table is complete: a test reads burn-nn's source and names layers that have no row.

#![allow(clippy::unwrap_used, reason = "a test ends at the first error")]
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "small numbers"
)]

mod common;
#[path = "common/fill.rs"]
mod fill;
#[path = "layers/harness.rs"]
mod harness;
#[path = "layers/source.rs"]
mod source;
#[path = "layers/table.rs"]
mod table;

use std::collections::BTreeSet;

use burn_shard::{ProcessGroup, ShardConfig, ShardingStrategy};
use harness::{Made, Row};

/// So small that no matrix is left whole.
const SMALL_GROUPS_BYTES: usize = 4 << 10;

/// Checks all rows, and says of all that fail how.
fn check(rows: &[Row], configs: &[fn(ShardingStrategy) -> ShardConfig], made: Made) {
    let world_sizes = if made == Made::Filled { 1..=3 } else { 2..=2 };
    let mut failures = Vec::new();
    for row in rows {
        for strategy in ShardingStrategy::ALL {
            for world_size in world_sizes.clone() {
                for (number, config) in configs.iter().enumerate() {
                    let config = config(strategy);
                    let run = |group: ProcessGroup| (row.check)(&group, &config, made);
                    if let Err(error) = ProcessGroup::spawn(world_size, run) {
                        failures.push(format!(
                            "{}, {strategy}, {world_size} ranks, configuration {number}: {error}",
                            row.name
                        ));
                    }
                }
            }
        }
    }
    assert!(
        failures.is_empty(),
        "{} failures:\n{}",
        failures.len(),
        failures.join("\n")
    );
}

fn by_default(strategy: ShardingStrategy) -> ShardConfig {
    ShardConfig::new(strategy)
}

fn in_small_groups(strategy: ShardingStrategy) -> ShardConfig {
    ShardConfig::new(strategy).with_group_cap_bytes(SMALL_GROUPS_BYTES)
}

macro_rules! checked {
    ($($rows:ident { $($(#[$attribute:meta])* $test:ident of $made:ident,)* })*) => {
        $(mod $rows {
            use super::*;
            $(
                #[test]
                $(#[$attribute])*
                fn $test() {
                    let (made, both) = (Made::$made, [by_default, in_small_groups]);
                    let configs = if made == Made::Filled { &both[..] } else { &both[..1] };
                    check(&table::$rows(), configs, made);
                }
            )*
        })*
    };
}

checked! {
    linear {
        they_equal_the_plain_ones of Filled,
        initialized_by_wrapping_they_equal_the_plain_ones of Unread,
        read_before_wrapping_they_equal_the_plain_ones of Read,
    }
    convolutions {
        they_equal_the_plain_ones of Filled,
        initialized_by_wrapping_they_equal_the_plain_ones of Unread,
        read_before_wrapping_they_equal_the_plain_ones of Read,
    }
    norms {
        they_equal_the_plain_ones of Filled,
        initialized_by_wrapping_they_equal_the_plain_ones of Unread,
        read_before_wrapping_they_equal_the_plain_ones of Read,
    }
    activations {
        they_equal_the_plain_ones of Filled,
        initialized_by_wrapping_they_equal_the_plain_ones of Unread,
        read_before_wrapping_they_equal_the_plain_ones of Read,
    }
    recurrent {
        they_equal_the_plain_ones of Filled,
        initialized_by_wrapping_they_equal_the_plain_ones of Unread,
        read_before_wrapping_they_equal_the_plain_ones of Read,
    }
    attention {
        they_equal_the_plain_ones of Filled,
        initialized_by_wrapping_they_equal_the_plain_ones of Unread,
        read_before_wrapping_they_equal_the_plain_ones of Read,
    }
    transformers {
        they_equal_the_plain_ones of Filled,
        initialized_by_wrapping_they_equal_the_plain_ones of Unread,
        read_before_wrapping_they_equal_the_plain_ones of Read,
    }
}

/// They hold no parameter: only that gradients go through them, and that wrapping leaves them as they are.
#[test]
fn layers_without_parameters_in_a_wrapped_module_equal_the_plain_ones() {
    check(&table::without_parameters(), &[by_default], Made::Filled);
}

/// Public modules of burn-nn that have no row, and why.
const EXCEPTIONS: &[(&str, &str)] = &[
    ("CTCLoss", LOSS),
    ("CosineEmbeddingLoss", LOSS),
    ("GaussianNLLLoss", LOSS),
    ("HingeEmbeddingLoss", LOSS),
    ("HuberLoss", LOSS),
    ("KLDivLoss", LOSS),
    ("LpLoss", LOSS),
    ("MarginRankingLoss", LOSS),
    ("MseLoss", LOSS),
    ("MultiMarginLoss", LOSS),
    ("PoissonNllLoss", LOSS),
    ("RNNTLoss", LOSS),
    ("SmoothL1Loss", LOSS),
    ("SoftMarginLoss", LOSS),
    ("TripletMarginLoss", LOSS),
];

const LOSS: &str = "a function of outputs and targets, without tensors of its own";

#[test]
fn the_table_has_a_row_of_every_public_module_of_burn_nn() {
    let found = source::modules();
    // A scan that finds nothing would find nothing missing.
    for name in [
        "Linear",
        "Activation",
        "HardSwish",
        "TransformerDecoderLayer",
    ] {
        assert!(found.contains_key(name), "the scan did not find {name}");
    }
    let tested: BTreeSet<String> = table::all().into_iter().flat_map(|row| row.types).collect();
    let missing: Vec<_> = found
        .keys()
        .filter(|name| !tested.contains(*name) && !EXCEPTIONS.iter().any(|(e, _)| e == name))
        .collect();
    assert!(missing.is_empty(), "no row, and no exception: {missing:?}");
    for (name, reason) in EXCEPTIONS {
        let body = found
            .get(*name)
            .unwrap_or_else(|| panic!("{name} is no module of burn-nn any more"));
        assert!(!tested.contains(*name), "{name} has a row: {reason}");
        let holds = ["Param<", "RunningState<", "Tensor<"];
        let held = holds.iter().find(|kind| body.contains(**kind));
        assert!(held.is_none(), "{name} holds a {held:?} by now: {reason}");
    }
}
