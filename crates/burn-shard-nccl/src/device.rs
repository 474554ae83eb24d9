//! Segments in the memory of a device, as the owner of that memory shows them.

use std::{any::Any, fmt};

use crate::{error::NcclError, memory::Memory};

/// What the owner of device memory does around its use on a communicator's stream; see the crate's page.
///
/// | | input of a collective | output of [`Work::finish`] |
/// |---|---|---|
/// | [`Owner::before`] | when the collective is started | when it is finished |
/// | [`Owner::after`] | never | when it is finished |
/// | who keeps the memory | the [`Segments`] that were passed, which the communicator holds until its stream has passed the collective | the caller until `finish` returns, the order of streams afterwards |
///
/// So an input may neither be written to nor freed while its `Segments` live, and what the owner launches
/// meanwhile does not wait for the collective: a backward goes on while its gradients are reduced. Nothing
/// but the output orders the owner's streams behind it.
///
/// Neither waits for the device: [`Memory::wait_for`] and [`Memory::hold_up`] order streams.
///
/// [`Segments`]: burn_shard_comm::Segments
/// [`Work::finish`]: burn_shard_comm::Work::finish
pub trait Owner: Send + Sync {
    /// What is put on the stream of `memory` from now on sees all that was written so far, and comes after
    /// all that reads the memory so far.
    ///
    /// # Errors
    ///
    /// If the streams cannot be ordered.
    fn before(&self, memory: &dyn Memory) -> Result<(), NcclError>;

    /// What the owner launches from now on, and any reuse of an output, waits for what is on the stream of
    /// `memory` by now.
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
    /// For as long as this value lives, each address is memory of the device (or that it can reach) of the
    /// segment's length, aligned to the element. Of an input, nobody writes to it meanwhile. An output stays
    /// until what was on the stream at [`Owner::after`] is over, and nobody else uses it from
    /// [`Owner::before`] to then. The owner's hooks do what they say.
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
