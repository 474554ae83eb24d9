//! Flat host buffers that Burn's tensors can be views of.
//!
//! A [`Buffer`] is written by this crate, then frozen into Burn's shared `Bytes`; tensors cut from
//! it share it, and Burn copies before it writes into shared storage. Buffers remember their kind
//! in the rank's [`Ledger`] and go back to the rank's [`Pool`] when the last view is dropped: a
//! fresh allocation of many MiB costs page faults, which on a CPU cost as much as the gather.

use std::collections::BTreeMap;
use std::mem::MaybeUninit;
use std::sync::{Arc, Weak};

use burn_std::{AccessError, AccessPolicy, AllocationController, AllocationProperty, Bytes};
use bytemuck::{Pod, Zeroable};
use parking_lot::Mutex;

use crate::plan::layout::ALIGN_BYTES;
use crate::storage::ledger::{Ledger, MemoryKind};

/// Allocation unit; gives the alignment.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C, align(64))]
struct Line([u8; ALIGN_BYTES]);

/// Idle storage of one rank, by length in lines.
#[derive(Debug)]
pub(crate) struct Pool {
    ledger: Arc<Ledger>,
    idle: Mutex<Idle>,
}

#[derive(Debug, Default)]
struct Idle {
    by_len: BTreeMap<usize, Vec<Vec<Line>>>,
    bytes: usize,
    cap_bytes: usize,
}

impl Pool {
    pub(crate) fn new(ledger: Arc<Ledger>) -> Arc<Self> {
        Arc::new(Self {
            ledger,
            idle: Mutex::default(),
        })
    }

    /// Sets how many bytes may lie idle or be in use for gathers and gradients, together: storage
    /// that waits must not add to the peak. What exceeds it goes back to the allocator.
    pub(crate) fn set_cap_bytes(&self, cap_bytes: usize) {
        self.idle.lock().cap_bytes = cap_bytes;
    }

    /// A buffer of at least `bytes` bytes, all of them initialized but with arbitrary contents.
    pub(crate) fn take(self: &Arc<Self>, kind: MemoryKind, bytes: usize) -> Buffer {
        let lines = bytes.div_ceil(ALIGN_BYTES);
        let idle = {
            let mut idle = self.idle.lock();
            let storage = idle.by_len.get_mut(&lines).and_then(Vec::pop);
            if storage.is_some() {
                idle.bytes -= lines * ALIGN_BYTES;
            }
            storage
        };
        if idle.is_some() {
            self.ledger.sub(MemoryKind::Staging, lines * ALIGN_BYTES);
        }
        let storage = idle.unwrap_or_else(|| {
            self.make_room(lines * ALIGN_BYTES);
            bytemuck::zeroed_vec(lines)
        });
        Buffer::new(storage, bytes, kind, &self.ledger, Arc::downgrade(self))
    }

    /// A buffer of zeros.
    pub(crate) fn zeros(self: &Arc<Self>, kind: MemoryKind, bytes: usize) -> Buffer {
        let storage = bytemuck::zeroed_vec(bytes.div_ceil(ALIGN_BYTES));
        Buffer::new(storage, bytes, kind, &self.ledger, Arc::downgrade(self))
    }

    /// Bytes that lie idle.
    #[cfg(test)]
    pub(crate) fn idle_bytes(&self) -> usize {
        self.idle.lock().bytes
    }

    /// Bytes in use by what comes and goes in each step.
    fn busy_bytes(&self) -> usize {
        let report = self.ledger.report();
        let live = |kind| report.of(kind).live_bytes;
        live(MemoryKind::Unsharded) + live(MemoryKind::Gradients)
    }

    /// Drops idle storage, the longest first, that would exceed the cap beside `bytes` new ones.
    fn make_room(&self, bytes: usize) {
        let busy = self.busy_bytes() + bytes;
        let mut dropped = Vec::new();
        let mut idle = self.idle.lock();
        while idle.bytes > 0 && idle.bytes + busy > idle.cap_bytes {
            let Some(mut longest) = idle.by_len.last_entry() else {
                break;
            };
            let Some(storage) = longest.get_mut().pop() else {
                // All of this length were taken.
                longest.remove();
                continue;
            };
            idle.bytes -= storage.len() * ALIGN_BYTES;
            dropped.push(storage);
        }
        drop(idle);
        let bytes = dropped
            .iter()
            .map(|storage| storage.len() * ALIGN_BYTES)
            .sum();
        self.ledger.sub(MemoryKind::Staging, bytes);
    }

    fn put_back(&self, storage: Vec<Line>) {
        let bytes = storage.len() * ALIGN_BYTES;
        let busy = self.busy_bytes();
        let mut idle = self.idle.lock();
        if bytes > 0 && idle.bytes + bytes + busy <= idle.cap_bytes {
            idle.bytes += bytes;
            idle.by_len.entry(storage.len()).or_default().push(storage);
            drop(idle);
            self.ledger.add(MemoryKind::Staging, bytes);
        }
    }
}

/// Owned host memory, aligned to [`ALIGN_BYTES`], counted in a ledger.
#[derive(Debug)]
pub(crate) struct Buffer {
    storage: Vec<Line>,
    len: usize,
    kind: MemoryKind,
    ledger: Arc<Ledger>,
    pool: Weak<Pool>,
}

impl Buffer {
    fn new(
        storage: Vec<Line>,
        len: usize,
        kind: MemoryKind,
        ledger: &Arc<Ledger>,
        pool: Weak<Pool>,
    ) -> Self {
        ledger.add(kind, storage.len() * ALIGN_BYTES);
        Self {
            storage,
            len,
            kind,
            ledger: Arc::clone(ledger),
            pool,
        }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.storage)[..self.len]
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.storage)[..self.len]
    }

    /// Hands the memory to Burn's tensors.
    pub(crate) fn freeze(self) -> Arc<Bytes> {
        let len = self.len;
        // SAFETY: all of the storage was initialized when it was allocated, `len` bytes of it
        // included, and the controller serves exactly that memory until it is dropped.
        Arc::new(unsafe { Bytes::from_controller(Box::new(self), len) })
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.ledger.sub(self.kind, self.storage.len() * ALIGN_BYTES);
        if let Some(pool) = self.pool.upgrade() {
            pool.put_back(std::mem::take(&mut self.storage));
        }
    }
}

impl AllocationController for Buffer {
    fn alloc_align(&self) -> usize {
        ALIGN_BYTES
    }

    fn property(&self) -> AllocationProperty {
        AllocationProperty::Other
    }

    unsafe fn memory_mut(
        &mut self,
        _policy: AccessPolicy,
    ) -> Result<&mut [MaybeUninit<u8>], AccessError> {
        let bytes = self.bytes_mut();
        // SAFETY: `MaybeUninit<u8>` has the layout of `u8`, and the trait's contract forbids the
        // caller to write uninitialized bytes through the result.
        Ok(unsafe { &mut *(std::ptr::from_mut(bytes) as *mut [MaybeUninit<u8>]) })
    }

    fn memory(&self, _policy: AccessPolicy) -> Result<&[MaybeUninit<u8>], AccessError> {
        let bytes = self.bytes();
        // SAFETY: `MaybeUninit<u8>` has the layout of `u8`, and the result is read-only.
        Ok(unsafe { &*(std::ptr::from_ref(bytes) as *const [MaybeUninit<u8>]) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_is_counted_until_its_last_view_is_gone_and_then_reused() {
        let ledger = Arc::new(Ledger::default());
        let pool = Pool::new(Arc::clone(&ledger));
        pool.set_cap_bytes(1 << 10);
        let live = |kind| ledger.report().of(kind).live_bytes;

        let mut buffer = pool.take(MemoryKind::Unsharded, 100);
        buffer.bytes_mut().fill(7);
        let bytes = buffer.freeze();
        let view = Arc::clone(&bytes);
        assert_eq!(&bytes[..3], [7, 7, 7]);
        assert_eq!(bytes.len(), 100);
        drop(bytes);
        assert_eq!(live(MemoryKind::Unsharded), 128);
        drop(view);
        assert_eq!((live(MemoryKind::Unsharded), pool.idle_bytes()), (0, 128));
        assert_eq!(live(MemoryKind::Staging), 128);

        drop(pool.take(MemoryKind::Gradients, 128));
        assert_eq!(pool.idle_bytes(), 128);
        assert!(
            pool.zeros(MemoryKind::Gradients, 128)
                .bytes()
                .iter()
                .all(|&byte| byte == 0)
        );
        drop(pool.take(MemoryKind::Gradients, 2 << 10));
        assert!(pool.idle_bytes() <= 1 << 10, "the cap holds");
    }

    #[test]
    fn a_buffer_outlives_its_pool() {
        let pool = Pool::new(Arc::default());
        let bytes = pool.take(MemoryKind::Unsharded, 64).freeze();
        drop(pool);
        assert_eq!(bytes.len(), 64);
    }

    #[test]
    fn making_room_counts_no_buffer_twice_nor_one_that_was_taken() {
        let pool = Pool::new(Arc::default());
        pool.set_cap_bytes(10 * ALIGN_BYTES);
        let take = |lines: usize| pool.take(MemoryKind::Gradients, lines * ALIGN_BYTES);
        // Idle: 1 and 2 lines; 3 were idle and are in use again.
        drop([take(1), take(2), take(3)]);
        let _three = take(3);
        assert_eq!(pool.idle_bytes(), 3 * ALIGN_BYTES);
        // 3 + 5 in use leave room for 2: the longest goes.
        let _five = take(5);
        assert_eq!(pool.idle_bytes(), ALIGN_BYTES);
        let _one = take(1);
        assert_eq!(pool.idle_bytes(), 0);
    }
}
