//! What a communicator needs of the memory that NCCL works on: buffers, copies, one stream, events, and
//! host memory that copies do not wait for.

use std::{fmt, sync::Arc};

use crate::error::NcclError;

/// The memory of one device, and one stream on it, on which a rank's communication runs.
///
/// Copies, zeros, waits and events are put on the stream and happen later, in order with what NCCL does
/// there. No call waits for the stream.
///
/// # Safety
///
/// What [`Memory::allocate`] and [`Memory::pin`] return has to be that many bytes nobody else uses, aligned
/// to 16, until it is freed; copies have to copy; an event may only be over once all that was put on the
/// stream before [`Memory::record`] is.
pub unsafe trait Memory: Send + Sync + fmt::Debug {
    /// Which device, as the machine counts them.
    fn device(&self) -> usize;

    /// Makes the device the one that this thread's calls of NCCL are about.
    ///
    /// # Errors
    ///
    /// If the device is lost.
    fn enter(&self) -> Result<(), NcclError>;

    /// The stream, as a `cudaStream_t`.
    fn stream(&self) -> u64;

    /// The address of `bytes` bytes with anything in them, for use on the stream.
    ///
    /// # Errors
    ///
    /// If there is not enough.
    fn allocate(&self, bytes: usize) -> Result<u64, NcclError>;

    /// Frees what [`Memory::allocate`] returned, once the stream comes to it.
    ///
    /// # Safety
    ///
    /// It was not freed before, and nothing uses it that is put on the stream later.
    unsafe fn free(&self, address: u64);

    /// The address of `bytes` bytes of host memory that the device itself reads and writes (page-locked).
    ///
    /// May wait for the device: call it before the first collective.
    ///
    /// # Errors
    ///
    /// If there is not enough.
    fn pin(&self, bytes: usize) -> Result<*mut u8, NcclError>;

    /// Frees what [`Memory::pin`] returned.
    ///
    /// # Safety
    ///
    /// It was not freed before, and nothing on the stream uses it any more.
    unsafe fn unpin(&self, address: *mut u8);

    /// Copies from the host.
    ///
    /// # Safety
    ///
    /// `from` is memory of [`Memory::pin`]: a driver copies other memory only while it holds the caller,
    /// until the stream has come to it. Both are `bytes` bytes and stay where they are until the stream has
    /// come to it; nobody writes to `from` until then.
    ///
    /// # Errors
    ///
    /// If it cannot be put on the stream.
    unsafe fn upload(&self, from: *const u8, to: u64, bytes: usize) -> Result<(), NcclError>;

    /// Copies to the host.
    ///
    /// # Safety
    ///
    /// `to` is memory of [`Memory::pin`], as for [`Memory::upload`]. Both are `bytes` bytes and stay where they are until the stream has come to it; nobody touches
    /// `to` until then.
    ///
    /// # Errors
    ///
    /// If it cannot be put on the stream.
    unsafe fn download(&self, from: u64, to: *mut u8, bytes: usize) -> Result<(), NcclError>;

    /// Copies within the device.
    ///
    /// # Safety
    ///
    /// Both are `bytes` bytes that do not overlap, when the stream comes to it.
    ///
    /// # Errors
    ///
    /// If it cannot be put on the stream.
    unsafe fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<(), NcclError>;

    /// Writes zeros.
    ///
    /// # Safety
    ///
    /// `to` is `bytes` bytes when the stream comes to it.
    ///
    /// # Errors
    ///
    /// If it cannot be put on the stream.
    unsafe fn zero(&self, to: u64, bytes: usize) -> Result<(), NcclError>;

    /// What is put on the stream from now on waits for what is on `other` by now.
    ///
    /// # Safety
    ///
    /// `other` is a stream of the same device, and alive.
    ///
    /// # Errors
    ///
    /// If the streams cannot be ordered.
    unsafe fn wait_for(&self, other: u64) -> Result<(), NcclError>;

    /// What is put on `other` from now on waits for what is on the stream by now.
    ///
    /// # Safety
    ///
    /// The conditions of [`Memory::wait_for`] hold.
    ///
    /// # Errors
    ///
    /// If the streams cannot be ordered.
    unsafe fn hold_up(&self, other: u64) -> Result<(), NcclError>;

    /// An event that is over once all that is on the stream by now is.
    ///
    /// # Errors
    ///
    /// If it cannot be put on the stream.
    fn record(&self) -> Result<Box<dyn Event>, NcclError>;
}

/// A point on a stream.
pub trait Event: Send + Sync {
    /// Whether the stream has passed it; never waits.
    ///
    /// # Errors
    ///
    /// If something before it failed.
    fn is_over(&self) -> Result<bool, NcclError>;
}

/// Memory that is freed once the stream has passed its last use.
pub(crate) struct Scratch {
    memory: Arc<dyn Memory>,
    address: u64,
    bytes: usize,
}

impl Scratch {
    pub(crate) fn new(memory: &Arc<dyn Memory>, bytes: usize) -> Result<Self, NcclError> {
        Ok(Self {
            memory: Arc::clone(memory),
            address: memory.allocate(bytes)?,
            bytes,
        })
    }

    pub(crate) const fn address(&self) -> u64 {
        self.address
    }

    pub(crate) const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Zeros from `start` on.
    pub(crate) fn zero_from(&self, start: usize) -> Result<(), NcclError> {
        if start >= self.bytes {
            return Ok(());
        }
        // SAFETY: the bytes from `start` on are ours until they are freed, later on the stream.
        unsafe {
            self.memory
                .zero(self.address + start as u64, self.bytes - start)
        }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // SAFETY: allocated in `new`, freed here only; what uses it was put on the stream before.
        unsafe { self.memory.free(self.address) }
    }
}
