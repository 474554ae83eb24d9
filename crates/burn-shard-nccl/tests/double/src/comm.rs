//! One rank of a communicator: sockets to the others, calls that wait for their stream, its end.

use std::{
    env, fs,
    io::{self, Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    path::PathBuf,
    ptr,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicI32, AtomicU64, AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use parking_lot::Mutex;

use crate::{
    Fault,
    fault::{self, Planned},
    host::{MAGIC, Stream},
    reduce,
};

pub(crate) const SUCCESS: i32 = 0;
pub(crate) const SYSTEM_ERROR: i32 = 2;
pub(crate) const INVALID_ARGUMENT: i32 = 4;
pub(crate) const INVALID_USAGE: i32 = 5;
pub(crate) const REMOTE_ERROR: i32 = 6;
pub(crate) const IN_PROGRESS: i32 = 7;

/// How often a caller has to ask before what it called is on the stream.
const PATIENCE: usize = 2;
const STEP: Duration = Duration::from_millis(1);

pub(crate) struct Comm {
    rank: usize,
    world_size: usize,
    folder: PathBuf,
    fault: Option<Planned>,
    /// What `ncclCommGetAsyncError` says, apart from launches that are under way.
    state: AtomicI32,
    peers: OnceLock<Vec<Option<UnixStream>>>,
    aborted: AtomicBool,
    finalized: AtomicBool,
    launching: Mutex<Launching>,
    /// Calls on a stream that are not over.
    outstanding: AtomicUsize,
    ops: AtomicU64,
}

#[derive(Default)]
struct Launching {
    asked: usize,
    calls: Vec<Call>,
}

/// What was called, checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    AllGather,
    AllReduce { op: i32 },
    ReduceScatter { op: i32 },
    Broadcast { root: usize },
}

#[derive(Clone, Copy)]
pub(crate) struct Call {
    pub(crate) kind: Kind,
    pub(crate) send: usize,
    pub(crate) receive: usize,
    pub(crate) count: usize,
    pub(crate) dtype: i32,
    pub(crate) stream: usize,
}

type Refusal = (i32, String);

impl Comm {
    pub(crate) fn new(rank: usize, world_size: usize, id: &[u8; 128]) -> Arc<Self> {
        let name: String = id[..16].iter().map(|byte| format!("{byte:02x}")).collect();
        let fault = fault::take(i32::try_from(rank).unwrap_or(i32::MAX));
        let comm = Arc::new(Self {
            rank,
            world_size,
            folder: env::temp_dir().join(format!("burn-shard-nccl-double-{name}")),
            fault,
            state: AtomicI32::new(IN_PROGRESS),
            peers: OnceLock::new(),
            aborted: AtomicBool::new(false),
            finalized: AtomicBool::new(false),
            launching: Mutex::default(),
            outstanding: AtomicUsize::new(0),
            ops: AtomicU64::new(0),
        });
        let joining = Arc::clone(&comm);
        thread::spawn(move || joining.join());
        comm
    }

    fn has_fault(&self, kind: Fault) -> bool {
        self.fault.is_some_and(|fault| fault.kind == kind as i32)
    }

    fn join(&self) {
        if self.has_fault(Fault::InitHang) {
            return self.hang();
        }
        let result = if self.has_fault(Fault::Init) {
            Err(io::Error::other("told to fail"))
        } else {
            self.meet()
        };
        let state = match result.map(|peers| self.peers.set(peers)) {
            Ok(Ok(())) => SUCCESS,
            _ => SYSTEM_ERROR,
        };
        self.state.store(state, Ordering::Release);
    }

    /// Connects to lower ranks, and is connected to by higher ones.
    fn meet(&self) -> io::Result<Vec<Option<UnixStream>>> {
        fs::create_dir_all(&self.folder)?;
        let address = |rank: usize| self.folder.join(rank.to_string());
        let listener = UnixListener::bind(address(self.rank))?;
        listener.set_nonblocking(true)?;
        let mut peers: Vec<Option<UnixStream>> = (0..self.world_size).map(|_| None).collect();
        for (rank, slot) in peers.iter_mut().enumerate().take(self.rank) {
            let mut peer = self.retry(|| UnixStream::connect(address(rank)).ok())?;
            peer.write_all(&(self.rank as u64).to_le_bytes())?;
            *slot = Some(peer);
        }
        for _ in self.rank + 1..self.world_size {
            let (mut peer, _) = self.retry(|| listener.accept().ok())?;
            peer.set_nonblocking(false)?;
            let mut rank = [0; 8];
            peer.read_exact(&mut rank)?;
            let rank = usize::try_from(u64::from_le_bytes(rank)).map_err(io::Error::other)?;
            peers[rank] = Some(peer);
        }
        fs::remove_file(address(self.rank))?;
        // The last one out; the others find it not empty.
        let _result = fs::remove_dir(&self.folder);
        Ok(peers)
    }

    fn retry<T>(&self, attempt: impl Fn() -> Option<T>) -> io::Result<T> {
        loop {
            if let Some(value) = attempt() {
                return Ok(value);
            }
            if self.aborted.load(Ordering::Acquire) {
                return Err(io::Error::other("aborted"));
            }
            thread::sleep(STEP);
        }
    }

    pub(crate) const fn world_size(&self) -> usize {
        self.world_size
    }

    /// What NCCL's state is; brings launches forward as its threads would.
    pub(crate) fn state(self: &Arc<Self>) -> i32 {
        let state = self.state.load(Ordering::Acquire);
        if state != SUCCESS {
            return state;
        }
        let mut launching = self.launching.lock();
        if !launching.calls.is_empty() {
            launching.asked += 1;
            if launching.asked < PATIENCE {
                return IN_PROGRESS;
            }
            launching.asked = 0;
            let calls = std::mem::take(&mut launching.calls);
            drop(launching);
            for call in calls {
                self.put_on_stream(call);
            }
        }
        if self.finalized.load(Ordering::Acquire) && self.outstanding.load(Ordering::Acquire) > 0 {
            return IN_PROGRESS;
        }
        SUCCESS
    }

    /// Whether a collective may be called now.
    pub(crate) fn accepts(&self) -> Result<(), Refusal> {
        let usage = |text: &str| Err((INVALID_USAGE, text.to_owned()));
        if self.finalized.load(Ordering::Acquire) {
            return usage("the communicator is finalized");
        }
        match self.state.load(Ordering::Acquire) {
            SUCCESS => {}
            IN_PROGRESS => return usage("the communicator is not initialized yet"),
            code => return Err((code, "the communicator has failed".to_owned())),
        }
        if !self.launching.lock().calls.is_empty() {
            return usage("the last group is still in progress");
        }
        if let Some(fault) = self.fault
            && fault.kind == Fault::Launch as i32
            && fault.op == self.ops.load(Ordering::Acquire)
        {
            return Err((SYSTEM_ERROR, "told to refuse".to_owned()));
        }
        Ok(())
    }

    pub(crate) fn launch(&self, calls: Vec<Call>) {
        self.launching.lock().calls.extend(calls);
    }

    fn put_on_stream(self: &Arc<Self>, call: Call) {
        let number = self.ops.fetch_add(1, Ordering::AcqRel);
        self.outstanding.fetch_add(1, Ordering::AcqRel);
        let comm = Arc::clone(self);
        let task: Box<Task> = Box::new(Task { comm, call, number });
        let stream = ptr::with_exposed_provenance::<Stream>(call.stream);
        // SAFETY: checked when it was called; a stream outlives what is put on it.
        let enqueue = unsafe { &*stream }.enqueue;
        // SAFETY: `run` takes the task back.
        unsafe { enqueue(stream, run, Box::into_raw(task).cast()) };
    }

    fn execute(&self, call: &Call, number: u64) {
        if let Some(fault) = self.fault
            && fault.op == number
        {
            if fault.kind == Fault::Hang as i32 {
                return self.hang();
            }
            if fault.kind == Fault::AsyncError as i32 {
                self.state.store(SYSTEM_ERROR, Ordering::Release);
                return self.hang();
            }
        }
        match self.exchange(call, number) {
            Ok(Some(inputs)) => self.write(call, &inputs),
            // Different calls: NCCL does not notice.
            Ok(None) => self.hang(),
            Err(_) => {
                if !self.aborted.load(Ordering::Acquire) {
                    self.state.store(REMOTE_ERROR, Ordering::Release);
                }
                self.hang();
            }
        }
    }

    /// As a kernel whose peers do not come: until the communicator is aborted.
    fn hang(&self) {
        while !self.aborted.load(Ordering::Acquire) {
            thread::sleep(STEP);
        }
    }

    /// What all ranks send, in rank order; none if they do not call the same.
    fn exchange(&self, call: &Call, number: u64) -> io::Result<Option<Vec<Vec<u8>>>> {
        let size_bytes = reduce::size_bytes(call.dtype).unwrap_or(1);
        let sent_by = |rank: usize| match call.kind {
            Kind::AllGather | Kind::AllReduce { .. } => call.count * size_bytes,
            Kind::ReduceScatter { .. } => call.count * size_bytes * self.world_size,
            Kind::Broadcast { root } if root == rank => call.count * size_bytes,
            Kind::Broadcast { .. } => 0,
        };
        let own = bytes_at(call.send, sent_by(self.rank));
        let header = format!("{number} {:?} {} {};", call.kind, call.count, call.dtype);
        let mut header = header.into_bytes();
        header.resize(HEADER_BYTES, 0);
        let peers = self.peers.get().map_or(&[][..], Vec::as_slice);
        thread::scope(|scope| {
            let sending = scope.spawn(|| -> io::Result<()> {
                for mut peer in peers.iter().flatten() {
                    peer.write_all(&header)?;
                    peer.write_all(&own)?;
                }
                Ok(())
            });
            let mut inputs = Vec::with_capacity(self.world_size);
            for (rank, peer) in peers.iter().enumerate() {
                let Some(mut peer) = peer.as_ref() else {
                    inputs.push(own.clone());
                    continue;
                };
                let mut theirs = vec![0; HEADER_BYTES];
                peer.read_exact(&mut theirs)?;
                if theirs != header {
                    // Ends the sending too, once this rank is aborted.
                    return Ok(None);
                }
                let mut input = vec![0; sent_by(rank)];
                peer.read_exact(&mut input)?;
                inputs.push(input);
            }
            match sending.join() {
                Ok(sent) => sent.map(|()| Some(inputs)),
                Err(_) => Err(io::Error::other("the sending thread panicked")),
            }
        })
    }

    fn write(&self, call: &Call, inputs: &[Vec<u8>]) {
        let result = match call.kind {
            Kind::AllGather => inputs.concat(),
            Kind::Broadcast { root } => inputs[root].clone(),
            Kind::AllReduce { op } => reduce::reduce(call.dtype, op, inputs),
            Kind::ReduceScatter { op } => {
                let shard = inputs[0].len() / self.world_size;
                let own = self.rank * shard..(self.rank + 1) * shard;
                let inputs: Vec<Vec<u8>> = inputs
                    .iter()
                    .map(|input| input[own.clone()].to_vec())
                    .collect();
                reduce::reduce(call.dtype, op, &inputs)
            }
        };
        let target = ptr::with_exposed_provenance_mut::<u8>(call.receive);
        // SAFETY: whoever called vouches for that many bytes.
        unsafe { ptr::copy_nonoverlapping(result.as_ptr(), target, result.len()) };
    }

    pub(crate) fn finalize(&self) -> Result<(), Refusal> {
        if self.state.load(Ordering::Acquire) == IN_PROGRESS {
            return Err((
                INVALID_USAGE,
                "finalized before it was initialized".to_owned(),
            ));
        }
        self.finalized.store(true, Ordering::Release);
        Ok(())
    }

    /// Whether it may be destroyed.
    pub(crate) fn ended(&self) -> Result<(), Refusal> {
        let ended =
            self.finalized.load(Ordering::Acquire) && self.outstanding.load(Ordering::Acquire) == 0;
        if ended {
            return Ok(());
        }
        Err((
            INVALID_USAGE,
            "destroyed before it was finalized".to_owned(),
        ))
    }

    pub(crate) fn abort(&self) {
        self.aborted.store(true, Ordering::Release);
        for peer in self.peers.get().into_iter().flatten().flatten() {
            let _result = peer.shutdown(std::net::Shutdown::Both);
        }
    }
}

const HEADER_BYTES: usize = 96;

struct Task {
    comm: Arc<Comm>,
    call: Call,
    number: u64,
}

unsafe extern "C" fn run(task: *mut std::ffi::c_void) {
    // SAFETY: made by `put_on_stream`, and called once.
    let task = unsafe { Box::from_raw(task.cast::<Task>()) };
    if !task.comm.aborted.load(Ordering::Acquire) {
        task.comm.execute(&task.call, task.number);
    }
    task.comm.outstanding.fetch_sub(1, Ordering::AcqRel);
}

fn bytes_at(address: usize, bytes: usize) -> Vec<u8> {
    let mut copy = vec![0; bytes];
    let source = ptr::with_exposed_provenance::<u8>(address);
    // SAFETY: whoever called vouches for that many bytes.
    unsafe { ptr::copy_nonoverlapping(source, copy.as_mut_ptr(), bytes) };
    copy
}

/// Whether `stream` is one of ours.
pub(crate) fn is_stream(stream: usize) -> bool {
    if stream == 0 || !stream.is_multiple_of(align_of::<Stream>()) {
        return false;
    }
    // SAFETY: a test's stream is a `Stream`, or this crashes: loud enough.
    let magic = unsafe { (*ptr::with_exposed_provenance::<Stream>(stream)).magic };
    magic == MAGIC
}
