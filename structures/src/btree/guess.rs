//! Where in a page a key probably is, guessed before the page is at hand.
//!
//! A search of a page that is in local memory but not in the processor's caches waits for memory. If keys are spread evenly
//! over a page, as hashed or scrambled ones are, the place of one follows from its distance to the page's first key, which
//! the page above repeats, and from how dense keys are, which is learned: then a few cache lines are all that is fetched, at
//! once, and all that is searched. Where guesses fail, as with keys in clusters, pages are fetched and searched as if there
//! were none.

use std::{cell::Cell, ops::Range};

use super::node::{HEAD, NEAR, capacity};

/// Pages above this level are in the processor's caches anyway.
const LEVEL_MAX: u8 = 1;
/// Guesses are acted upon from so much trust on.
const TRUST_MIN: u32 = 8;
const TRUST_MAX: u32 = 15;
/// What a wrong guess costs.
const TRUST_LOST: u32 = 3;

/// A guess: a key is among the [`NEAR`] entries from `near` on.
#[derive(Debug, Clone, Copy)]
pub(super) struct Guess {
    pub(super) near: usize,
    pub(super) is_trusted: bool,
    level: u8,
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
    /// interested. `notes` are the access's.
    #[inline]
    pub(super) fn new(notes: Option<&Cell<[u64; 2]>>, level: u8, words: usize, distance: u64) -> Option<Self> {
        if level > LEVEL_MAX {
            return None;
        }
        let known = Known::from_word(notes?.get()[usize::from(level)]);
        let near = ((distance as f32 * known.density) as usize).saturating_sub(NEAR / 2);
        Some(Self { near: near.min(capacity(words).saturating_sub(NEAR)), is_trusted: known.trust >= TRUST_MIN, level })
    }

    /// Learns whether the key's place, if known, is where it was guessed; if not, what the page's density is.
    #[inline]
    pub(super) fn learn(
        self,
        notes: Option<&Cell<[u64; 2]>>,
        index: Option<usize>,
        density: impl FnOnce() -> Option<f32>,
    ) {
        let Some(notes) = notes else { return };
        let mut all = notes.get();
        let known = Known::from_word(all[usize::from(self.level)]);
        let is_right = index.is_some_and(|index| index.wrapping_sub(self.near) < NEAR);
        if is_right && known.trust == TRUST_MAX {
            return;
        }
        let known = match is_right {
            true => Known { trust: known.trust + 1, ..known },
            false => {
                Known { density: density().unwrap_or(known.density), trust: known.trust.saturating_sub(TRUST_LOST) }
            }
        };
        all[usize::from(self.level)] = known.word();
        notes.set(all);
    }
}

/// Where a page of `words` words has the keys and the values of the entries from `near` on.
#[inline]
pub(super) fn likely(words: usize, near: usize) -> [Range<usize>; 2] {
    let [keys, values] = [HEAD + near, HEAD + capacity(words) + near];
    [keys..keys + NEAR, values..values + NEAR]
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORDS: usize = 128;

    /// What a handle makes of one key: the guess for it, and where it was.
    fn look(notes: &Cell<[u64; 2]>, distance: u64, index: usize, density: f32) -> Guess {
        let guess = Guess::new(Some(notes), 0, WORDS, distance).unwrap();
        guess.learn(Some(notes), Some(index), || Some(density));
        guess
    }

    #[test]
    fn evenly_spread_keys_are_soon_found_where_they_are_guessed_to_be() {
        let notes = Cell::default();
        for index in (0..50).cycle().take(1000) {
            look(&notes, index * 1000, index as usize, 1e-3);
        }
        let guess = look(&notes, 30_000, 30, 1e-3);
        assert!(guess.is_trusted && (guess.near..guess.near + NEAR).contains(&30));
    }

    #[test]
    fn trust_is_lost_where_keys_are_in_clusters_and_comes_back() {
        let notes = Cell::default();
        let look_often = |indices: [usize; 2]| {
            for index in indices.into_iter().cycle().take(100) {
                look(&notes, 30_000, index, 1e-3);
            }
            look(&notes, 30_000, 30, 1e-3).is_trusted
        };
        assert!(look_often([30, 30]));
        assert!(!look_often([3, 50]));
        assert!(look_often([30, 30]));
    }

    #[test]
    fn guesses_lie_in_the_page_whatever_is_known_and_not_all_levels_have_one() {
        for density in [0.0, -1.0, 1e30, f32::INFINITY, f32::NAN] {
            let notes = Cell::new([u64::from(density.to_bits()) << 32 | 15; 2]);
            for distance in [0, 1, u64::MAX] {
                let guess = Guess::new(Some(&notes), 1, WORDS, distance).unwrap();
                assert!(likely(WORDS, guess.near).iter().all(|words| words.end <= WORDS), "{density}, {distance}");
            }
        }
        assert!(Guess::new(Some(&Cell::default()), LEVEL_MAX + 1, WORDS, 0).is_none());
        assert!(Guess::new(None, 0, WORDS, 0).is_none());
    }
}
