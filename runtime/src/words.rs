//! Pages are words. One view of a page serves a private copy (`[u64]`) and shared memory (`[AtomicU64]`).

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
}
