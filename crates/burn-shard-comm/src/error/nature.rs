//! What kind of error it is: refusal or failure, first cause or consequence.

use std::sync::Arc;

use super::Error;

/// The color and the ranks of a sub-group.
type InGroup<'a> = (usize, &'a Arc<[usize]>);

impl Error {
    /// Whether the group is as usable as before.
    #[must_use]
    pub fn is_refusal(&self) -> bool {
        match self {
            Self::SubGroup { error, .. } => error.is_refusal(),
            Self::NoRanks
            | Self::NoLauncher
            | Self::Placement(_)
            | Self::MeanOfIntegers { .. }
            | Self::RootOutOfRange { .. }
            | Self::RootWithoutInput { .. }
            | Self::InputOutsideRoot { .. }
            | Self::AbsentSegment { .. }
            | Self::DTypeDiffers { .. }
            | Self::SegmentCountDiffers { .. }
            | Self::NumelDiffers { .. }
            | Self::BadSegment { .. }
            | Self::DeviceSegments { .. }
            | Self::OtherDevice { .. }
            | Self::UnsupportedDType { .. }
            | Self::CannotSplit { .. } => true,
            Self::Backend { .. }
            | Self::Rendezvous(_)
            | Self::Mismatch { .. }
            | Self::Deadline { .. }
            | Self::RankLeft { .. }
            | Self::Interrupted { .. }
            | Self::Aborted { .. }
            | Self::RankPanicked { .. }
            | Self::RankDied { .. }
            | Self::OutOfStep { .. }
            | Self::Injected { .. }
            | Self::Threads { .. }
            | Self::Poisoned { .. } => false,
        }
    }

    /// The error this one follows from, or itself: what poisoned the group.
    #[must_use]
    pub fn root_cause(&self) -> &Self {
        self.root_cause_in().1
    }

    /// The [`Error::root_cause`], with the color and ranks of the sub-group it happened in.
    pub(crate) fn root_cause_in(&self) -> (Option<InGroup<'_>>, &Self) {
        let (mut group, mut error) = (None, self);
        loop {
            if let Self::Interrupted { cause, .. } | Self::Poisoned { cause, .. } = error {
                (group, error) = (None, cause);
            } else if let Self::SubGroup {
                color,
                ranks,
                error: inner,
            } = error
            {
                (group, error) = (Some((*color, ranks)), inner);
            } else {
                return (group, error);
            }
        }
    }

    /// `error` in the sub-group in which this one happened.
    pub(crate) fn in_the_same_group(&self, error: Self) -> Self {
        match self.root_cause_in().0 {
            Some((color, ranks)) => Self::SubGroup {
                color,
                ranks: Arc::clone(ranks),
                error: Arc::new(error),
            },
            None => error,
        }
    }

    /// The rank on which a failure began, if it began on one.
    pub(crate) fn origin(&self) -> Option<usize> {
        if let Self::Backend { rank, .. }
        | Self::Deadline { rank, .. }
        | Self::RankLeft { rank, .. }
        | Self::Aborted { rank, .. }
        | Self::RankPanicked { rank, .. }
        | Self::Injected { rank, .. } = self.root_cause_in().1
        {
            Some(*rank)
        } else {
            None
        }
    }
}
