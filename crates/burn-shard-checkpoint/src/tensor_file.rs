//! One safetensors file on disk: opened with suspicion, read by ranges, and written as a stream.

use std::collections::HashMap;
use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use safetensors::tensor::TensorInfo;
use xxhash_rust::xxh3::{Xxh3Default, xxh3_64};

use crate::header::Header;
use crate::manifest::{Checksum, FileInfo};
use crate::positioned::read_exact_at;
use crate::{Error, TensorPart};

/// Bytes that are written, hashed or copied at a time.
pub(crate) const CHUNK_BYTES: usize = 1 << 20;

/// A file that is open, and whose header was checked.
#[derive(Debug)]
pub(crate) struct TensorFile {
    pub(crate) path: PathBuf,
    file: File,
    pub(crate) bytes: u64,
    pub(crate) header: Header,
}

impl TensorFile {
    pub(crate) fn open(path: PathBuf, links: Links) -> Result<Self, Error> {
        let (file, bytes) = open_regular(&path, links)?;
        Self::with_header(path, file, bytes)
    }

    fn with_header(path: PathBuf, file: File, bytes: u64) -> Result<Self, Error> {
        let header = Header::read(&file, &path, bytes)?;
        Ok(Self {
            path,
            file,
            bytes,
            header,
        })
    }

    /// Opens the file `info` beside a manifest, and checks its length and its header's checksum.
    pub(crate) fn open_as(directory: &Path, info: &FileInfo) -> Result<Self, Error> {
        let path = directory.join(&info.name);
        let (file, bytes) = open_regular(&path, Links::Refused)?;
        compare_length(&path, info.bytes, bytes)?;
        let file = Self::with_header(path, file, bytes)?;
        let found = Checksum(xxh3_64(&file.header.bytes));
        if found != info.header_xxh3 {
            return Err(Error::Checksum {
                path: file.path,
                part: "header",
                expected: info.header_xxh3.to_string(),
                found: found.to_string(),
            });
        }
        Ok(file)
    }

    /// Fills `out` with the bytes at `offset` of the tensor at `tensor_start`.
    pub(crate) fn read(
        &self,
        info: &TensorInfo,
        offset: usize,
        out: &mut [u8],
    ) -> Result<(), Error> {
        let at = self.header.data_start() + (info.data_offsets.0 + offset) as u64;
        read_exact_at(&self.file, out, at).map_err(Error::io("read", &self.path))
    }

    /// The checksum of the whole file.
    pub(crate) fn checksum(&self) -> Result<Checksum, Error> {
        let mut hasher = Xxh3Default::new();
        let mut chunk = vec![0; CHUNK_BYTES];
        let mut at = 0;
        while at < self.bytes {
            let left = usize::try_from(self.bytes - at).unwrap_or(usize::MAX);
            let chunk = &mut chunk[..left.min(CHUNK_BYTES)];
            read_exact_at(&self.file, chunk, at).map_err(Error::io("read", &self.path))?;
            hasher.update(chunk);
            at += chunk.len() as u64;
        }
        Ok(Checksum(hasher.digest()))
    }
}

/// What becomes of symbolic links.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Links {
    /// They are refused: nothing of ours is one.
    Refused,
    /// They are followed: caches of downloaded models consist of them.
    Followed,
}

/// Opens a file that is no directory, pipe or device. Returns its length, too.
pub(crate) fn open_regular(path: &Path, links: Links) -> Result<(File, u64), Error> {
    regular(path, links)?;
    let file = File::open(path).map_err(Error::io("open", path))?;
    let bytes = file.metadata().map_err(Error::io("open", path))?.len();
    Ok((file, bytes))
}

/// The bytes of a small file. Allocates what the file has.
pub(crate) fn read_regular(path: &Path, links: Links) -> Result<Vec<u8>, Error> {
    let (file, bytes) = open_regular(path, links)?;
    let mut contents = Vec::new();
    file.take(bytes)
        .read_to_end(&mut contents)
        .map_err(Error::io("read", path))?;
    Ok(contents)
}

/// Checks that a file is there, regular, and of a length, without opening it.
pub(crate) fn check_length(path: &Path, expected_bytes: u64) -> Result<(), Error> {
    compare_length(path, expected_bytes, regular(path, Links::Refused)?.len())
}

fn compare_length(path: &Path, expected_bytes: u64, found_bytes: u64) -> Result<(), Error> {
    if found_bytes != expected_bytes {
        return Err(Error::FileLength {
            path: path.into(),
            expected_bytes,
            found_bytes,
        });
    }
    Ok(())
}

/// What the system says of a file that is no directory, pipe or device.
fn regular(path: &Path, links: Links) -> Result<Metadata, Error> {
    let metadata = match links {
        Links::Refused => fs::symlink_metadata(path),
        Links::Followed => fs::metadata(path),
    }
    .map_err(Error::io("open", path))?;
    if !metadata.file_type().is_file() {
        return Err(Error::NotARegularFile { path: path.into() });
    }
    Ok(metadata)
}

/// What was written: length and checksums.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Written {
    pub(crate) bytes: u64,
    pub(crate) xxh3: Checksum,
    pub(crate) header_xxh3: Checksum,
}

/// Writes `parts` to a new file and makes it durable. Each part becomes one tensor: of its full shape
/// if it is whole, and flat otherwise. Parts without elements are left out, unless the tensor has
/// none. They were checked; their names are not equal.
///
/// Memory: none of the bytes is held twice but those of one buffer and one lazy part.
pub(crate) fn write(
    path: &Path,
    about: HashMap<String, String>,
    parts: Vec<TensorPart<'_>>,
) -> Result<Written, Error> {
    let mut parts: Vec<_> = parts
        .into_iter()
        .filter(|part| part.numel() > 0 || part.is_whole())
        .map(|part| (part.name.key(), part))
        .collect();
    // The order of the crate `safetensors`: wide elements first, so that all are aligned.
    parts.sort_by(|(left_key, left), (right_key, right)| {
        let (left, right) = (left.dtype.to_safetensors(), right.dtype.to_safetensors());
        right.cmp(&left).then_with(|| left_key.cmp(right_key))
    });
    let mut tensors = Vec::with_capacity(parts.len());
    let mut offset = 0;
    for (key, part) in &parts {
        let whole = part.is_whole();
        let bytes = part.numel() * part.dtype.size_bytes();
        let end = offset_after(offset, bytes).ok_or_else(|| Error::ShapeOverflow {
            name: part.name.clone(),
            shape: part.shape.clone(),
        })?;
        tensors.push((
            key.clone(),
            TensorInfo {
                dtype: part.dtype.to_safetensors(),
                shape: if whole {
                    part.shape.clone()
                } else {
                    vec![part.numel()]
                },
                data_offsets: (offset, end),
            },
        ));
        offset = end;
    }
    let header = Header::encode(path, about, tensors)?;

    let file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .open(path)
        .map_err(Error::io("create", path))?;
    let failed = |source| Error::io("write", path)(source);
    let mut out = BufWriter::with_capacity(CHUNK_BYTES, Hashing::new(file));
    out.write_all(&header).map_err(failed)?;
    for (_, part) in parts {
        out.write_all(&part.bytes()?).map_err(failed)?;
    }
    let Hashing {
        file,
        hasher,
        bytes,
    } = out
        .into_inner()
        .map_err(|error| failed(error.into_error()))?;
    file.sync_all().map_err(Error::io("sync", path))?;
    Ok(Written {
        bytes,
        xxh3: Checksum(hasher.digest()),
        header_xxh3: Checksum(xxh3_64(&header)),
    })
}

/// Offsets stay so small that the length of the whole file, header and all, can be counted.
fn offset_after(offset: usize, bytes: usize) -> Option<usize> {
    offset
        .checked_add(bytes)
        .filter(|&end| end <= isize::MAX.unsigned_abs())
}

/// Hashes and counts what goes to a file.
struct Hashing {
    file: File,
    hasher: Xxh3Default,
    bytes: u64,
}

impl Hashing {
    fn new(file: File) -> Self {
        Self {
            file,
            hasher: Xxh3Default::new(),
            bytes: 0,
        }
    }
}

impl Write for Hashing {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        let written = self.file.write(buffer)?;
        self.hasher.update(&buffer[..written]);
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}
