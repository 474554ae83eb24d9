//! Saving: rank 0 prepares, every rank writes its file, rank 0 publishes.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use crate::directory::{
    self, Lock, MANIFEST, MANIFEST_CHECKSUM, Name, PARTIAL, leftovers, sync_directory,
    write_durably,
};
use crate::manifest::{Checksum, FileInfo, Manifest, PartInfo, TensorInfo};
use crate::part::check_all;
use crate::tensor_file::{self, check_length};
use crate::{DType, Description, Error, Keep, TensorName, TensorPart};

/// What rank 0 tells the others about the save that it prepared.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Prepared {
    step: u64,
    sequence: u64,
    nonce: u64,
}

impl Prepared {
    fn name(&self) -> Name {
        Name {
            sequence: self.sequence,
            step: self.step,
        }
    }

    fn directory(&self) -> String {
        self.name().hidden(self.nonce, PARTIAL)
    }
}

/// What a rank tells rank 0 about the file that it wrote.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RankReport {
    /// Directory of the save, to tell reports of different saves apart.
    directory: String,
    file: FileInfo,
    tensors: Vec<Held>,
}

/// What one rank holds of a tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Held {
    name: TensorName,
    dtype: DType,
    shape: Vec<usize>,
    ranges: Vec<(usize, usize)>,
}

/// What rank 0 tells the others about the checkpoint that it published.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Published {
    /// Directory of the checkpoint.
    pub path: PathBuf,
    /// Step that was saved.
    pub step: u64,
    /// Bytes of all ranks' files.
    pub bytes: u64,
    /// Names of old checkpoints that were removed.
    pub removed: Vec<String>,
    /// Why old checkpoints could not be removed. The new one is published nevertheless.
    pub not_removed: Vec<String>,
}

/// One save, on one rank. Rank 0 [creates](Self::create) it, the others [join](Self::join) it.
///
/// See [the crate's page](crate) for the whole of a save. Dropped without publishing it leaves a
/// hidden directory, which the next save removes.
#[derive(Debug)]
pub struct Writer {
    root: PathBuf,
    prepared: Prepared,
    /// Rank 0's.
    lock: Option<Lock>,
}

impl Writer {
    /// Prepares a save of `step` below the directory `root`, on rank 0. Makes `root` if it is not
    /// there, and removes what saves that did not finish have left.
    ///
    /// # Errors
    ///
    /// [`Error::Locked`] if another job saves there, [`Error::Io`].
    pub fn create(root: impl AsRef<Path>, step: u64) -> Result<Self, Error> {
        let root = root.as_ref();
        fs::create_dir_all(root).map_err(Error::io("create", root))?;
        let lock = Lock::take(root)?;
        for leftover in leftovers(root)? {
            fs::remove_dir_all(&leftover).map_err(Error::io("remove", &leftover))?;
        }
        let newest = directory::checkpoints(root)?.last().copied();
        let prepared = Prepared {
            step,
            sequence: newest.map_or(1, |name| name.sequence.saturating_add(1)),
            nonce: directory::nonce(),
        };
        let writer = Self {
            root: root.into(),
            prepared,
            lock: Some(lock),
        };
        let path = writer.partial();
        fs::create_dir(&path).map_err(Error::io("create", &path))?;
        Ok(writer)
    }

    /// Joins a save that rank 0 prepared, on another rank. `root` is the same directory, which need
    /// not have the same path.
    ///
    /// # Errors
    ///
    /// [`Error::NotShared`] if this rank does not see what rank 0 made.
    pub fn join(root: impl AsRef<Path>, prepared: &Prepared) -> Result<Self, Error> {
        let writer = Self {
            root: root.as_ref().into(),
            prepared: prepared.clone(),
            lock: None,
        };
        let path = writer.partial();
        if !path.is_dir() {
            return Err(Error::NotShared { path });
        }
        Ok(writer)
    }

    /// What the other ranks need to [join](Self::join).
    #[must_use]
    pub const fn prepared(&self) -> &Prepared {
        &self.prepared
    }

    /// Where files lie until the checkpoint is published.
    fn partial(&self) -> PathBuf {
        self.root.join(self.prepared.directory())
    }

    /// Writes this rank's file and makes it durable.
    ///
    /// May run on any thread. Memory: nothing but a buffer of 1 MiB and the bytes of one lazy part.
    ///
    /// # Errors
    ///
    /// Before anything is written: [`Error::BadName`], [`Error::DuplicateTensor`],
    /// [`Error::ShapeOverflow`], [`Error::Range`], [`Error::Overlap`] for parts that cannot be.
    /// Then [`Error::PartLength`], [`Error::Source`], and [`Error::Io`] if the system refuses (a
    /// full disk, for example).
    pub fn write_rank(&self, rank: usize, parts: Vec<TensorPart<'_>>) -> Result<RankReport, Error> {
        check_all(&parts)?;
        let tensors = parts
            .iter()
            .map(|part| Held {
                name: part.name.clone(),
                dtype: part.dtype,
                shape: part.shape.clone(),
                ranges: part
                    .ranges
                    .iter()
                    .map(|range| (range.start, range.end))
                    .collect(),
            })
            .collect();
        let about = HashMap::from([
            ("format".into(), crate::manifest::FORMAT.into()),
            ("save".into(), self.prepared.directory()),
            ("rank".into(), rank.to_string()),
        ]);
        let name = format!("rank-{rank:05}.safetensors");
        let partial = self.partial();
        let written = tensor_file::write(&partial.join(&name), about, parts)?;
        sync_directory(&partial)?;
        Ok(RankReport {
            directory: self.prepared.directory(),
            file: FileInfo {
                name,
                rank,
                bytes: written.bytes,
                xxh3: written.xxh3,
                header_xxh3: written.header_xxh3,
            },
            tensors,
        })
    }

    /// Publishes what all ranks have written, on rank 0: writes the manifest, gives the directory its
    /// name, moves `latest`, and then removes the old checkpoints that `keep` does not keep.
    ///
    /// # Errors
    ///
    /// Refusals: [`Error::NotRankZero`], [`Error::Reports`], [`Error::OtherSave`],
    /// [`Error::UserState`], [`Error::NotShared`] or [`Error::FileLength`] for a file that is not
    /// there as reported, [`Error::Conflict`], [`Error::Gap`] and [`Error::Overlap`] if ranks do not
    /// hold each element once. Failure: [`Error::Io`]. In all of them what was written is removed
    /// (unless all that failed was to make the move of `latest` durable: then the checkpoint stays).
    /// An old checkpoint that cannot be removed is no error, but in [`Published::not_removed`].
    pub fn publish(
        self,
        reports: &[RankReport],
        description: &Description,
        keep: Keep,
    ) -> Result<Published, Error> {
        if self.lock.is_none() {
            return Err(Error::NotRankZero);
        }
        let partial = self.partial();
        match self.complete(&partial, reports, description) {
            Ok(bytes) => self.announce(&partial, bytes, keep),
            Err(error) => Err(self.withdrawn(error)),
        }
    }

    /// Gives up a save, on rank 0, and removes what was written. Other ranks do not write any more.
    ///
    /// # Errors
    ///
    /// [`Error::NotRankZero`], [`Error::Io`].
    pub fn abandon(self) -> Result<(), Error> {
        if self.lock.is_none() {
            return Err(Error::NotRankZero);
        }
        let partial = self.partial();
        fs::remove_dir_all(&partial).map_err(Error::io("remove", &partial))
    }

    /// Removes what was written, as far as that is possible; `error` is what the caller needs to
    /// know.
    pub(crate) fn withdrawn(self, error: Error) -> Error {
        if let Err(left) = self.abandon() {
            log::warn!("{left} (the next save tries again)");
        }
        error
    }

    /// Writes the manifest. Returns the bytes of all files.
    fn complete(
        &self,
        partial: &Path,
        reports: &[RankReport],
        description: &Description,
    ) -> Result<u64, Error> {
        let mut by_rank: Vec<&RankReport> = reports.iter().collect();
        by_rank.sort_by_key(|report| report.file.rank);
        for report in &by_rank {
            if report.directory != self.prepared.directory() {
                return Err(Error::OtherSave {
                    rank: report.file.rank,
                    expected: self.prepared.directory(),
                    found: report.directory.clone(),
                });
            }
        }
        let manifest = Manifest::new(
            (self.prepared.step, self.prepared.sequence),
            description.clone(),
            by_rank.iter().map(|report| report.file.clone()).collect(),
            merge(&by_rank)?,
        );
        let path = partial.join(MANIFEST);
        manifest.check(&path)?;
        for file in &manifest.files {
            let path = partial.join(&file.name);
            match check_length(&path, file.bytes) {
                Err(Error::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
                    return Err(Error::NotShared { path });
                }
                other => other?,
            }
        }
        check_user_state(description)?;
        let json = manifest.to_json().map_err(user_state)?;
        write_durably(&path, json.as_bytes())?;
        let checksum = Checksum(xxh3_64(json.as_bytes()));
        write_durably(
            &partial.join(MANIFEST_CHECKSUM),
            format!("{checksum}\n").as_bytes(),
        )?;
        sync_directory(partial)?;
        Ok(manifest.bytes())
    }

    /// Renames the directory, moves `latest`, removes old ones.
    fn announce(self, partial: &Path, bytes: u64, keep: Keep) -> Result<Published, Error> {
        let name = self.prepared.name();
        let path = self.root.join(name.to_string());
        if let Err(source) = fs::rename(partial, &path) {
            return Err(self.withdrawn(Error::io("publish", path)(source)));
        }
        let named =
            sync_directory(&self.root).and_then(|()| directory::set_latest(&self.root, name));
        if let Err(error) = named {
            // An error means that nothing was published: the name is taken back.
            if let Err(source) = fs::rename(&path, partial) {
                log::warn!("{}", Error::io("withdraw", &path)(source));
                return Err(error);
            }
            return Err(self.withdrawn(error));
        }
        sync_directory(&self.root)?;
        let (removed, failed) = keep.apply(&self.root, name, self.prepared.nonce);
        Ok(Published {
            path,
            step: name.step,
            bytes,
            removed,
            not_removed: failed.iter().map(ToString::to_string).collect(),
        })
    }
}

/// Puts what ranks hold of each tensor together. That it fits is checked with the manifest.
fn merge(reports: &[&RankReport]) -> Result<Vec<TensorInfo>, Error> {
    let mut tensors: BTreeMap<&TensorName, TensorInfo> = BTreeMap::new();
    for (file, report) in reports.iter().enumerate() {
        for held in &report.tensors {
            let tensor = tensors.entry(&held.name).or_insert_with(|| TensorInfo {
                path: held.name.path.clone(),
                role: held.name.role.clone(),
                dtype: held.dtype,
                shape: held.shape.clone(),
                parts: Vec::new(),
            });
            if (tensor.dtype, &tensor.shape) != (held.dtype, &held.shape) {
                return Err(Error::Conflict {
                    name: held.name.clone(),
                    rank: report.file.rank,
                    expected: format!("{:?} {:?}", tensor.dtype, tensor.shape),
                    found: format!("{:?} {:?}", held.dtype, held.shape),
                });
            }
            let parts = held
                .ranges
                .iter()
                .map(|&(start, end)| PartInfo { file, start, end });
            tensor.parts.extend(parts);
        }
    }
    let mut tensors: Vec<_> = tensors.into_values().collect();
    for tensor in &mut tensors {
        tensor.parts.sort_by_key(|part| part.start);
    }
    Ok(tensors)
}

/// Checks that user state will be read back as it is, without reading the whole manifest.
fn check_user_state(description: &Description) -> Result<(), Error> {
    // It lies as deep as in a manifest: readers refuse JSON that is nested deeper than they go.
    #[derive(Serialize, Deserialize)]
    struct Nested<T> {
        description: T,
    }
    let json = serde_json::to_string(&Nested { description }).map_err(user_state)?;
    let again: Nested<Description> = serde_json::from_str(&json).map_err(user_state)?;
    let (user, again) = (&description.user, &again.description.user);
    if again == user {
        return Ok(());
    }
    Err(user_state(first_difference(user, again)))
}

fn user_state(detail: impl ToString) -> Error {
    Error::UserState {
        detail: detail.to_string(),
    }
}

/// Where two values differ first, for an error.
fn first_difference(left: &serde_json::Value, right: &serde_json::Value) -> String {
    use serde_json::Value;

    match (left, right) {
        (Value::Object(left), Value::Object(right)) => left
            .iter()
            .find(|(key, value)| right.get(*key) != Some(value))
            .map(|(key, value)| match right.get(key) {
                Some(other) => format!("{key}: {}", first_difference(value, other)),
                None => format!("{key} is lost"),
            }),
        (Value::Array(left), Value::Array(right)) => left
            .iter()
            .zip(right)
            .find(|(left, right)| left != right)
            .map(|(left, right)| first_difference(left, right)),
        (_, _) => None,
    }
    .unwrap_or_else(|| format!("{left} becomes {right}"))
}
