//! Memory: what a collective packs and receives into, and results until they are taken.

use parking_lot::Mutex;

/// Memory in `u64`s, to be aligned for every element.
pub(super) type Scratch = Vec<u64>;

/// Bytes of results a rank keeps for later ones.
const KEPT_BYTES: usize = 64 << 20;

/// Memory of the collective that has its turn; kept for the next.
#[derive(Debug, Default)]
pub(super) struct Desk {
    own: Scratch,
    others: Scratch,
}

impl Desk {
    /// Room for `bytes` of this rank, and as many of each rank.
    pub(super) fn lay_out(&mut self, bytes: usize, world_size: usize) -> (&mut [u8], Slots<'_>) {
        let stride = bytes.next_multiple_of(8);
        grow(&mut self.own, stride);
        grow(&mut self.others, stride * world_size);
        let slots = Slots {
            bytes: bytemuck::cast_slice_mut(&mut self.others),
            stride,
        };
        (bytemuck::cast_slice_mut(&mut self.own), slots)
    }
}

/// One slot for each rank.
#[derive(Debug)]
pub(super) struct Slots<'a> {
    bytes: &'a mut [u8],
    stride: usize,
}

impl Slots<'_> {
    pub(super) fn slot(&mut self, rank: usize, bytes: usize) -> &mut [u8] {
        assert!(bytes <= self.stride, "a slot should hold what is received");
        &mut self.bytes[rank * self.stride..][..bytes]
    }

    pub(super) fn get(&self, rank: usize, bytes: usize) -> &[u8] {
        &self.bytes[rank * self.stride..][..bytes]
    }
}

fn grow(scratch: &mut Scratch, bytes: usize) {
    if scratch.len() * 8 < bytes {
        // Nothing in it is worth copying.
        *scratch = vec![0; bytes.div_ceil(8)];
    }
}

/// Memory of results that were taken, kept for the next: fresh pages cost more than the sums.
#[derive(Debug, Default)]
pub(super) struct Shelf {
    kept: Mutex<Vec<Scratch>>,
}

impl Shelf {
    /// At least `bytes` of memory, with anything in it.
    pub(super) fn take(&self, bytes: usize) -> Scratch {
        let needed = bytes.div_ceil(8);
        let mut kept = self.kept.lock();
        let fitting = kept
            .iter()
            .enumerate()
            .filter(|(_, scratch)| (needed..=needed * 2).contains(&scratch.len()))
            .min_by_key(|(_, scratch)| scratch.len())
            .map(|(index, _)| index);
        match fitting {
            Some(index) => kept.swap_remove(index),
            None => {
                drop(kept);
                vec![0; needed]
            }
        }
    }

    /// Keeps `scratch`, in place of older memory if that is too much.
    pub(super) fn give_back(&self, scratch: Scratch) {
        if scratch.len() * 8 > KEPT_BYTES {
            return;
        }
        let mut kept = self.kept.lock();
        kept.push(scratch);
        let mut total_bytes: usize = kept.iter().map(|scratch| scratch.len() * 8).sum();
        let mut oldest = 0;
        while total_bytes > KEPT_BYTES {
            total_bytes -= kept[oldest].len() * 8;
            oldest += 1;
        }
        drop(kept.drain(..oldest).collect::<Vec<_>>());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_kept_up_to_a_cap() {
        let shelf = Shelf::default();
        let first = shelf.take(1 << 20);
        let place = first.as_ptr();
        shelf.give_back(first);
        let small = shelf.take(100);
        assert_ne!(small.as_ptr(), place, "too large for this");
        let again = shelf.take((1 << 20) - 5);
        assert_eq!(again.as_ptr(), place);
        for _ in 0..100 {
            shelf.give_back(vec![0; (3 << 20) / 8]);
        }
        shelf.give_back(vec![0; KEPT_BYTES]);
        let kept: usize = shelf.kept.lock().iter().map(|s| s.len() * 8).sum();
        assert!((KEPT_BYTES - (3 << 20)..=KEPT_BYTES).contains(&kept));
    }
}
