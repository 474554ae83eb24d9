//! The manifest: what a checkpoint holds, and which file holds which elements. JSON, one line per
//! file and tensor, for people and other programs to read.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::part::checked_numel;
use crate::{DType, Error, TensorName};

/// What a manifest says that it is.
pub(crate) const FORMAT: &str = "burn-shard-checkpoint";

/// The version that is written, and the only one that is read.
pub(crate) const VERSION: u64 = 1;

/// A 64-bit XXH3 checksum. It finds damage, and not malice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Checksum(pub u64);

impl fmt::Display for Checksum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl From<Checksum> for String {
    fn from(checksum: Checksum) -> Self {
        checksum.to_string()
    }
}

impl TryFrom<String> for Checksum {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        let digits = text.len() == 16 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        match u64::from_str_radix(&text, 16) {
            Ok(value) if digits => Ok(Self(value)),
            Ok(_) | Err(_) => Err("a checksum has 16 hexadecimal digits"),
        }
    }
}

/// What the caller says about a checkpoint, beside its tensors.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Description {
    /// How parameters were sharded, for people to read.
    pub strategy: String,
    /// What ranks shared which collective, for people to read.
    pub plan: String,
    /// Whatever else the run needs to go on: schedules, generators, position in the data, loss
    /// scale. Equal on all ranks, or a list by rank.
    pub user: Value,
}

/// A file of a checkpoint, and what it should be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileInfo {
    /// Its name, beside the manifest.
    pub name: String,
    /// The rank that wrote it.
    pub rank: usize,
    /// Its length.
    pub bytes: u64,
    /// Checksum of the whole file.
    pub xxh3: Checksum,
    /// Checksum of the first 8 bytes and the header, which readers check before they believe it.
    pub header_xxh3: Checksum,
}

/// A contiguous range of the elements of a tensor, in one file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PartInfo {
    /// Index of the file in [`Manifest::files`].
    pub file: usize,
    /// First element of the flattened tensor.
    pub start: usize,
    /// Element after the last.
    pub end: usize,
}

/// A tensor of a checkpoint, and where its elements are.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorInfo {
    /// Module path.
    pub path: String,
    /// What the tensor is for that path.
    pub role: crate::Role,
    /// Element type.
    pub dtype: DType,
    /// Full shape.
    pub shape: Vec<usize>,
    /// Its elements, in order: each is in exactly one part. Parts in one file lie there one after
    /// the other, as one tensor.
    pub parts: Vec<PartInfo>,
}

impl TensorInfo {
    /// Path and role.
    #[must_use]
    pub fn name(&self) -> TensorName {
        TensorName {
            path: self.path.clone(),
            role: self.role.clone(),
        }
    }

    /// Number of elements. That it can be counted was checked when the manifest was read.
    #[must_use]
    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }
}

/// All that a checkpoint says of itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    format: String,
    version: u64,
    /// Optimizer steps made.
    pub step: u64,
    /// Counts the checkpoints of one directory in the order in which they were published.
    pub sequence: u64,
    /// Ranks that saved.
    pub world_size: usize,
    /// What the caller said.
    pub description: Description,
    /// Files, by rank.
    pub files: Vec<FileInfo>,
    /// Tensors, by path and role.
    pub tensors: Vec<TensorInfo>,
}

impl Manifest {
    pub(crate) fn new(
        (step, sequence): (u64, u64),
        description: Description,
        files: Vec<FileInfo>,
        tensors: Vec<TensorInfo>,
    ) -> Self {
        Self {
            format: FORMAT.into(),
            version: VERSION,
            step,
            sequence,
            world_size: files.len(),
            description,
            files,
            tensors,
        }
    }

    /// Bytes of all files.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.files
            .iter()
            .fold(0, |sum, file| sum.saturating_add(file.bytes))
    }

    /// JSON with one line per file and tensor.
    pub(crate) fn to_json(&self) -> serde_json::Result<String> {
        use serde_json::to_string;

        let lines = |items: Vec<String>| {
            if items.is_empty() {
                String::new()
            } else {
                format!("\n    {}\n  ", items.join(",\n    "))
            }
        };
        let files = self.files.iter().map(to_string).collect::<Result<_, _>>()?;
        let tensors = self
            .tensors
            .iter()
            .map(to_string)
            .collect::<Result<_, _>>()?;
        Ok(format!(
            "{{\n  \"format\": {},\n  \"version\": {},\n  \"step\": {},\n  \"sequence\": {},\n  \
             \"world_size\": {},\n  \"description\": {},\n  \"files\": [{}],\n  \"tensors\": [{}]\n}}\n",
            to_string(&self.format)?,
            self.version,
            self.step,
            self.sequence,
            self.world_size,
            to_string(&self.description)?,
            lines(files),
            lines(tensors),
        ))
    }

    /// Reads and checks a manifest. What it returns contradicts itself nowhere: file names stay in
    /// the directory, shapes can be counted, each element is in exactly one part, and no file is too
    /// small for what it is said to hold.
    pub(crate) fn parse(path: &Path, json: &[u8]) -> Result<Self, Error> {
        #[derive(Deserialize)]
        struct Envelope {
            format: String,
            version: u64,
        }
        let bad = |source| Error::BadManifest {
            path: path.into(),
            source,
        };
        // First alone, so that a manifest of another version is not refused for its fields.
        let envelope: Envelope = serde_json::from_slice(json).map_err(bad)?;
        if envelope.format != FORMAT {
            return Err(Error::WrongFormat {
                path: path.into(),
                found: envelope.format.chars().take(64).collect(),
            });
        }
        if envelope.version != VERSION {
            return Err(Error::WrongVersion {
                path: path.into(),
                found: envelope.version,
                supported: VERSION,
            });
        }
        let manifest: Self = serde_json::from_slice(json).map_err(bad)?;
        manifest.check(path)?;
        Ok(manifest)
    }

    pub(crate) fn check(&self, path: &Path) -> Result<(), Error> {
        let mut names = HashSet::new();
        for file in &self.files {
            if !is_plain_file_name(&file.name) {
                return Err(Error::UnsafeFileName {
                    path: path.into(),
                    name: file.name.clone(),
                });
            }
            if !names.insert(file.name.as_str()) {
                return Err(Error::DuplicateFile {
                    path: path.into(),
                    name: file.name.clone(),
                });
            }
        }
        self.check_ranks()?;
        let mut keys = HashSet::new();
        let mut held_bytes = vec![0_u64; self.files.len()];
        for tensor in &self.tensors {
            tensor.check(&mut held_bytes)?;
            let key = tensor.name().key();
            if keys.contains(&key) {
                return Err(Error::DuplicateTensor { name: key });
            }
            keys.insert(key);
        }
        for (file, held) in self.files.iter().zip(held_bytes) {
            if held > file.bytes {
                return Err(Error::FileLength {
                    path: path.with_file_name(&file.name),
                    expected_bytes: held,
                    found_bytes: file.bytes,
                });
            }
        }
        Ok(())
    }

    /// One file of each rank, in order.
    fn check_ranks(&self) -> Result<(), Error> {
        let (expected, found) = (self.world_size, self.files.len());
        let wrong = self
            .files
            .iter()
            .enumerate()
            .find(|(rank, file)| file.rank != *rank);
        match wrong {
            Some((rank, _)) => Err(Error::Reports {
                rank,
                expected,
                found,
            }),
            None if found != expected || found == 0 => Err(Error::Reports {
                rank: found,
                expected,
                found,
            }),
            None => Ok(()),
        }
    }

    pub(crate) fn index(&self) -> HashMap<TensorName, usize> {
        self.tensors
            .iter()
            .enumerate()
            .map(|(index, tensor)| (tensor.name(), index))
            .collect()
    }
}

impl TensorInfo {
    /// Adds the bytes of its parts to those of their files.
    fn check(&self, held_bytes: &mut [u64]) -> Result<(), Error> {
        let name = self.name();
        name.check()?;
        let numel = checked_numel(&name, &self.shape, self.dtype)?;
        let mut covered = 0;
        for part in &self.parts {
            let PartInfo { file, start, end } = *part;
            if start >= end || end > numel {
                return Err(Error::Range {
                    name,
                    start,
                    end,
                    numel,
                });
            }
            if start < covered {
                let end = covered.min(end);
                return Err(Error::Overlap { name, start, end });
            }
            if start > covered {
                return Err(Error::Gap {
                    name,
                    start: covered,
                    end: start,
                });
            }
            covered = end;
            let files = held_bytes.len();
            let Some(held) = held_bytes.get_mut(file) else {
                return Err(Error::NoSuchFile { name, file, files });
            };
            let bytes = (end - start) * self.dtype.size_bytes();
            *held = held.saturating_add(u64::try_from(bytes).unwrap_or(u64::MAX));
        }
        if covered < numel {
            return Err(Error::Gap {
                name,
                start: covered,
                end: numel,
            });
        }
        Ok(())
    }
}

/// Whether `name` is that of a safetensors file in the same directory, on any system: no separator,
/// no drive, no leading dot.
pub(crate) fn is_plain_file_name(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
    name.len() <= 255
        && name.ends_with(".safetensors")
        && !name.starts_with('.')
        && name.bytes().all(plain)
}
