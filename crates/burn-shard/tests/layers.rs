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

/// Ranks, and the most bytes of a group. In the small groups no matrix is left whole.
const BY_DEFAULT: &[(usize, usize)] = &[(1, 25 << 20), (2, 25 << 20), (3, 25 << 20)];
const BOTH: &[(usize, usize)] = &[(1, 25 << 20), (2, 25 << 20), (3, 25 << 20), (3, 4 << 10)];
const TWO_RANKS: &[(usize, usize)] = &[(2, 25 << 20)];

/// Checks all rows under every strategy, and says of all that fail how.
fn check(rows: &[Row], made: Made, runs: &[(usize, usize)]) {
    let mut failures = Vec::new();
    for row in rows {
        for strategy in ShardingStrategy::ALL {
            for &(world_size, cap_bytes) in runs {
                let config = ShardConfig::new(strategy).with_group_cap_bytes(cap_bytes);
                let run = |group: ProcessGroup| (row.check)(&group, &config, made);
                if let Err(error) = ProcessGroup::spawn(world_size, run) {
                    failures.push(format!(
                        "{}, {strategy}, {world_size} ranks, groups of {cap_bytes} bytes: {error}",
                        row.name
                    ));
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

macro_rules! checked {
    ($($rows:ident { $($(#[$attribute:meta])* $test:ident of $made:ident,)* })*) => {
        $(mod $rows {
            use super::*;
            $(
                #[test]
                $(#[$attribute])*
                fn $test() {
                    let made = Made::$made;
                    let runs = if made == Made::Filled { BOTH } else { TWO_RANKS };
                    check(&table::$rows(), made, runs);
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
    check(&table::without_parameters(), Made::Filled, BY_DEFAULT);
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
