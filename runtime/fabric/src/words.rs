//! Pages are words. One view of a page serves a private copy (`[u64]`) and shared memory (`[AtomicU64]`).

use std::ops::Range;

use crate::sync::{AtomicU64, Ordering};

/// The words of a page, for reading.
///
/// On shared memory each word is one relaxed load. Whoever reads a shared page brackets the reads with an acquire load
/// of its lock word, an acquire fence and a second load of the lock word, and uses what was read only if both agree.
pub trait Words {
    /// How many words the page has.
    fn count(&self) -> usize;

    /// The word at `index`.
    ///
    /// # Panics
    /// If `index` is not below [`Words::count`]; code clamps what it computes from page contents before it indexes.
    fn word(&self, index: usize) -> u64;

    /// Copies the words from `index` on: what is made of them next can then be made of several at once.
    ///
    /// # Panics
    /// If they go beyond [`Words::count`].
    #[inline]
    fn copy_to(&self, index: usize, to: &mut [u64]) {
        (index..).zip(to).for_each(|(index, word)| *word = self.word(index));
    }

    /// A bit for each of `count` words from `index` on, 64 at most: whether `is` says so of it. No branch depends on a word.
    ///
    /// # Panics
    /// If they go beyond [`Words::count`], or are more.
    #[inline]
    fn mask(&self, index: usize, count: usize, is: impl Fn(u64) -> bool) -> u64 {
        assert!(count <= 64, "a mask has 64 bits");
        (0..count).rev().fold(0, |mask, at| mask << 1 | u64::from(is(self.word(index + at))))
    }

    /// The first of the places `within` whose word is not `below`, or the end of `within`; those that are come first. Of words
    /// in another order, some place.
    ///
    /// # Panics
    /// If `within` goes beyond [`Words::count`].
    fn partition_point(&self, within: Range<usize>, below: impl Fn(u64) -> bool) -> usize {
        let (mut base, mut size) = (within.start, within.len());
        while size > 0 {
            let half = size / 2;
            let is_below = below(self.word(base + half));
            base = if is_below { base + half + 1 } else { base };
            size = if is_below { size - half - 1 } else { half };
        }
        base
    }
}

impl<W: Words + ?Sized> Words for &W {
    #[inline]
    fn count(&self) -> usize {
        (**self).count()
    }

    #[inline]
    fn word(&self, index: usize) -> u64 {
        (**self).word(index)
    }

    #[inline]
    fn copy_to(&self, index: usize, to: &mut [u64]) {
        (**self).copy_to(index, to);
    }

    #[inline]
    fn mask(&self, index: usize, count: usize, is: impl Fn(u64) -> bool) -> u64 {
        (**self).mask(index, count, is)
    }

    #[inline(always)]
    fn partition_point(&self, within: Range<usize>, below: impl Fn(u64) -> bool) -> usize {
        (**self).partition_point(within, below)
    }
}

impl Words for [u64] {
    #[inline]
    fn count(&self) -> usize {
        self.len()
    }

    #[inline]
    fn word(&self, index: usize) -> u64 {
        self[index]
    }

    #[inline]
    fn copy_to(&self, index: usize, to: &mut [u64]) {
        to.copy_from_slice(&self[index..index + to.len()]);
    }

    #[inline(always)]
    fn partition_point(&self, within: Range<usize>, below: impl Fn(u64) -> bool) -> usize {
        within.start + self[within].partition_point(|&word| below(word))
    }
}

impl Words for [AtomicU64] {
    #[inline]
    fn count(&self) -> usize {
        self.len()
    }

    #[inline]
    fn word(&self, index: usize) -> u64 {
        self[index].load(Ordering::Relaxed)
    }

    #[inline]
    fn copy_to(&self, index: usize, to: &mut [u64]) {
        let words = &self[index..index + to.len()];
        to.iter_mut().zip(words).for_each(|(word, shared)| *word = shared.load(Ordering::Relaxed));
    }

    #[inline]
    fn mask(&self, index: usize, count: usize, is: impl Fn(u64) -> bool) -> u64 {
        assert!(count <= 64, "a mask has 64 bits");
        let words = self[index..index + count].iter().rev().map(|word| word.load(Ordering::Relaxed));
        words.fold(0, |mask, word| mask << 1 | u64::from(is(word)))
    }

    #[inline(always)]
    fn partition_point(&self, within: Range<usize>, below: impl Fn(u64) -> bool) -> usize {
        within.start + self[within].partition_point(|word| below(word.load(Ordering::Relaxed)))
    }
}
