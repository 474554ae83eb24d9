//! Segments in the device's memory: the protocol of their owners, no copies, nobody waits.

#![allow(clippy::unwrap_used, reason = "a test ends at the first error")]

mod common;

use std::{
    any::Any,
    ptr, slice,
    sync::{Arc, atomic::AtomicBool, atomic::Ordering},
    thread,
    time::{Duration, Instant},
};

use burn_shard_comm::{
    Collective, DType, Error, Local, OwnedSegments, ProcessGroup, ReduceOp, SegmentLayout,
    Segments, SegmentsMut,
};
use burn_shard_nccl::{DeviceSegments, Memory, NcclError, Owner};
use burn_shard_nccl_double::HostMemory;
use common::{LONG, spawn};
use parking_lot::Mutex;

/// What owners were asked, and how many tasks the stream had behind it by then.
type Log = Arc<Mutex<Vec<String>>>;

struct Noting {
    name: &'static str,
    memory: Arc<HostMemory>,
    log: Log,
}

impl Noting {
    fn note(&self, what: &str, memory: &dyn Memory) {
        assert_eq!(memory.stream(), self.memory.stream());
        self.log.lock().push(format!("{what} {}", self.name));
    }
}

impl Owner for Noting {
    fn before(&self, memory: &dyn Memory) -> Result<(), NcclError> {
        self.note("before", memory);
        Ok(())
    }

    fn after(&self, memory: &dyn Memory) -> Result<(), NcclError> {
        self.note("after", memory);
        Ok(())
    }
}

/// Buffers of `f32` that only the stream touches.
struct Buffers {
    memory: Arc<HostMemory>,
    dtype: DType,
    numels: Vec<usize>,
    addresses: Vec<Option<u64>>,
    device: DeviceSegments,
    log: Log,
}

impl Buffers {
    fn new(
        name: &'static str,
        memory: &Arc<HostMemory>,
        values: &[Option<&[f32]>],
        numels: &[usize],
    ) -> Self {
        let addresses: Vec<Option<u64>> = values
            .iter()
            .map(|values| {
                let values = (*values)?;
                let address = memory.allocate(size_of_val(values)).unwrap();
                // SAFETY: freed below, after the copy; `finish_stream` waits for it.
                unsafe { memory.upload(values.as_ptr().cast(), address, size_of_val(values)) }
                    .unwrap();
                Some(address)
            })
            .collect();
        finish_stream(memory);
        let log = Log::default();
        let owner = Noting {
            name,
            memory: Arc::clone(memory),
            log: Arc::clone(&log),
        };
        // SAFETY: freed on the stream when dropped; nobody else uses the buffers.
        let device =
            unsafe { DeviceSegments::new(memory.device(), addresses.clone(), Box::new(owner)) };
        Self {
            memory: Arc::clone(memory),
            dtype: DType::F32,
            numels: numels.to_vec(),
            addresses,
            device,
            log,
        }
    }

    fn full(name: &'static str, memory: &Arc<HostMemory>, values: &[&[f32]]) -> Self {
        let numels: Vec<usize> = values.iter().map(|values| values.len()).collect();
        let values: Vec<Option<&[f32]>> = values.iter().copied().map(Some).collect();
        Self::new(name, memory, &values, &numels)
    }

    /// What the buffers hold, once the stream is at its end.
    fn read(&self) -> Vec<Vec<f32>> {
        finish_stream(&self.memory);
        let each = self.addresses.iter().zip(&self.numels);
        each.map(|(address, &numel)| {
            let buffer =
                ptr::with_exposed_provenance::<f32>(usize::try_from(address.unwrap()).unwrap());
            // SAFETY: allocated by `new`, that long, and the stream is at its end.
            unsafe { slice::from_raw_parts(buffer, numel) }.to_vec()
        })
        .collect()
    }

    fn log(&self) -> Vec<String> {
        self.log.lock().clone()
    }
}

impl Drop for Buffers {
    fn drop(&mut self) {
        for address in self.addresses.iter().flatten() {
            // SAFETY: allocated by `new`; what uses it was put on the stream before.
            unsafe { self.memory.free(*address) };
        }
    }
}

impl Segments for Buffers {
    fn dtype(&self) -> DType {
        self.dtype
    }
    fn count(&self) -> usize {
        self.numels.len()
    }
    fn numel(&self, index: usize) -> usize {
        self.numels[index]
    }
    fn bytes(&self, _: usize) -> Option<&[u8]> {
        panic!("segments on a device have no bytes on the host")
    }
    fn device(&self) -> Option<&dyn Any> {
        Some(&self.device)
    }
}

impl SegmentsMut for Buffers {
    fn dtype(&self) -> DType {
        self.dtype
    }
    fn count(&self) -> usize {
        self.numels.len()
    }
    fn numel(&self, index: usize) -> usize {
        self.numels[index]
    }
    fn bytes_mut(&mut self, _: usize) -> &mut [u8] {
        panic!("segments on a device have no bytes on the host")
    }
    fn device(&self) -> Option<&dyn Any> {
        Some(&self.device)
    }
}

fn finish_stream(memory: &HostMemory) {
    let event = memory.record().unwrap();
    let start = Instant::now();
    while !event.is_over().unwrap() {
        assert!(start.elapsed() < LONG, "the stream should come to its end");
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn collectives_work_on_the_memory_itself() {
    spawn(2, LONG, |group, memory| {
        let (rank, communicator) = (group.rank(), group.communicator());
        let one = 1.0 + f32::from(u8::try_from(rank).unwrap());

        // Only the result is new memory.
        let input = Arc::new(Buffers::full("input", &memory, &[&[one; 3]]));
        let mut output = Buffers::full("output", &memory, &[&[0.0; 6]]);
        let before = memory.allocated();
        let work = communicator.all_gather(Arc::clone(&input) as _, &[6]);
        assert_eq!(memory.allocated(), before + 1);
        work.unwrap().finish(&mut output).unwrap();
        assert_eq!(output.read()[0], [1.0, 1.0, 1.0, 2.0, 2.0, 2.0]);
        assert_eq!(input.log(), ["before input"]);
        assert_eq!(output.log(), ["before output", "after output"]);

        // Lengths that do not: cut.
        let mut output = Buffers::full("output", &memory, &[&[0.0; 5]]);
        let work = communicator.all_gather(Arc::clone(&input) as _, &[5]);
        work.unwrap().finish(&mut output).unwrap();
        assert_eq!(output.read()[0], [1.0, 1.0, 1.0, 2.0, 2.0]);

        // A reduction, whose input keeps its values, and of which only the result is new memory.
        let input = Arc::new(Buffers::full("input", &memory, &[&[one, 2.0, 3.0, 4.0]]));
        let before = memory.allocated();
        let scatter = communicator
            .reduce_scatter(Arc::clone(&input) as _, ReduceOp::Sum)
            .unwrap();
        assert_eq!(memory.allocated(), before + 1);
        let reduce = communicator
            .all_reduce(Arc::clone(&input) as _, ReduceOp::Max)
            .unwrap();
        let mut own = Buffers::full("own", &memory, &[&[9.0; 2]]);
        let mut all = Buffers::full("all", &memory, &[&[9.0; 4]]);
        reduce.finish(&mut all).unwrap();
        scatter.finish(&mut own).unwrap();
        assert_eq!(own.log(), ["before own", "after own"]);
        assert_eq!(
            own.read()[0],
            if rank == 0 { [3.0, 4.0] } else { [6.0, 8.0] }
        );
        assert_eq!(all.read()[0], [2.0, 2.0, 3.0, 4.0]);
        assert_eq!(input.read()[0], [one, 2.0, 3.0, 4.0]);

        // Absent on rank 0, and an odd length.
        let values = [3.0, 4.0, 5.0f32];
        let present = (rank == 1).then_some(&values[..]);
        let input = Arc::new(Buffers::new("input", &memory, &[present], &[3]));
        let scatter = communicator.reduce_scatter(input, ReduceOp::Mean).unwrap();
        let mut own = Buffers::full("own", &memory, &[&[9.0; 2]]);
        scatter.finish(&mut own).unwrap();
        assert_eq!(
            own.read()[0],
            if rank == 0 { [1.5, 2.0] } else { [2.5, 0.0] }
        );

        let mut buffer = Buffers::full("buffer", &memory, &[&[one; 3], &[one; 1]]);
        let layout = SegmentLayout {
            dtype: DType::F32,
            numels: vec![3, 1],
        };
        if rank == 1 {
            let work = communicator.broadcast(Some(Arc::new(buffer)), layout, 1);
            work.unwrap().wait().unwrap();
        } else {
            let work = communicator.broadcast(None, layout, 1).unwrap();
            work.finish(&mut buffer).unwrap();
            assert_eq!(buffer.read(), [vec![2.0; 3], vec![2.0]]);
        }
        group.barrier().unwrap();
    })
    .unwrap();
}

#[test]
fn the_host_and_the_device_may_be_mixed() {
    spawn(2, LONG, |group, memory| {
        let (rank, communicator) = (group.rank(), group.communicator());
        // From the device to the host.
        let input = Arc::new(Buffers::full("input", &memory, &[&[1.0, 2.0, 3.0]]));
        let work = communicator
            .all_reduce(Arc::clone(&input) as _, ReduceOp::Sum)
            .unwrap();
        let later = communicator
            .all_reduce(Arc::clone(&input) as _, ReduceOp::Max)
            .unwrap();
        let mut output = OwnedSegments(vec![vec![0.0f32; 3]]);
        work.finish(&mut output).unwrap();
        assert_eq!(output.0[0], [2.0, 4.0, 6.0]);
        drop(later);
        let mut output = OwnedSegments(vec![vec![0.0f32; 6]]);
        let work = communicator.all_gather(input, &[6]).unwrap();
        work.finish(&mut output).unwrap();
        assert_eq!(output.0[0], [1.0, 2.0, 3.0, 1.0, 2.0, 3.0]);
        // From the host to the device.
        let input = Arc::new(OwnedSegments(vec![vec![1.0f32, 5.0]]));
        let mut output = Buffers::full("output", &memory, &[&[0.0; 4]]);
        let work = communicator.all_gather(input, &[4]).unwrap();
        work.finish(&mut output).unwrap();
        assert_eq!(output.read()[0], [1.0, 5.0, 1.0, 5.0]);
        let input = Arc::new(OwnedSegments(vec![vec![1.0f32, 5.0]]));
        let work = communicator.reduce_scatter(input, ReduceOp::Sum).unwrap();
        let mut output = Buffers::full("output", &memory, &[&[0.0]]);
        work.finish(&mut output).unwrap();
        assert_eq!(output.read()[0], if rank == 0 { [2.0] } else { [10.0] });
    })
    .unwrap();
}

/// Owned by a stream of its own, as CubeCL's buffers are.
struct ByStream {
    compute: Arc<HostMemory>,
}

impl Owner for ByStream {
    fn before(&self, memory: &dyn Memory) -> Result<(), NcclError> {
        // SAFETY: the stream lives as long as the test.
        unsafe { memory.wait_for(self.compute.stream()) }
    }

    fn after(&self, memory: &dyn Memory) -> Result<(), NcclError> {
        // SAFETY: as above.
        unsafe { memory.hold_up(self.compute.stream()) }
    }
}

impl Buffers {
    fn of_stream(mut self, compute: &Arc<HostMemory>) -> Self {
        let owner = ByStream {
            compute: Arc::clone(compute),
        };
        let addresses = self.addresses.clone();
        // SAFETY: as in `new`.
        self.device =
            unsafe { DeviceSegments::new(self.memory.device(), addresses, Box::new(owner)) };
        self
    }
}

/// Holds a stream until it is dropped.
struct Gate(Arc<AtomicBool>);

impl Gate {
    fn new(memory: &HostMemory) -> Self {
        let open = Arc::new(AtomicBool::new(false));
        let gate = Arc::clone(&open);
        memory.launch(move || {
            while !gate.load(Ordering::Acquire) {
                thread::sleep(Duration::from_millis(1));
            }
        });
        Self(open)
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// The stream of the computation passes what was launched on it while a collective hangs, until somebody
/// takes its result.
#[test]
fn the_computation_waits_for_results_and_not_for_collectives() {
    spawn(2, LONG, |group, memory| {
        let communicator = group.communicator();
        let compute = Arc::new(HostMemory::new(memory.device()));
        let log: Arc<Mutex<Vec<&'static str>>> = Arc::default();
        let note = |on: &HostMemory, what: &'static str| {
            let log = Arc::clone(&log);
            on.launch(move || log.lock().push(what));
        };
        let input = Arc::new(Buffers::full("input", &memory, &[&[1.0; 4]]).of_stream(&compute));
        let mut shard = Buffers::full("shard", &memory, &[&[0.0; 2]]).of_stream(&compute);
        note(&compute, "written");
        let gate = Gate::new(&memory);
        let work = communicator
            .reduce_scatter(Arc::clone(&input) as _, ReduceOp::Sum)
            .unwrap();
        note(&memory, "reduced");
        note(&compute, "the next layer");
        // Comes to its end although the collective does not.
        finish_stream(&compute);
        assert_eq!(*log.lock(), ["written", "the next layer"]);
        work.finish(&mut shard).unwrap();
        note(&compute, "the step");
        drop(gate);
        finish_stream(&compute);
        assert_eq!(
            *log.lock(),
            ["written", "the next layer", "reduced", "the step"]
        );
        assert_eq!(shard.read()[0], [2.0; 2]);
        group.barrier().unwrap();
    })
    .unwrap();
}

/// A gather that was started early runs while the computation goes on, which waits where it takes the result.
#[test]
fn a_gather_that_was_prefetched_overlaps() {
    spawn(2, LONG, |group, memory| {
        let compute = Arc::new(HostMemory::new(memory.device()));
        let ran = Arc::new(AtomicBool::new(false));
        let one = 1.0 + group.rank() as f32;
        let shard = Arc::new(Buffers::full("shard", &memory, &[&[one; 2]]).of_stream(&compute));
        let mut full = Buffers::full("full", &memory, &[&[0.0; 3]]).of_stream(&compute);
        let gate = Gate::new(&memory);
        let work = group.communicator().all_gather(shard, &[3]).unwrap();
        finish_stream(&compute);
        work.finish(&mut full).unwrap();
        let seen = Arc::clone(&ran);
        compute.launch(move || seen.store(true, Ordering::Release));
        thread::sleep(Duration::from_millis(20));
        assert!(!ran.load(Ordering::Acquire), "the result is not there yet");
        drop(gate);
        finish_stream(&compute);
        assert_eq!(full.read()[0], [1.0, 1.0, 2.0]);
        group.barrier().unwrap();
    })
    .unwrap();
}

/// What an input is made of stays until the stream has passed the collective, whoever drops what.
#[test]
fn an_input_is_held_until_the_stream_has_passed_it() {
    spawn(2, LONG, |group, memory| {
        let input = Arc::new(Buffers::full("input", &memory, &[&[1.0; 4]]));
        let gate = Gate::new(&memory);
        let alive = Arc::downgrade(&input);
        let work = group
            .communicator()
            .all_reduce(input, ReduceOp::Sum)
            .unwrap();
        drop(work);
        thread::sleep(Duration::from_millis(20));
        assert!(alive.upgrade().is_some());
        drop(gate);
        let start = Instant::now();
        while alive.upgrade().is_some() {
            assert!(start.elapsed() < LONG, "the input should be let go");
            thread::sleep(Duration::from_millis(1));
        }
        group.barrier().unwrap();
    })
    .unwrap();
}

/// More than there is page-locked memory for, several times.
#[test]
fn large_segments_on_the_host_go_in_pieces() {
    const NUMEL: usize = 2_100_001;
    spawn(2, LONG, |group, memory| {
        let rank = group.rank();
        let value = |index: usize| (index % 8191 + rank) as f32;
        let input: Vec<f32> = (0..NUMEL).map(value).collect();
        let pinned = memory.pinned();
        let mut sum = input.clone();
        group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
        let sums = |index: usize| (2 * (index % 8191) + 1) as f32;
        assert!((0..NUMEL).all(|index| sum[index] == sums(index)));
        // As 32-bit integers, in pieces of half as many bytes.
        let mut small: Vec<i16> = (0..999).cycle().take(NUMEL).collect();
        group.all_reduce(&mut small, ReduceOp::Sum).unwrap();
        assert!(
            (0..NUMEL).all(|index| usize::from(small[index].unsigned_abs()) == 2 * (index % 999))
        );
        group.broadcast(&mut sum, 1).unwrap();
        assert!((0..NUMEL).all(|index| sum[index] == sums(index)));
        assert_eq!(memory.pinned(), pinned, "allocated once");
    })
    .unwrap();
}

#[test]
fn nobody_waits_for_the_device() {
    spawn(2, LONG, |group, memory| {
        let communicator = group.communicator();
        let input = Arc::new(Buffers::full("input", &memory, &[&[1.0; 2]]));
        let mut output = Buffers::full("output", &memory, &[&[0.0; 4]]);
        let mut shard = Buffers::full("shard", &memory, &[&[0.0; 1]]);
        // The stream stands still until the very end.
        let gate = Gate::new(&memory);
        let gather = communicator
            .all_gather(Arc::clone(&input) as _, &[4])
            .unwrap();
        gather.finish(&mut output).unwrap();
        let work = communicator.reduce_scatter(input, ReduceOp::Sum).unwrap();
        assert!(!work.is_ready());
        work.finish(&mut shard).unwrap();
        drop(gate);
        assert_eq!(output.read()[0], [1.0; 4]);
        assert_eq!(shard.read()[0], [2.0]);
        group.barrier().unwrap();
    })
    .unwrap();
}

#[test]
fn results_are_not_delivered_once_the_group_has_failed() {
    spawn(2, LONG, |group, memory| {
        let input = Arc::new(Buffers::full("input", &memory, &[&[1.0; 4]]));
        let work = group
            .communicator()
            .all_reduce(input, ReduceOp::Sum)
            .unwrap();
        let mut output = Buffers::full("output", &memory, &[&[0.0; 4]]);
        group.barrier().unwrap();
        group.abort("enough");
        let error = work.finish(&mut output).unwrap_err();
        assert!(error.to_string().contains("enough"), "{error}");
        assert!(output.log().is_empty());
    })
    .unwrap();
}

#[test]
fn nothing_is_left_allocated() {
    spawn(2, LONG, |group, memory| {
        let communicator = group.communicator();
        for _ in 0..5 {
            let input = Arc::new(Buffers::full("input", &memory, &[&[1.0; 3]]));
            let mut output = Buffers::full("output", &memory, &[&[0.0; 5]]);
            let work = communicator.all_gather(Arc::clone(&input) as _, &[5]);
            work.unwrap().finish(&mut output).unwrap();
            let mut own = Buffers::full("own", &memory, &[&[0.0; 2]]);
            communicator
                .reduce_scatter(Arc::clone(&input) as _, ReduceOp::Sum)
                .unwrap()
                .finish(&mut own)
                .unwrap();
            drop(communicator.all_reduce(input, ReduceOp::Sum).unwrap());
            group.all_reduce(&mut [1.0f32; 4], ReduceOp::Sum).unwrap();
        }
        group.barrier().unwrap();
        let start = Instant::now();
        while memory.live() > 0 {
            assert!(start.elapsed() < LONG, "{} buffers are left", memory.live());
            finish_stream(&memory);
        }
    })
    .unwrap();
}

#[test]
fn what_does_not_fit_the_device_is_refused() {
    spawn(1, LONG, |group, memory| {
        let communicator = group.communicator();
        let refused = |error: Error| {
            assert!(error.is_refusal(), "{error}");
            error
        };
        let elsewhere = Arc::new(HostMemory::new(7));
        let input = Arc::new(Buffers::full("input", &elsewhere, &[&[1.0; 3]]));
        let error = refused(
            communicator
                .all_reduce(input, ReduceOp::Sum)
                .map(drop)
                .unwrap_err(),
        );
        assert!(
            matches!(
                error,
                Error::OtherDevice {
                    expected: 0,
                    found: Some(7),
                    ..
                }
            ),
            "{error}"
        );

        let mut input = Buffers::full("input", &memory, &[&[1.0; 3]]);
        input.dtype = DType::I16;
        let error = refused(
            communicator
                .all_reduce(Arc::new(input), ReduceOp::Sum)
                .map(drop)
                .unwrap_err(),
        );
        assert!(
            matches!(
                error,
                Error::UnsupportedDType {
                    dtype: DType::I16,
                    ..
                }
            ),
            "{error}"
        );

        let mut input = Buffers::full("input", &memory, &[&[1.0; 3]]);
        input.numels.push(3);
        let error = refused(
            communicator
                .all_reduce(Arc::new(input), ReduceOp::Sum)
                .map(drop)
                .unwrap_err(),
        );
        assert!(
            matches!(
                error,
                Error::SegmentCountDiffers {
                    input: 2,
                    output: 1,
                    ..
                }
            ),
            "{error}"
        );

        let absent = Arc::new(Buffers::new("input", &memory, &[None], &[3]));
        let error = refused(communicator.all_gather(absent, &[3]).map(drop).unwrap_err());
        assert!(
            matches!(error, Error::AbsentSegment { segment: 0, .. }),
            "{error}"
        );

        let kind = OtherKind;
        let error = refused(
            communicator
                .all_reduce(Arc::new(kind), ReduceOp::Sum)
                .map(drop)
                .unwrap_err(),
        );
        assert!(
            matches!(error, Error::OtherDevice { found: None, .. }),
            "{error}"
        );
        group.barrier().unwrap();
    })
    .unwrap();
}

#[test]
fn ranks_as_threads_refuse_segments_on_a_device() {
    Local::new(1)
        .spawn(|group: ProcessGroup| {
            let memory = Arc::new(HostMemory::new(0));
            let input = Arc::new(Buffers::full("input", &memory, &[&[1.0; 3]]));
            let error = group
                .communicator()
                .all_reduce(Arc::clone(&input) as _, ReduceOp::Sum);
            let error = error.map(drop).unwrap_err();
            assert!(error.is_refusal());
            assert!(
                matches!(
                    error,
                    Error::DeviceSegments {
                        collective: Collective::AllReduce,
                        ..
                    }
                ),
                "{error}"
            );
            let mut output = Buffers::full("output", &memory, &[&[1.0; 3]]);
            let host = Arc::new(OwnedSegments(vec![vec![1.0f32; 3]]));
            let error = group
                .communicator()
                .all_gather(host, &[3])
                .unwrap()
                .finish(&mut output)
                .unwrap_err();
            assert!(matches!(error, Error::DeviceSegments { .. }), "{error}");
        })
        .unwrap();
}

/// On a device that nobody here knows.
struct OtherKind;

impl Segments for OtherKind {
    fn dtype(&self) -> DType {
        DType::F32
    }
    fn count(&self) -> usize {
        1
    }
    fn numel(&self, _: usize) -> usize {
        1
    }
    fn bytes(&self, _: usize) -> Option<&[u8]> {
        None
    }
    fn device(&self) -> Option<&dyn Any> {
        Some(self)
    }
}

#[test]
fn streams_wait_for_each_other() {
    let (ours, other) = (HostMemory::new(0), HostMemory::new(0));
    let order = Arc::new(Mutex::new(Vec::new()));
    let note = |memory: &HostMemory, what: &'static str, pause_ms| {
        let order = Arc::clone(&order);
        memory.launch(move || {
            thread::sleep(Duration::from_millis(pause_ms));
            order.lock().push(what);
        });
    };
    note(&other, "written", 50);
    // SAFETY: both live until the end of the test.
    unsafe { ours.wait_for(other.stream()) }.unwrap();
    note(&ours, "sent", 50);
    // SAFETY: as above.
    unsafe { ours.hold_up(other.stream()) }.unwrap();
    note(&other, "reused", 0);
    finish_stream(&other);
    assert_eq!(*order.lock(), ["written", "sent", "reused"]);
}
