//! What only a machine with GPUs can show; `scripts/gpu-check.sh` runs it.
//!
//! ```text
//! gpu doctor|conformance|bandwidth|hang|hang-device|race [--ranks N] [--double]
//! ```
//!
//! Ranks are the processes that a launcher started, if its variables are there, and else `N` threads with
//! a GPU each. `--double` takes the test double and host memory instead, to try the program itself.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a program for tests ends at the first error, and prints"
)]

use std::{
    any::Any,
    env,
    process::ExitCode,
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use burn_shard_comm::{DType, Error, Local, ProcessGroup, ReduceOp, Segments, SegmentsMut};
use burn_shard_nccl::{DeviceSegments, Memory, Nccl, NcclCommunicator, NcclError, Owner};
use burn_shard_nccl_double::HostMemory;
use parking_lot::Mutex;

mod order;
mod suite;

use order::{Late, hang, race};
use suite::conformance;

const DEADLINE: Duration = Duration::from_secs(60);
const MEBIBYTES: [usize; 3] = [1, 16, 256];
const ROUNDS: usize = 5;

#[derive(Clone, Copy, PartialEq)]
enum Library {
    Real,
    Double,
}

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let has = |flag: &str| arguments.iter().any(|argument| argument == flag);
    let library = if has("--double") {
        Library::Double
    } else {
        Library::Real
    };
    let ranks = arguments.iter().position(|argument| argument == "--ranks");
    let ranks = ranks.map_or(1, |at| arguments[at + 1].parse().unwrap());
    let ranks = processes().map_or(ranks, |group| group.world_size());
    let code = match arguments.first().map(String::as_str) {
        Some("conformance") => conformance(library, ranks),
        Some("bandwidth") => bandwidth(library, ranks),
        Some("hang") => hang(library, ranks, Late::Host),
        Some("hang-device") => hang(library, ranks, Late::Device),
        Some("race") => race(library, ranks),
        Some("doctor") => {
            print!("{}", burn_shard_nccl::doctor::Report::new());
            ExitCode::SUCCESS
        }
        _ => {
            eprintln!(
                "usage: gpu doctor|conformance|bandwidth|hang|hang-device|race [--ranks N] [--double]"
            );
            ExitCode::from(2)
        }
    };
    // Dropped, not left to the end of the process: its last words would not be sent.
    drop(GROUP.get().and_then(|group| group.lock().take()));
    code
}

/// A stream of its own on this rank's device.
fn stream(control: &ProcessGroup, library: Library) -> Result<Arc<dyn Memory>, NcclError> {
    let device =
        env::var("LOCAL_RANK").map_or_else(|_| control.rank(), |rank| rank.parse().unwrap());
    match library {
        Library::Double => Ok(Arc::new(HostMemory::new(device))),
        Library::Real => gpu(device),
    }
}

fn join(control: &ProcessGroup, library: Library) -> (ProcessGroup, Arc<dyn Memory>, Arc<Nccl>) {
    let nccl = match library {
        Library::Double => Ok(burn_shard_nccl_double::load()),
        Library::Real => Nccl::open(),
    };
    let memory = stream(control, library);
    let loaded = nccl.clone().map(|nccl| (nccl, memory.clone()));
    let communicator =
        NcclCommunicator::new(control, nccl, memory).unwrap_or_else(|error| panic!("{error}"));
    let (nccl, memory) = loaded.unwrap();
    (
        ProcessGroup::new(Arc::new(communicator)),
        memory.unwrap(),
        nccl,
    )
}

#[cfg(feature = "cuda")]
fn gpu(device: usize) -> Result<Arc<dyn Memory>, NcclError> {
    burn_shard_nccl::Cuda::new(device).map(|cuda| Arc::new(cuda) as _)
}

#[cfg(not(feature = "cuda"))]
fn gpu(_: usize) -> Result<Arc<dyn Memory>, NcclError> {
    panic!("built without the feature cuda")
}

static GROUP: OnceLock<Mutex<Option<ProcessGroup>>> = OnceLock::new();

/// The launcher's group, if there is one.
fn processes() -> Option<ProcessGroup> {
    let group = GROUP.get_or_init(|| match ProcessGroup::from_env() {
        Ok(group) => Mutex::new(Some(group)),
        Err(Error::NoLauncher) => Mutex::default(),
        Err(error) => panic!("{error}"),
    });
    group.lock().clone()
}

/// Runs `f` on this process's rank of the launcher's group, one NCCL after another, or else on threads.
fn spawn(world_size: usize, f: impl Fn(&ProcessGroup) + Sync) -> Result<(), Error> {
    if let Some(control) = processes() {
        f(&control);
        return control.barrier();
    }
    let local = Local::new(world_size).deadline(DEADLINE);
    local.spawn(|control| f(&control)).map(drop)
}

/// `f32` buffers on the communication stream: in order with NCCL by themselves.
struct Buffer {
    memory: Arc<dyn Memory>,
    numel: usize,
    device: DeviceSegments,
    address: u64,
}

struct SameStream;

impl Owner for SameStream {
    fn before(&self, _: &dyn Memory) -> Result<(), NcclError> {
        Ok(())
    }
    fn after(&self, _: &dyn Memory) -> Result<(), NcclError> {
        Ok(())
    }
}

impl Buffer {
    fn new(memory: &Arc<dyn Memory>, numel: usize) -> Self {
        let address = memory.allocate(numel * 4).unwrap();
        // SAFETY: just allocated, that long.
        unsafe { memory.zero(address, numel * 4) }.unwrap();
        // SAFETY: freed on the stream when dropped; only the stream uses it.
        let device = unsafe {
            DeviceSegments::new(memory.device(), vec![Some(address)], Box::new(SameStream))
        };
        Self {
            memory: Arc::clone(memory),
            numel,
            device,
            address,
        }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: allocated in `new`; what uses it is on the stream already.
        unsafe { self.memory.free(self.address) };
    }
}

impl Segments for Buffer {
    fn dtype(&self) -> DType {
        DType::F32
    }
    fn count(&self) -> usize {
        1
    }
    fn numel(&self, _: usize) -> usize {
        self.numel
    }
    fn bytes(&self, _: usize) -> Option<&[u8]> {
        None
    }
    fn device(&self) -> Option<&dyn Any> {
        Some(&self.device)
    }
}

impl SegmentsMut for Buffer {
    fn dtype(&self) -> DType {
        DType::F32
    }
    fn count(&self) -> usize {
        1
    }
    fn numel(&self, _: usize) -> usize {
        self.numel
    }
    fn bytes_mut(&mut self, _: usize) -> &mut [u8] {
        &mut []
    }
    fn device(&self) -> Option<&dyn Any> {
        Some(&self.device)
    }
}

fn finish_stream(memory: &Arc<dyn Memory>) {
    let event = memory.record().unwrap();
    let start = Instant::now();
    while !event.is_over().unwrap() {
        assert!(
            start.elapsed() < DEADLINE,
            "the stream does not come to its end"
        );
        std::hint::spin_loop();
    }
}

fn bandwidth(library: Library, world_size: usize) -> ExitCode {
    let result = spawn(world_size, |control| {
        let plain = (library == Library::Real).then(|| plain::Id::exchange(control));
        let (group, memory, nccl) = join(control, library);
        let plain = plain.map(|id| plain::Plain::new(&nccl, id, group.rank(), group.world_size()));
        if group.rank() == 0 {
            println!(
                "{:<16} {:>5} {:>12} {:>12} {:>7}",
                "collective", "MiB", "ours GB/s", "plain GB/s", "ratio"
            );
        }
        // The double is no faster than it needs to be.
        let sizes = if library == Library::Real {
            &MEBIBYTES[..]
        } else {
            &MEBIBYTES[..1]
        };
        for &mebibytes in sizes {
            measure(&group, &memory, plain.as_ref(), mebibytes);
        }
    });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn measure(
    group: &ProcessGroup,
    memory: &Arc<dyn Memory>,
    plain: Option<&plain::Plain>,
    mebibytes: usize,
) {
    let world_size = group.world_size();
    let communicator = group.communicator();
    let numel = (mebibytes << 20) / 4 / world_size * world_size;
    let most = if plain.is_some() { 50 } else { 4 };
    let iterations = (512 / mebibytes).clamp(4, most);
    let full = Arc::new(Buffer::new(memory, numel));
    let shard = Arc::new(Buffer::new(memory, numel / world_size));
    let mut to_full = Buffer::new(memory, numel);
    let mut to_shard = Buffer::new(memory, numel / world_size);
    let addresses = [
        full.address,
        shard.address,
        to_full.address,
        to_shard.address,
    ];
    for name in ["all_gather", "reduce_scatter", "all_reduce"] {
        let mut ours = || match name {
            "all_gather" => communicator
                .all_gather(Arc::clone(&shard) as _, &[numel])
                .and_then(|work| work.finish(&mut to_full))
                .unwrap(),
            "reduce_scatter" => {
                let work = communicator
                    .reduce_scatter(Arc::clone(&full) as _, ReduceOp::Sum)
                    .unwrap();
                work.finish(&mut to_shard).unwrap();
            }
            _ => {
                let work = communicator
                    .all_reduce(Arc::clone(&full) as _, ReduceOp::Sum)
                    .unwrap();
                work.finish(&mut to_full).unwrap();
            }
        };
        let time = |run: &mut dyn FnMut()| {
            group.barrier().unwrap();
            finish_stream(memory);
            let start = Instant::now();
            for _ in 0..iterations {
                run();
            }
            finish_stream(memory);
            (numel * 4 * iterations) as f64 / start.elapsed().as_secs_f64() / 1e9
        };
        // Interleaved, so that both see the same machine; the first round warms up.
        let (mut mine, mut theirs) = (Vec::new(), Vec::new());
        for round in 0..=ROUNDS {
            let (a, b) = (
                time(&mut ours),
                plain
                    .map(|plain| time(&mut || plain.call(name, addresses, numel, memory.stream()))),
            );
            if round > 0 {
                mine.push(a);
                theirs.extend(b);
            }
        }
        if group.rank() == 0 {
            let (a, b) = (median(mine), median(theirs));
            println!(
                "{name:<16} {mebibytes:>5} {a:>12.2} {b:>12.2} {:>7.2}",
                a / b
            );
        }
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// NCCL without anything of ours.
mod plain {
    use std::{
        ffi::{c_int, c_void},
        ptr,
        sync::Arc,
    };

    use burn_shard_comm::ProcessGroup;
    use burn_shard_nccl::Nccl;

    #[repr(C)]
    #[derive(Clone, Copy)]
    pub(crate) struct Id([u8; 128]);

    impl Id {
        pub(crate) fn exchange(control: &ProcessGroup) -> Self {
            let mut id = Self([0; 128]);
            if control.rank() == 0 {
                let nccl = Nccl::open().unwrap_or_else(|error| panic!("{error}"));
                // SAFETY: the header's type.
                let get = unsafe {
                    nccl.loaded()
                        .get::<unsafe extern "C" fn(*mut Id) -> c_int>("ncclGetUniqueId")
                };
                // SAFETY: fills the id.
                let code = unsafe { get.unwrap()(&raw mut id) };
                assert_eq!(code, 0, "ncclGetUniqueId");
            }
            let bytes = control.broadcast_bytes(id.0.to_vec(), 0).unwrap();
            Self(bytes.try_into().unwrap())
        }
    }

    type Gather = unsafe extern "C" fn(
        *const c_void,
        *mut c_void,
        usize,
        c_int,
        *mut c_void,
        *mut c_void,
    ) -> c_int;
    type Reduce = unsafe extern "C" fn(
        *const c_void,
        *mut c_void,
        usize,
        c_int,
        c_int,
        *mut c_void,
        *mut c_void,
    ) -> c_int;

    pub(crate) struct Plain {
        nccl: Arc<Nccl>,
        comm: *mut c_void,
        world_size: usize,
    }

    impl Plain {
        pub(crate) fn new(nccl: &Arc<Nccl>, id: Id, rank: usize, world_size: usize) -> Self {
            type Init = unsafe extern "C" fn(*mut *mut c_void, c_int, Id, c_int) -> c_int;
            // SAFETY: the header's type.
            let init = unsafe { nccl.loaded().get::<Init>("ncclCommInitRank") };
            let mut comm = ptr::null_mut();
            let (ranks, rank) = (
                c_int::try_from(world_size).unwrap(),
                c_int::try_from(rank).unwrap(),
            );
            // SAFETY: fills the communicator.
            let code = unsafe { init.unwrap()(&raw mut comm, ranks, id, rank) };
            assert_eq!(code, 0, "ncclCommInitRank");
            Self {
                nccl: Arc::clone(nccl),
                comm,
                world_size,
            }
        }

        /// `addresses`: full and shard to read, full and shard to write.
        pub(crate) fn call(&self, name: &str, addresses: [u64; 4], numel: usize, stream: u64) {
            const FLOAT: c_int = 7;
            const SUM: c_int = 0;
            let [full, shard, to_full, to_shard] = addresses.map(|address| {
                ptr::with_exposed_provenance_mut::<c_void>(usize::try_from(address).unwrap())
            });
            let stream = ptr::with_exposed_provenance_mut(usize::try_from(stream).unwrap());
            let own = numel / self.world_size;
            let library = self.nccl.loaded();
            let code = if name == "all_gather" {
                // SAFETY: the header's type.
                let call = unsafe { library.get::<Gather>("ncclAllGather") }.unwrap();
                // SAFETY: the buffers live, and are that long.
                unsafe { call(shard, to_full, own, FLOAT, self.comm, stream) }
            } else if name == "reduce_scatter" {
                // SAFETY: the header's type.
                let call = unsafe { library.get::<Reduce>("ncclReduceScatter") }.unwrap();
                // SAFETY: the buffers live, and are that long.
                unsafe { call(full, to_shard, own, FLOAT, SUM, self.comm, stream) }
            } else {
                // SAFETY: the header's type.
                let call = unsafe { library.get::<Reduce>("ncclAllReduce") }.unwrap();
                // SAFETY: the buffers live, and are that long.
                unsafe { call(full, to_full, numel, FLOAT, SUM, self.comm, stream) }
            };
            assert_eq!(code, 0, "{name}");
        }
    }
}
