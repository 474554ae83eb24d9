//! Ranks that exchange bytes: the conformance suite, the bits of ranks that are threads, and what is sent.
#![allow(clippy::unwrap_used, reason = "a test ends at the first error")]

mod common;

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use burn_shard_comm::{
    Element, Fault, Limit, MaybeSegment, OwnedSegments, ProcessGroup, ReduceOp, SegmentLayout,
    Segments, SparseSegments, Transport, conformance::MemoryTransport, shard_numel,
};
use common::{LONG, Memory, over, spawn};
use half::{bf16, f16};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

burn_shard_comm::conformance_tests!(Memory);
burn_shard_comm::sub_group_tests!(Memory);

/// What a rank ends with after a random program that is the same on all ranks, data apart.
fn random_program(group: &ProcessGroup, seed: u64) -> Vec<Vec<u8>> {
    let mut common = ChaCha8Rng::seed_from_u64(seed);
    let mut own = ChaCha8Rng::seed_from_u64(seed ^ (group.rank() as u64 + 1) << 32);
    (0..12)
        .map(|_| {
            let step = Step::draw(&mut common, group.world_size());
            match common.random_range(0..5) {
                0 => step.run(group, &mut own, |rng| rng.random::<f32>() - 0.5),
                1 => step.run(group, &mut own, |rng| {
                    bf16::from_f32(rng.random::<f32>() - 0.5)
                }),
                2 => step.run(group, &mut own, |rng| {
                    f16::from_f32(rng.random::<f32>() - 0.5)
                }),
                3 => step.run(group, &mut own, |rng| rng.random::<f64>() - 0.5),
                _ => step.run(group, &mut own, |rng| rng.random::<f32>() * 100.0),
            }
        })
        .collect()
}

struct Step {
    kind: u32,
    numels: Vec<usize>,
    op: ReduceOp,
    root: usize,
}

impl Step {
    fn draw(rng: &mut ChaCha8Rng, world_size: usize) -> Self {
        let longest = [3, 40, 600, 20_000][rng.random_range(0..4usize)];
        let mut numels: Vec<usize> = (0..rng.random_range(0..20))
            .map(|_| rng.random_range(0..=longest))
            .collect();
        if rng.random_range(0..4) == 0 {
            numels.push(rng.random_range(0..600_000));
        }
        let ops = [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Max, ReduceOp::Min];
        Self {
            kind: rng.random_range(0..4),
            numels,
            op: ops[rng.random_range(0..4usize)],
            root: rng.random_range(0..world_size),
        }
    }

    fn run<T: Element>(
        &self,
        group: &ProcessGroup,
        rng: &mut ChaCha8Rng,
        draw: impl Fn(&mut ChaCha8Rng) -> T,
    ) -> Vec<u8> {
        let (rank, world_size) = (group.rank(), group.world_size());
        let communicator = group.communicator();
        let mut vector = |numel: usize| -> Vec<T> { (0..numel).map(|_| draw(rng)).collect() };
        let shards: Vec<usize> = self
            .numels
            .iter()
            .map(|&numel| shard_numel(numel, world_size))
            .collect();
        let lengths = if self.kind == 1 {
            &shards
        } else {
            &self.numels
        };
        let mut output = OwnedSegments(lengths.iter().map(|&numel| vector(numel)).collect());
        match self.kind {
            0 => {
                let input = OwnedSegments(shards.iter().map(|&numel| vector(numel)).collect());
                let work = communicator.all_gather(Arc::new(input), &self.numels);
                work.unwrap().finish(&mut output).unwrap();
            }
            1 | 2 => {
                let segments = self.numels.iter().enumerate().map(|(index, &numel)| {
                    if (index + rank).is_multiple_of(3) {
                        MaybeSegment::Absent { numel }
                    } else {
                        MaybeSegment::Present(vector(numel))
                    }
                });
                let input = Arc::new(SparseSegments(segments.collect()));
                let work = if self.kind == 1 {
                    communicator.reduce_scatter(input, self.op).unwrap()
                } else {
                    communicator.all_reduce(input, self.op).unwrap()
                };
                work.finish(&mut output).unwrap();
            }
            _ => {
                let input: OwnedSegments<T> =
                    OwnedSegments(lengths.iter().map(|&numel| vector(numel)).collect());
                let input = (rank == self.root).then(|| Arc::new(input) as Arc<dyn Segments>);
                let work = communicator.broadcast(input, SegmentLayout::of(&output), self.root);
                work.unwrap().finish(&mut output).unwrap();
            }
        }
        (0..output.0.len())
            .flat_map(|index| output.bytes(index).unwrap().to_vec())
            .collect()
    }
}

#[test]
fn every_bit_is_that_of_ranks_that_are_threads() {
    for world_size in 1..=5 {
        for seed in 0..8 {
            let threads =
                ProcessGroup::spawn(world_size, |group| random_program(&group, seed)).unwrap();
            let pairs = spawn(world_size, LONG, |group| random_program(&group, seed));
            assert!(threads == pairs, "world size {world_size}, seed {seed}");
        }
    }
}

/// Counts what a rank sends.
#[derive(Debug)]
struct Counting {
    inner: MemoryTransport,
    sent: Arc<Sent>,
}

#[derive(Debug, Default)]
struct Sent {
    bytes: AtomicU64,
    exchanges: AtomicU64,
}

impl Transport for Counting {
    fn rank(&self) -> usize {
        self.inner.rank()
    }
    fn world_size(&self) -> usize {
        self.inner.world_size()
    }
    fn exchange(
        &mut self,
        to: usize,
        send: &[u8],
        from: usize,
        receive: &mut [u8],
        limit: Limit<'_>,
    ) -> Result<(), Fault> {
        self.sent
            .bytes
            .fetch_add(send.len() as u64, Ordering::Relaxed);
        self.sent.exchanges.fetch_add(1, Ordering::Relaxed);
        self.inner.exchange(to, send, from, receive, limit)
    }
    fn poll(&mut self) -> Result<(), Fault> {
        self.inner.poll()
    }
    fn ask(&mut self, words: &[u8], limit: Limit<'_>) -> Option<Vec<(usize, Vec<u8>)>> {
        self.inner.ask(words, limit)
    }
    fn farewell(&mut self, words: &[u8], limit: Limit<'_>) {
        self.inner.farewell(words, limit);
    }
}

/// Bytes each rank sent for `f`, and its exchanges.
fn sent(world_size: usize, f: impl Fn(&ProcessGroup) + Sync) -> Vec<(u64, u64)> {
    let counts: Vec<Arc<Sent>> = (0..world_size).map(|_| Arc::default()).collect();
    let transports = MemoryTransport::group(world_size)
        .into_iter()
        .zip(&counts)
        .map(|(inner, sent)| Counting {
            inner,
            sent: Arc::clone(sent),
        });
    for result in over(transports.collect(), LONG, |group| f(&group)) {
        result.unwrap();
    }
    counts
        .iter()
        .map(|sent| {
            (
                sent.bytes.load(Ordering::Relaxed),
                sent.exchanges.load(Ordering::Relaxed),
            )
        })
        .collect()
}

#[test]
fn every_rank_sends_what_the_table_says() {
    const NUMEL: usize = 120_000;
    const BYTES: u64 = 4 * NUMEL as u64;
    for world_size in 2..=4 {
        let others = world_size as u64 - 1;
        let part = BYTES / world_size as u64;
        let header = 40 * others;
        for (bytes, exchanges) in sent(world_size, |group| group.barrier().unwrap()) {
            assert_eq!((bytes, exchanges), (header, 2 * others));
        }
        let gather = sent(world_size, |group| {
            let input = vec![1.0f32; NUMEL / world_size];
            group.all_gather(&input, &mut [0.0; NUMEL]).unwrap();
        });
        let scatter = sent(world_size, |group| {
            let mut output = vec![0.0; NUMEL / world_size];
            let input = vec![1.0f32; NUMEL];
            group
                .reduce_scatter(&input, &mut output, ReduceOp::Sum)
                .unwrap();
        });
        for (bytes, _) in gather.into_iter().chain(scatter) {
            assert_eq!(bytes, header + others * part);
        }
        let reduce = sent(world_size, |group| {
            group
                .all_reduce(&mut vec![1.0f32; NUMEL], ReduceOp::Sum)
                .unwrap();
        });
        for (bytes, _) in reduce {
            assert_eq!(bytes, header + 2 * others * part);
        }
        let broadcast = sent(world_size, |group| {
            group.broadcast(&mut vec![1.0f32; NUMEL], 1).unwrap();
        });
        for (rank, (bytes, _)) in broadcast.into_iter().enumerate() {
            let parts = if rank == 1 { 2 * others } else { others - 1 };
            assert_eq!(bytes, header + parts * part);
        }
        // Small ones are over after one phase.
        let small = sent(world_size, |group| {
            group.all_reduce(&mut [1.0f32; 500], ReduceOp::Sum).unwrap();
        });
        for (bytes, exchanges) in small {
            assert_eq!((bytes, exchanges), (header + 2000 * others, 4 * others));
        }
    }
}

#[test]
fn many_small_segments_are_few_exchanges() {
    let counts = sent(2, |group| {
        let input = Arc::new(OwnedSegments(vec![vec![1.0f32; 100]; 300]));
        let mut output = input.0.clone();
        let work = group
            .communicator()
            .all_reduce(input, ReduceOp::Sum)
            .unwrap();
        work.finish(&mut OwnedSegments(std::mem::take(&mut output)))
            .unwrap();
        let shards = Arc::new(OwnedSegments(vec![vec![1.0f32; 50]; 300]));
        let mut output = OwnedSegments(vec![vec![0.0f32; 100]; 300]);
        let work = group.communicator().all_gather(shards, &[100; 300]);
        work.unwrap().finish(&mut output).unwrap();
    });
    for (_, exchanges) in counts {
        // Two for each header, then two and one.
        assert_eq!(exchanges, 2 + 2 + 2 + 1);
    }
}
