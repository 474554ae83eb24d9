//! The memory of an NVIDIA GPU, through the driver's interface.

use std::{
    fmt::{self, Display},
    mem, ptr, slice,
    sync::Arc,
};

use cudarc::driver::{
    DriverError,
    result::{self, event, mem_pool, stream},
    sys::{self, CUevent, CUmemoryPool, CUresult, CUstream},
};

use crate::{
    error::{CudaVersion, NcclError},
    library::search_path,
    memory::{Event, Memory},
};

/// A GPU's primary context, which is CubeCL's too, and a stream in it that goes before others.
///
/// Buffers come from a memory pool of its own, which gives nothing back before it ends: the driver's default
/// pool returns what is free to the system whenever somebody waits for an event, to map it again at the next
/// step. Where GPUs reach each other, the pool is open to all of them.
pub struct Cuda {
    context: Arc<Context>,
    stream: CUstream,
    pool: CUmemoryPool,
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
    /// If there is no driver, or an old one, or no such GPU, or one without memory pools.
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
        check_driver()?;
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
        let pool = pool(&context)?;
        // Lower numbers go first.
        let stream = stream::get_priority_range()
            .map_err(failed("cuCtxGetStreamPriorityRange"))
            .and_then(|(_, first)| {
                stream::create_with_priority(stream::StreamKind::NonBlocking, first)
                    .map_err(failed("cuStreamCreateWithPriority"))
            });
        let stream = stream.inspect_err(|_| {
            // SAFETY: created above, and nothing was allocated in it.
            let _result = unsafe { mem_pool::destroy(pool) };
        })?;
        Ok(Self {
            context,
            stream,
            pool,
        })
    }

    fn failed(&self, function: &'static str) -> impl FnOnce(DriverError) -> NcclError {
        let device = self.context.device;
        move |error| driver_error(device, function, &error)
    }
}

/// Refuses drivers that lack what this crate or CubeCL calls.
fn check_driver() -> Result<(), NcclError> {
    let mut found = 0;
    // SAFETY: the function writes one `int`.
    let result = unsafe { sys::cuDriverGetVersion(&raw mut found) }.result();
    // Whoever cannot say it is too old.
    let found = CudaVersion(result.map_or(0, |()| found));
    if found < CudaVersion::MINIMUM {
        return Err(NcclError::DriverTooOld { found });
    }
    Ok(())
}

/// A pool of memory of the device that keeps what was freed, and that other GPUs reach if they can.
fn pool(context: &Context) -> Result<CUmemoryPool, NcclError> {
    let device = context.device;
    let failed = |function| move |error| driver_error(device, function, &error);
    let supported = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED;
    // SAFETY: the context's device.
    let supported = unsafe { result::device::get_attribute(context.handle, supported) };
    if supported.map_err(failed("cuDeviceGetAttribute"))? == 0 {
        return Err(NcclError::NoMemoryPools { device });
    }
    // SAFETY: a C structure of numbers and a null pointer.
    let mut properties: sys::CUmemPoolProps = unsafe { mem::zeroed() };
    properties.allocType = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location = location(context.handle);
    // SAFETY: the properties name the context's device.
    let pool = unsafe { mem_pool::create(&raw const properties) };
    let pool = pool.map_err(failed("cuMemPoolCreate"))?;
    let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    let mut keep_all = u64::MAX;
    // SAFETY: the pool was just created; this attribute is a `cuuint64_t`.
    let result = unsafe { mem_pool::set_attribute(pool, attribute, (&raw mut keep_all).cast()) };
    let result = result.map_err(failed("cuMemPoolSetAttribute"));
    result
        .and_then(|()| open_to_peers(context, pool))
        .inspect_err(|_| {
            // SAFETY: created above, and nothing was allocated in it.
            let _result = unsafe { mem_pool::destroy(pool) };
        })?;
    Ok(pool)
}

/// Lets every GPU that can reach the context's read and write in `pool`: NCCL's kernels of other ranks in
/// this process do so, and peer access between contexts does not cover pools.
fn open_to_peers(context: &Context, pool: CUmemoryPool) -> Result<(), NcclError> {
    let device = context.device;
    let failed = |function| move |error| driver_error(device, function, &error);
    let count = result::device::get_count().map_err(failed("cuDeviceGetCount"))?;
    for peer in 0..count {
        let peer = result::device::get(peer).map_err(failed("cuDeviceGet"))?;
        let mut reaches = 0;
        // SAFETY: the function writes one `int`.
        let asked =
            unsafe { sys::cuDeviceCanAccessPeer(&raw mut reaches, peer, context.handle) }.result();
        asked.map_err(failed("cuDeviceCanAccessPeer"))?;
        if peer == context.handle || reaches == 0 {
            continue;
        }
        // SAFETY: a C structure of numbers.
        let mut access: sys::CUmemAccessDesc = unsafe { mem::zeroed() };
        access.location = location(peer);
        access.flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        // SAFETY: the pool is alive, and there is one description.
        // A rank that has a process to itself needs none of this, so it does not fail there.
        let _result = unsafe { sys::cuMemPoolSetAccess(pool, &raw const access, 1) };
    }
    Ok(())
}

/// The memory of `device`.
fn location(device: sys::CUdevice) -> sys::CUmemLocation {
    // The bindings of CUDA 13.2 and later have the number in a union.
    const _: () = assert!(size_of::<sys::CUmemLocation>() == 2 * size_of::<i32>());
    // SAFETY: a C structure of numbers, whatever the version.
    let mut location: sys::CUmemLocation = unsafe { mem::zeroed() };
    location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    // SAFETY: the second of two `int`s, as asserted above.
    let id = unsafe { (&raw mut location).cast::<i32>().add(1) };
    // SAFETY: within `location`, which nobody else uses.
    unsafe { id.write(device) };
    location
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
        let (bytes, mut address) = (bytes.max(1), 0);
        // SAFETY: pool and stream are ours and alive.
        let result = unsafe {
            sys::cuMemAllocFromPoolAsync(&raw mut address, bytes, self.pool, self.stream)
        };
        result
            .result()
            .map_err(self.failed("cuMemAllocFromPoolAsync"))?;
        Ok(address)
    }

    unsafe fn free(&self, address: u64) {
        if self.context.enter().is_ok() {
            // SAFETY: the caller's. If it fails, the context is broken, and its memory goes with it.
            let _result = unsafe { result::free_async(address, self.stream) };
        }
    }

    fn pin(&self, bytes: usize) -> Result<*mut u8, NcclError> {
        self.context.enter()?;
        // Of all contexts: ranks that are threads may share it.
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE;
        // SAFETY: what is returned is not read before it is written.
        let address = unsafe { result::malloc_host(bytes.max(1), flags) };
        Ok(address.map_err(self.failed("cuMemHostAlloc"))?.cast())
    }

    unsafe fn unpin(&self, address: *mut u8) {
        if self.context.enter().is_ok() {
            // SAFETY: the caller's. If it fails, the context is broken, and its memory goes with it.
            let _result = unsafe { result::free_host(address.cast()) };
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
    /// The conditions of [`Cuda::recorded`] hold.
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
            // It ends with the last buffer that was allocated in it.
            // SAFETY: created in `new`, and used no more.
            let _result = unsafe { mem_pool::destroy(self.pool) };
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
