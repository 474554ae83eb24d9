//! [`process_group`]: what most programs need.

use std::sync::Arc;

use burn_shard_comm::{Pairwise, ProcessGroup, Recording};

use crate::{error::MpiError, transport::MpiTransport};

/// The group of all ranks of the job.
///
/// They wait for each other as long as `BURN_SHARD_TIMEOUT` says, see
/// [`ProcessGroup::deadline_from_env`].
///
/// All ranks have to call it. For the rank on this host, or a part of the ranks, make a
/// [`MpiTransport`] and a [`Pairwise`] of it.
///
/// # Errors
///
/// What [`MpiTransport::init`] refuses or fails with.
pub fn process_group() -> Result<ProcessGroup, MpiError> {
    let transport = MpiTransport::init()?;
    let deadline = transport.deadline();
    let communicator = Arc::new(Pairwise::new(transport, deadline));
    Ok(ProcessGroup::new(Recording::flight_from_env(communicator)))
}
