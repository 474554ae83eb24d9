//! Ranks with different numbers of batches: the gradient is that of the mean over what there is.

#![allow(clippy::unwrap_used, reason = "a test ends at the first error")]

mod common;
#[path = "common/fill.rs"]
mod fill;
#[path = "common/pair.rs"]
mod pair;

use burn::prelude::*;
use burn_shard::{Collective, Error, Join, ProcessGroup, Turn};
use common::{bits, device};
use pair::{Net, Pair, WIDTH, for_all, small_groups, spawn};

/// The number of rows of this rank's batches. Rank 0 has the fewest, and the last rank the most.
fn rows_of(rank: usize) -> Vec<usize> {
    (0..2 + 2 * rank).map(|at| 1 + (at + rank) % 3).collect()
}

fn batch(rank: usize, at: usize, rows: usize) -> Tensor<2> {
    let value = |i: usize| ((i * 7 + rank * 3 + at * 15) % 11) as f32 / 11.0 - 0.5;
    let data: Vec<f32> = (0..rows * WIDTH).map(value).collect();
    Tensor::from_data(TensorData::new(data, [rows, WIDTH]), &device())
}

fn batches(rank: usize) -> Vec<Tensor<2>> {
    let rows = rows_of(rank).into_iter().enumerate();
    rows.map(|(at, rows)| batch(rank, at, rows)).collect()
}

/// By turn: what all ranks' batches weigh, when each has as many samples as rows.
fn weights(ranks: usize) -> Vec<Vec<f64>> {
    let turns = (0..ranks).map(|rank| rows_of(rank).len()).max().unwrap();
    let weight = |rank: usize, at| rows_of(rank).get(at).map_or(0.0, |&rows| rows as f64);
    let turn = |at| (0..ranks).map(|rank| weight(rank, at)).collect();
    (0..turns).map(turn).collect()
}

/// The oracle is plain data parallelism in which a rank that has no more data repeats its last batch for
/// nothing: equal bits.
#[test]
fn training_by_samples_equals_plain_data_parallelism_of_weighted_losses() {
    for_all(|group, strategy| {
        let (rank, ranks) = (group.rank(), group.world_size());
        let mut pair = Pair::new(Net::new(&device()), small_groups(strategy), group);
        let own = batches(rank);
        let join = Join::new(own.clone(), group).with_weights(|batch| batch.dims()[0] as f64);
        let mut turns = 0;
        for (turn, weights) in join.zip(weights(ranks)) {
            let Turn {
                batch,
                weight,
                loss_factor,
            } = turn.unwrap();
            let expected = &own[turns.min(own.len() - 1)];
            assert_eq!(bits(batch.clone()), bits(expected.clone()), "turn {turns}");
            assert_eq!(weight, weights[rank]);
            assert_eq!(
                loss_factor,
                weights[rank] * ranks as f64 / weights.iter().sum::<f64>()
            );
            pair = pair.step(|net| net.loss(batch.clone()) * loss_factor);
            turns += 1;
        }
        assert_eq!(turns, rows_of(ranks - 1).len());
    });
}

/// What the factors are for: the averaged gradient is that of one mean over all samples of all ranks.
#[test]
fn the_average_is_the_mean_over_all_samples() {
    spawn(3, |group| {
        let factors = Join::new(batches(group.rank()), group);
        let factors = factors.with_weights(|batch| batch.dims()[0] as f64);
        for (at, turn) in factors.enumerate() {
            let turn = turn.unwrap();
            // The gradient of a loss in something that it is proportional to, averaged over ranks.
            let mean = turn.batch.clone().mean().into_scalar::<f32>();
            let averaged = f64::from(mean) * turn.loss_factor / 3.0;
            let averaged = group.mean(averaged, 1.0).unwrap() * 3.0;

            let present = (0..3).filter(|&rank| at < rows_of(rank).len());
            let all = present.map(|rank| batch(rank, at, rows_of(rank)[at]));
            let all = Tensor::cat(all.collect(), 0);
            let expected = f64::from(all.mean().into_scalar::<f32>());
            // Means of at most 54 elements in f32, each below 0.5.
            assert!((averaged - expected).abs() < 54.0 * 0.5 * f64::from(f32::EPSILON));
        }
    });
}

/// One collective per turn, and one by which all learn that nobody has any more.
#[test]
fn a_turn_is_one_collective_and_all_end_together() {
    let turns = spawn(3, |group| {
        let mut join = Join::new(vec![(); 2 * group.rank() + 1], group);
        let before = group.traffic().total_calls();
        let factors: Vec<f64> = join
            .by_ref()
            .map(|turn| turn.unwrap().loss_factor)
            .collect();
        assert_eq!(group.traffic().total_calls() - before, 6);
        assert_eq!(group.traffic().get(Collective::AllGather).calls, 6);
        assert!(join.next().is_none());
        assert_eq!(group.traffic().total_calls() - before, 6);
        factors
    });
    // Each counts as one of those that are left.
    assert_eq!(turns[0], [1.0, 0.0, 0.0, 0.0, 0.0]);
    assert_eq!(turns[1], [1.0, 1.5, 1.5, 0.0, 0.0]);
    assert_eq!(turns[2], [1.0, 1.5, 1.5, 3.0, 3.0]);
}

#[test]
fn a_rank_without_any_batch_needs_a_filler_and_no_rank_having_any_is_the_end() {
    spawn(2, |group| {
        let few = if group.rank() == 1 {
            vec![]
        } else {
            vec![7, 8]
        };
        let mut join = Join::new(few.clone(), group);
        let error = join.next().unwrap().unwrap_err();
        assert!(matches!(error, Error::NoBatch { other: 1, .. }), "{error}");
        assert!(error.to_string().contains("with_filler"));
        assert!(join.next().is_none());

        let join = Join::new(few, group).with_filler(9);
        let seen = join.map(|turn| turn.map(|turn| (turn.batch, turn.loss_factor)).unwrap());
        let seen: Vec<_> = seen.collect();
        let expected = [[(7, 2.0), (8, 2.0)], [(9, 0.0), (9, 0.0)]];
        assert_eq!(seen, expected[group.rank()]);
        assert!(Join::new(Vec::<u8>::new(), group).next().is_none());
    });
}

#[test]
fn weights_that_mean_nothing_are_refused_on_all_ranks() {
    spawn(2, |group: &ProcessGroup| {
        for wrong in [-1.0, f64::NAN, f64::INFINITY] {
            let own = if group.rank() == 1 { wrong } else { 1.0 };
            let mut join = Join::new([own, own], group).with_weights(|&weight| weight);
            let error = join.next().unwrap().unwrap_err();
            assert!(
                matches!(error, Error::BatchWeight { other: 1, .. }),
                "{error}"
            );
            assert!(join.next().is_none());
        }
        // Nothing that counts anywhere, such as batches without a masked token.
        let mut join = Join::new([0.0], group).with_weights(|&weight| weight);
        assert_eq!(join.next().unwrap().unwrap().loss_factor, 0.0);
    });
}
