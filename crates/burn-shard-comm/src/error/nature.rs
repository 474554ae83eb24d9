//! What kind of error it is: refusal or failure, first cause or consequence.

use super::Error;

impl Error {
    /// Whether the group is as usable as before.
    #[must_use]
    pub const fn is_refusal(&self) -> bool {
        match self {
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
            | Self::UnsupportedDType { .. } => true,
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
        let mut error = self;
        while let Self::Interrupted { cause, .. } | Self::Poisoned { cause, .. } = error {
            error = cause;
        }
        error
    }

    /// The rank on which a failure began, if it began on one.
    pub(crate) const fn origin(&self) -> Option<usize> {
        if let Self::Backend { rank, .. }
        | Self::Deadline { rank, .. }
        | Self::RankLeft { rank, .. }
        | Self::Aborted { rank, .. }
        | Self::RankPanicked { rank, .. }
        | Self::Injected { rank, .. } = self
        {
            Some(*rank)
        } else {
            None
        }
    }
}
