//! Where in a page a key probably is, guessed before the page is at hand.
//!
//! A search of a page that is in local memory but not in the processor's caches waits for memory. If keys are spread evenly
//! over a page, as hashed or scrambled ones are, the place of one follows from its distance to the page's first key, which
//! the page above repeats, and from how dense keys are, which is learned: then three or four cache lines are all that is
//! fetched, at once. Where guesses fail, as with keys in clusters, the whole search area is fetched, as if there were none.

use std::ops::Range;

use farlink_runtime::access::Access;

use super::node::{HEAD, NEAR, capacity};

/// Pages above this level are in the processor's caches anyway.
pub(super) const LEVEL_MAX: u8 = 1;
/// Guesses are acted upon from so much trust on.
const TRUST_MIN: u32 = 8;
const TRUST_MAX: u32 = 15;
/// What a wrong guess costs.
const TRUST_LOST: u32 = 3;
/// Guesses off by more were of no use.
const ERROR_MAX: usize = 1;

/// A guess: the first of [`NEAR`] entries among which a key is.
#[derive(Debug, Clone, Copy)]
pub(super) struct Guess {
    level: u8,
    near: usize,
    is_trusted: bool,
}

/// What is known of the pages of a level.
#[derive(Debug, Clone, Copy)]
struct Known {
    density: f32,
    trust: u32,
}

impl Known {
    fn from_word(word: u64) -> Self {
        Self { density: f32::from_bits((word >> 32) as u32), trust: word as u32 }
    }

    fn word(self) -> u64 {
        u64::from(self.density.to_bits()) << 32 | u64::from(self.trust)
    }
}

impl Guess {
    /// The place of a key that is `distance` above the first one of a page of `words` words at `level`; `None` if nobody is
    /// interested.
    #[inline]
    pub(super) fn new(access: &impl Access, level: u8, words: usize, distance: u64) -> Option<Self> {
        if level > LEVEL_MAX {
            return None;
        }
        let known = Known::from_word(access.notes()?.get()[usize::from(level)]);
        let near = ((distance as f32 * known.density) as usize).saturating_sub(NEAR / 2);
        Some(Self { level, near: near.min(capacity(words) - NEAR), is_trusted: known.trust >= TRUST_MIN })
    }

    /// The words to be read first, of a page of `words` words, if the guess is to be acted upon.
    #[inline]
    pub(super) fn words(self, words: usize) -> Option<[Range<usize>; 3]> {
        let [keys, values] = likely(words, self.near);
        self.is_trusted.then_some([0..HEAD, keys, values])
    }

    /// Learns from where the key really was to be looked for; whether the guess was of use. `density` is that of the page.
    #[inline]
    pub(super) fn learn(self, access: &impl Access, near: usize, density: impl FnOnce() -> Option<f32>) -> bool {
        let Some(notes) = access.notes() else { return false };
        let mut known = notes.get();
        let Known { density: before, trust } = Known::from_word(known[usize::from(self.level)]);
        let is_right = self.near.abs_diff(near) <= ERROR_MAX;
        if is_right && trust == TRUST_MAX {
            return self.is_trusted;
        }
        let (density, trust) = match is_right {
            true => (before, trust + 1),
            false => (density().unwrap_or(before), trust.saturating_sub(TRUST_LOST)),
        };
        known[usize::from(self.level)] = Known { density, trust }.word();
        notes.set(known);
        is_right && self.is_trusted
    }
}

/// Where a page of `words` words has the keys and the values of the entries from `near` on.
#[inline]
pub(super) fn likely(words: usize, near: usize) -> [Range<usize>; 2] {
    let [keys, values] = [HEAD + near, HEAD + capacity(words) + near];
    [keys..keys + NEAR, values..values + NEAR]
}
