//! Host memory through which all copies between host and device go.
//!
//! A driver copies ordinary host memory only while it holds the caller, possibly until all that is on the
//! stream is over: a rank would wait in the driver behind a collective that another rank never starts, and
//! nobody would look at the deadline. So everything is copied through page-locked memory, allocated once,
//! before the first collective, and every wait for room in it ends.

use std::{
    collections::VecDeque,
    mem::ManuallyDrop,
    ptr,
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;

use crate::{
    comm::{Patience, pause},
    error::NcclError,
    memory::{Event, Memory},
};

/// What is on its way to the device, first come, first gone.
const UPLOADS_BYTES: usize = 4 << 20;
/// What came to the host and was not taken yet.
const RESULTS_BYTES: usize = 256 << 10;
/// A large result comes in pieces of this size, and so a large input goes.
const CHUNK_BYTES: usize = 1 << 20;
/// Larger results do not come before somebody waits for them.
const MOST_RESULT_BYTES: usize = 16 << 10;
const ALIGNMENT: usize = 64;

/// Page-locked memory of one rank, in three parts: uploads, results, one chunk.
pub(crate) struct Staging {
    memory: Arc<dyn Memory>,
    /// An address, so that it may be sent.
    base: usize,
    uploads: Mutex<Uploads>,
    /// Parts that are taken, in order.
    results: Mutex<Vec<(usize, usize)>>,
    /// Held while the chunk is used.
    chunk: Mutex<()>,
}

impl Staging {
    pub(crate) fn new(memory: &Arc<dyn Memory>) -> Result<Arc<Self>, NcclError> {
        let base = memory.pin(UPLOADS_BYTES + RESULTS_BYTES + CHUNK_BYTES)?;
        Ok(Arc::new(Self {
            memory: Arc::clone(memory),
            base: base.expose_provenance(),
            uploads: Mutex::default(),
            results: Mutex::default(),
            chunk: Mutex::default(),
        }))
    }

    fn pointer(&self, offset: usize) -> *mut u8 {
        ptr::with_exposed_provenance_mut(self.base + offset)
    }

    /// Puts a copy of `bytes` to the device address `to` on the stream; `bytes` are free again afterwards.
    ///
    /// Waits only where more than fits is on its way: until the stream has come to what was sent before.
    ///
    /// # Safety
    ///
    /// `to` is that many bytes, until the stream has come to it.
    pub(crate) unsafe fn upload(
        &self,
        bytes: &[u8],
        to: u64,
        patience: &Patience<'_>,
    ) -> Result<(), NcclError> {
        let mut to = to;
        for chunk in bytes.chunks(CHUNK_BYTES) {
            let start = Instant::now();
            let mut uploads = self.uploads.lock();
            let at = loop {
                uploads.release()?;
                if let Some(at) = uploads.room(chunk.len()) {
                    break at;
                }
                patience.check("copying to the device", start)?;
                pause(start);
            };
            let from = self.pointer(at);
            // SAFETY: nobody uses this part of our memory, which is as long as the chunk.
            unsafe { ptr::copy_nonoverlapping(chunk.as_ptr(), from, chunk.len()) };
            // SAFETY: page-locked, and not used again before the event is over; the target is the caller's.
            unsafe { self.memory.upload(from, to, chunk.len()) }?;
            uploads.sent(at, chunk.len(), self.memory.record()?);
            to += chunk.len() as u64;
        }
        Ok(())
    }

    /// Puts a copy of `bytes` bytes at the device address `from` on the stream, if it is small and there is
    /// room. The result may be read once the stream has come to it.
    ///
    /// # Safety
    ///
    /// `from` is that many bytes, when the stream comes to it.
    pub(crate) unsafe fn receive(
        self: &Arc<Self>,
        from: u64,
        bytes: usize,
    ) -> Result<Option<Received>, NcclError> {
        if bytes > MOST_RESULT_BYTES {
            return Ok(None);
        }
        let Some(start) = first_fit(&mut self.results.lock(), bytes) else {
            return Ok(None);
        };
        let received = Received {
            staging: Arc::clone(self),
            start,
            bytes,
        };
        let to = self.pointer(UPLOADS_BYTES + start);
        if bytes > 0 {
            // SAFETY: page-locked, this long, and nobody else's before `received` is dropped.
            unsafe { self.memory.download(from, to, bytes) }?;
        }
        Ok(Some(received))
    }

    /// Copies `bytes` bytes at the device address `from` to the host, and hands them to `take`, piece by
    /// piece. Waits for the stream, as long as `patience` says.
    ///
    /// # Safety
    ///
    /// `from` is that many bytes, until this returns.
    pub(crate) unsafe fn fetch(
        self: &Arc<Self>,
        from: u64,
        bytes: usize,
        patience: &Patience<'_>,
        mut take: impl FnMut(&[u8]),
    ) -> Result<(), NcclError> {
        let _ours = self.chunk.lock();
        let host = self.pointer(UPLOADS_BYTES + RESULTS_BYTES);
        let mut done = 0;
        while done < bytes {
            let piece = CHUNK_BYTES.min(bytes - done);
            let start = Instant::now();
            // SAFETY: page-locked, this long, and ours while locked; the source is the caller's.
            unsafe { self.memory.download(from + done as u64, host, piece) }?;
            let event = self.memory.record()?;
            while !event.is_over()? {
                patience
                    .check("copying to the host", start)
                    .inspect_err(|_| {
                        // The stream may come to it yet.
                        let _forever = ManuallyDrop::new(Arc::clone(self));
                    })?;
                pause(start);
            }
            // SAFETY: ours while locked, and the stream has written it.
            take(unsafe { std::slice::from_raw_parts(host, piece) });
            done += piece;
        }
        Ok(())
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // What the stream may still read stays for good: an aborted device can be slow to end.
        let start = Instant::now();
        let uploads = self.uploads.get_mut();
        while uploads.release().is_ok() && !uploads.on_their_way.is_empty() {
            if start.elapsed() >= DROP_DEADLINE {
                return;
            }
            pause(start);
        }
        if uploads.on_their_way.is_empty() {
            // SAFETY: pinned by `new`; results keep this value, uploads are over, the chunk is not in use.
            unsafe { self.memory.unpin(self.pointer(0)) };
        }
    }
}

/// Longer than an orderly end needs; this runs where nobody waits for it.
const DROP_DEADLINE: Duration = Duration::from_secs(2);

/// A result in page-locked memory.
pub(crate) struct Received {
    staging: Arc<Staging>,
    start: usize,
    bytes: usize,
}

impl Received {
    /// The bytes, if the stream has come to them.
    pub(crate) fn bytes(&self) -> &[u8] {
        let at = self.staging.pointer(UPLOADS_BYTES + self.start);
        // SAFETY: this part is ours until dropped; whoever reads it knows that the stream is past it.
        unsafe { std::slice::from_raw_parts(at, self.bytes) }
    }
}

impl Drop for Received {
    fn drop(&mut self) {
        let mut taken = self.staging.results.lock();
        if let Some(index) = taken.iter().position(|part| part.0 == self.start) {
            taken.remove(index);
        }
    }
}

/// Takes `bytes` bytes, or more, of those that are free.
fn first_fit(taken: &mut Vec<(usize, usize)>, bytes: usize) -> Option<usize> {
    let bytes = bytes.max(1).next_multiple_of(ALIGNMENT);
    let mut start = 0;
    let mut index = 0;
    while index < taken.len() && taken[index].0 - start < bytes {
        start = taken[index].1;
        index += 1;
    }
    if start + bytes > RESULTS_BYTES {
        return None;
    }
    taken.insert(index, (start, start + bytes));
    Some(start)
}

/// A ring.
#[derive(Default)]
struct Uploads {
    on_their_way: VecDeque<Upload>,
}

struct Upload {
    start: usize,
    end: usize,
    event: Box<dyn Event>,
}

impl Uploads {
    /// Forgets what the stream has passed.
    fn release(&mut self) -> Result<(), NcclError> {
        while let Some(first) = self.on_their_way.front()
            && first.event.is_over()?
        {
            self.on_their_way.pop_front();
        }
        Ok(())
    }

    /// Where `bytes` bytes are free.
    fn room(&self, bytes: usize) -> Option<usize> {
        let bytes = bytes.next_multiple_of(ALIGNMENT);
        let (Some(first), Some(last)) = (self.on_their_way.front(), self.on_their_way.back())
        else {
            return (bytes <= UPLOADS_BYTES).then_some(0);
        };
        let (tail, head) = (first.start, last.end);
        if head <= tail {
            return (tail - head >= bytes).then_some(head);
        }
        if UPLOADS_BYTES - head >= bytes {
            return Some(head);
        }
        (tail >= bytes).then_some(0)
    }

    fn sent(&mut self, start: usize, bytes: usize, event: Box<dyn Event>) {
        let end = start + bytes.next_multiple_of(ALIGNMENT);
        self.on_their_way.push_back(Upload { start, end, event });
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    struct Switch(Arc<AtomicBool>);

    impl Event for Switch {
        fn is_over(&self) -> Result<bool, NcclError> {
            Ok(self.0.load(Ordering::Relaxed))
        }
    }

    #[test]
    fn uploads_go_round_and_never_share_a_byte() {
        let mut uploads = Uploads::default();
        let mut switches = VecDeque::new();
        let mut live: VecDeque<(usize, usize)> = VecDeque::new();
        let mut refused = 0;
        for round in 0..4000usize {
            let bytes = 1 + round * 7919 % CHUNK_BYTES;
            while uploads.room(bytes).is_none() {
                refused += 1;
                let switch: Arc<AtomicBool> = switches.pop_front().expect("something on its way");
                switch.store(true, Ordering::Relaxed);
                live.pop_front();
                uploads.release().expect("switches do not fail");
            }
            let at = uploads.room(bytes).expect("just asked");
            assert!(at.is_multiple_of(ALIGNMENT) && at + bytes <= UPLOADS_BYTES);
            for &(start, end) in &live {
                assert!(at + bytes <= start || end <= at, "{at}: {live:?}");
            }
            let switch = Arc::new(AtomicBool::new(false));
            uploads.sent(at, bytes, Box::new(Switch(Arc::clone(&switch))));
            switches.push_back(switch);
            live.push_back((at, at + bytes));
        }
        assert!(refused > 1000, "the ring should have been full: {refused}");
    }

    #[test]
    fn results_fill_gaps_and_never_share_a_byte() {
        let mut taken = Vec::new();
        let starts: Vec<usize> = (0..4)
            .map(|_| first_fit(&mut taken, 100).expect("room"))
            .collect();
        assert_eq!(starts, [0, 128, 256, 384]);
        taken.remove(1);
        assert_eq!(first_fit(&mut taken, 129), Some(512));
        assert_eq!(first_fit(&mut taken, 128), Some(128));
        assert_eq!(first_fit(&mut taken, RESULTS_BYTES), None);
        assert!(taken.is_sorted());
    }
}
