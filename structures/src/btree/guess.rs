//! Where in a page a key probably is, guessed before the page is at hand.
//!
//! A search of a page that is in local memory but not in the processor's caches waits for memory. If keys are spread evenly
//! over a page, as hashed or scrambled ones are, the place of one follows from its distance to the page's first key, which
//! the page above repeats, and from how dense keys are, which is learned: then a few cache lines are all that is fetched, at
//! once, and all that is searched. Where guesses fail, as with keys in clusters, pages are fetched and searched as if there
//! were none.

use std::cell::Cell;

use super::node::{HEAD, NEAR, capacity};

/// Pages above this level are in the processor's caches anyway.
const LEVEL_MAX: u8 = 1;
/// Guesses are acted upon from so much trust on.
const TRUST_MIN: u32 = 8;
/// All bits of it are set.
const TRUST_MAX: u32 = 15;
/// What a wrong guess costs.
const TRUST_LOST: u32 = 3;

/// What a handle has learned of its pages, by level; see [`Guess`].
pub(super) type Learned = Cell<[u64; 2]>;

/// A guess: a key is among the [`NEAR`] entries from `near` on.
#[derive(Debug, Clone, Copy)]
pub(super) struct Guess {
    pub(super) near: usize,
    pub(super) is_trusted: bool,
    level: u8,
}

/// Entries for each key that belongs to a page, in units of 2^-64.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Density(u64);

impl Density {
    /// Of `count` entries for `range` keys.
    pub(super) fn of(count: usize, range: u64) -> Self {
        Self(u64::try_from(((count as u128) << 64) / u128::from(range.max(1))).unwrap_or(u64::MAX))
    }

    /// The entries for so many keys.
    #[inline]
    pub(super) fn entries(self, keys: u64) -> usize {
        ((u128::from(self.0) * u128::from(keys)) >> 64) as usize
    }
}

/// What is known of the pages of a level.
#[derive(Debug, Clone, Copy)]
struct Known {
    density: Density,
    trust: u32,
}

impl Known {
    // The density with the trust in its last bits, which are so little that they do no harm.
    #[inline]
    fn from_word(word: u64) -> Self {
        Self { density: Density(word), trust: word as u32 & TRUST_MAX }
    }

    fn word(self) -> u64 {
        self.density.0 & !u64::from(TRUST_MAX) | u64::from(self.trust)
    }
}

impl Guess {
    /// The place of a key that is `distance` above the first one of a page of `words` words at `level`; `None` if nobody is
    /// interested. `learned` is the handle's.
    #[inline(always)]
    pub(super) fn new(learned: Option<&Learned>, level: u8, words: usize, distance: u64) -> Option<Self> {
        if level > LEVEL_MAX {
            return None;
        }
        let known = Known::from_word(of_level(learned?, level).get());
        let near = known.density.entries(distance).saturating_sub(NEAR / 2);
        Some(Self { near: near.min(capacity(words).saturating_sub(NEAR)), is_trusted: known.trust >= TRUST_MIN, level })
    }

    /// Learns whether the key's place (none: a number that no place has) is where it was guessed to be; if not, what the page's
    /// density is.
    #[inline(always)]
    pub(super) fn learn(self, learned: Option<&Learned>, index: usize, density: impl FnOnce() -> Option<Density>) {
        let Some(learned) = learned else { return };
        let is_right = index.wrapping_sub(self.near) < NEAR;
        let cell = of_level(learned, self.level);
        let known = Known::from_word(cell.get());
        if is_right && known.trust == TRUST_MAX {
            return;
        }
        revise(cell, known, is_right, if is_right { None } else { density() });
    }
}

#[cold]
fn revise(cell: &Cell<u64>, known: Known, is_right: bool, density: Option<Density>) {
    let trust = if is_right { known.trust + 1 } else { known.trust.saturating_sub(TRUST_LOST) };
    cell.set(Known { density: density.unwrap_or(known.density), trust }.word());
}

#[inline(always)]
fn of_level(learned: &Learned, level: u8) -> &Cell<u64> {
    let learned: &Cell<[u64]> = learned;
    &learned.as_slice_of_cells()[usize::from(level)]
}

/// Where a page of `words` words has the keys and the values of the entries from `near` on.
#[inline]
pub(super) fn likely(words: usize, near: usize) -> [(u16, u16); 2] {
    [HEAD + near, HEAD + capacity(words) + near].map(|first| (first as u16, (first + NEAR) as u16))
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORDS: usize = 128;

    /// What a handle makes of one key: the guess for it, and where it was.
    fn look(learned: &Learned, distance: u64, index: usize, density: Density) -> Guess {
        let guess = Guess::new(Some(learned), 0, WORDS, distance).unwrap();
        guess.learn(Some(learned), index, || Some(density));
        guess
    }

    #[test]
    fn evenly_spread_keys_are_soon_found_where_they_are_guessed_to_be() {
        // Close together, apart, and a page in sixteen of all keys.
        for apart in [1, 1000, u64::MAX / 50 / 16] {
            let learned = Cell::default();
            let density = Density::of(50, apart.saturating_mul(50));
            for index in (0..50).cycle().take(1000) {
                look(&learned, index * apart, index as usize, density);
            }
            let guess = look(&learned, 30 * apart, 30, density);
            assert!(guess.is_trusted && (guess.near..guess.near + NEAR).contains(&30), "{apart}: {guess:?}");
        }
    }

    #[test]
    fn trust_is_lost_where_keys_are_in_clusters_and_comes_back() {
        let learned = Cell::default();
        let density = Density::of(50, 50_000);
        let look_often = |indices: [usize; 2]| {
            for index in indices.into_iter().cycle().take(100) {
                look(&learned, 30_000, index, density);
            }
            look(&learned, 30_000, 30, density).is_trusted
        };
        assert!(look_often([30, 30]));
        assert!(!look_often([3, 50]));
        assert!(look_often([30, 30]));
    }

    #[test]
    fn guesses_lie_in_the_page_whatever_is_known_and_not_all_levels_have_one() {
        for word in [0, 15, 1 << 63, u64::MAX] {
            let learned = Cell::new([word; 2]);
            for distance in [0, 1, u64::MAX] {
                let guess = Guess::new(Some(&learned), 1, WORDS, distance).unwrap();
                assert!(
                    likely(WORDS, guess.near).iter().all(|words| usize::from(words.1) <= WORDS),
                    "{word}, {distance}"
                );
            }
        }
        for (count, range) in [(0, 0), (0, 1), (1, 0), (57, 1), (57, u64::MAX)] {
            let _ = Density::of(count, range).entries(u64::MAX);
        }
        assert!(Guess::new(Some(&Cell::default()), LEVEL_MAX + 1, WORDS, 0).is_none());
        assert!(Guess::new(None, 0, WORDS, 0).is_none());
    }
}
