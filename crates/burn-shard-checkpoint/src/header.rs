//! The header of a safetensors file: `u64` length, JSON, then the tensors' bytes without gaps.
//!
//! What a header means is checked by the crate `safetensors`. Here it is read from a file without
//! reading the file, and names that appear twice are refused, which a map would swallow.

use std::collections::HashMap;
use std::fs::File;
use std::path::Path;

use safetensors::SafeTensorError;
use safetensors::tensor::{Metadata, TensorInfo};
use serde::Deserialize;

use crate::Error;
use crate::positioned::read_exact_at;
use crate::unique_map::UniqueMap;

/// The largest header that the crate `safetensors` (and so Python) reads.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// Bytes before the header.
const LENGTH_BYTES: u64 = 8;

/// A header that was checked against the length of its file.
#[derive(Debug)]
pub(crate) struct Header {
    /// Length and JSON, as they are in the file.
    pub(crate) bytes: Vec<u8>,
    pub(crate) tensors: HashMap<String, TensorInfo>,
}

impl Header {
    /// Where the tensors' bytes begin.
    pub(crate) fn data_start(&self) -> u64 {
        self.bytes.len() as u64
    }

    /// Reads the header of a file of `file_bytes`. It allocates no more than the file has.
    pub(crate) fn read(file: &File, path: &Path, file_bytes: u64) -> Result<Self, Error> {
        let invalid = |source| Error::Header {
            path: path.into(),
            source,
        };
        if file_bytes < LENGTH_BYTES {
            return Err(invalid(SafeTensorError::HeaderTooSmall));
        }
        let mut length = [0; 8];
        read_exact_at(file, &mut length, 0).map_err(Error::io("read", path))?;
        let header_bytes = u64::from_le_bytes(length);
        if header_bytes > MAX_HEADER_BYTES {
            return Err(invalid(SafeTensorError::HeaderTooLarge));
        }
        let data_start = LENGTH_BYTES + header_bytes;
        if data_start > file_bytes {
            return Err(invalid(SafeTensorError::InvalidHeaderLength));
        }
        let mut bytes = vec![0; usize::try_from(data_start).expect("100 MB should fit a usize")];
        read_exact_at(file, &mut bytes, 0).map_err(Error::io("read", path))?;

        let json = std::str::from_utf8(&bytes[length.len()..])
            .map_err(|source| invalid(SafeTensorError::InvalidHeader(source)))?;
        let UniqueMap(values) = serde_json::from_str::<UniqueMap<Value>>(json)
            .map_err(|source| invalid(SafeTensorError::InvalidHeaderDeserialization(source)))?;
        let mut entries = Vec::with_capacity(values.len());
        for (name, value) in values {
            if let Value::Tensor(info) = value {
                entries.push((name, info));
            } else if name != "__metadata__" {
                return Err(invalid(SafeTensorError::TensorInvalidInfo));
            }
        }
        entries.sort_by_key(|(_, info)| info.data_offsets);
        let metadata = Metadata::new(None, entries.clone()).map_err(invalid)?;
        if metadata.data_len() as u64 != file_bytes - data_start {
            return Err(invalid(SafeTensorError::MetadataIncompleteBuffer));
        }
        Ok(Self {
            bytes,
            tensors: entries.into_iter().collect(),
        })
    }

    /// Length and JSON of a header for `tensors`, which are in order of their offsets, padded so
    /// that the tensors' bytes begin at a multiple of 8.
    pub(crate) fn encode(
        path: &Path,
        about: HashMap<String, String>,
        tensors: Vec<(String, TensorInfo)>,
    ) -> Result<Vec<u8>, Error> {
        let invalid = |source| Error::Header {
            path: path.into(),
            source,
        };
        let metadata = Metadata::new(Some(about), tensors).map_err(invalid)?;
        let mut json = serde_json::to_vec(&metadata)
            .map_err(|source| invalid(SafeTensorError::JsonError(source)))?;
        json.resize(json.len().next_multiple_of(8), b' ');
        let bytes = json.len() as u64;
        if bytes > MAX_HEADER_BYTES {
            return Err(Error::HeaderTooLarge {
                path: path.into(),
                bytes,
            });
        }
        Ok([&bytes.to_le_bytes()[..], &json[..]].concat())
    }
}

/// What a name of a header stands for.
#[derive(Deserialize)]
#[serde(untagged)]
enum Value {
    Tensor(TensorInfo),
    /// The value of `__metadata__`, which says nothing that is needed.
    About(#[allow(dead_code, reason = "checked for its type")] HashMap<String, String>),
}
