//! Pre-trains BERT; see the README of this example.

use std::process::ExitCode;

use bert_large::cli::Options;
use burn_shard_alloc::HugePageAllocator;
use clap::Parser;

#[global_allocator]
static ALLOCATOR: HugePageAllocator = HugePageAllocator::new();

fn main() -> ExitCode {
    match bert_large::run(&Options::parse(), || ALLOCATOR.peak_bytes()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
