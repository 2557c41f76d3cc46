//! The cooling map: the clean pages that go next (DEX, VLDB 2024, section 5.2).
//!
//! A hash table of FIFO arrays in place of one FIFO list: a bucket is one cache line with a lock of its own and six slots,
//! so threads that cool and evict rarely meet. A slot names a frame and the version at which it cooled; frame and version
//! are the authority, so a slot that was left behind (the page was rescued while somebody had the slot in hand) is
//! recognised and does no harm.

use crate::{
    id::PageId,
    mix::mix,
    sync::{AtomicU32, AtomicU64, Ordering, Spin},
};

/// Slots of a bucket.
pub(crate) const SLOTS: usize = 6;

/// A frame that cooled at a version with this tag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cooled {
    /// The frame's number, not zero.
    pub frame: u32,
    /// The low half of the version.
    pub tag: u32,
}

impl Cooled {
    const fn word(self) -> u64 {
        (self.frame as u64) << 32 | self.tag as u64
    }

    const fn of(word: u64) -> Option<Self> {
        if word == 0 { None } else { Some(Self { frame: (word >> 32) as u32, tag: word as u32 }) }
    }
}

#[derive(Debug, Default)]
#[repr(C, align(64))]
struct Bucket {
    lock: AtomicU32,
    count: AtomicU32,
    /// The oldest first.
    slots: [AtomicU64; SLOTS],
}

const _: () = assert!(cfg!(loom) || size_of::<Bucket>() == 64);

struct Locked<'a>(&'a Bucket);

impl Bucket {
    fn lock(&self) -> Locked<'_> {
        let mut spin = Spin::default();
        while self.lock.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).is_err() {
            spin.turn();
        }
        Locked(self)
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        self.0.lock.store(0, Ordering::Release);
    }
}

impl Locked<'_> {
    fn count(&self) -> usize {
        self.0.count.load(Ordering::Relaxed) as usize
    }

    fn slot(&self, index: usize) -> u64 {
        self.0.slots[index].load(Ordering::Relaxed)
    }

    fn remove(&self, index: usize) -> Option<Cooled> {
        let cooled = Cooled::of(self.slot(index));
        let count = self.count();
        for from in index + 1..count {
            self.0.slots[from - 1].store(self.slot(from), Ordering::Relaxed);
        }
        self.0.count.store(count as u32 - 1, Ordering::Relaxed);
        cooled
    }

    fn append(&self, cooled: Cooled) {
        let count = self.count();
        self.0.slots[count].store(cooled.word(), Ordering::Relaxed);
        self.0.count.store(count as u32 + 1, Ordering::Relaxed);
    }
}

/// Six-slot queues of clean pages, each with a lock of its own.
#[derive(Debug)]
pub struct CoolingMap {
    buckets: Box<[Bucket]>,
}

impl CoolingMap {
    /// For about `pages` pages.
    pub fn new(pages: usize) -> Self {
        Self { buckets: (0..pages.div_ceil(SLOTS).max(1)).map(|_| Bucket::default()).collect() }
    }

    pub(crate) fn bytes_for(pages: usize) -> usize {
        pages.div_ceil(SLOTS).max(1) * size_of::<Bucket>()
    }

    fn bucket(&self, page: PageId) -> &Bucket {
        self.any(mix(page.get()))
    }

    fn any(&self, random: u64) -> &Bucket {
        &self.buckets[((u128::from(random) * self.buckets.len() as u128) >> 64) as usize]
    }

    /// Puts a page in, at the end of its bucket. Returns the oldest one there, if the bucket was full.
    pub fn push(&self, page: PageId, cooled: Cooled) -> Option<Cooled> {
        let bucket = self.bucket(page).lock();
        let oldest = if bucket.count() == SLOTS { bucket.remove(0) } else { None };
        bucket.append(cooled);
        oldest
    }

    /// Takes a page out that was touched; false if somebody has it in hand.
    pub fn remove(&self, page: PageId, cooled: Cooled) -> bool {
        let bucket = self.bucket(page).lock();
        // Not by the frame alone: the page may have cooled anew meanwhile, and has another slot then.
        let is_its = |&index: &usize| bucket.slot(index) == cooled.word();
        (0..bucket.count()).find(is_its).is_some_and(|index| bucket.remove(index).is_some())
    }

    /// Takes the oldest page of a random bucket.
    pub fn pop(&self, random: u64) -> Option<Cooled> {
        let bucket = self.any(random);
        if bucket.count.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let bucket = bucket.lock();
        if bucket.count() == 0 { None } else { bucket.remove(0) }
    }

    /// The oldest page of a random bucket, without taking it.
    pub fn peek(&self, random: u64) -> Option<Cooled> {
        let bucket = self.any(random);
        if bucket.count.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let bucket = bucket.lock();
        if bucket.count() == 0 { None } else { Cooled::of(bucket.slot(0)) }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn page(number: u64) -> PageId {
        PageId::new(number).unwrap()
    }

    #[test]
    fn a_bucket_is_a_fifo_of_six() {
        let map = CoolingMap::new(6);
        let cooled = |frame| Cooled { frame, tag: frame + 100 };
        for frame in 1..=6 {
            assert_eq!(map.push(page(u64::from(frame)), cooled(frame)), None);
        }
        assert_eq!(map.push(page(7), cooled(7)), Some(cooled(1)));
        assert!(map.remove(page(3), cooled(3)) && !map.remove(page(3), cooled(3)));
        assert_eq!(map.peek(0), Some(cooled(2)));
        let rest: Vec<u32> = std::iter::from_fn(|| map.pop(0)).map(|cooled| cooled.frame).collect();
        assert_eq!(rest, [2, 4, 5, 6, 7]);
    }
}
