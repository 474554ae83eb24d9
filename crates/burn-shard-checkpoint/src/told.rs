//! How ranks tell each other what became of a step of a save: bytes for the caller's collectives.
//!
//! A rank that fails alone must not return alone, or the others wait for it. So each step's result,
//! good or bad, is sent to all, and all return the same.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::Error;

#[derive(Serialize, Deserialize)]
enum Told<T> {
    Ok(T),
    Failed { rank: usize, message: String },
}

/// Bytes that tell other ranks what a step returned on this one.
///
/// # Panics
///
/// If a `T` that is not of this crate cannot be written as JSON.
pub fn tell<T: Serialize>(rank: usize, result: &Result<T, Error>) -> Vec<u8> {
    let told = match result {
        Ok(value) => Told::Ok(value),
        Err(error) => Told::Failed {
            rank,
            message: error.to_string(),
        },
    };
    serde_json::to_vec(&told).expect("what ranks tell each other should be JSON")
}

/// What one rank told: its value, or [`Error::OtherRank`].
///
/// # Errors
///
/// [`Error::OtherRank`] if that rank failed, [`Error::BadReport`] if these are not bytes of
/// [`tell`].
pub fn told<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Error> {
    match serde_json::from_slice(bytes).map_err(|source| Error::BadReport { source })? {
        Told::Ok(value) => Ok(value),
        Told::Failed { rank, message } => Err(Error::OtherRank { rank, message }),
    }
}

/// What all ranks told, in order of rank. All ranks get the same result from the same bytes.
///
/// # Errors
///
/// The first rank's that failed, as in [`told`].
pub fn told_by_all<T: DeserializeOwned>(
    messages: impl IntoIterator<Item = impl AsRef<[u8]>>,
) -> Result<Vec<T>, Error> {
    messages
        .into_iter()
        .map(|message| told(message.as_ref()))
        .collect()
}
