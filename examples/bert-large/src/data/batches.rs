//! The batches each rank makes of its share of the examples.
//!
//! Example `i` of a run depends on the text, the seed and `i` alone. Rank `r` of `n` takes the
//! examples `r, r + n, r + 2n, ...`: no two ranks see the same one, and a step of `n` ranks with
//! `b` rows each reads the same examples as a step of one rank with `n * b` rows.
//!
//! `burn::data` has no such order: its loader shuffles with a generator of its own, and it comes with
//! `burn-dataset` (databases, downloads), while dealing out indices takes the twenty lines below.

use std::sync::Arc;

use burn::prelude::*;
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;

use super::dataset::{Dataset, Example};
use super::masking::Hidden;
use crate::model::{Input, Targets};

/// Which rank of how many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    /// Below `world_size`.
    pub rank: usize,
    /// All ranks.
    pub world_size: usize,
}

/// One rank's batches, without end: every epoch is shuffled anew.
#[derive(Debug)]
pub struct Batches {
    dataset: Arc<Dataset>,
    shard: Shard,
    micro_batch: usize,
    seed: u64,
    next: usize,
    epoch: usize,
    order: Vec<usize>,
}

impl Batches {
    /// A rank's batches of `micro_batch` rows.
    pub fn new(dataset: Arc<Dataset>, shard: Shard, micro_batch: usize, seed: u64) -> Self {
        let next = shard.rank;
        let mut batches = Self {
            dataset,
            shard,
            micro_batch,
            seed,
            next,
            epoch: 0,
            order: Vec::new(),
        };
        batches.shuffle();
        batches
    }

    fn shuffle(&mut self) {
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
        // Stream 0 is for orders, the others are for examples.
        rng.set_word_pos(u128::from(self.epoch as u64) << 40);
        self.order = (0..self.dataset.examples()).collect();
        self.order.shuffle(&mut rng);
    }

    fn next_example(&mut self) -> Example {
        let (epoch, index) = (
            self.next / self.dataset.examples(),
            self.next % self.dataset.examples(),
        );
        if epoch != self.epoch {
            self.epoch = epoch;
            self.shuffle();
        }
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
        rng.set_stream(1 + self.next as u64);
        self.next += self.shard.world_size;
        self.dataset.example(self.order[index], &mut rng)
    }

    /// Passes over batches without making them.
    pub fn skip(&mut self, batches: usize) {
        self.next += batches * self.micro_batch * self.shard.world_size;
    }

    /// The next batch.
    pub fn next_batch(&mut self) -> Batch {
        Batch {
            rows: (0..self.micro_batch).map(|_| self.next_example()).collect(),
        }
    }
}

/// Rows of one length.
#[derive(Clone, Debug)]
pub struct Batch {
    /// At least one.
    pub rows: Vec<Example>,
}

impl Batch {
    /// At most `rows` of the examples that are not trained on, `None` if there are none. The same for
    /// the same seed.
    pub fn held_out(dataset: &Dataset, rows: usize, seed: u64) -> Option<Self> {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        // The last stream: training counts up from the first.
        rng.set_stream(u64::MAX);
        let rows = 0..rows.min(dataset.held_out());
        let rows: Vec<_> = rows
            .map(|index| dataset.held_out_example(index, &mut rng))
            .collect();
        (!rows.is_empty()).then_some(Self { rows })
    }

    /// Tokens that are not padding.
    pub fn tokens(&self) -> usize {
        self.rows.iter().map(|row| row.end).sum()
    }

    /// The batch as tensors.
    pub fn to_device(&self, device: &Device) -> (Input, Targets) {
        let (rows, length) = (self.rows.len(), self.rows[0].ids.len());
        let grid = |cell: &dyn Fn(&Example, usize) -> i64| {
            let cells = self
                .rows
                .iter()
                .flat_map(|row| (0..length).map(move |at| cell(row, at)));
            let cells: Vec<i64> = cells.collect();
            Tensor::<2, Int>::from_data(TensorData::new(cells, [rows, length]), device)
        };
        let input = Input {
            ids: grid(&|row, at| i64::from(row.ids[at])),
            token_types: grid(&|row, at| i64::from((row.second..row.end).contains(&at))),
            padding: grid(&|row, at| i64::from(at >= row.end)).bool(),
        };

        let hidden = self.rows.iter().enumerate().flat_map(|(index, row)| {
            let cell = move |hidden: &Hidden| (index * length + hidden.position) as i64;
            row.hidden
                .iter()
                .map(move |hidden| (cell(hidden), i64::from(hidden.token)))
        });
        let (mut positions, mut labels): (Vec<i64>, Vec<i64>) = hidden.unzip();
        let masked = labels.len();
        if masked == 0 {
            positions.push(0);
            labels.push(0);
        }
        let line = |values: &[i64]| Tensor::<1, Int>::from_data(values, device);
        let next: Vec<i64> = self
            .rows
            .iter()
            .map(|row| i64::from(row.random_next))
            .collect();
        let targets = Targets {
            positions: line(&positions),
            labels: line(&labels),
            masked,
            next_sentence: line(&next),
        };
        (input, targets)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::super::dataset::tests;
    use super::*;
    use crate::config::PAD_ID;

    const SEQ_LEN: usize = 32;

    fn dataset(documents: usize) -> Dataset {
        tests::dataset(documents, SEQ_LEN)
    }

    fn batches(dataset: &Arc<Dataset>, rank: usize, world_size: usize) -> Batches {
        Batches::new(Arc::clone(dataset), Shard { rank, world_size }, 3, 7)
    }

    /// The row as it was before tokens were hidden.
    fn original(row: &Example) -> Vec<u32> {
        let mut ids = row.ids.clone();
        for hidden in &row.hidden {
            ids[hidden.position] = hidden.token;
        }
        ids
    }

    #[test]
    fn a_row_is_cls_first_sep_second_sep_padding() {
        let dataset = Arc::new(dataset(20));
        let rows = (0..100).flat_map(|_| batches(&dataset, 0, 1).next_batch().rows);
        for row in rows {
            let ids = original(&row);
            assert_eq!(ids.len(), SEQ_LEN);
            assert_eq!((ids[0], ids[row.second - 1], ids[row.end - 1]), (2, 3, 3));
            assert!(ids[row.end..].iter().all(|&id| id == PAD_ID));
            let texts = [&ids[1..row.second - 1], &ids[row.second..row.end - 1]];
            assert!(
                texts
                    .iter()
                    .all(|text| !text.is_empty() && text.iter().all(|&id| id > 4))
            );
            assert!(!row.hidden.is_empty());
            assert!(
                row.hidden.iter().all(|hidden| hidden.token > 4),
                "a special token is hidden"
            );
        }
    }

    #[test]
    fn half_of_the_second_segments_are_from_another_document() {
        let dataset = Arc::new(dataset(50));
        let mut batches = batches(&dataset, 0, 1);
        let mut random = 0;
        for row in (0..700).flat_map(|_| batches.next_batch().rows) {
            let ids = original(&row);
            let [last, next] = [ids[row.second - 2], ids[row.second]];
            assert_eq!(last / 100 != next / 100, row.random_next);
            assert!(row.random_next || last < next, "text should go on");
            random += usize::from(row.random_next);
        }
        // 2,100 fair coins: a standard deviation is 23.
        assert!(random.abs_diff(1050) < 100, "{random}");
    }

    #[test]
    fn ranks_share_an_epoch_without_overlap() {
        let dataset = Arc::new(dataset(30));
        for world_size in [1, 2, 3, 4] {
            let mut seen = HashSet::new();
            let mut rows = 0;
            for rank in 0..world_size {
                let mut batches = batches(&dataset, rank, world_size);
                let mut left = dataset.examples().saturating_sub(rank).div_ceil(world_size);
                while left > 0 {
                    let order = batches.order.clone();
                    let index = batches.next;
                    batches.next_example();
                    seen.insert(order[index]);
                    rows += 1;
                    left -= 1;
                }
            }
            assert_eq!(rows, dataset.examples(), "{world_size} ranks");
            assert_eq!(seen.len(), dataset.examples(), "{world_size} ranks");
        }
    }

    #[test]
    fn an_example_does_not_depend_on_the_number_of_ranks() {
        let dataset = Arc::new(dataset(10));
        let mut one = batches(&dataset, 0, 1);
        let mut ranks: Vec<_> = (0..3).map(|rank| batches(&dataset, rank, 3)).collect();
        // Well beyond an epoch, so that orders change on the way.
        for _ in 0..dataset.examples() {
            for rank in &mut ranks {
                assert_eq!(one.next_example(), rank.next_example());
            }
        }
        let other_seed = Batches::new(
            Arc::clone(&dataset),
            Shard {
                rank: 0,
                world_size: 1,
            },
            3,
            8,
        )
        .next_batch();
        assert_ne!(other_seed.rows, batches(&dataset, 0, 1).next_batch().rows);
    }

    #[test]
    fn batches_that_are_skipped_change_nothing_of_the_next() {
        let dataset = Arc::new(dataset(10));
        let mut made = batches(&dataset, 1, 3);
        // From within the first epoch to beyond the second.
        for skipped in 0..dataset.examples() {
            let mut rest = batches(&dataset, 1, 3);
            rest.skip(skipped);
            let expected = made.next_batch();
            assert_eq!(rest.next_batch().rows, expected.rows, "{skipped} skipped");
        }
        assert!(made.epoch > 1);
    }

    #[test]
    fn tensors_say_what_the_rows_say() {
        let dataset = Arc::new(dataset(20));
        let batch = batches(&dataset, 0, 1).next_batch();
        let (input, targets) = batch.to_device(&Device::flex());
        let flags = |tensor: Tensor<2, Int>| tensor.into_data().iter::<i64>().collect::<Vec<_>>();
        let (ids, types) = (flags(input.ids), flags(input.token_types));
        let padding = flags(input.padding.int());
        for (index, row) in batch.rows.iter().enumerate() {
            let at = index * SEQ_LEN;
            assert_eq!(
                ids[at..at + SEQ_LEN],
                row.ids.iter().map(|&id| i64::from(id)).collect::<Vec<_>>()
            );
            let types = &types[at..at + SEQ_LEN];
            assert_eq!(types.iter().position(|&kind| kind == 1), Some(row.second));
            assert_eq!(types.iter().sum::<i64>(), (row.end - row.second) as i64);
            assert_eq!(
                padding[at..at + SEQ_LEN].iter().sum::<i64>(),
                (SEQ_LEN - row.end) as i64
            );
        }
        let labels: Vec<i64> = targets.labels.into_data().iter().collect();
        let positions: Vec<i64> = targets.positions.into_data().iter().collect();
        let hidden = batch.rows.iter().flat_map(|row| &row.hidden);
        assert_eq!(
            labels,
            hidden
                .map(|hidden| hidden.token.into())
                .collect::<Vec<i64>>()
        );
        assert_eq!(targets.masked, positions.len());
    }
}
