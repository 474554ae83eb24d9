//! Models in the layout of Hugging Face: several safetensors files, and an index that says which
//! tensor is in which. For loading only.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::checkpoint::read_as;
use crate::manifest::is_plain_file_name;
use crate::tensor_file::{Links, TensorFile, read_regular};
use crate::unique_map::UniqueMap;
use crate::{DType, DTypePolicy, Error, Renames, Resolution, TensorName, Wanted};

const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";

/// The fields of the index that are needed; others may be there.
#[derive(Deserialize)]
struct Index {
    weight_map: UniqueMap<String>,
}

/// A model in one or several safetensors files, open for reading by ranges of elements.
///
/// All tensors are parameters, and their names are their paths.
#[derive(Debug)]
pub struct IndexedSafetensors {
    path: PathBuf,
    files: Vec<TensorFile>,
    /// By name, the file of each.
    tensors: HashMap<String, usize>,
    /// Names, sorted.
    listed: Vec<Wanted>,
}

impl IndexedSafetensors {
    /// Opens `path`: an index (`model.safetensors.index.json`), one safetensors file, or the
    /// directory of either. Reads the headers of all files. Symbolic links are followed, as caches of
    /// downloaded models consist of them.
    ///
    /// # Errors
    ///
    /// [`Error::BadManifest`] for an index that is none, [`Error::UnsafeFileName`] if it leads out of
    /// its directory, [`Error::Header`] for a file that is not safetensors,
    /// [`Error::FileDisagrees`] if a tensor is not where the index says, or of an element type that
    /// this crate does not know; [`Error::Io`].
    pub fn open(path: impl AsRef<Path>) -> Result<Self, Error> {
        let mut path = path.as_ref().to_path_buf();
        if path.is_dir() {
            let index = path.join(INDEX);
            path = if index.is_file() {
                index
            } else {
                path.join(SINGLE)
            };
        }
        if path
            .extension()
            .is_some_and(|extension| extension == "json")
        {
            return Self::open_index(path);
        }
        let file = TensorFile::open(path.clone(), Links::Followed)?;
        let tensors = file
            .header
            .tensors
            .keys()
            .map(|name| (name.clone(), 0))
            .collect();
        Self::new(path, vec![file], tensors)
    }

    fn open_index(path: PathBuf) -> Result<Self, Error> {
        let json = read_regular(&path, Links::Followed)?;
        let index: Index = serde_json::from_slice(&json).map_err(|source| Error::BadManifest {
            path: path.clone(),
            source,
        })?;
        let UniqueMap(entries) = index.weight_map;
        let mut names: Vec<_> = entries.iter().map(|(_, file)| file.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        let mut files = Vec::with_capacity(names.len());
        let mut numbers = HashMap::new();
        for name in names {
            if !is_plain_file_name(name) {
                return Err(Error::UnsafeFileName {
                    path,
                    name: name.into(),
                });
            }
            numbers.insert(name, files.len());
            files.push(TensorFile::open(
                path.with_file_name(name),
                Links::Followed,
            )?);
        }
        let tensors = entries
            .iter()
            .map(|(name, file)| (name.clone(), numbers[file.as_str()]));
        let tensors = tensors.collect();
        Self::new(path, files, tensors)
    }

    fn new(
        path: PathBuf,
        files: Vec<TensorFile>,
        tensors: HashMap<String, usize>,
    ) -> Result<Self, Error> {
        let mut listed = Vec::with_capacity(tensors.len());
        for (name, &file) in &tensors {
            let file = &files[file];
            let disagrees = |detail: String| Error::FileDisagrees {
                path: file.path.clone(),
                name: name.clone(),
                detail,
            };
            let Some(entry) = file.header.tensors.get(name) else {
                return Err(disagrees("the index says that it is there".into()));
            };
            let Some(dtype) = DType::from_safetensors(entry.dtype) else {
                return Err(disagrees(format!(
                    "elements of {} cannot be read",
                    entry.dtype
                )));
            };
            listed.push(Wanted {
                name: TensorName::parameter(name.clone()),
                dtype,
                shape: entry.shape.clone(),
            });
        }
        listed.sort_by(|left, right| left.name.cmp(&right.name));
        Ok(Self {
            path,
            files,
            tensors,
            listed,
        })
    }

    /// All tensors, by name: path, element type and shape.
    #[must_use]
    pub fn tensors(&self) -> &[Wanted] {
        &self.listed
    }

    /// The tensor of that name.
    #[must_use]
    pub fn tensor(&self, name: &TensorName) -> Option<&Wanted> {
        let found = self
            .listed
            .binary_search_by(|tensor| tensor.name.cmp(name))
            .ok()?;
        Some(&self.listed[found])
    }

    /// Tensors of the files that the index does not name, and that cannot be read therefore.
    #[must_use]
    pub fn not_indexed(&self) -> Vec<String> {
        let named: HashSet<_> = self.tensors.keys().collect();
        let all = self
            .files
            .iter()
            .flat_map(|file| file.header.tensors.keys());
        let mut left: Vec<_> = all.filter(|name| !named.contains(name)).cloned().collect();
        left.sort_unstable();
        left
    }

    /// Finds what is wanted as [`Checkpoint::resolve`](crate::Checkpoint::resolve) does.
    ///
    /// # Errors
    ///
    /// [`Error::RenameCollision`].
    pub fn resolve(
        &self,
        wanted: &[Wanted],
        renames: &Renames,
        policy: DTypePolicy,
    ) -> Result<Resolution, Error> {
        Resolution::new(self.listed.iter().cloned(), wanted, renames, policy)
    }

    /// Fills `out` with the elements `range` of a tensor as `wanted`, converted if `policy` allows it.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownTensor`], [`Error::Range`], [`Error::PartLength`], [`Error::DTypeMismatch`],
    /// [`Error::Io`].
    pub fn read_range_as(
        &self,
        name: &TensorName,
        range: Range<usize>,
        (wanted, policy): (DType, DTypePolicy),
        out: &mut [u8],
    ) -> Result<(), Error> {
        let Some(tensor) = self.tensor(name) else {
            return Err(Error::UnknownTensor {
                path: self.path.clone(),
                name: name.clone(),
            });
        };
        let file = &self.files[self.tensors[&name.path]];
        let entry = &file.header.tensors[&name.path];
        let size = tensor.dtype.size_bytes();
        read_as(
            name,
            (tensor.dtype, tensor.shape.iter().product()),
            range,
            (wanted, policy),
            out,
            |range, out| file.read(entry, range.start * size, out),
        )
    }
}
