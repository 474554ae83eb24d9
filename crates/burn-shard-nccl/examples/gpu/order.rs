//! Checks that a rank which waits for nothing ends in time, and that streams are ordered where they have
//! to be.

use std::{
    any::Any,
    process::ExitCode,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use burn_shard_comm::{DType, ReduceOp, Segments, SegmentsMut};
use burn_shard_nccl::{DeviceSegments, Memory, NcclError, Owner};

use super::{Library, finish_stream, join, spawn, stream};

/// Met on purpose.
const SHORT: Duration = Duration::from_secs(3);
const ROUNDS: usize = 200;

/// Where the segments of the collective that a rank is late for are.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Late {
    Host,
    Device,
}

/// The last rank is late for a collective: the others have to end with an error, soon after the deadline.
pub(crate) fn hang(library: Library, world_size: usize, late: Late) -> ExitCode {
    if world_size < 2 {
        eprintln!("hang: takes two ranks or more");
        return ExitCode::from(2);
    }
    let result = spawn(world_size, |control| {
        let (group, memory, _) = join(control, library);
        group.barrier().unwrap();
        group.set_deadline(SHORT);
        if group.rank() + 1 == world_size {
            thread::sleep(3 * SHORT);
            return;
        }
        let start = Instant::now();
        let error = if late == Late::Host {
            group.all_reduce(&mut [1.0f32; 4], ReduceOp::Sum)
        } else {
            let input = Arc::new(Owned::new(&memory, &memory, 1 << 20));
            let communicator = group.communicator();
            let work = communicator.reduce_scatter(input, ReduceOp::Sum);
            work.and_then(|mut work| work.wait())
        };
        let error = error.expect_err("a collective of which a rank is missing should fail");
        let waited = start.elapsed();
        assert!(
            waited < 2 * SHORT,
            "{waited:?} after a deadline of {SHORT:?}"
        );
        println!("ended after {:.1} s: {error}", waited.as_secs_f64());
    });
    match result {
        // The control group of processes is poisoned, on purpose.
        Err(error) if super::processes().is_none() => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
        _ => ExitCode::SUCCESS,
    }
}

/// Each round writes a gradient on a stream of the computation, behind something that takes long, reduces it,
/// and at once writes another where it was as soon as it is let go. Results have to be those of the round.
pub(crate) fn race(library: Library, world_size: usize) -> ExitCode {
    const NUMEL: usize = 1 << 18;
    let result = spawn(world_size, |control| {
        let (group, _, _) = join(control, library);
        let compute = stream(control, library).unwrap_or_else(|error| panic!("{error}"));
        let communicator = group.communicator();
        let rounds = if library == Library::Real { ROUNDS } else { 20 };
        let ballast_bytes = if library == Library::Real {
            512 << 20
        } else {
            1 << 20
        };
        let ballast = Owned::new(&compute, &compute, ballast_bytes / 4);
        let host = compute.pin(NUMEL * 4).unwrap();
        let mut output = Owned::new(&compute, &compute, NUMEL / world_size);
        for round in 0..rounds {
            let input = Arc::new(Owned::new(&compute, &compute, NUMEL));
            // What the last round left on the stream read the host's memory.
            finish_stream(&compute);
            let value = |rank: usize, index: usize| ((round + rank + index) % 1021) as f32;
            for index in 0..NUMEL {
                // SAFETY: in the pinned memory, which is that long.
                let place = unsafe { host.cast::<f32>().add(index) };
                // SAFETY: pinned above, and nobody else's.
                unsafe { place.write(value(group.rank(), index)) };
            }
            // Milliseconds on a GPU.
            for _ in 0..8 {
                ballast.fill();
            }
            // SAFETY: both live until the stream is past them, see `finish_stream`.
            unsafe { compute.upload(host, input.address, NUMEL * 4) }.unwrap();
            let work = communicator
                .reduce_scatter(Arc::clone(&input) as _, ReduceOp::Sum)
                .unwrap();
            drop(input);
            // Would be where the input was, were it freed too early.
            let reused = Owned::new(&compute, &compute, NUMEL);
            reused.fill();
            work.finish(&mut output).unwrap();
            // The step: in order behind the result.
            // SAFETY: as above.
            unsafe { compute.download(output.address, host, NUMEL / world_size * 4) }.unwrap();
            finish_stream(&compute);
            let own = NUMEL / world_size;
            for index in 0..own {
                // SAFETY: in the pinned memory, which is that long.
                let place = unsafe { host.cast::<f32>().add(index) };
                // SAFETY: written by the stream, which is at its end.
                let found = unsafe { place.read() };
                let element = group.rank() * own + index;
                let expected: f32 = (0..world_size).map(|rank| value(rank, element)).sum();
                assert_eq!(found, expected, "round {round}, element {index}");
            }
        }
        group.barrier().unwrap();
        // SAFETY: the stream is at its end.
        unsafe { compute.unpin(host) };
        if group.rank() == 0 {
            println!("{rounds} rounds, no element of another round");
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

/// A buffer of `f32` that belongs to a stream, as a tensor belongs to that of its computation.
struct Owned {
    compute: Arc<dyn Memory>,
    numel: usize,
    address: u64,
    device: DeviceSegments,
}

struct ByStream(Arc<dyn Memory>);

impl Owner for ByStream {
    fn before(&self, memory: &dyn Memory) -> Result<(), NcclError> {
        if memory.stream() == self.0.stream() {
            return Ok(());
        }
        // SAFETY: alive as long as its memory.
        unsafe { memory.wait_for(self.0.stream()) }
    }

    fn after(&self, memory: &dyn Memory) -> Result<(), NcclError> {
        if memory.stream() == self.0.stream() {
            return Ok(());
        }
        // SAFETY: as above.
        unsafe { memory.hold_up(self.0.stream()) }
    }
}

impl Owned {
    /// A buffer that belongs to the stream of `compute`, on the device of `memory`.
    fn new(compute: &Arc<dyn Memory>, memory: &Arc<dyn Memory>, numel: usize) -> Self {
        let address = compute.allocate(numel * 4).unwrap();
        let owner = Box::new(ByStream(Arc::clone(compute)));
        // SAFETY: just allocated, that long; freed on its stream, when nobody holds it.
        let device = unsafe { DeviceSegments::new(memory.device(), vec![Some(address)], owner) };
        Self {
            compute: Arc::clone(compute),
            numel,
            address,
            device,
        }
    }

    fn fill(&self) {
        // SAFETY: as long as the buffer.
        unsafe { self.compute.zero(self.address, self.numel * 4) }.unwrap();
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: allocated in `new`; what uses it is on the stream already, or over.
        unsafe { self.compute.free(self.address) };
    }
}

impl Segments for Owned {
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

impl SegmentsMut for Owned {
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
