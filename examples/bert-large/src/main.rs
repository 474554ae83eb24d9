//! Pre-trains BERT; see the README of this example.

use std::panic::{self, AssertUnwindSafe};
use std::process::ExitCode;

use bert_large::cli::Options;
use bert_large::error::Error;
use bert_large::ranks::message_of;
use bert_large::{launch, logging};
use burn_shard_alloc::HugePageAllocator;
use clap::Parser;

#[global_allocator]
static ALLOCATOR: HugePageAllocator = HugePageAllocator::new();

fn main() -> ExitCode {
    let options = Options::parse();
    if let Err(error) = logging::install() {
        return failed(&error);
    }
    // A rank that panics (Burn's signatures return no error) is an error of the run, said in one line
    // below. The place in the code is for those who ask.
    if std::env::var_os("RUST_BACKTRACE").is_none() {
        panic::set_hook(Box::new(|panic| log::info!("{panic}")));
    }
    match panic::catch_unwind(AssertUnwindSafe(|| run(&options))) {
        Ok(Ok(code)) => code,
        Ok(Err(error)) => failed(&error.to_string()),
        Err(panic) => failed(&format!(
            "{} (a fault of this program; RUST_BACKTRACE=1 shows where)",
            message_of(panic.as_ref())
        )),
    }
}

fn run(options: &Options) -> Result<ExitCode, Error> {
    if let Some(ranks) = options.launch {
        return launch::launch(options, ranks).map(ExitCode::from);
    }
    let signal = bert_large::run(options, || ALLOCATOR.peak_bytes())?;
    // As a shell says of what a signal has ended.
    Ok(signal.map_or(ExitCode::SUCCESS, |signal| ExitCode::from(128 + signal)))
}

fn failed(error: &str) -> ExitCode {
    // Messages of a library may have several lines.
    let error = error.lines().map(str::trim).collect::<Vec<_>>().join(" ");
    eprintln!("error: {error}");
    ExitCode::FAILURE
}
