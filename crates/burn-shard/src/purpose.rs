//! What a collective is for. Ranks compare it before anything is sent, so that values of one
//! parameter never end in another, and replicas that drifted apart are found at the next collective.

/// The purpose of one collective, in the form that ranks compare and the one that people read.
#[derive(Clone, Debug, Default)]
pub(crate) struct Purpose {
    /// Equal on all ranks, or the collective fails.
    pub(crate) label: u64,
    /// Said in the error then.
    pub(crate) text: String,
}
