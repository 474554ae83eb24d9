//! [`process_group`]: what most programs need.

use std::sync::Arc;

use burn_shard_comm::{Pairwise, ProcessGroup};

use crate::{
    error::MpiError,
    transport::{DEADLINE, MpiTransport},
};

/// The group of all ranks of the job, with a deadline of five minutes.
///
/// All ranks have to call it. For the rank on this host, or a part of the ranks, make a
/// [`MpiTransport`] and a [`Pairwise`] of it.
///
/// # Errors
///
/// As [`MpiTransport::init`].
pub fn process_group() -> Result<ProcessGroup, MpiError> {
    let transport = MpiTransport::init()?;
    Ok(ProcessGroup::new(Arc::new(Pairwise::new(
        transport, DEADLINE,
    ))))
}
