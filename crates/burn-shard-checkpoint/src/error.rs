//! Why a checkpoint was not written, or is not what it should be.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use crate::part::SourceError;
use crate::{DType, Mismatch, TensorName};

/// What this crate refuses or fails with. Whatever is returned, checkpoints that were published
/// before are as they were.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Failure: the system refused. The kind of `source` tells a full disk from a missing permission.
    #[error("cannot {action} {}: {source}{}", .path.display(), hint(.source))]
    Io {
        /// What was tried.
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },

    /// Another rank failed; this rank has nothing wrong.
    #[error("rank {rank} could not save: {message}")]
    OtherRank {
        /// The rank that failed.
        rank: usize,
        /// Its error.
        message: String,
    },

    /// Failure: bytes that a rank sent are not what [`tell`](crate::tell) made.
    #[error("a rank's report cannot be read: {source} (do all ranks run the same program?)")]
    BadReport {
        /// What is wrong with it.
        source: serde_json::Error,
    },

    /// Refusal: another writer saves below the same directory.
    #[error("another job is saving in {} (give each job a directory of its own)", .root.display())]
    Locked {
        /// The directory.
        root: PathBuf,
    },

    /// Refusal: what rank 0 prepared is not there on this rank, or what this rank wrote is not there
    /// on rank 0.
    #[error("{} is not there (a checkpoint needs a directory that all ranks share)", .path.display())]
    NotShared {
        /// What one rank made and another does not see.
        path: PathBuf,
    },

    /// Refusal: not a name that a tensor may have.
    #[error("{name} cannot name a tensor: {reason}")]
    BadName {
        /// The name.
        name: TensorName,
        /// What is wrong with it.
        reason: &'static str,
    },

    /// Refusal: one name for two tensors.
    #[error("two tensors are named {name:?}")]
    DuplicateTensor {
        /// The name, as it is in the file.
        name: String,
    },

    /// Refusal: more elements or bytes than this machine can count.
    #[error("{name}: shape {shape:?} has more bytes than can be counted")]
    ShapeOverflow {
        /// The tensor.
        name: TensorName,
        /// Its shape.
        shape: Vec<usize>,
    },

    /// Refusal: elements that the tensor does not have.
    #[error("{name}: elements {start}..{end} of {numel}")]
    Range {
        /// The tensor.
        name: TensorName,
        /// First element.
        start: usize,
        /// Element after the last.
        end: usize,
        /// Elements of the tensor.
        numel: usize,
    },

    /// Refusal: elements that are there twice.
    #[error(
        "{name}: elements {start}..{end} are held twice (what is replicated is written by one rank)"
    )]
    Overlap {
        /// The tensor.
        name: TensorName,
        /// First element.
        start: usize,
        /// Element after the last.
        end: usize,
    },

    /// Refusal: elements that no file holds.
    #[error("{name}: no file holds elements {start}..{end}")]
    Gap {
        /// The tensor.
        name: TensorName,
        /// First element.
        start: usize,
        /// Element after the last.
        end: usize,
    },

    /// Refusal: ranks describe one tensor in two ways.
    #[error("{name}: rank {rank} says {found}, a rank before it {expected}")]
    Conflict {
        /// The tensor.
        name: TensorName,
        /// The rank that differs.
        rank: usize,
        /// Dtype and shape so far.
        expected: String,
        /// Dtype and shape of that rank.
        found: String,
    },

    /// Refusal: bytes to write, or room to read into, of another length than the ranges have.
    #[error("{name}: {found_bytes} bytes for elements of {expected_bytes}")]
    PartLength {
        /// The tensor.
        name: TensorName,
        /// Bytes of the ranges.
        expected_bytes: usize,
        /// Bytes given.
        found_bytes: usize,
    },

    /// Failure: a lazy part could not give its bytes.
    #[error("{name}: cannot be fetched: {source}")]
    Source {
        /// The tensor.
        name: TensorName,
        /// What the source said.
        source: SourceError,
    },

    /// Refusal: more tensors than the header of a safetensors file may name.
    #[error("{}: the header would have {bytes} bytes, more than safetensors reads", .path.display())]
    HeaderTooLarge {
        /// The file.
        path: PathBuf,
        /// Bytes of the header.
        bytes: u64,
    },

    /// Refusal: reports to publish that are not one of each rank.
    #[error("{found} of {expected} ranks reported, or rank {rank} did not do so exactly once")]
    Reports {
        /// The first rank without exactly one report.
        rank: usize,
        /// The world size.
        expected: usize,
        /// Reports given.
        found: usize,
    },

    /// Refusal: a report of another save.
    #[error("rank {rank} reports {found:?}, this save is {expected:?}")]
    OtherSave {
        /// The rank.
        rank: usize,
        /// Directory of this save.
        expected: String,
        /// Directory that the report names.
        found: String,
    },

    /// Refusal: only the writer that rank 0 created can publish.
    #[error("only the writer of rank 0 publishes (this one joined)")]
    NotRankZero,

    /// Refusal: user state would not be read back as it is.
    #[error(
        "the user state would not be read back as it is: {detail} (store floats by their bits, as integers or strings)"
    )]
    UserState {
        /// What changes.
        detail: String,
    },

    /// Refusal: a save in the background is unfinished, or its result was not taken.
    #[error("the save before is still in flight (wait for it first)")]
    InFlight,

    /// Failure: a save in the background is unfinished after the time given. It goes on.
    #[error("the save is not finished after {waited:?} (it goes on; wait again)")]
    StillWriting {
        /// How long was waited.
        waited: Duration,
    },

    /// Failure: the thread of a background save panicked.
    #[error("the save in the background panicked")]
    Panicked,

    /// Refusal: nothing to open.
    #[error("no complete checkpoint in {}", .root.display())]
    NoCheckpoint {
        /// The directory.
        root: PathBuf,
    },

    /// Failure: there are checkpoints, and none of them is intact.
    #[error("{}: none of {count} checkpoints is intact; the newest: {newest}", .root.display())]
    NoneIntact {
        /// The directory.
        root: PathBuf,
        /// Checkpoints that are there.
        count: usize,
        /// What is wrong with the newest.
        newest: Box<Error>,
    },

    /// Refusal: a symbolic link, directory or device where a file should be.
    #[error("{} is not a regular file", .path.display())]
    NotARegularFile {
        /// What was found.
        path: PathBuf,
    },

    /// Refusal: a manifest that is not JSON, or has other fields than it should.
    #[error("{}: {source}", .path.display())]
    BadManifest {
        /// The manifest.
        path: PathBuf,
        /// What is wrong with it.
        source: serde_json::Error,
    },

    /// Refusal: JSON of something else.
    #[error("{}: the format is {found:?}, not {expected:?}", .path.display(), expected = crate::manifest::FORMAT)]
    WrongFormat {
        /// The manifest.
        path: PathBuf,
        /// What it says it is.
        found: String,
    },

    /// Refusal: a manifest of another version.
    #[error("{}: version {found}, this program reads version {supported}", .path.display())]
    WrongVersion {
        /// The manifest.
        path: PathBuf,
        /// Its version.
        found: u64,
        /// The version that is read.
        supported: u64,
    },

    /// Refusal: the name of a file that would lead out of the checkpoint, or is no name of ours.
    #[error("{}: {name:?} is not the name of a file beside it", .path.display())]
    UnsafeFileName {
        /// The manifest or index.
        path: PathBuf,
        /// The name in it.
        name: String,
    },

    /// Refusal: a manifest that names a file twice.
    #[error("{}: {name:?} is named twice", .path.display())]
    DuplicateFile {
        /// The manifest.
        path: PathBuf,
        /// The name in it.
        name: String,
    },

    /// Refusal: a part in a file that the manifest does not name.
    #[error("{name}: is in file {file} of {files}")]
    NoSuchFile {
        /// The tensor.
        name: TensorName,
        /// Index of the file.
        file: usize,
        /// Files that there are.
        files: usize,
    },

    /// Refusal: a file of another length: cut off, or of another checkpoint.
    #[error("{}: {found_bytes} bytes, should have {expected_bytes} (cut off, or another checkpoint's)", .path.display())]
    FileLength {
        /// The file.
        path: PathBuf,
        /// Bytes it should have.
        expected_bytes: u64,
        /// Bytes it has.
        found_bytes: u64,
    },

    /// Refusal: a file whose bytes are not those that were written.
    #[error("{}: the checksum of its {part} is {found}, should be {expected} (damaged, or another checkpoint's)", .path.display())]
    Checksum {
        /// The file.
        path: PathBuf,
        /// What the checksum is of: the header, or all of it.
        part: &'static str,
        /// Checksum that was written.
        expected: String,
        /// Checksum of what is there.
        found: String,
    },

    /// Refusal: not a safetensors file, or one that contradicts itself.
    #[error("{}: not a valid safetensors file: {source}", .path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: safetensors::SafeTensorError,
    },

    /// Refusal: a file that holds something other than the manifest or index says.
    #[error("{}: {name:?}: {detail}", .path.display())]
    FileDisagrees {
        /// The file.
        path: PathBuf,
        /// The tensor, as it is named in the file.
        name: String,
        /// What differs.
        detail: String,
    },

    /// Refusal: no tensor of that name.
    #[error("{} has no {name}", .path.display())]
    UnknownTensor {
        /// The checkpoint.
        path: PathBuf,
        /// The name asked for.
        name: TensorName,
    },

    /// Refusal: another element type than asked for, and the policy does not allow a cast.
    #[error("{name} is {found:?}, asked for as {wanted:?} (the policy does not allow this cast)")]
    DTypeMismatch {
        /// The tensor.
        name: TensorName,
        /// Element type in the checkpoint.
        found: DType,
        /// Element type asked for.
        wanted: DType,
    },

    /// Refusal: not all that is wanted is there, or more is there than is wanted.
    #[error("{}", unmatched(.missing, .unexpected, .mismatched))]
    Unmatched {
        /// Wanted, and not there.
        missing: Vec<TensorName>,
        /// There, and not wanted.
        unexpected: Vec<TensorName>,
        /// There with another shape, or another element type than the policy allows.
        mismatched: Vec<Mismatch>,
    },

    /// Refusal: not a pattern.
    #[error("cannot rename by {pattern:?}: {source}")]
    BadPattern {
        /// The pattern.
        pattern: String,
        /// What is wrong with it.
        source: Box<regex::Error>,
    },

    /// Refusal: two tensors have one name after renaming.
    #[error("{first} and {second} are both renamed to {renamed}")]
    RenameCollision {
        /// One of them.
        first: TensorName,
        /// The other.
        second: TensorName,
        /// What both would be named.
        renamed: TensorName,
    },

    /// Refusal: something is where the output should go.
    #[error("{} exists already (nothing is overwritten)", .path.display())]
    Exists {
        /// The output.
        path: PathBuf,
    },

    /// Refusal: a checkpoint for no ranks.
    #[error("a checkpoint has at least one rank")]
    NoRanks,
}

impl Error {
    pub(crate) fn io(
        action: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io {
            action,
            path,
            source,
        }
    }
}

#[allow(
    clippy::wildcard_enum_match_arm,
    reason = "other kinds of errors say enough by themselves"
)]
fn hint(source: &io::Error) -> &'static str {
    match source.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            " (free some space, or keep fewer checkpoints)"
        }
        io::ErrorKind::ReadOnlyFilesystem => " (the file system is mounted read-only)",
        io::ErrorKind::PermissionDenied => " (the user of this job needs to write there)",
        _ => "",
    }
}

fn unmatched(missing: &[TensorName], unexpected: &[TensorName], wrong: &[Mismatch]) -> String {
    const SHOWN: usize = 5;
    let mut text = Vec::new();
    let mut list = |what: &str, names: Vec<String>| {
        if !names.is_empty() {
            let more = names.len().saturating_sub(SHOWN);
            let shown = names[..names.len() - more].join(", ");
            let rest = if more > 0 {
                format!(" and {more} more")
            } else {
                String::new()
            };
            text.push(format!("{what}: {shown}{rest}"));
        }
    };
    let strings = |names: &[TensorName]| names.iter().map(ToString::to_string).collect();
    list("missing", strings(missing));
    list("unexpected", strings(unexpected));
    list("different", wrong.iter().map(ToString::to_string).collect());
    format!(
        "the checkpoint does not fit: {} (rename by pattern, or load what matches)",
        text.join("; ")
    )
}
