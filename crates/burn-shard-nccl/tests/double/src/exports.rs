//! NCCL's functions, under its names.

use std::{
    cell::RefCell,
    collections::{BTreeMap, HashMap},
    ffi::{CString, c_char, c_int, c_uint, c_void},
    hash::{BuildHasher, RandomState},
    ptr,
    sync::{
        Arc, LazyLock,
        atomic::{AtomicUsize, Ordering},
    },
};

use parking_lot::Mutex;

use crate::{
    comm::{self, Call, Comm, IN_PROGRESS, INVALID_ARGUMENT, INVALID_USAGE, Kind, SUCCESS},
    fault, reduce,
};

/// Communicators that are alive. A handle is a number, never used again: a stale one is found out.
static COMMS: LazyLock<Mutex<HashMap<usize, Arc<Comm>>>> = LazyLock::new(Mutex::default);
static NEXT: AtomicUsize = AtomicUsize::new(1);

#[derive(Default)]
struct Thread {
    depth: usize,
    calls: BTreeMap<usize, Vec<Call>>,
    last_error: CString,
}

thread_local! {
    static THREAD: RefCell<Thread> = RefCell::default();
}

fn refuse(code: c_int, text: &str) -> c_int {
    eprintln!("NCCL double: {text}");
    THREAD.with_borrow_mut(|thread| {
        thread.last_error = CString::new(text).unwrap_or_default();
    });
    code
}

fn comm_of(handle: *mut c_void) -> Result<Arc<Comm>, c_int> {
    let comm = COMMS.lock().get(&handle.addr()).cloned();
    comm.ok_or_else(|| {
        refuse(
            INVALID_ARGUMENT,
            "no such communicator (destroyed or aborted?)",
        )
    })
}

/// The first release that has all this double has.
#[unsafe(no_mangle)]
unsafe extern "C" fn ncclGetVersion(version: *mut c_int) -> c_int {
    // SAFETY: the caller's.
    unsafe { version.write(21_800) };
    SUCCESS
}

#[repr(C)]
struct UniqueId([u8; 128]);

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclGetUniqueId(id: *mut UniqueId) -> c_int {
    let mut bytes = [0; 128];
    for chunk in bytes.chunks_exact_mut(8) {
        // A hasher's keys are the standard library's random numbers.
        chunk.copy_from_slice(
            &RandomState::new()
                .hash_one(std::process::id())
                .to_le_bytes(),
        );
    }
    // SAFETY: the caller's.
    unsafe { id.write(UniqueId(bytes)) };
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn ncclGetErrorString(code: c_int) -> *const c_char {
    let text = match code {
        SUCCESS => c"no error",
        comm::SYSTEM_ERROR => c"double: system error",
        INVALID_ARGUMENT => c"double: invalid argument",
        INVALID_USAGE => c"double: invalid usage",
        comm::REMOTE_ERROR => c"double: remote process exited or there was a network error",
        IN_PROGRESS => c"in progress",
        _ => c"double: unknown code",
    };
    text.as_ptr()
}

#[unsafe(no_mangle)]
extern "C" fn ncclGetLastError(_comm: *mut c_void) -> *const c_char {
    THREAD.with_borrow(|thread| thread.last_error.as_ptr())
}

/// The first fields of NCCL's configuration.
#[repr(C)]
struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclCommInitRankConfig(
    handle: *mut *mut c_void,
    ranks: c_int,
    id: UniqueId,
    rank: c_int,
    config: *const Config,
) -> c_int {
    // SAFETY: the caller's.
    let config = unsafe { &*config };
    if config.magic != 0xcafe_beef || config.size < size_of::<Config>() || config.version < 21_400 {
        return refuse(INVALID_ARGUMENT, "not a configuration");
    }
    if config.blocking != 0 {
        return refuse(INVALID_USAGE, "a call that blocks has no deadline");
    }
    let (Ok(ranks), Ok(rank)) = (usize::try_from(ranks), usize::try_from(rank)) else {
        return refuse(INVALID_ARGUMENT, "a negative number of ranks");
    };
    if rank >= ranks {
        return refuse(INVALID_ARGUMENT, "a rank beyond the number of ranks");
    }
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    COMMS.lock().insert(number, Comm::new(rank, ranks, &id.0));
    // SAFETY: the caller's.
    unsafe { handle.write(ptr::without_provenance_mut(number)) };
    IN_PROGRESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclCommGetAsyncError(handle: *mut c_void, state: *mut c_int) -> c_int {
    let comm = match comm_of(handle) {
        Ok(comm) => comm,
        Err(code) => return code,
    };
    // SAFETY: the caller's.
    unsafe { state.write(comm.state()) };
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommFinalize(handle: *mut c_void) -> c_int {
    match comm_of(handle).map(|comm| comm.finalize()) {
        Ok(Ok(())) => IN_PROGRESS,
        Ok(Err((code, text))) => refuse(code, &text),
        Err(code) => code,
    }
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommDestroy(handle: *mut c_void) -> c_int {
    match comm_of(handle).map(|comm| comm.ended()) {
        Ok(Ok(())) => {
            COMMS.lock().remove(&handle.addr());
            SUCCESS
        }
        Ok(Err((code, text))) => refuse(code, &text),
        Err(code) => code,
    }
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommAbort(handle: *mut c_void) -> c_int {
    match comm_of(handle) {
        Ok(comm) => {
            comm.abort();
            COMMS.lock().remove(&handle.addr());
            SUCCESS
        }
        Err(code) => code,
    }
}

#[unsafe(no_mangle)]
extern "C" fn ncclGroupStart() -> c_int {
    THREAD.with_borrow_mut(|thread| thread.depth += 1);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn ncclGroupEnd() -> c_int {
    let calls = THREAD.with_borrow_mut(|thread| {
        thread.depth = thread.depth.checked_sub(1)?;
        let outermost = thread.depth == 0;
        Some(if outermost {
            std::mem::take(&mut thread.calls)
        } else {
            BTreeMap::new()
        })
    });
    let Some(calls) = calls else {
        return refuse(INVALID_USAGE, "a group ends that was not started");
    };
    let mut result = SUCCESS;
    for (number, calls) in calls {
        match comm_of(ptr::without_provenance_mut(number)) {
            Ok(comm) => {
                comm.launch(calls);
                result = IN_PROGRESS;
            }
            Err(code) => return code,
        }
    }
    result
}

fn called(handle: *mut c_void, call: Call) -> c_int {
    let comm = match comm_of(handle) {
        Ok(comm) => comm,
        Err(code) => return code,
    };
    let Some(size_bytes) = reduce::size_bytes(call.dtype) else {
        return refuse(INVALID_ARGUMENT, "no such element type");
    };
    let unknown = match call.kind {
        Kind::AllReduce { op } | Kind::ReduceScatter { op } => !reduce::has(op),
        Kind::Broadcast { root } => root >= comm.world_size(),
        Kind::AllGather => false,
    };
    let crooked = !(call.send | call.receive).is_multiple_of(size_bytes);
    let checks = [
        (unknown, "no such operation or root"),
        (!comm::is_stream(call.stream), "not a stream"),
        (call.count == 0, "nothing to do: skip it"),
        (call.send == 0 || call.receive == 0, "a null buffer"),
        (crooked, "a buffer that is not aligned"),
    ];
    if let Some((_, text)) = checks.iter().find(|(refused, _)| *refused) {
        return refuse(INVALID_ARGUMENT, text);
    }
    if let Err((code, text)) = comm.accepts() {
        return refuse(code, &text);
    }
    let grouped = THREAD.with_borrow_mut(|thread| {
        if thread.depth > 0 {
            thread.calls.entry(handle.addr()).or_default().push(call);
        }
        thread.depth > 0
    });
    if grouped {
        return SUCCESS;
    }
    comm.launch(vec![call]);
    IN_PROGRESS
}

#[unsafe(no_mangle)]
extern "C" fn ncclAllGather(
    send: *const c_void,
    receive: *mut c_void,
    count: usize,
    dtype: c_int,
    handle: *mut c_void,
    stream: *mut c_void,
) -> c_int {
    let kind = Kind::AllGather;
    called(handle, call(kind, send, receive, count, dtype, stream))
}

#[unsafe(no_mangle)]
extern "C" fn ncclAllReduce(
    send: *const c_void,
    receive: *mut c_void,
    count: usize,
    dtype: c_int,
    op: c_int,
    handle: *mut c_void,
    stream: *mut c_void,
) -> c_int {
    let kind = Kind::AllReduce { op };
    called(handle, call(kind, send, receive, count, dtype, stream))
}

#[unsafe(no_mangle)]
extern "C" fn ncclReduceScatter(
    send: *const c_void,
    receive: *mut c_void,
    count: usize,
    dtype: c_int,
    op: c_int,
    handle: *mut c_void,
    stream: *mut c_void,
) -> c_int {
    let kind = Kind::ReduceScatter { op };
    called(handle, call(kind, send, receive, count, dtype, stream))
}

#[unsafe(no_mangle)]
extern "C" fn ncclBroadcast(
    send: *const c_void,
    receive: *mut c_void,
    count: usize,
    dtype: c_int,
    root: c_int,
    handle: *mut c_void,
    stream: *mut c_void,
) -> c_int {
    let root = usize::try_from(root).unwrap_or(usize::MAX);
    let kind = Kind::Broadcast { root };
    called(handle, call(kind, send, receive, count, dtype, stream))
}

fn call(
    kind: Kind,
    send: *const c_void,
    receive: *mut c_void,
    count: usize,
    dtype: c_int,
    stream: *mut c_void,
) -> Call {
    Call {
        kind,
        send: send.expose_provenance(),
        receive: receive.expose_provenance(),
        count,
        dtype,
        stream: stream.expose_provenance(),
    }
}

/// The double's own: see `inject`.
#[unsafe(no_mangle)]
extern "C" fn nccl_double_inject(rank: c_int, op: u64, kind: c_int) {
    fault::plan(rank, op, kind);
}

/// The double's own: see `alive`.
#[unsafe(no_mangle)]
extern "C" fn nccl_double_alive() -> usize {
    COMMS.lock().len()
}
