//! A lookup written by hand over the very same pages: no async, no trait, no framework. What a specialist would write.
//!
//! It knows that the page size is constant, and of a page only what a lookup needs; see the layout in
//! `farlink_structures::btree`.

use farlink_runtime::{
    access::Link,
    page::{IDENTITY, LOCK, SELF, SizeClass},
    ptr::RemotePtr,
    structure::Structure,
    sync::{AtomicU64, Ordering, fence},
};

use crate::tree::{LocalPages, PAGE_BYTES};

const WORDS: usize = PAGE_BYTES / 8;
const LOW: usize = 4;
const HIGH: usize = 5;
const RIGHT: usize = 6;
const META: usize = 7;
const KEYS: usize = 8;
const CAPACITY: usize = (WORDS - KEYS) / 2;
const HIGH_IS_INFINITE: u64 = 1 << 16;
const LOCKED: u64 = 1 << 63;

/// Words asked for: the header and, of pages of 1 KiB, all keys that nine tenths of a page hold.
#[cfg(target_arch = "x86_64")]
const PREFETCH_WORDS: usize = 64;
#[cfg(target_arch = "x86_64")]
const LINE_WORDS: usize = 8;

/// Attempts, each of which found a page other than promised, before the tree counts as damaged.
const ATTEMPTS_MAX: u32 = 1000;

/// The tree, as the hand-written lookup sees it.
#[derive(Debug)]
pub(crate) struct Hand<'a> {
    pages: &'a LocalPages,
    root: RemotePtr,
    class: SizeClass,
    structure: u64,
}

/// What a page says of a key.
enum Found {
    Value(u64),
    Absent,
    Page(u64),
}

impl<'a> Hand<'a> {
    /// The tree in `pages`.
    ///
    /// # Panics
    /// If its pages have another size than [`PAGE_BYTES`].
    pub(crate) fn new(structure: &Structure, pages: &'a LocalPages) -> Self {
        assert_eq!(structure.class.bytes(), PAGE_BYTES, "the page size is part of the code");
        Self { pages, root: structure.root, class: structure.class, structure: u64::from(structure.id.0) }
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
            prefetch(page);
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
                Found::Page(next) => at = Link::from_word(next).remote()?.0,
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

/// Asks the processor for the cache lines of a page's header and keys.
#[inline]
fn prefetch(page: &[AtomicU64]) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch of any address is harmless; these lie in a live mapping.
        let prefetch = |word: &AtomicU64| unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(word).cast()) };
        page.iter().take(PREFETCH_WORDS).step_by(LINE_WORDS).for_each(prefetch);
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = page;
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::tree::LocalTree;

    #[test]
    fn agrees_with_a_map_also_on_absent_keys() {
        for count in [0u64, 1, 2, 53, 54, 55, 1000, 30_000] {
            let map: BTreeMap<u64, u64> = (0..count).map(|index| (index * 3 + 1, index ^ 0x55)).collect();
            let tree = LocalTree::build(map.clone(), map.len()).unwrap();
            let pages = tree.pages().unwrap();
            let hand = Hand::new(&tree.structure, &pages);
            for key in (0..count * 3 + 6).chain([u64::MAX - 1, u64::MAX]) {
                assert_eq!(hand.get(key), map.get(&key).copied(), "{count}: {key}");
            }
        }
    }
}
