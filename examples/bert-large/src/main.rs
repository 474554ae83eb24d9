//! Pre-trains BERT; see the README of this example.

use std::process::ExitCode;

use bert_large::cli::Options;
use bert_large::launch;
use burn_shard_alloc::HugePageAllocator;
use clap::Parser;

#[global_allocator]
static ALLOCATOR: HugePageAllocator = HugePageAllocator::new();

fn main() -> ExitCode {
    let options = Options::parse();
    let outcome = match options.launch {
        Some(ranks) => launch::launch(&options, ranks).map(ExitCode::from),
        None => bert_large::run(&options, || ALLOCATOR.peak_bytes()).map(|()| ExitCode::SUCCESS),
    };
    match outcome {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
