//! A lookup written by hand over the very same pages: no async, no trait, no framework. What a specialist would write.
//!
//! It knows that the page size is constant, and of a page only what a lookup needs; see the layout in
//! `farlink_structures::btree`.

use farlink_runtime::{
    page::{IDENTITY, LOCK, SELF, SizeClass},
    ptr::RemotePtr,
    structure::Structure,
    sync::{AtomicU64, Ordering, fence},
};

use crate::{
    direct::{PREFETCH_WORDS, prefetch},
    tree::{LocalPages, PAGE_BYTES},
};

const WORDS: usize = PAGE_BYTES / 8;
const LOW: usize = 4;
const HIGH: usize = 5;
const RIGHT: usize = 6;
const META: usize = 7;
const KEYS: usize = 8;
const CAPACITY: usize = (WORDS - KEYS) / 2;
const HIGH_IS_INFINITE: u64 = 1 << 16;
const LOCKED: u64 = 1 << 63;

/// Attempts, each of which found a page other than promised, before the tree counts as damaged.
const ATTEMPTS_MAX: u32 = 1000;

/// The tree, as the hand-written lookup sees it.
#[derive(Debug)]
pub(crate) struct Hand<'a> {
    pages: &'a LocalPages,
    root: RemotePtr,
    class: SizeClass,
    structure: u64,
    prefetches: bool,
}

/// What a page says of a key.
enum Found {
    Value(u64),
    Absent,
    Page(u64),
}

impl<'a> Hand<'a> {
    /// The tree in `pages`; whether lookups ask for a page's cache lines before they touch it.
    ///
    /// # Panics
    /// If its pages have another size than [`PAGE_BYTES`].
    pub(crate) fn new(structure: &Structure, pages: &'a LocalPages, prefetches: bool) -> Self {
        assert_eq!(structure.class.bytes(), PAGE_BYTES, "the page size is part of the code");
        Self { pages, root: structure.root, class: structure.class, structure: u64::from(structure.id.0), prefetches }
    }

    /// The value of a key.
    ///
    /// # Panics
    /// If the tree is damaged.
    #[inline]
    pub(crate) fn get(&self, key: u64) -> Option<u64> {
        for _ in 0..ATTEMPTS_MAX {
            if let Some(result) = self.attempt(key) {
                return result;
            }
            std::thread::yield_now();
        }
        panic!("the tree is damaged, or changes all the time");
    }

    /// `None` if a page was not what its link promised, or changed.
    #[inline]
    fn attempt(&self, key: u64) -> Option<Option<u64>> {
        let mut at = self.root;
        loop {
            let page: &[AtomicU64; WORDS] = self.pages.page(at, self.class)?.try_into().ok()?;
            if self.prefetches {
                prefetch(page, 0..PREFETCH_WORDS);
            }
            let version = page[LOCK].load(Ordering::Acquire);
            let is_promised =
                word(page, SELF) == at.raw() && word(page, IDENTITY) >> 32 == self.structure && version & LOCKED == 0;
            if !is_promised {
                return None;
            }
            let found = look(page, key);
            fence(Ordering::Acquire);
            if word(page, LOCK) != version {
                return None;
            }
            match found? {
                Found::Value(value) => return Some(Some(value)),
                Found::Absent => return Some(None),
                Found::Page(next) => at = RemotePtr::from_raw(next).ok()?,
            }
        }
    }
}

#[inline(always)]
fn word(page: &[AtomicU64; WORDS], index: usize) -> u64 {
    page[index].load(Ordering::Relaxed)
}

/// One page's part of a lookup; `None` if the key does not belong there.
#[inline(always)]
fn look(page: &[AtomicU64; WORDS], key: u64) -> Option<Found> {
    let meta = word(page, META);
    if key < word(page, LOW) {
        return None;
    }
    if meta & HIGH_IS_INFINITE == 0 && key >= word(page, HIGH) {
        return Some(Found::Page(word(page, RIGHT)));
    }
    let count = ((meta & 0xffff) as usize).min(CAPACITY);
    // The number of keys that are not above `key`.
    let upto = page[KEYS..KEYS + count].partition_point(|word| word.load(Ordering::Relaxed) <= key);
    let last = upto.checked_sub(1);
    let is_leaf = word(page, IDENTITY) >> 24 & 0xff == 0;
    match last {
        Some(index) if !is_leaf => Some(Found::Page(word(page, KEYS + CAPACITY + index))),
        Some(index) if word(page, KEYS + index) == key => Some(Found::Value(word(page, KEYS + CAPACITY + index))),
        _ if is_leaf => Some(Found::Absent),
        _ => None,
    }
}
