//! Who waits for which stream.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use burn_shard_comm::ReduceOp;
use burn_shard_nccl::{DeviceSegments, Memory, NcclError, Owner};
use burn_shard_nccl_double::HostMemory;
use parking_lot::Mutex;

use crate::{
    buffers::{Buffers, finish_stream},
    common::{LONG, spawn},
};

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
