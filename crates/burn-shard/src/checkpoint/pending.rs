//! A save under way: prepare, write, publish, each agreed on by all ranks.

use std::fmt;
use std::time::Duration;

use burn_shard_checkpoint::{
    Background, Description, Error as FileError, Keep, Published, RankReport, Writer, tell, told,
    told_by_all,
};
use burn_shard_comm::ProcessGroup;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::Error;

/// How often a quarter of the group's deadline is waited for files.
const TURNS: u32 = 16;

/// A checkpoint that is being written while training goes on, see
/// [`Checkpoints::begin_save`](super::Checkpoints::begin_save).
///
/// It is there for others once [`finish`](Self::finish) has published it. Dropped before, it is given up:
/// earlier checkpoints stay the newest, the next save removes what was written, and the log says so. A file that
/// is being written then is written to its end, or until the next save removes its directory.
#[must_use = "a save that is not finished is given up"]
pub struct PendingSave {
    group: ProcessGroup,
    step: u64,
    /// `None` once it has been finished.
    writing: Option<Writing>,
    /// Rank 0's part of it.
    publication: Option<Publication>,
}

/// The writing of this rank's file.
pub(super) enum Writing {
    UnderWay(Background<RankReport>),
    Over(Result<RankReport, FileError>),
}

/// What rank 0 does once all files are there.
pub(super) struct Publication {
    pub(super) writer: Writer,
    pub(super) description: Description,
    pub(super) keep: Keep,
}

impl PendingSave {
    pub(super) fn new(
        group: &ProcessGroup,
        step: u64,
        writing: Writing,
        publication: Option<Publication>,
    ) -> Self {
        Self {
            group: group.clone(),
            step,
            writing: Some(writing),
            publication,
        }
    }

    /// The step that is saved.
    #[must_use]
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Whether every rank has written its file, or failed to: then [`finish`](Self::finish) does not wait. A
    /// collective of one byte.
    ///
    /// # Errors
    ///
    /// Failures of the communicator.
    pub fn is_ready(&mut self) -> Result<bool, Error> {
        self.is_ready_within(Duration::ZERO)
    }

    /// Waits for this rank's file first.
    fn is_ready_within(&mut self, at_most: Duration) -> Result<bool, Error> {
        if let Some(Writing::UnderWay(background)) = &mut self.writing {
            let report = match background.wait(at_most) {
                Err(FileError::StillWriting { .. }) => None,
                Ok(report) => Some(report.ok_or(FileError::Panicked)),
                Err(error) => Some(Err(error)),
            };
            if let Some(report) = report {
                self.writing = Some(Writing::Over(report));
            }
        }
        let is_writing = matches!(self.writing, Some(Writing::UnderWay(_)));
        Ok(!self.group.any(is_writing)?)
    }

    /// Waits until every rank has written its file, and publishes the checkpoint. A collective. Ranks tell each
    /// other meanwhile that they still write, so that a disk may be slower than the group's deadline: by as
    /// much as four times.
    ///
    /// # Errors
    ///
    /// Every rank has the same error: what any of them could not write, or did not write in time
    /// ([`Error::Checkpoint`]), or a failure of the communicator. Earlier checkpoints are untouched then,
    /// and training may go on.
    pub fn finish(mut self) -> Result<Published, Error> {
        let rank = self.group.rank();
        let turn = self.group.deadline() / 4;
        for _ in 0..TURNS {
            if self.is_ready_within(turn)? {
                break;
            }
        }
        let report = match self.writing.take() {
            Some(Writing::Over(report)) => report,
            Some(Writing::UnderWay(_)) | None => Err(FileError::StillWriting {
                waited: turn * TURNS,
            }),
        };
        let reports = self.group.all_gather_bytes(&tell(rank, &report))?;
        let publication = self.publication.take();
        let (published, _) = tell_from_rank_0(&self.group, || {
            let reports = told_by_all(&reports)?;
            let Publication {
                writer,
                description,
                keep,
            } = publication.ok_or(FileError::NotRankZero)?;
            Ok((writer.publish(&reports, &description, keep)?, ()))
        })?;
        Ok(published)
    }
}

impl Drop for PendingSave {
    fn drop(&mut self) {
        if self.writing.is_some() {
            log::warn!(
                "rank {}: the checkpoint of step {} is given up: it was dropped without `finish`",
                self.group.rank(),
                self.step
            );
        }
    }
}

impl fmt::Debug for PendingSave {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PendingSave")
            .field("step", &self.step)
            .finish_non_exhaustive()
    }
}

/// Does something on rank 0, of which all ranks learn the result. What only rank 0 has is returned
/// there alone.
pub(super) fn tell_from_rank_0<T, O>(
    group: &ProcessGroup,
    act: impl FnOnce() -> Result<(T, O), FileError>,
) -> Result<(T, Option<O>), Error>
where
    T: Serialize + DeserializeOwned,
{
    if group.rank() != 0 {
        let message = group.broadcast_bytes(Vec::new(), 0)?;
        return Ok((told(&message)?, None));
    }
    let (told, own) = match act() {
        Ok((told, own)) => (Ok(told), Some(own)),
        Err(error) => (Err(error), None),
    };
    group.broadcast_bytes(tell(0, &told), 0)?;
    Ok((told?, own))
}
