//! Full tensors in one safetensors file, and a checkpoint cut anew for another number of ranks.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use crate::directory::{self, PARTIAL, sync_directory};
use crate::manifest::TensorInfo;
use crate::part::check_all;
use crate::tensor_file;
use crate::{Checkpoint, Error, Keep, Published, Role, TensorPart, Writer, even_range};

/// Which tensors go to a consolidated file.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// Parameters only, under their module paths: what other programs load.
    Parameters,
    /// Parameters, and all else under `role/path`.
    Everything,
}

/// Writes full tensors to one safetensors file, durable and whole or not at all. Returns its bytes.
///
/// Lazy parts are fetched one at a time. A tensor that is only partly given is refused.
///
/// # Errors
///
/// [`Error::Exists`] if `out` is there, [`Error::Gap`] for a tensor that is not whole, and
/// those of [`Writer::write_rank`]. On failure nothing is left at `out`.
pub fn write_consolidated(out: impl AsRef<Path>, parts: Vec<TensorPart<'_>>) -> Result<u64, Error> {
    let out = out.as_ref();
    check_all(&parts)?;
    if let Some(part) = parts.iter().find(|part| !part.is_whole()) {
        let (start, end) = part.first_gap();
        return Err(Error::Gap {
            name: part.name.clone(),
            start,
            end,
        });
    }
    if fs::symlink_metadata(out).is_ok() {
        return Err(Error::Exists { path: out.into() });
    }
    let temporary = beside(out)?;
    let about = HashMap::from([("format".into(), "pt".into())]);
    let written = tensor_file::write(&temporary, about, parts).and_then(|written| {
        fs::rename(&temporary, out).map_err(Error::io("publish", out))?;
        Ok(written.bytes)
    });
    match written {
        Ok(bytes) => {
            sync_directory(&parent(out))?;
            Ok(bytes)
        }
        Err(error) => {
            if let Err(left) = fs::remove_file(&temporary)
                && left.kind() != std::io::ErrorKind::NotFound
            {
                log::warn!("{}", Error::io("remove", temporary)(left));
            }
            Err(error)
        }
    }
}

/// Writes the full tensors of a checkpoint to one safetensors file. Returns its bytes.
///
/// Memory: one tensor. The checkpoint is not [verified](Checkpoint::verify).
///
/// # Errors
///
/// Those of [`write_consolidated`] and [`Checkpoint::read`].
pub fn consolidate(
    checkpoint: &Checkpoint,
    out: impl AsRef<Path>,
    content: Content,
) -> Result<u64, Error> {
    let wanted =
        |tensor: &&TensorInfo| content == Content::Everything || tensor.role == Role::PARAMETER;
    let tensors = checkpoint.tensors().iter().filter(wanted);
    write_consolidated(
        out,
        tensors
            .map(|tensor| part(checkpoint, tensor, 0, 1))
            .collect(),
    )
}

/// Writes a checkpoint below `root` that holds the same as `checkpoint`, cut evenly for `world_size`
/// ranks. Loading needs no such thing: any number of ranks reads any checkpoint.
///
/// Memory: one rank's part of one tensor. The checkpoint is not [verified](Checkpoint::verify).
///
/// # Errors
///
/// [`Error::NoRanks`], and those of [`Writer`] and [`Checkpoint::read`].
pub fn reshard(
    checkpoint: &Checkpoint,
    world_size: usize,
    root: impl AsRef<Path>,
) -> Result<Published, Error> {
    if world_size == 0 {
        return Err(Error::NoRanks);
    }
    let manifest = checkpoint.manifest();
    let writer = Writer::create(root, manifest.step)?;
    let written = (0..world_size)
        .map(|rank| {
            let tensors = checkpoint.tensors().iter();
            let parts = tensors.map(|tensor| part(checkpoint, tensor, rank, world_size));
            writer.write_rank(rank, parts.collect())
        })
        .collect::<Result<Vec<_>, _>>();
    match written {
        Ok(reports) => writer.publish(&reports, &manifest.description, Keep::ALL),
        Err(error) => Err(writer.withdrawn(error)),
    }
}

/// Rank `rank`'s part of a tensor, read when its turn comes.
fn part<'a>(
    checkpoint: &'a Checkpoint,
    tensor: &'a TensorInfo,
    rank: usize,
    world_size: usize,
) -> TensorPart<'a> {
    let range = even_range(tensor.numel(), rank, world_size);
    let name = tensor.name();
    let ranges = vec![range.clone()];
    TensorPart::lazy(
        name.clone(),
        tensor.dtype,
        &tensor.shape,
        ranges,
        move || {
            let mut bytes = vec![0; range.len() * tensor.dtype.size_bytes()];
            checkpoint.read_range(&name, range, &mut bytes)?;
            Ok(bytes)
        },
    )
}

/// Where a file is written before it has its name: in the same directory, hidden.
fn beside(out: &Path) -> Result<PathBuf, Error> {
    let Some(name) = out.file_name() else {
        return Err(Error::NotARegularFile { path: out.into() });
    };
    let nonce = directory::nonce();
    let mut hidden = OsString::from(".");
    hidden.push(name);
    hidden.push(format!(".{nonce:016x}.{PARTIAL}"));
    Ok(out.with_file_name(hidden))
}

fn parent(out: &Path) -> PathBuf {
    match out.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.into(),
        Some(_) | None => PathBuf::from("."),
    }
}
