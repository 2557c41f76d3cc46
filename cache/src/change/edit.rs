//! The words of a change, until it is made.

use smallvec::SmallVec;

use super::Few;
use crate::sync::{AtomicU64, Ordering};

/// Words that a change of one page sets at most, as a rule.
const USUAL_WORDS: usize = 16;

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

/// A word as it was.
#[derive(Debug, Clone, Copy)]
pub(super) struct Overwritten {
    pub(super) page: u32,
    pub(super) index: u32,
    word: u64,
}

impl<'a> Change<'a> {
    pub(super) fn new(old: impl Iterator<Item = &'a [AtomicU64]>, new: impl Iterator<Item = &'a [AtomicU64]>) -> Self {
        let mut bodies: Few<_> = old.collect();
        let mut fates: Few<_> = SmallVec::from_elem(Fate::Kept, bodies.len());
        bodies.extend(new);
        fates.resize(bodies.len(), Fate::Changed);
        let overwritten = Vec::with_capacity(USUAL_WORDS);
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

    /// Sets a word of `page`. A link is set to the id of a page, or to a link word that stood in a page of this change.
    pub fn set(&mut self, page: usize, index: usize, word: u64) {
        let place = &self.bodies[page][index];
        let before = place.load(Ordering::Relaxed);
        self.overwritten.push(Overwritten { page: page as u32, index: index as u32, word: before });
        place.store(word, Ordering::Relaxed);
        if self.fates[page] == Fate::Kept {
            self.fates[page] = Fate::Changed;
        }
    }

    /// Takes the change back: once the function has returned, all words are put back, and the call fails with
    /// [`Misuse::Refused`](crate::Misuse::Refused).
    pub fn refuse(&mut self) {
        self.is_refused = true;
    }

    /// The caller writes `page`, as this change leaves it, to the store itself, and nobody else changes the store's copy: the cache
    /// does not take it for dirty. Whoever reads it from the store waits until it is there.
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
