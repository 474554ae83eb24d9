//! The example over NCCL, as far as that goes without a GPU: over a double that works on host memory.

#![allow(
    clippy::unwrap_used,
    reason = "a test fails by panicking, helpers included"
)]

mod common;

use std::fs;
use std::sync::Arc;

use bert_large::cli::Options;
use bert_large::ranks::Ranks;
use bert_large::run_on;
use burn::prelude::*;
use burn_shard::{Local, ProcessGroup};
use burn_shard_nccl::{Memory, NcclCommunicator};
use burn_shard_nccl_double::{HostMemory, load};
use clap::Parser;
use common::{write_corpus, write_tokenizer};

#[test]
fn losses_over_nccl_are_those_of_threads_to_the_last_bit() {
    let root = tempfile::tempdir().unwrap();
    let [corpus, tokenizer, losses] =
        ["corpus.jsonl", "tokenizer.json", "losses.csv"].map(|name| root.path().join(name));
    write_corpus(&corpus, 60);
    write_tokenizer(&tokenizer);
    for strategy in ["zero2", "zero3"] {
        let options = Options::try_parse_from([
            "bert-large",
            "--steps=3",
            "--micro-batch=2",
            "--seq-len=32",
            "--dropout=0",
            "--strategy",
            strategy,
            "--corpus",
            corpus.to_str().unwrap(),
            "--tokenizer",
            tokenizer.to_str().unwrap(),
            "--losses",
            losses.to_str().unwrap(),
        ])
        .unwrap();
        let run = options.run().unwrap();
        // The program's device, but for its float type: that can be set once, before there are tensors.
        let device = Device::flex().autodiff();
        let device = match strategy {
            "zero3" => device.gradient_checkpointing(),
            _ => device,
        };

        run_on(&Ranks::Threads(2), &options, run.clone(), &device, || 0).unwrap();
        let of_threads = fs::read_to_string(&losses).unwrap();
        assert_eq!(of_threads.lines().count(), 4, "{of_threads}");

        let ranks = Local::new(2).threads_per_rank(1);
        let reduced = ranks.spawn(|control| {
            let memory: Arc<dyn Memory> = Arc::new(HostMemory::new(control.rank()));
            let nccl = NcclCommunicator::new(&control, Ok(load()), Ok(memory)).unwrap();
            let group = ProcessGroup::new(Arc::new(nccl));
            let ranks = Ranks::Process(group.clone());
            run_on(&ranks, &options, run.clone(), &device, || 0).unwrap();
            group.traffic().total_bytes()
        });
        assert_eq!(
            fs::read_to_string(&losses).unwrap(),
            of_threads,
            "{strategy}"
        );
        assert!(
            reduced.unwrap().iter().all(|&bytes| bytes > 1 << 20),
            "NCCL carried it"
        );
    }
}
