//! A B+-tree page, read and written as words.
//!
//! ```text
//! word 0..4   common header (lock, checksum, self-address, identity with the level)
//! word 4      low fence: the least key that belongs here
//! word 5      high fence: the least key that belongs to the right; not used if there is none
//! word 6      link to the right sibling; never swizzled
//! word 7      number of entries:16 | high fence is infinite:1
//! word 8..    keys, ascending, then as many values; both arrays have room for `capacity` words
//! ```
//!
//! In a leaf, values are the user's. In an inner page they are links to children, and a key is its child's low fence; the
//! first one repeats the page's own. Keys and values are contiguous arrays: one search, one write for a shifted range. The
//! header's `kind` names this layout, so that one for variable-length entries can stand beside it.

use std::ops::Range;

use farlink_runtime::{
    access::{Link, PagesMut, Slot, Words},
    page::SizeClass,
};

use super::guess::Density;

/// The header's mark of this layout: fixed 8-byte keys and values.
pub(super) const KIND: u8 = 1;

const LOW: usize = 4;
const HIGH: usize = 5;
const RIGHT: usize = 6;
const META: usize = 7;
const ENTRIES: usize = 8;
/// The header: the words that tell where in the page a key is likely to be.
pub(super) const HEAD: usize = ENTRIES;
/// A key is looked for among so many entries first.
pub(super) const NEAR: usize = 8;
const HIGH_IS_INFINITE: u64 = 1 << 16;

/// How many entries a page of `words` words holds.
pub(super) const fn capacity(words: usize) -> usize {
    (words - ENTRIES) / 2
}

/// The smallest page that makes sense: 12 entries.
pub(super) const PAGE_BYTES_MIN: usize = 256;
const _: () = assert!(SizeClass::of_bytes(PAGE_BYTES_MIN).is_some() && capacity(PAGE_BYTES_MIN / 8) == 12);

/// Where a key is, seen from a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Here,
    Left,
    Right,
}

/// A page open for reading. Copes with any words: the count is clamped, sums cannot overflow.
pub(super) struct Node<'a, W: Words + ?Sized>(pub(super) &'a W);

impl<W: Words + ?Sized> Node<'_, W> {
    pub(super) fn capacity(&self) -> usize {
        capacity(self.0.count())
    }

    /// The number of entries as the page states it, possibly nonsense.
    pub(super) fn stated_count(&self) -> usize {
        (self.0.word(META) & 0xffff) as usize
    }

    pub(super) fn count(&self) -> usize {
        self.stated_count().min(self.capacity())
    }

    pub(super) fn low(&self) -> u64 {
        self.0.word(LOW)
    }

    /// `None`: no key is too high.
    pub(super) fn high(&self) -> Option<u64> {
        (self.0.word(META) & HIGH_IS_INFINITE == 0).then(|| self.0.word(HIGH))
    }

    pub(super) fn right(&self) -> Link {
        Link::from_word(self.0.word(RIGHT))
    }

    pub(super) fn key(&self, index: usize) -> u64 {
        self.0.word(ENTRIES + index)
    }

    pub(super) fn value(&self, index: usize) -> u64 {
        self.0.word(self.value_position(index))
    }

    pub(super) fn value_position(&self, index: usize) -> usize {
        ENTRIES + self.capacity() + index
    }

    pub(super) fn child(&self, index: usize) -> Link {
        Link::from_word(self.value(index))
    }

    #[inline(always)]
    pub(super) fn side(&self, key: u64) -> Side {
        if key < self.low() {
            return Side::Left;
        }
        if self.high().is_some_and(|high| key >= high) {
            return Side::Right;
        }
        Side::Here
    }

    /// The number of keys below `key`.
    #[inline]
    pub(super) fn lower_bound(&self, key: u64) -> usize {
        self.0.partition_point(ENTRIES..ENTRIES + self.count(), |other| other < key) - ENTRIES
    }

    /// The number of keys up to `key`.
    #[inline(always)]
    pub(super) fn upper_bound(&self, key: u64) -> usize {
        self.upper_bound_among(key, 0..self.count())
    }

    /// [`Node::upper_bound`], if all keys before `entries` are below `key`, and all after them above.
    #[inline(always)]
    fn upper_bound_among(&self, key: u64, entries: Range<usize>) -> usize {
        self.0.partition_point(ENTRIES + entries.start..ENTRIES + entries.end, |other| other <= key) - ENTRIES
    }

    /// The first of [`NEAR`] entries about where `key` would be if keys were spread evenly between the fences.
    pub(super) fn near(&self, key: u64) -> usize {
        let index = self.density().entries(key.wrapping_sub(self.low()));
        index.saturating_sub(NEAR / 2).min(self.capacity().saturating_sub(NEAR))
    }

    pub(super) fn density(&self) -> Density {
        Density::of(self.count(), self.high().unwrap_or(u64::MAX).wrapping_sub(self.low()))
    }

    /// [`Node::upper_bound`], if the last key up to `key` is among the [`NEAR`] entries from `near` on, or the last ones if
    /// there are not as many.
    #[inline(always)]
    pub(super) fn upper_bound_near(&self, key: u64, near: usize) -> Option<usize> {
        let near = near.min(self.count().checked_sub(NEAR)?);
        let is_there = self.key(near) <= key && key <= self.key(near + NEAR - 1);
        is_there.then(|| self.upper_bound_among(key, near..near + NEAR))
    }

    /// In a leaf: where `key` is, or where it would be inserted.
    #[inline]
    pub(super) fn search(&self, key: u64) -> Result<usize, usize> {
        let index = self.lower_bound(key);
        if index < self.count() && self.key(index) == key { Ok(index) } else { Err(index) }
    }

    /// In an inner page: the child to which `key` belongs; `None` if the page has no children.
    #[inline]
    pub(super) fn child_for(&self, key: u64) -> Option<usize> {
        self.upper_bound(key).checked_sub(1)
    }

    pub(super) fn entries(&self) -> Vec<(u64, u64)> {
        (0..self.count()).map(|index| (self.key(index), self.value(index))).collect()
    }
}

/// A page open for writing.
pub(super) struct NodeMut<'a, V> {
    pages: &'a mut V,
    slot: Slot,
}

impl<'a, V: PagesMut> NodeMut<'a, V> {
    pub(super) fn new(pages: &'a mut V, slot: Slot) -> Self {
        Self { pages, slot }
    }

    fn set(&mut self, index: usize, word: u64) {
        self.pages.set(self.slot, index, word);
    }

    fn set_entry(&mut self, index: usize, (key, value): (u64, u64)) {
        let capacity = self.capacity();
        self.set(ENTRIES + index, key);
        self.set(ENTRIES + capacity + index, value);
    }

    fn set_count(&mut self, count: usize) {
        let flags = self.pages.page(self.slot).word(META) & !0xffff;
        self.set(META, flags | count as u64);
    }

    fn capacity(&self) -> usize {
        capacity(self.pages.page(self.slot).count())
    }

    fn count(&self) -> usize {
        Node(&self.pages.page(self.slot)).count()
    }

    fn entry(&self, index: usize) -> (u64, u64) {
        let words = self.pages.page(self.slot);
        (Node(&words).key(index), Node(&words).value(index))
    }

    pub(super) fn set_value(&mut self, index: usize, value: u64) {
        let capacity = self.capacity();
        self.set(ENTRIES + capacity + index, value);
    }

    /// Puts an entry at `index` of a page that has room.
    pub(super) fn insert_at(&mut self, index: usize, entry: (u64, u64)) {
        let count = self.count();
        for from in (index..count).rev() {
            self.set_entry(from + 1, self.entry(from));
        }
        self.set_entry(index, entry);
        self.set_count(count + 1);
    }

    pub(super) fn remove_at(&mut self, index: usize) {
        let count = self.count();
        for to in index..count - 1 {
            self.set_entry(to, self.entry(to + 1));
        }
        self.set_count(count - 1);
        self.forget_links(count - 1, count);
    }

    pub(super) fn replace_key(&mut self, index: usize, key: u64) {
        self.set(ENTRIES + index, key);
    }

    /// Replaces everything: level, fences, right link and entries.
    pub(super) fn rewrite(&mut self, level: u8, fences: Fences, right: Link, entries: &[(u64, u64)]) {
        let before = self.count();
        self.pages.describe(self.slot, level, KIND);
        self.set(LOW, fences.low);
        self.set(HIGH, fences.high.unwrap_or(0));
        // A damaged page's link is not handed on.
        self.set(RIGHT, right.remote().map_or(0, |_| right.word()));
        let infinite = if fences.high.is_none() { HIGH_IS_INFINITE } else { 0 };
        self.set(META, infinite | entries.len() as u64);
        for (index, &entry) in entries.iter().enumerate() {
            self.set_entry(index, entry);
        }
        self.forget_links(entries.len(), before);
    }

    /// Clears what looks like a swizzled link in places that are no longer used: nobody would unswizzle it on its way out.
    fn forget_links(&mut self, from: usize, until: usize) {
        for index in from..until {
            let position = ENTRIES + self.capacity() + index;
            if self.pages.page(self.slot).word(position) >> 63 != 0 {
                self.set(position, 0);
            }
        }
    }
}

/// The keys that belong to a page: from `low` up to, not including, `high`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Fences {
    pub(super) low: u64,
    pub(super) high: Option<u64>,
}

impl Fences {
    pub(super) const ALL: Self = Self { low: 0, high: None };
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn searches_cope_with_any_words(words in prop::collection::vec(any::<u64>(), 32), key: u64) {
            let node = Node(words.as_slice());
            prop_assert!(node.count() <= 12);
            let _ = (node.search(key), node.child_for(key), node.side(key), node.entries());
            let near = node.near(key);
            prop_assert!(near + NEAR <= node.capacity());
            let _ = node.upper_bound_near(key, near);
        }

        #[test]
        fn search_agrees_with_a_sorted_vector(keys in prop::collection::btree_set(0u64..40, 0..12), key in 0u64..40) {
            let mut words = vec![0u64; 32];
            words[META] = keys.len() as u64;
            let keys: Vec<u64> = keys.into_iter().collect();
            words[ENTRIES..ENTRIES + keys.len()].copy_from_slice(&keys);
            prop_assert_eq!(Node(words.as_slice()).search(key), keys.binary_search(&key));
            let upto = keys.partition_point(|&other| other <= key);
            prop_assert_eq!(Node(words.as_slice()).child_for(key), upto.checked_sub(1));
            for near in 0..=12 {
                let index = Node(words.as_slice()).upper_bound_near(key, near);
                prop_assert!(index.is_none_or(|index| index == upto), "{} {:?}", near, index);
                let is_among = (near..near + NEAR).contains(&upto.wrapping_sub(1)) && keys.len() >= near + NEAR;
                prop_assert!(index.is_some() || !is_among || keys[near + NEAR - 1] < key, "{} {}", near, key);
            }
        }
    }
}
