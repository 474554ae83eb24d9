//! The memory of an NVIDIA GPU, through the driver's interface.

use std::{
    fmt::{self, Display},
    ptr, slice,
    sync::Arc,
};

use cudarc::driver::{
    DriverError,
    result::{self, event, stream},
    sys::{self, CUevent, CUresult, CUstream},
};

use crate::{
    error::NcclError,
    library::search_path,
    memory::{Event, Memory},
};

/// A GPU's primary context, which is CubeCL's too, and a stream in it that goes before others.
pub struct Cuda {
    context: Arc<Context>,
    stream: CUstream,
}

struct Context {
    device: usize,
    handle: sys::CUdevice,
    raw: sys::CUcontext,
}

// SAFETY: a context and a stream may be used from any thread.
unsafe impl Send for Context {}
// SAFETY: as above; the driver locks.
unsafe impl Sync for Context {}
// SAFETY: as above.
unsafe impl Send for Cuda {}
// SAFETY: as above.
unsafe impl Sync for Cuda {}

impl Cuda {
    /// The GPU with number `device`, counted as `CUDA_VISIBLE_DEVICES` says.
    ///
    /// # Errors
    ///
    /// If there is no driver, or no such GPU.
    pub fn new(device: usize) -> Result<Self, NcclError> {
        // The first call of a function whose library is missing would panic.
        // SAFETY: loads and unloads the driver's library.
        if !unsafe { sys::is_culib_present() } {
            return Err(NcclError::DriverMissing {
                search: search_path(),
            });
        }
        let failed = |function| move |error| driver_error(device, function, &error);
        result::init().map_err(failed("cuInit"))?;
        let missing = |message: &dyn Display| NcclError::Driver {
            device,
            function: "cuDeviceGet",
            message: message.to_string(),
        };
        let ordinal = i32::try_from(device).map_err(|error| missing(&error))?;
        let handle = result::device::get(ordinal).map_err(failed("cuDeviceGet"))?;
        // SAFETY: the driver has just returned the device; released when `Context` is dropped.
        let raw = unsafe { result::primary_ctx::retain(handle) };
        let context = Arc::new(Context {
            device,
            handle,
            raw: raw.map_err(failed("cuDevicePrimaryCtxRetain"))?,
        });
        context.enter()?;
        // Lower numbers go first.
        let (_, first) =
            stream::get_priority_range().map_err(failed("cuCtxGetStreamPriorityRange"))?;
        let created = stream::create_with_priority(stream::StreamKind::NonBlocking, first);
        Ok(Self {
            context,
            stream: created.map_err(failed("cuStreamCreateWithPriority"))?,
        })
    }

    fn failed(&self, function: &'static str) -> impl FnOnce(DriverError) -> NcclError {
        let device = self.context.device;
        move |error| driver_error(device, function, &error)
    }
}

impl Context {
    /// Makes the context this thread's, which most calls of the driver want.
    fn enter(&self) -> Result<(), NcclError> {
        // SAFETY: retained until `self` is dropped.
        let result = unsafe { result::ctx::set_current(self.raw) };
        result.map_err(|error| driver_error(self.device, "cuCtxSetCurrent", &error))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained in `Cuda::new`. An error would leave nothing to do.
        let _result = unsafe { result::primary_ctx::release(self.handle) };
    }
}

fn driver_error(device: usize, function: &'static str, error: &DriverError) -> NcclError {
    let name = error
        .error_name()
        .ok()
        .map(|name| name.to_string_lossy().into_owned());
    let text = error
        .error_string()
        .ok()
        .map(|text| text.to_string_lossy().into_owned());
    NcclError::Driver {
        device,
        function,
        message: format!(
            "{} ({})",
            text.unwrap_or_default(),
            name.unwrap_or_else(|| format!("{:?}", error.0))
        ),
    }
}

// SAFETY: buffers come from the driver's pool, aligned to 256 and more; copies and events are put on the
// one stream, which the driver works off in order.
unsafe impl Memory for Cuda {
    fn device(&self) -> usize {
        self.context.device
    }

    fn enter(&self) -> Result<(), NcclError> {
        self.context.enter()
    }

    fn stream(&self) -> u64 {
        self.stream.expose_provenance() as u64
    }

    fn allocate(&self, bytes: usize) -> Result<u64, NcclError> {
        self.context.enter()?;
        // The driver refuses to allocate nothing.
        // SAFETY: the stream is ours and alive.
        let address = unsafe { result::malloc_async(self.stream, bytes.max(1)) };
        address.map_err(self.failed("cuMemAllocAsync"))
    }

    unsafe fn free(&self, address: u64) {
        if self.context.enter().is_ok() {
            // SAFETY: the caller's. If it fails, the context is broken, and its memory goes with it.
            let _result = unsafe { result::free_async(address, self.stream) };
        }
    }

    unsafe fn upload(&self, from: *const u8, to: u64, bytes: usize) -> Result<(), NcclError> {
        self.context.enter()?;
        // SAFETY: the caller's.
        let from = unsafe { slice::from_raw_parts(from, bytes) };
        // SAFETY: the caller's.
        let result = unsafe { result::memcpy_htod_async(to, from, self.stream) };
        result.map_err(self.failed("cuMemcpyHtoDAsync"))
    }

    unsafe fn download(&self, from: u64, to: *mut u8, bytes: usize) -> Result<(), NcclError> {
        self.context.enter()?;
        // SAFETY: the caller's.
        let to = unsafe { slice::from_raw_parts_mut(to, bytes) };
        // SAFETY: the caller's.
        let result = unsafe { result::memcpy_dtoh_async(to, from, self.stream) };
        result.map_err(self.failed("cuMemcpyDtoHAsync"))
    }

    unsafe fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<(), NcclError> {
        self.context.enter()?;
        // SAFETY: the caller's.
        let result = unsafe { result::memcpy_dtod_async(to, from, bytes, self.stream) };
        result.map_err(self.failed("cuMemcpyDtoDAsync"))
    }

    unsafe fn zero(&self, to: u64, bytes: usize) -> Result<(), NcclError> {
        self.context.enter()?;
        // SAFETY: the caller's.
        let result = unsafe { result::memset_d8_async(to, 0, bytes, self.stream) };
        result.map_err(self.failed("cuMemsetD8Async"))
    }

    unsafe fn wait_for(&self, other: u64) -> Result<(), NcclError> {
        let other = to_stream(other);
        // SAFETY: the caller's.
        let event = unsafe { self.recorded(other) }?;
        // SAFETY: both are alive; the driver keeps what it needs of the event after it is destroyed.
        unsafe { self.wait_event(self.stream, &event) }
    }

    unsafe fn hold_up(&self, other: u64) -> Result<(), NcclError> {
        // SAFETY: the stream is ours and alive.
        let event = unsafe { self.recorded(self.stream) }?;
        // SAFETY: as above, and the caller's.
        unsafe { self.wait_event(to_stream(other), &event) }
    }

    fn record(&self) -> Result<Box<dyn Event>, NcclError> {
        // SAFETY: the stream is ours and alive.
        Ok(Box::new(unsafe { self.recorded(self.stream) }?))
    }
}

impl Cuda {
    /// # Safety
    ///
    /// `stream` is a stream of this device, and alive.
    unsafe fn recorded(&self, stream: CUstream) -> Result<CudaEvent, NcclError> {
        self.context.enter()?;
        let created = event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING);
        let event = CudaEvent {
            context: Arc::clone(&self.context),
            raw: created.map_err(self.failed("cuEventCreate"))?,
        };
        // SAFETY: the event is new; the stream is the caller's.
        let result = unsafe { event::record(event.raw, stream) };
        result.map_err(self.failed("cuEventRecord"))?;
        Ok(event)
    }

    /// # Safety
    ///
    /// As [`Cuda::recorded`].
    unsafe fn wait_event(&self, stream: CUstream, event: &CudaEvent) -> Result<(), NcclError> {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: the event is alive, the stream the caller's.
        let result = unsafe { stream::wait_event(stream, event.raw, flags) };
        result.map_err(self.failed("cuStreamWaitEvent"))
    }
}

/// A stream, from what [`Memory::stream`] returns.
fn to_stream(stream: u64) -> CUstream {
    let address = usize::try_from(stream).expect("an address should fit this machine's");
    ptr::with_exposed_provenance_mut(address)
}

impl Drop for Cuda {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // What is still on it will be done: the driver keeps a stream until then.
            // SAFETY: created in `new`, and used no more.
            let _result = unsafe { stream::destroy(self.stream) };
        }
    }
}

impl fmt::Debug for Cuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cuda")
            .field("device", &self.context.device)
            .field("stream", &self.stream)
            .finish()
    }
}

struct CudaEvent {
    context: Arc<Context>,
    raw: CUevent,
}

// SAFETY: an event may be used from any thread.
unsafe impl Send for CudaEvent {}
// SAFETY: as above; the driver locks.
unsafe impl Sync for CudaEvent {}

impl Event for CudaEvent {
    fn is_over(&self) -> Result<bool, NcclError> {
        self.context.enter()?;
        // SAFETY: alive until dropped.
        match unsafe { event::query(self.raw) } {
            Ok(()) => Ok(true),
            Err(DriverError(CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
            Err(error) => Err(driver_error(self.context.device, "cuEventQuery", &error)),
        }
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: created by `record`, and used no more.
            let _result = unsafe { event::destroy(self.raw) };
        }
    }
}
