//! Buffers on the device whose owner notes what it is asked.

use std::{
    any::Any,
    ptr, slice,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use burn_shard_comm::{DType, Segments, SegmentsMut};
use burn_shard_nccl::{DeviceSegments, Memory, NcclError, Owner};
use burn_shard_nccl_double::HostMemory;
use parking_lot::Mutex;

use crate::common::LONG;

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
pub(crate) struct Buffers {
    pub(crate) memory: Arc<HostMemory>,
    pub(crate) dtype: DType,
    pub(crate) numels: Vec<usize>,
    pub(crate) addresses: Vec<Option<u64>>,
    pub(crate) device: DeviceSegments,
    log: Log,
}

impl Buffers {
    pub(crate) fn new(
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

    pub(crate) fn full(name: &'static str, memory: &Arc<HostMemory>, values: &[&[f32]]) -> Self {
        let numels: Vec<usize> = values.iter().map(|values| values.len()).collect();
        let values: Vec<Option<&[f32]>> = values.iter().copied().map(Some).collect();
        Self::new(name, memory, &values, &numels)
    }

    /// What the buffers hold, once the stream is at its end.
    pub(crate) fn read(&self) -> Vec<Vec<f32>> {
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

    pub(crate) fn log(&self) -> Vec<String> {
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

pub(crate) fn finish_stream(memory: &HostMemory) {
    let event = memory.record().unwrap();
    let start = Instant::now();
    while !event.is_over().unwrap() {
        assert!(start.elapsed() < LONG, "the stream should come to its end");
        thread::sleep(Duration::from_millis(1));
    }
}
