//! The words of a change, until it is made.

use smallvec::SmallVec;

use super::Few;
use crate::{
    overwritten::Overwritten,
    sync::{AtomicU64, Ordering},
};

/// The pages of one change, locked: first those given to [`CacheHandle::change`](crate::CacheHandle::change), then the new ones, numbered in that order.
/// Dropped before its end, it puts back what was set.
#[derive(Debug, Default)]
pub struct Change<'a> {
    pub(super) bodies: Few<&'a [AtomicU64]>,
    pub(super) fates: Few<Fate>,
    pub(super) overwritten: Vec<Overwritten>,
    pub(super) is_refused: bool,
    /// Pages that the caller writes to the store.
    pub(super) written_through: Few<usize>,
}

/// What a change makes of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fate {
    Kept,
    Changed,
    Freed,
}

impl<'a> Change<'a> {
    /// What it overwrites is kept in `overwritten`, which is empty.
    pub(super) fn new(
        old: impl Iterator<Item = &'a [AtomicU64]>,
        new: impl Iterator<Item = &'a [AtomicU64]>,
        overwritten: Vec<Overwritten>,
    ) -> Self {
        let mut bodies: Few<_> = old.collect();
        let mut fates: Few<_> = SmallVec::from_elem(Fate::Kept, bodies.len());
        bodies.extend(new);
        fates.resize(bodies.len(), Fate::Changed);
        Self { bodies, fates, overwritten, is_refused: false, written_through: Few::new() }
    }
}

impl Change<'_> {
    /// How many words `page` has.
    pub fn count(&self, page: usize) -> usize {
        self.bodies[page].len()
    }

    /// All words of `page`.
    pub fn words(&self, page: usize) -> &[AtomicU64] {
        self.bodies[page]
    }

    /// A word of `page`, as changed so far. Words of a new page are zero at first. A link may be swizzled.
    pub fn word(&self, page: usize, index: usize) -> u64 {
        self.bodies[page][index].load(Ordering::Relaxed)
    }

    /// Sets a word of `page`. A link is set to the id of a page, or to a link word that stood in a page of this change and
    /// is set to something else there, if the layout names the word that is set.
    pub fn set(&mut self, page: usize, index: usize, word: u64) {
        self.fill(page, index, &[word]);
    }

    /// [`Change::set`] for the words from `index` on. Only a word that becomes another one makes the page a changed one; whether
    /// there was any.
    ///
    /// # Panics
    /// If they go beyond the page: then none is set.
    #[inline]
    pub fn fill(&mut self, page: usize, index: usize, words: &[u64]) -> bool {
        let places = &self.bodies[page][index..index + words.len()];
        let before = self.overwritten.len();
        self.overwritten.reserve(words.len());
        for ((place, &word), index) in places.iter().zip(words).zip(index as u32..) {
            let old = place.load(Ordering::Relaxed);
            if old != word {
                self.overwritten.push(Overwritten { page: page as u32, index, word: old });
                place.store(word, Ordering::Relaxed);
            }
        }
        let has_changed = self.overwritten.len() > before;
        if has_changed && self.fates[page] == Fate::Kept {
            self.fates[page] = Fate::Changed;
        }
        has_changed
    }

    /// Takes the change back: once the function has returned, all words are put back, and the call fails with
    /// [`Misuse::Refused`](crate::Misuse::Refused).
    pub fn refuse(&mut self) {
        self.is_refused = true;
    }

    /// The caller writes `page`, as this change leaves it, to the store itself, and nobody else changes the store's copy: the cache
    /// does not take it for dirty, unless [`CacheHandle::update`](crate::CacheHandle::update) has changed it while an older version is on
    /// its way there. Whoever reads it from the store waits until it is there.
    pub fn write_through(&mut self, page: usize) {
        self.written_through.push(page);
    }

    /// Drops `page` from the cache with this change, unwritten: nothing links to it any more.
    pub fn free(&mut self, page: usize) {
        self.fates[page] = Fate::Freed;
    }
}

impl Drop for Change<'_> {
    fn drop(&mut self) {
        for before in self.overwritten.drain(..).rev() {
            self.bodies[before.page as usize][before.index as usize].store(before.word, Ordering::Relaxed);
        }
    }
}
