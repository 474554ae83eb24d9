//! Segments in the memory of a device, as the owner of that memory shows them.

use std::{any::Any, fmt};

use crate::{error::NcclError, memory::Memory};

/// What the owner of device memory does around its use on a communicator's stream; see the crate's page.
///
/// Neither waits for the device: [`Memory::wait_for`] and [`Memory::hold_up`] order streams.
pub trait Owner: Send + Sync {
    /// What is put on the stream of `memory` from now on sees all that was written so far.
    ///
    /// # Errors
    ///
    /// If the streams cannot be ordered.
    fn before(&self, memory: &dyn Memory) -> Result<(), NcclError>;

    /// What the owner launches from now on, and any reuse of its memory, waits for what is on the stream
    /// of `memory` by now.
    ///
    /// # Errors
    ///
    /// If the streams cannot be ordered.
    fn after(&self, memory: &dyn Memory) -> Result<(), NcclError>;
}

/// Where the segments of a list are in a device's memory; what [`Segments::device`] returns for
/// [`NcclCommunicator`].
///
/// [`Segments::device`]: burn_shard_comm::Segments::device
/// [`NcclCommunicator`]: crate::NcclCommunicator
pub struct DeviceSegments {
    device: usize,
    addresses: Vec<Option<u64>>,
    owner: Box<dyn Owner>,
}

impl DeviceSegments {
    /// The segments of a list on `device`, in order; `None`: absent, and contributes zeros.
    ///
    /// # Safety
    ///
    /// For as long as this value lives, and until what was on the stream at the last
    /// [`Owner::after`] is over, each address is memory of the device (or that it can reach) of the
    /// segment's length, aligned to the element. For an output, nobody else uses it from
    /// [`Owner::before`] to then; of an input, nobody writes to it (but the input of an `all_gather` may be
    /// this rank's part of the output). The owner's hooks do what they say.
    #[must_use]
    pub unsafe fn new(device: usize, addresses: Vec<Option<u64>>, owner: Box<dyn Owner>) -> Self {
        Self {
            device,
            addresses,
            owner,
        }
    }

    pub(crate) const fn device(&self) -> usize {
        self.device
    }

    pub(crate) fn addresses(&self) -> &[Option<u64>] {
        &self.addresses
    }

    pub(crate) fn owner(&self) -> &dyn Owner {
        &*self.owner
    }
}

impl fmt::Debug for DeviceSegments {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceSegments")
            .field("device", &self.device)
            .field("addresses", &self.addresses)
            .finish_non_exhaustive()
    }
}

/// What [`Segments::device`](burn_shard_comm::Segments::device) returns, if it is ours.
pub(crate) fn on_device(device: Option<&dyn Any>) -> Option<&DeviceSegments> {
    device.and_then(<dyn Any>::downcast_ref)
}
