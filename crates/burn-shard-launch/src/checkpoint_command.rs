//! `burn-shard checkpoint`: what a checkpoint holds, whether it is intact, and copies of it in other
//! forms. Nothing here changes the checkpoint that it looks at.
#![allow(clippy::doc_markdown, reason = "the comments are what --help prints")]

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use burn_shard_checkpoint::{Checkpoint, Content, Error, FileInfo, TensorInfo};
use clap::{Args, Subcommand};

use crate::report;

#[derive(Subcommand)]
pub(crate) enum CheckpointCommand {
    /// Prints step, ranks, files and tensors. Reads the manifest only.
    Inspect(Inspect),
    /// Compares all checksums, prints what is wrong, and fails if anything is.
    Verify(Directory),
    /// Writes the full tensors to one safetensors file.
    Consolidate(Consolidate),
    /// Writes the same checkpoint, cut evenly for another number of ranks. (Loading needs no such
    /// thing: any number of ranks reads any checkpoint.)
    Reshard(Reshard),
}

#[derive(Args)]
pub(crate) struct Directory {
    /// A checkpoint, or the directory in which checkpoints are kept: then the latest.
    #[arg(value_name = "DIR")]
    path: PathBuf,
}

#[derive(Args)]
pub(crate) struct Inspect {
    #[command(flatten)]
    directory: Directory,
    /// Prints one line per tensor, too.
    #[arg(long)]
    tensors: bool,
}

#[derive(Args)]
pub(crate) struct Consolidate {
    #[command(flatten)]
    directory: Directory,
    /// The file to write, which must not be there yet.
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Writes optimizer state, too, under `role/path`.
    #[arg(long)]
    everything: bool,
}

#[derive(Args)]
pub(crate) struct Reshard {
    #[command(flatten)]
    directory: Directory,
    /// Ranks that the new checkpoint is cut for.
    #[arg(long, value_name = "RANKS")]
    ranks: usize,
    /// The directory in which to keep it; made if it is not there.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
}

/// Does what the command line says; what to exit with: 1 if a checkpoint is not what it should be, or
/// could not be read or written.
pub(crate) fn run(command: &CheckpointCommand) -> ExitCode {
    let report = match command {
        CheckpointCommand::Inspect(arguments) => inspect(arguments),
        CheckpointCommand::Verify(directory) => return verify(&directory.path),
        CheckpointCommand::Consolidate(arguments) => consolidate(arguments),
        CheckpointCommand::Reshard(arguments) => reshard(arguments),
    };
    match report {
        Ok(text) => print(&text),
        Err(error) => failed(&error),
    }
}

fn inspect(arguments: &Inspect) -> Result<String, Error> {
    let checkpoint = Checkpoint::open(&arguments.directory.path)?;
    let listed = if arguments.tensors {
        checkpoint.tensors()
    } else {
        &[]
    };
    Ok(describe(&checkpoint, listed))
}

fn describe(checkpoint: &Checkpoint, listed: &[TensorInfo]) -> String {
    let manifest = checkpoint.manifest();
    let mut text = format!("{}\n", checkpoint.path().display());
    let mut line = |name: &str, value: String| {
        let (Ok(()) | Err(_)) = writeln!(text, "{name:<12} {value}");
    };
    line("step", manifest.step.to_string());
    line("sequence", manifest.sequence.to_string());
    line("ranks", manifest.world_size.to_string());
    line("strategy", quoted(&manifest.description.strategy));
    line("plan", quoted(&manifest.description.plan));
    line("user state", manifest.description.user.to_string());
    line("tensors", tensors_by_role(checkpoint.tensors()));
    line("bytes", size(manifest.bytes()));
    for file in &manifest.files {
        let FileInfo {
            name, bytes, xxh3, ..
        } = file;
        line("file", format!("{name}  {}  xxh3 {xxh3}", size(*bytes)));
    }
    for tensor in listed {
        let parts = tensor
            .parts
            .iter()
            .map(|part| format!("{}..{}@{}", part.start, part.end, part.file));
        let parts: Vec<_> = parts.collect();
        let name = tensor.name();
        line(
            "tensor",
            format!(
                "{name}  {:?} {:?}  {}",
                tensor.dtype,
                tensor.shape,
                parts.join(" ")
            ),
        );
    }
    text
}

/// Such as `12: 6 parameter, 3 moment_1, 3 moment_2`.
fn tensors_by_role(tensors: &[TensorInfo]) -> String {
    let mut roles = std::collections::BTreeMap::<_, usize>::new();
    for tensor in tensors {
        *roles.entry(&tensor.role).or_default() += 1;
    }
    let counts: Vec<_> = roles
        .iter()
        .map(|(role, count)| format!("{count} {role}"))
        .collect();
    format!("{}: {}", tensors.len(), counts.join(", "))
}

fn quoted(text: &str) -> String {
    text.escape_debug().to_string()
}

/// Bytes, and in a unit that is easier to read.
fn size(bytes: u64) -> String {
    let units = [("GiB", 30), ("MiB", 20), ("KiB", 10)];
    match units.into_iter().find(|(_, shift)| bytes >> shift > 0) {
        Some((unit, shift)) => {
            let tenths = (u128::from(bytes) * 10) >> shift;
            format!("{bytes} ({}.{} {unit})", tenths / 10, tenths % 10)
        }
        None => bytes.to_string(),
    }
}

fn verify(path: &Path) -> ExitCode {
    let checkpoint = match Checkpoint::open(path) {
        Ok(checkpoint) => checkpoint,
        Err(error) => return failed(&error),
    };
    let errors = checkpoint.verify_all();
    for error in &errors {
        eprintln!("burn-shard checkpoint: {error}");
    }
    let (files, bytes) = (
        checkpoint.manifest().files.len(),
        checkpoint.manifest().bytes(),
    );
    let path = checkpoint.path().display();
    if errors.is_empty() {
        return print(&format!(
            "{path}: intact, {files} files, {} bytes\n",
            size(bytes)
        ));
    }
    eprintln!(
        "burn-shard checkpoint: {path}: {} of {files} files are not intact",
        errors.len()
    );
    ExitCode::FAILURE
}

fn consolidate(arguments: &Consolidate) -> Result<String, Error> {
    let checkpoint = Checkpoint::open(&arguments.directory.path)?;
    checkpoint.verify()?;
    let content = if arguments.everything {
        Content::Everything
    } else {
        Content::Parameters
    };
    let bytes = burn_shard_checkpoint::consolidate(&checkpoint, &arguments.out, content)?;
    Ok(format!(
        "{}: {} bytes\n",
        arguments.out.display(),
        size(bytes)
    ))
}

fn reshard(arguments: &Reshard) -> Result<String, Error> {
    let checkpoint = Checkpoint::open(&arguments.directory.path)?;
    checkpoint.verify()?;
    let made = burn_shard_checkpoint::reshard(&checkpoint, arguments.ranks, &arguments.out)?;
    let (path, ranks) = (made.path.display(), arguments.ranks);
    Ok(format!(
        "{path}: {ranks} ranks, {} bytes\n",
        size(made.bytes)
    ))
}

fn print(text: &str) -> ExitCode {
    report::print("checkpoint", text)
}

fn failed(error: &Error) -> ExitCode {
    eprintln!("burn-shard checkpoint: {error}");
    ExitCode::FAILURE
}
