//! Size classes: which block a request takes. Pure arithmetic, no memory.
//!
//! Up to 16 MiB a class is a number of huge pages. Above, each doubling has eight classes, so
//! requests that differ a little share blocks and none is over by more than an eighth.

use crate::map::HUGE_PAGE_BYTES;

/// Classes whose blocks are cached; the largest of them has 512 GiB.
pub(crate) const CACHED_CLASSES: usize = 128;

/// Classes to each doubling of the size, and classes below the first doubling.
const PER_DOUBLING: usize = 8;

/// The class of a request: requests of the same class take blocks of the same size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SizeClass {
    /// Its place in order of size; not cached from [`CACHED_CLASSES`] on.
    pub(crate) index: usize,
    /// The size of its blocks, a multiple of the huge page.
    pub(crate) block_bytes: usize,
}

impl SizeClass {
    /// The class of a request of `size_bytes`, which a [`std::alloc::Layout`] keeps below
    /// `isize::MAX` (so nothing here overflows).
    pub(crate) const fn of(size_bytes: usize) -> Self {
        let pages = size_bytes.div_ceil(HUGE_PAGE_BYTES);
        if pages <= PER_DOUBLING {
            let pages = if pages == 0 { 1 } else { pages };
            return Self {
                index: pages - 1,
                block_bytes: pages * HUGE_PAGE_BYTES,
            };
        }
        // pages is in (8 * step, 16 * step], so steps is in 9..=16.
        let doubling = ((pages - 1) / PER_DOUBLING).ilog2() as usize;
        let step = 1 << doubling;
        let steps = pages.div_ceil(step);
        Self {
            index: PER_DOUBLING * (doubling + 1) + steps - PER_DOUBLING - 1,
            block_bytes: steps * step * HUGE_PAGE_BYTES,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_fits_its_request_with_at_most_an_eighth_more() {
        let mut sizes: Vec<usize> = (0..4096)
            .flat_map(|pages| [pages * HUGE_PAGE_BYTES, pages * HUGE_PAGE_BYTES + 1])
            .collect();
        sizes.extend((20..isize::BITS - 1).flat_map(|bit| {
            let size_bytes = 1usize << bit;
            [
                size_bytes - 1,
                size_bytes,
                size_bytes + 1,
                size_bytes / 2 * 3 + 12345,
            ]
        }));
        sizes.push(isize::MAX.unsigned_abs());
        for size_bytes in sizes {
            let block_bytes = SizeClass::of(size_bytes).block_bytes;
            let page_multiple = size_bytes.max(1).next_multiple_of(HUGE_PAGE_BYTES);
            assert!(block_bytes.is_multiple_of(HUGE_PAGE_BYTES));
            assert!(block_bytes >= page_multiple, "{size_bytes}");
            assert!(
                block_bytes - page_multiple <= page_multiple / 8,
                "{size_bytes}"
            );
        }
    }

    /// A freed block is filed under the class of its layout: two sizes there would overrun.
    #[test]
    fn an_index_stands_for_one_block_size() {
        let mut previous = SizeClass::of(1);
        assert_eq!(previous.index, 0);
        // Miri is a thousand times slower: there the first classes are enough.
        let most = if cfg!(miri) { 1 << 9 } else { 1 << 18 };
        for pages in 2..=most {
            let class = SizeClass::of(pages * HUGE_PAGE_BYTES);
            if class != previous {
                assert_eq!(class.index, previous.index + 1);
                assert!(class.block_bytes > previous.block_bytes);
            }
            previous = class;
        }
        assert!(cfg!(miri) || previous.index == CACHED_CLASSES - 1);
        assert_eq!(SizeClass::of((1 << 39) + 1).index, CACHED_CLASSES);
    }
}
