//! Loading: a checkpoint that was published, read by ranges of elements.

use std::collections::HashMap;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use safetensors::tensor::TensorInfo as Entry;
use xxhash_rust::xxh3::xxh3_64;

use crate::directory::{self, MANIFEST, MANIFEST_CHECKSUM, Name};
use crate::dtype::cast;
use crate::manifest::{Checksum, Manifest, TensorInfo};
use crate::tensor_file::{CHUNK_BYTES, Links, TensorFile, check_length, read_regular};
use crate::{DType, DTypePolicy, Error, Renames, Resolution, TensorName, Wanted};

/// A published checkpoint, open for reading by any number of ranks and threads.
///
/// Opening reads the manifest and looks at the lengths of all files. A file is opened, and the
/// checksum of its header compared, when something is first read from it. Checksums of whole files
/// are compared by [`verify`](Self::verify) only, as that reads them all.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    manifest: Manifest,
    index: HashMap<TensorName, usize>,
    files: Vec<OnceLock<TensorFile>>,
}

/// A checkpoint whose checksums are right, and those newer ones that were passed over.
#[derive(Debug)]
pub struct Intact {
    /// The newest that is intact.
    pub checkpoint: Checkpoint,
    /// Newer ones, and what is wrong with them.
    pub refused: Vec<(PathBuf, Error)>,
}

impl Checkpoint {
    /// Opens a checkpoint: `path` is its directory, or the one in which checkpoints are kept. Of the
    /// latter the checkpoint is opened that `latest` names; if `latest` is missing or names nothing
    /// that is there, the one that was published last.
    ///
    /// # Errors
    ///
    /// [`Error::NoCheckpoint`] if there is none, and what is wrong with the manifest or with the
    /// length of a file. Nothing older is opened instead: see
    /// [`open_newest_intact`](Self::open_newest_intact).
    pub fn open(path: impl AsRef<Path>) -> Result<Self, Error> {
        let path = path.as_ref();
        if fs::symlink_metadata(path.join(MANIFEST)).is_ok() {
            return Self::open_directory(path.into());
        }
        let candidates = candidates(path)?;
        let Some(&newest) = candidates.first() else {
            return Err(Error::NoCheckpoint { root: path.into() });
        };
        Self::open_directory(path.join(newest.to_string()))
    }

    /// Opens the newest checkpoint below `root` that [verifies](Self::verify), beginning with the one
    /// that [`open`](Self::open) opens. Reads all of it, and all of those that it passes over.
    ///
    /// # Errors
    ///
    /// [`Error::NoCheckpoint`] if there is none, [`Error::NoneIntact`] if all are damaged.
    pub fn open_newest_intact(root: impl AsRef<Path>) -> Result<Intact, Error> {
        let root = root.as_ref();
        let candidates = candidates(root)?;
        let mut refused = Vec::new();
        for name in &candidates {
            let path = root.join(name.to_string());
            let checked = Self::open_directory(path.clone())
                .and_then(|checkpoint| checkpoint.verify().map(|()| checkpoint));
            match checked {
                Ok(checkpoint) => {
                    return Ok(Intact {
                        checkpoint,
                        refused,
                    });
                }
                Err(error) => refused.push((path, error)),
            }
        }
        match refused.into_iter().next() {
            None => Err(Error::NoCheckpoint { root: root.into() }),
            Some((_, newest)) => Err(Error::NoneIntact {
                root: root.into(),
                count: candidates.len(),
                newest: Box::new(newest),
            }),
        }
    }

    fn open_directory(path: PathBuf) -> Result<Self, Error> {
        let manifest_path = path.join(MANIFEST);
        let json = read_regular(&manifest_path, Links::Refused)?;
        let found = Checksum(xxh3_64(&json));
        let checksum_path = path.join(MANIFEST_CHECKSUM);
        let expected = read_regular(&checksum_path, Links::Refused)?;
        if expected != format!("{found}\n").as_bytes() {
            let expected = String::from_utf8_lossy(&expected[..expected.len().min(64)]);
            return Err(Error::Checksum {
                path: manifest_path,
                part: "text",
                expected: expected.trim_end().escape_debug().to_string(),
                found: found.to_string(),
            });
        }
        let manifest = Manifest::parse(&manifest_path, &json)?;
        for file in &manifest.files {
            check_length(&path.join(&file.name), file.bytes)?;
        }
        Ok(Self {
            path,
            index: manifest.index(),
            files: manifest.files.iter().map(|_| OnceLock::new()).collect(),
            manifest,
        })
    }

    /// Its directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All that it says of itself.
    #[must_use]
    pub const fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Its tensors, by path and role.
    #[must_use]
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.manifest.tensors
    }

    /// The tensor of that name.
    #[must_use]
    pub fn tensor(&self, name: &TensorName) -> Option<&TensorInfo> {
        self.index
            .get(name)
            .map(|&index| &self.manifest.tensors[index])
    }

    /// Finds for each tensor that is wanted the one of this checkpoint, after renaming its paths.
    ///
    /// # Errors
    ///
    /// [`Error::RenameCollision`]. What is missing, unexpected or different is in the result:
    /// [`Resolution::strict`] makes an error of it.
    pub fn resolve(
        &self,
        wanted: &[Wanted],
        renames: &Renames,
        policy: DTypePolicy,
    ) -> Result<Resolution, Error> {
        let available = self.tensors().iter().map(|tensor| Wanted {
            name: tensor.name(),
            dtype: tensor.dtype,
            shape: tensor.shape.clone(),
        });
        Resolution::new(available, wanted, renames, policy)
    }

    /// Fills `out` with the elements `range` of a tensor, little-endian, from whichever files hold
    /// them. Reads those bytes, and the headers of files not yet open.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownTensor`], [`Error::Range`], [`Error::PartLength`] if `out` has not the
    /// length of the range; what is wrong with a file; [`Error::Io`].
    pub fn read_range(
        &self,
        name: &TensorName,
        range: Range<usize>,
        out: &mut [u8],
    ) -> Result<(), Error> {
        let tensor = self.known(name)?;
        check_request(name, &range, tensor.numel(), tensor.dtype, out.len())?;
        self.read_pieces(tensor, range, out)
    }

    /// Like [`read_range`](Self::read_range), for elements of type `wanted`, converted if `policy`
    /// allows it.
    ///
    /// # Errors
    ///
    /// Those of [`read_range`](Self::read_range), and [`Error::DTypeMismatch`].
    pub fn read_range_as(
        &self,
        name: &TensorName,
        range: Range<usize>,
        (wanted, policy): (DType, DTypePolicy),
        out: &mut [u8],
    ) -> Result<(), Error> {
        let tensor = self.known(name)?;
        read_as(
            name,
            (tensor.dtype, tensor.numel()),
            range,
            (wanted, policy),
            out,
            |range, out| self.read_pieces(tensor, range, out),
        )
    }

    /// All elements of a tensor.
    ///
    /// # Errors
    ///
    /// Those of [`read_range`](Self::read_range).
    pub fn read(&self, name: &TensorName) -> Result<Vec<u8>, Error> {
        let tensor = self.known(name)?;
        // No more than the files have, or they would have been refused.
        let mut out = vec![0; tensor.numel() * tensor.dtype.size_bytes()];
        self.read_pieces(tensor, 0..tensor.numel(), &mut out)?;
        Ok(out)
    }

    /// Compares the checksums of all files, and that they hold what the manifest says. Reads
    /// everything once.
    ///
    /// # Errors
    ///
    /// The first thing that is wrong.
    pub fn verify(&self) -> Result<(), Error> {
        (0..self.files.len()).try_for_each(|file| self.verify_file(file))
    }

    /// Checks as [`verify`](Self::verify) does, but goes on: everything that is wrong, at most one error
    /// per file.
    #[must_use]
    pub fn verify_all(&self) -> Vec<Error> {
        (0..self.files.len())
            .filter_map(|file| self.verify_file(file).err())
            .collect()
    }

    fn verify_file(&self, index: usize) -> Result<(), Error> {
        let info = &self.manifest.files[index];
        let file = self.file(index)?;
        let found = file.checksum()?;
        if found != info.xxh3 {
            return Err(Error::Checksum {
                path: file.path.clone(),
                part: "contents",
                expected: info.xxh3.to_string(),
                found: found.to_string(),
            });
        }
        let here = |tensor: &&TensorInfo| tensor.parts.iter().any(|part| part.file == index);
        let mut tensors = self.manifest.tensors.iter().filter(here);
        tensors.try_for_each(|tensor| self.entry(tensor, index).map(drop))
    }

    fn known(&self, name: &TensorName) -> Result<&TensorInfo, Error> {
        self.tensor(name).ok_or_else(|| Error::UnknownTensor {
            path: self.path.clone(),
            name: name.clone(),
        })
    }

    fn file(&self, index: usize) -> Result<&TensorFile, Error> {
        let slot = &self.files[index];
        if let Some(file) = slot.get() {
            return Ok(file);
        }
        let file = TensorFile::open_as(&self.path, &self.manifest.files[index])?;
        // Another thread may have been faster; its is as good.
        Ok(slot.get_or_init(|| file))
    }

    /// The tensor in a file that holds the parts of `tensor` there.
    fn entry(&self, tensor: &TensorInfo, index: usize) -> Result<(&TensorFile, &Entry), Error> {
        let file = self.file(index)?;
        let key = tensor.name().key();
        let disagrees = |detail: String| Error::FileDisagrees {
            path: file.path.clone(),
            name: key.clone(),
            detail,
        };
        let Some(entry) = file.header.tensors.get(&key) else {
            return Err(disagrees("the manifest says that it is there".into()));
        };
        let in_file = tensor.parts.iter().filter(|part| part.file == index);
        let numel: usize = in_file.map(|part| part.end - part.start).sum();
        let found: usize = entry.shape.iter().product();
        if entry.dtype != tensor.dtype.to_safetensors() || found != numel {
            return Err(disagrees(format!(
                "the manifest says {numel} elements of {:?}, the file {found} of {:?}",
                tensor.dtype, entry.dtype
            )));
        }
        Ok((file, entry))
    }

    /// Reads a range that was checked. Parts are in order and cover the tensor.
    fn read_pieces(
        &self,
        tensor: &TensorInfo,
        range: Range<usize>,
        mut out: &mut [u8],
    ) -> Result<(), Error> {
        let size = tensor.dtype.size_bytes();
        let mut at = range.start;
        let first = tensor.parts.partition_point(|part| part.end <= at);
        for (index, part) in tensor.parts.iter().enumerate().skip(first) {
            if at >= range.end {
                break;
            }
            let (file, entry) = self.entry(tensor, part.file)?;
            let before = tensor.parts[..index]
                .iter()
                .filter(|other| other.file == part.file);
            let skipped: usize = before.map(|other| other.end - other.start).sum();
            let end = part.end.min(range.end);
            let (piece, rest) = out.split_at_mut((end - at) * size);
            file.read(entry, (skipped + at - part.start) * size, piece)?;
            (out, at) = (rest, end);
        }
        Ok(())
    }
}

/// Checkpoints below `root` in the order in which they are tried: the one that `latest` names, then
/// from the newest to the oldest.
fn candidates(root: &Path) -> Result<Vec<Name>, Error> {
    let mut names = directory::checkpoints(root)?;
    names.reverse();
    if let Some(latest) = directory::latest(root) {
        names.retain(|&name| name != latest);
        names.insert(0, latest);
    }
    Ok(names)
}

/// Checks that a tensor of `numel` has the elements `range`, and `out` room for them as `dtype`.
fn check_request(
    name: &TensorName,
    range: &Range<usize>,
    numel: usize,
    dtype: DType,
    found_bytes: usize,
) -> Result<(), Error> {
    let Range { start, end } = *range;
    if start > end || end > numel {
        return Err(Error::Range {
            name: name.clone(),
            start,
            end,
            numel,
        });
    }
    let expected_bytes = (end - start).saturating_mul(dtype.size_bytes());
    if found_bytes != expected_bytes {
        return Err(Error::PartLength {
            name: name.clone(),
            expected_bytes,
            found_bytes,
        });
    }
    Ok(())
}

/// Reads elements of a tensor of `numel` with `read`, which gives them as `found`, and converts to
/// `wanted` if need be.
pub(crate) fn read_as(
    name: &TensorName,
    (found, numel): (DType, usize),
    range: Range<usize>,
    (wanted, policy): (DType, DTypePolicy),
    out: &mut [u8],
    mut read: impl FnMut(Range<usize>, &mut [u8]) -> Result<(), Error>,
) -> Result<(), Error> {
    check_request(name, &range, numel, wanted, out.len())?;
    if found == wanted {
        return read(range, out);
    }
    if !policy.allows(found, wanted) {
        return Err(Error::DTypeMismatch {
            name: name.clone(),
            found,
            wanted,
        });
    }
    let at_once = CHUNK_BYTES / found.size_bytes();
    let mut buffer = vec![0; CHUNK_BYTES.min(range.len() * found.size_bytes())];
    let pieces = out.chunks_mut(at_once * wanted.size_bytes());
    for (piece, start) in pieces.zip(range.clone().step_by(at_once)) {
        let end = range.end.min(start + at_once);
        let buffer = &mut buffer[..(end - start) * found.size_bytes()];
        read(start..end, buffer)?;
        cast(found, buffer, wanted, piece);
    }
    Ok(())
}
