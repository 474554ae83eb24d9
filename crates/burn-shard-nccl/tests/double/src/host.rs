//! Host memory that behaves like a device's: one stream, worked off by a thread, events, buffers.

use std::{
    alloc::{Layout, alloc, dealloc},
    collections::HashMap,
    ffi::c_void,
    fmt, ptr, slice,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc::{Sender, channel},
    },
    thread,
};

use burn_shard_nccl::{Event, Memory, NcclError};
use parking_lot::Mutex;

/// What a stream looks like from the other side of the library's border.
#[repr(C)]
pub(crate) struct Stream {
    pub(crate) magic: u64,
    /// Calls `run(data)` once all that came before is over.
    pub(crate) enqueue: unsafe extern "C" fn(
        *const Stream,
        run: unsafe extern "C" fn(*mut c_void),
        data: *mut c_void,
    ),
}

pub(crate) const MAGIC: u64 = 0x6475_4253_7472_6d31;

type Task = Box<dyn FnOnce() + Send>;

#[repr(C)]
struct Queue {
    stream: Stream,
    tasks: Sender<Task>,
}

/// The memory of a rank, on the host; a device's stand-in for tests.
pub struct HostMemory {
    device: usize,
    queue: Box<Queue>,
    buffers: Arc<Mutex<HashMap<usize, Layout>>>,
    /// What copies do not hold their caller for.
    pinned: Mutex<HashMap<usize, Layout>>,
    allocated: AtomicUsize,
}

/// Aligned as a GPU's buffers are, so that nothing is right by accident only there.
const ALIGNMENT: usize = 64;

impl HostMemory {
    /// Memory that says it is on `device`.
    ///
    /// # Panics
    ///
    /// If no thread can be started.
    #[must_use]
    pub fn new(device: usize) -> Self {
        let (tasks, queued) = channel::<Task>();
        let thread = thread::Builder::new().name(format!("host stream {device}"));
        thread
            .spawn(move || queued.into_iter().for_each(|task| task()))
            .expect("a test should be able to start a thread");
        Self {
            device,
            queue: Box::new(Queue {
                stream: Stream {
                    magic: MAGIC,
                    enqueue,
                },
                tasks,
            }),
            buffers: Arc::default(),
            pinned: Mutex::default(),
            allocated: AtomicUsize::new(0),
        }
    }

    /// Buffers that were allocated so far.
    pub fn allocated(&self) -> usize {
        self.allocated.load(Ordering::Relaxed)
    }

    /// Buffers that are not freed.
    pub fn live(&self) -> usize {
        self.buffers.lock().len()
    }

    /// Puts `task` on the stream. As a driver does where the memory on the host is not page-locked, returns
    /// only once the stream has come to it.
    fn transfer(&self, host: *const u8, bytes: usize, task: Task) {
        let (start, end) = (host.addr(), host.addr() + bytes);
        let pinned = self.pinned.lock();
        let pinned = pinned
            .iter()
            .any(|(address, layout)| *address <= start && end <= address + layout.size());
        if pinned {
            return self.queue.launch(task);
        }
        let (done, wait) = channel();
        self.launch(move || {
            task();
            // Whoever sent it waits.
            let _heard = done.send(());
        });
        // An error: the stream has ended, with all that was on it.
        let _ended = wait.recv();
    }

    /// Host memory that is not freed.
    pub fn pinned(&self) -> usize {
        self.pinned.lock().len()
    }

    /// Puts `task` on the stream.
    pub fn launch(&self, task: impl FnOnce() + Send + 'static) {
        self.queue.launch(Box::new(task));
    }
}

impl Queue {
    fn launch(&self, task: Task) {
        self.tasks
            .send(task)
            .expect("a stream should live as long as its memory");
    }

    /// What comes to `other` from now on waits for what is here by now.
    fn hold_up(&self, other: &Self) {
        let (reached, wait) = channel();
        self.launch(Box::new(move || {
            // Nobody waits any more: the other stream has ended.
            let _unheard = reached.send(());
        }));
        other.launch(Box::new(move || {
            // An error: this stream has ended, with all that was on it.
            let _ended = wait.recv();
        }));
    }
}

unsafe extern "C" fn enqueue(
    stream: *const Stream,
    run: unsafe extern "C" fn(*mut c_void),
    data: *mut c_void,
) {
    // SAFETY: streams are made in `HostMemory::new` only, as the first field of a `Queue`.
    let queue = unsafe { &*stream.cast::<Queue>() };
    let data = data.expose_provenance();
    queue.launch(Box::new(move || {
        // SAFETY: whoever called `enqueue` said so.
        unsafe { run(ptr::with_exposed_provenance_mut(data)) }
    }));
}

fn pointer(address: u64) -> *mut u8 {
    ptr::with_exposed_provenance_mut(usize::try_from(address).expect("an address should fit"))
}

fn copied(from: usize, to: usize, bytes: usize) -> Task {
    Box::new(move || {
        let (from, to) = (
            ptr::with_exposed_provenance::<u8>(from),
            ptr::with_exposed_provenance_mut(to),
        );
        // SAFETY: the caller of `upload`, `download` or `copy` vouches for both.
        unsafe { ptr::copy_nonoverlapping(from, to, bytes) };
    })
}

// SAFETY: buffers come from the allocator, and are freed on the stream; the thread works the stream off in
// order.
unsafe impl Memory for HostMemory {
    fn device(&self) -> usize {
        self.device
    }

    fn enter(&self) -> Result<(), NcclError> {
        Ok(())
    }

    fn stream(&self) -> u64 {
        ptr::from_ref(&self.queue.stream).expose_provenance() as u64
    }

    fn allocate(&self, bytes: usize) -> Result<u64, NcclError> {
        let layout =
            Layout::from_size_align(bytes.max(1), ALIGNMENT).expect("a buffer should be small");
        // SAFETY: the layout is not empty.
        let buffer = unsafe { alloc(layout) };
        assert!(!buffer.is_null(), "out of memory");
        // What nobody has written shows.
        // SAFETY: just allocated, that long.
        unsafe { buffer.write_bytes(0xa5, layout.size()) };
        let address = buffer.expose_provenance();
        self.buffers.lock().insert(address, layout);
        self.allocated.fetch_add(1, Ordering::Relaxed);
        Ok(address as u64)
    }

    unsafe fn free(&self, address: u64) {
        let buffers = Arc::clone(&self.buffers);
        self.launch(move || {
            let buffer = pointer(address);
            let layout = buffers.lock().remove(&buffer.addr());
            let layout = layout.expect("what is freed should be a buffer, once");
            // So that a late reader is not right by accident.
            // SAFETY: allocated in `allocate`, that long.
            unsafe { buffer.write_bytes(0x5a, layout.size()) };
            // SAFETY: allocated in `allocate` with this layout, and out of the table.
            unsafe { dealloc(buffer, layout) };
        });
    }

    fn pin(&self, bytes: usize) -> Result<*mut u8, NcclError> {
        let layout =
            Layout::from_size_align(bytes.max(1), ALIGNMENT).expect("a buffer should be small");
        // SAFETY: the layout is not empty.
        let buffer = unsafe { alloc(layout) };
        assert!(!buffer.is_null(), "out of memory");
        self.pinned
            .lock()
            .insert(buffer.expose_provenance(), layout);
        Ok(buffer)
    }

    unsafe fn unpin(&self, address: *mut u8) {
        let layout = self.pinned.lock().remove(&address.addr());
        let layout = layout.expect("what is freed should be a buffer, once");
        // SAFETY: allocated in `pin` with this layout, and out of the table.
        unsafe { dealloc(address, layout) };
    }

    unsafe fn upload(&self, from: *const u8, to: u64, bytes: usize) -> Result<(), NcclError> {
        let task = copied(from.expose_provenance(), pointer(to).addr(), bytes);
        self.transfer(from, bytes, task);
        Ok(())
    }

    unsafe fn download(&self, from: u64, to: *mut u8, bytes: usize) -> Result<(), NcclError> {
        let task = copied(pointer(from).addr(), to.expose_provenance(), bytes);
        self.transfer(to, bytes, task);
        Ok(())
    }

    unsafe fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<(), NcclError> {
        self.queue
            .launch(copied(pointer(from).addr(), pointer(to).addr(), bytes));
        Ok(())
    }

    unsafe fn zero(&self, to: u64, bytes: usize) -> Result<(), NcclError> {
        self.launch(move || {
            // SAFETY: the caller vouches for it.
            let target = unsafe { slice::from_raw_parts_mut(pointer(to), bytes) };
            target.fill(0);
        });
        Ok(())
    }

    unsafe fn wait_for(&self, other: u64) -> Result<(), NcclError> {
        // SAFETY: the caller's; every stream is the first field of a `Queue`.
        let other = unsafe { &*pointer(other).cast::<Queue>() };
        other.hold_up(&self.queue);
        Ok(())
    }

    unsafe fn hold_up(&self, other: u64) -> Result<(), NcclError> {
        // SAFETY: the caller's; every stream is the first field of a `Queue`.
        let other = unsafe { &*pointer(other).cast::<Queue>() };
        self.queue.hold_up(other);
        Ok(())
    }

    fn record(&self) -> Result<Box<dyn Event>, NcclError> {
        let over = Arc::new(AtomicBool::new(false));
        let set = Arc::clone(&over);
        self.launch(move || set.store(true, Ordering::Release));
        Ok(Box::new(HostEvent(over)))
    }
}

impl fmt::Debug for HostMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostMemory")
            .field("device", &self.device)
            .finish_non_exhaustive()
    }
}

struct HostEvent(Arc<AtomicBool>);

impl Event for HostEvent {
    fn is_over(&self) -> Result<bool, NcclError> {
        Ok(self.0.load(Ordering::Acquire))
    }
}
