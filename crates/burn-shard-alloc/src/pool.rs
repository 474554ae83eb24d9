//! The cache of freed blocks.
//!
//! Each class has a list, newest block first, since what was just freed is still in the caches of
//! the processor. All blocks are also in one list by age, whose oldest end is evicted: after a
//! change of shapes the sizes no longer asked for leave, while those in use stay. The links of both
//! lists live at the start of the freed blocks themselves.
//!
//! One lock guards the lists. It is [`std::sync::Mutex`], which is a futex on Linux: it neither
//! allocates nor spins for long. System calls happen outside of it.

use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::class::{CACHED_CLASSES, SizeClass};
use crate::map::{map, unmap};

/// What a block holds when it is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Contents {
    /// Zeros, fresh from the kernel.
    Zero,
    /// Whatever its last user left.
    Stale,
}

/// Freed blocks up to a limit, and the way to new ones.
#[derive(Debug)]
pub(crate) struct Pool {
    limit_bytes: usize,
    lists: Mutex<Lists>,
}

impl Pool {
    pub(crate) const fn new(limit_bytes: usize) -> Self {
        Self {
            limit_bytes,
            lists: Mutex::new(Lists::new()),
        }
    }

    /// Takes a block of this class: cached if there is one, else mapped for a request of that size.
    /// `None` if out of memory.
    pub(crate) fn take(
        &self,
        class: SizeClass,
        request_bytes: usize,
    ) -> Option<(NonNull<u8>, Contents)> {
        if let Some(block) = self.lock().pop_newest(class) {
            return Some((block.0.cast(), Contents::Stale));
        }
        let fresh = map(class.block_bytes, request_bytes).or_else(|| {
            // Other classes may hold what is missing.
            self.release_cached();
            map(class.block_bytes, request_bytes)
        })?;
        Some((fresh, Contents::Zero))
    }

    /// Takes a block back, to keep it or to unmap it; makes room by evicting the oldest.
    ///
    /// # Safety
    ///
    /// The block was taken from this pool with this class, and is not used any more.
    pub(crate) unsafe fn give(&self, block: NonNull<u8>, class: SizeClass) {
        if class.index >= CACHED_CLASSES || class.block_bytes > self.limit_bytes {
            // SAFETY: the pool maps blocks of exactly this size, and the caller gave this one up.
            unsafe { unmap(block, class.block_bytes) };
            return;
        }
        let room_bytes = self.limit_bytes - class.block_bytes;
        loop {
            let mut lists = self.lock();
            if lists.cached_bytes <= room_bytes {
                lists.push(Block(block.cast()), class);
                return;
            }
            let oldest = lists.pop_oldest();
            drop(lists);
            release(oldest);
        }
    }

    pub(crate) fn cached_bytes(&self) -> usize {
        self.lock().cached_bytes
    }

    /// Unmaps all cached blocks.
    pub(crate) fn release_cached(&self) {
        loop {
            // Not in the condition of a `while let`: the lock would be held over the system call.
            let oldest = self.lock().pop_oldest();
            if oldest.is_none() {
                return;
            }
            release(oldest);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Lists> {
        // Nothing panics under the lock; and if it did, an allocator has nobody to tell.
        self.lists.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Unmaps a block that has left the lists.
fn release(block: Option<(Block, SizeClass)>) {
    if let Some((block, class)) = block {
        // SAFETY: the pool maps blocks of exactly the size of their class, and a block that left
        // the lists without being handed out is ours alone.
        unsafe { unmap(block.0.cast(), class.block_bytes) };
    }
}

/// A freed block in the lists: mapped, at least a huge page long, and used by nobody else. Only
/// [`Pool::give`] makes one, and one that left the lists is not looked at again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Block(NonNull<Links>);

// SAFETY: memory has no thread; a block in the lists is reached only under their lock.
unsafe impl Send for Block {}

/// What a freed block holds at its start.
#[derive(Clone, Copy, Debug)]
struct Links {
    class: SizeClass,
    newer: Option<Block>,
    older: Option<Block>,
    newer_of_class: Option<Block>,
    older_of_class: Option<Block>,
}

impl Block {
    fn links(self) -> Links {
        // SAFETY: the block is mapped and used by nobody else, and was pushed with links.
        unsafe { self.0.read() }
    }

    fn set_links(self, links: Links) {
        // SAFETY: the block is mapped, aligned to 2 MiB, longer than links, and used by nobody
        // else.
        unsafe { self.0.write(links) };
    }

    fn update(self, change: impl FnOnce(&mut Links)) {
        let mut links = self.links();
        change(&mut links);
        self.set_links(links);
    }
}

/// The lists. Each neighbour of a block names the block as its own neighbour on the other side.
#[derive(Debug)]
struct Lists {
    cached_bytes: usize,
    newest: Option<Block>,
    oldest: Option<Block>,
    newest_of_class: [Option<Block>; CACHED_CLASSES],
}

impl Lists {
    const fn new() -> Self {
        Self {
            cached_bytes: 0,
            newest: None,
            oldest: None,
            newest_of_class: [None; CACHED_CLASSES],
        }
    }

    fn push(&mut self, block: Block, class: SizeClass) {
        let older = self.newest.replace(block);
        let older_of_class = self.newest_of_class[class.index].replace(block);
        block.set_links(Links {
            class,
            newer: None,
            older,
            newer_of_class: None,
            older_of_class,
        });
        match older {
            Some(older) => older.update(|links| links.newer = Some(block)),
            None => self.oldest = Some(block),
        }
        if let Some(older) = older_of_class {
            older.update(|links| links.newer_of_class = Some(block));
        }
        self.cached_bytes += class.block_bytes;
    }

    fn pop_newest(&mut self, class: SizeClass) -> Option<Block> {
        let block = (*self.newest_of_class.get(class.index)?)?;
        self.unlink(block);
        Some(block)
    }

    fn pop_oldest(&mut self) -> Option<(Block, SizeClass)> {
        let block = self.oldest?;
        Some((block, self.unlink(block)))
    }

    fn unlink(&mut self, block: Block) -> SizeClass {
        let Links {
            class,
            newer,
            older,
            newer_of_class,
            older_of_class,
        } = block.links();
        match newer {
            Some(newer) => newer.update(|links| links.older = older),
            None => self.newest = older,
        }
        match older {
            Some(older) => older.update(|links| links.newer = newer),
            None => self.oldest = newer,
        }
        match newer_of_class {
            Some(newer) => newer.update(|links| links.older_of_class = older_of_class),
            None => self.newest_of_class[class.index] = older_of_class,
        }
        if let Some(older) = older_of_class {
            older.update(|links| links.newer_of_class = newer_of_class);
        }
        self.cached_bytes -= class.block_bytes;
        class
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::map::HUGE_PAGE_BYTES;

    fn class(pages: usize) -> SizeClass {
        SizeClass::of(pages * HUGE_PAGE_BYTES)
    }

    fn any(pool: &Pool, pages: usize) -> Option<(NonNull<u8>, Contents)> {
        pool.take(class(pages), pages * HUGE_PAGE_BYTES)
    }

    fn take(pool: &Pool, pages: usize) -> NonNull<u8> {
        any(pool, pages).unwrap().0
    }

    fn give(pool: &Pool, block: NonNull<u8>, pages: usize) {
        // SAFETY: the tests below give back what they took, once, and do not use it after.
        unsafe { pool.give(block, class(pages)) };
    }

    #[test]
    fn the_block_freed_last_is_the_first_to_be_reused() {
        let pool = Pool::new(usize::MAX);
        let blocks = [take(&pool, 2), take(&pool, 2), take(&pool, 3)];
        give(&pool, blocks[0], 2);
        give(&pool, blocks[1], 2);
        give(&pool, blocks[2], 3);
        assert_eq!(pool.cached_bytes(), 7 * HUGE_PAGE_BYTES);
        assert_eq!(any(&pool, 2), Some((blocks[1], Contents::Stale)));
        assert_eq!(any(&pool, 2), Some((blocks[0], Contents::Stale)));
        assert_eq!(any(&pool, 3), Some((blocks[2], Contents::Stale)));
        assert_eq!(pool.cached_bytes(), 0);
        assert_eq!(any(&pool, 3).unwrap().1, Contents::Zero);
    }

    #[test]
    fn the_block_freed_first_is_the_first_to_be_evicted() {
        let pool = Pool::new(5 * HUGE_PAGE_BYTES);
        let blocks = [
            take(&pool, 1),
            take(&pool, 3),
            take(&pool, 1),
            take(&pool, 3),
        ];
        give(&pool, blocks[0], 1);
        give(&pool, blocks[1], 3);
        give(&pool, blocks[2], 1);
        assert_eq!(pool.cached_bytes(), 5 * HUGE_PAGE_BYTES);
        // Three pages more: the first page and the three after it have to go.
        give(&pool, blocks[3], 3);
        assert_eq!(pool.cached_bytes(), 4 * HUGE_PAGE_BYTES);
        assert_eq!(any(&pool, 3), Some((blocks[3], Contents::Stale)));
        assert_eq!(any(&pool, 1), Some((blocks[2], Contents::Stale)));
        assert_eq!(pool.cached_bytes(), 0);
    }

    #[test]
    fn a_block_over_the_limit_is_not_kept_and_evicts_nothing() {
        let pool = Pool::new(2 * HUGE_PAGE_BYTES);
        let blocks = [take(&pool, 2), take(&pool, 3)];
        give(&pool, blocks[0], 2);
        give(&pool, blocks[1], 3);
        assert_eq!(pool.cached_bytes(), 2 * HUGE_PAGE_BYTES);
        pool.release_cached();
        assert_eq!(pool.cached_bytes(), 0);
    }

    /// Random pushes and pops against a plain vector, so that every way to unlink is taken.
    #[test]
    fn the_lists_agree_with_a_plain_vector() {
        let pool = Pool::new(24 * HUGE_PAGE_BYTES);
        let mut cached: Vec<(NonNull<u8>, usize)> = Vec::new();
        let mut taken: Vec<(NonNull<u8>, usize)> = Vec::new();
        let mut state = 1u64;
        for _ in 0..5000 {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let draw = usize::try_from(state >> 40).unwrap();
            let pages = draw / 64 % 4 + 1;
            if draw % 2 == 0 || taken.is_empty() {
                let expected = cached
                    .iter()
                    .rposition(|&(_, p)| p == pages)
                    .map(|i| cached.remove(i));
                let (block, contents) = any(&pool, pages).unwrap();
                match expected {
                    Some(expected) => assert_eq!((block, pages), expected),
                    None => assert_eq!(contents, Contents::Zero),
                }
                taken.push((block, pages));
            } else {
                let (block, pages) = taken.swap_remove(draw / 2 % taken.len());
                give(&pool, block, pages);
                while cached.iter().map(|&(_, p)| p).sum::<usize>() + pages > 24 {
                    cached.remove(0);
                }
                cached.push((block, pages));
            }
            let cached_pages: usize = cached.iter().map(|&(_, p)| p).sum();
            assert_eq!(pool.cached_bytes(), cached_pages * HUGE_PAGE_BYTES);
        }
        for (block, pages) in taken {
            give(&pool, block, pages);
        }
        pool.release_cached();
    }
}
