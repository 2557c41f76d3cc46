//! What every page in remote memory has in common: its header and the checksum that proves a copy whole.
//!
//! ```text
//! word 0   lock word               see `lock`
//! word 1   checksum                of everything below, bound to the version that the unlock sets; of the header alone
//!                                  where words change one by one
//! word 2   self-address            the page's own remote pointer
//! word 3   identity                structure:32 | level:8 | size class:8 | kind:8 | 0:7 | words change one by one:1
//! word 4.. the structure's own
//! ```
//!
//! The checksum is a sum over the words 2.. of `mix(position, word)`, plus a binding of the version. A sum, so that a
//! change of one word updates it in O(1); nonlinear in each word, so that moved, swapped or torn words do not cancel;
//! bound to the version, so that a new lock word over an old body does not pass. A reader that gets a matching sum and an
//! unlocked lock word in *one* READ has the page as it was at that version, in whatever order its cache lines came. The
//! sum has 64 bits and its mix is no proof: of 57 million copies torn between two versions of a page with dense keys it
//! accepted none. It also catches corruption.

pub use farlink_fabric::{hash::avalanche, size_class::SizeClass};

use crate::{lock::LockWord, ptr::RemotePtr};

/// Position of the lock word.
pub const LOCK: usize = 0;
/// Position of the checksum.
pub const CHECKSUM: usize = 1;
/// Position of the page's own address.
pub const SELF: usize = 2;
/// Position of the identity word.
pub const IDENTITY: usize = 3;
/// Words of the common header; a structure's own words begin here.
pub const HEADER_WORDS: usize = 4;
/// Words of the largest page.
pub const PAGE_WORDS_MAX: usize = SizeClass::LARGEST.words();

/// The number of a structure in its cluster; never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StructureId(pub u32);

/// The identity word of a page: what it is and where it belongs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Identity {
    /// The structure that the page belongs to.
    pub structure: StructureId,
    /// Its level: 0 at the leaves.
    pub level: u8,
    /// Its size.
    pub class: SizeClass,
    /// The structure's own mark of the page's layout.
    pub kind: u8,
    /// Whether its words change one by one, without a lock: it has no checksum.
    pub is_words: bool,
}

impl Identity {
    /// The word that stands for this identity.
    pub const fn word(self) -> u64 {
        (self.structure.0 as u64) << 32
            | (self.level as u64) << 24
            | (self.class.index() as u64) << 16
            | (self.kind as u64) << 8
            | self.is_words as u64
    }

    /// `None` if the word is no identity.
    pub const fn from_word(word: u64) -> Option<Self> {
        match SizeClass::from_index((word >> 16) as u8) {
            Some(class) if word as u8 <= 1 => Some(Self {
                structure: StructureId((word >> 32) as u32),
                level: (word >> 24) as u8,
                class,
                kind: Self::kind_in(word),
                is_words: word & 1 == 1,
            }),
            _ => None,
        }
    }

    /// The kind that a word states which is known to be an identity.
    #[inline]
    pub const fn kind_in(word: u64) -> u8 {
        (word >> 8) as u8
    }
}

/// A key for each position. Random, not in arithmetic progression: else the shares of small words at neighbouring positions
/// can cancel.
static KEYS: [u64; PAGE_WORDS_MAX] = {
    let mut keys = [0; PAGE_WORDS_MAX];
    let mut position = 0;
    while position < PAGE_WORDS_MAX {
        keys[position] = avalanche(position as u64 + 1);
        position += 1;
    }
    keys
};

/// One word's share of the checksum, a different function at each position. `position` is below [`PAGE_WORDS_MAX`].
#[inline]
pub fn mix(position: usize, word: u64) -> u64 {
    mix_keyed(word ^ KEYS[position])
}

/// Spreads the low half over the word, then multiplies the halves, so that it is not linear in either of them, whatever
/// the other one is. Made of what vector instructions do for two or four words at once: products of 32-bit halves, turns
/// and sums, as in XXH3.
#[inline(always)]
fn mix_keyed(keyed: u64) -> u64 {
    const LOW: u64 = 0xffff_ffff;
    const SPREAD: u64 = 0x9e37_79b1;
    let spread = (keyed & LOW).wrapping_mul(SPREAD).wrapping_add(keyed.rotate_left(32));
    (spread & LOW).wrapping_mul(spread >> 32).wrapping_add(spread.rotate_left(32))
}

/// The version's share of the checksum: neighbouring versions have unrelated shares.
#[inline]
pub fn binding(version: u64) -> u64 {
    avalanche(version)
}

/// The sum of the mixes of the words 2.. of a page; the checksum less its [`binding`].
#[inline]
pub fn body_sum(page: &[u64]) -> u64 {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        #[target_feature(enable = "avx512f")]
        fn of_eight(page: &[u64]) -> u64 {
            sum_of_mixes(page)
        }
        #[target_feature(enable = "avx2")]
        fn of_four(page: &[u64]) -> u64 {
            sum_of_mixes(page)
        }
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: the processor has AVX-512, as was just asked.
            return unsafe { of_eight(page) };
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the processor has AVX2, as was just asked.
            return unsafe { of_four(page) };
        }
    }
    sum_of_mixes(page)
}

#[inline(always)]
fn sum_of_mixes(page: &[u64]) -> u64 {
    let mut sum = 0u64;
    for (word, key) in page.get(SELF..).unwrap_or_default().iter().zip(&KEYS[SELF..]) {
        sum = sum.wrapping_add(mix_keyed(word ^ key));
    }
    sum
}

/// What the checksum word of a page must be once it is unlocked at `version`.
#[inline]
pub fn checksum(page: &[u64], version: u64) -> u64 {
    body_sum(page).wrapping_add(binding(version))
}

/// Whether a copy of a page is whole: its checksum fits its body and the version in its lock word, or its words change one
/// by one.
#[inline]
pub fn is_whole(page: &[u64]) -> bool {
    is_whole_at(page, LockWord::from_word(page[LOCK]).version())
}

/// Whether a copy of a page is whole at this version, whatever its lock word says.
pub(crate) fn is_whole_at(page: &[u64], version: u64) -> bool {
    page[CHECKSUM] == checksum(page, version) || has_words(page) && page[CHECKSUM] == checksum(header(page), version)
}

/// Whether a page says that its words change one by one.
#[inline]
pub fn has_words(page: &[u64]) -> bool {
    Identity::from_word(page[IDENTITY]).is_some_and(|identity| identity.is_words)
}

fn header(page: &[u64]) -> &[u64] {
    &page[..HEADER_WORDS]
}

/// Makes `page` a complete page image, unlocked at `version`: self-address, identity, checksum and lock word.
pub fn seal(page: &mut [u64], at: RemotePtr, identity: Identity, version: u64) {
    page[SELF] = at.raw();
    page[IDENTITY] = identity.word();
    page[CHECKSUM] = checksum(if identity.is_words { header(page) } else { page }, version);
    page[LOCK] = LockWord::unlocked(version).word();
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::ptr::ServerId;

    fn page(words: usize) -> Vec<u64> {
        let mut page: Vec<u64> = (0..words as u64).map(|i| i / 3).collect();
        let identity = Identity {
            structure: StructureId(7),
            level: 0,
            class: SizeClass::of_bytes(words * 8).unwrap(),
            kind: 1,
            is_words: false,
        };
        seal(&mut page, RemotePtr::new(ServerId::new(1).unwrap(), 8192).unwrap(), identity, 41);
        page
    }

    #[test]
    fn any_single_wrong_word_is_caught() {
        for words in [8, 128, 512] {
            let whole = page(words);
            assert!(is_whole(&whole));
            for index in 1..words {
                for flip in [1u64, 1 << 63, u64::MAX, 0x0100] {
                    let mut torn = whole.clone();
                    torn[index] ^= flip;
                    assert!(!is_whole(&torn), "word {index} of {words}");
                }
            }
            let mut newer = whole.clone();
            newer[LOCK] = LockWord::unlocked(42).word();
            assert!(!is_whole(&newer), "a new lock word over an old body");
        }
    }

    /// Copies torn between two versions of a page: an insert that shifts dense keys, for which words, their differences and
    /// the differences of those are small.
    #[test]
    fn torn_shifts_of_dense_keys_are_caught() {
        use rand::{RngExt, SeedableRng, rngs::StdRng};
        let mut rng = StdRng::seed_from_u64(7);
        for step in [1u64, 2, 3, 1000] {
            for value_of in [|_| 0, |key: u64| key, |key: u64| key << 10] {
                for _ in 0..200 {
                    let (before, after) = around_an_insert(step, value_of, rng.random_range(0..50));
                    for unit in [1, 8] {
                        for _ in 0..200 {
                            let mut torn = before.clone();
                            for first in (8..torn.len()).step_by(unit).filter(|_| rng.random()) {
                                torn[first..first + unit].copy_from_slice(&after[first..first + unit]);
                            }
                            let whole = torn == before || torn == after;
                            assert!(whole || !is_whole(&torn), "keys {step} apart, torn by {unit}");
                            torn[..8].copy_from_slice(&after[..8]);
                            let whole = torn == before || torn == after;
                            assert!(whole || !is_whole(&torn), "keys {step} apart, torn by {unit}, new header");
                        }
                    }
                }
            }
        }
    }

    fn around_an_insert(step: u64, value_of: impl Fn(u64) -> u64, at: usize) -> (Vec<u64>, Vec<u64>) {
        let mut keys: Vec<u64> = (0..50u64).map(|key| 2 * step * key).collect();
        let image = |keys: &[u64], version| {
            let mut page = page(128);
            page[8..].fill(0);
            page[7] = keys.len() as u64;
            page[8..8 + keys.len()].copy_from_slice(keys);
            for (word, &key) in page[68..].iter_mut().zip(keys) {
                *word = value_of(key);
            }
            page[CHECKSUM] = checksum(&page, version);
            page[LOCK] = LockWord::unlocked(version).word();
            page
        };
        let before = image(&keys, 41);
        keys.insert(at + 1, keys[at] + step);
        (before, image(&keys, 42))
    }

    proptest! {
        #[test]
        fn moved_words_are_caught(a in 2usize..128, b in 2usize..128) {
            let mut torn = page(128);
            let differ = torn[a] != torn[b];
            torn.swap(a, b);
            prop_assert_eq!(is_whole(&torn), !differ);
        }

        #[test]
        fn the_sum_updates_in_one_step(index in 4usize..128, word: u64) {
            let mut page = page(128);
            let stepped = body_sum(&page).wrapping_sub(mix(index, page[index])).wrapping_add(mix(index, word));
            page[index] = word;
            prop_assert_eq!(stepped, body_sum(&page));
        }

        #[test]
        fn identities_round_trip_or_are_refused(word: u64) {
            if let Some(identity) = Identity::from_word(word) {
                prop_assert_eq!(identity.word(), word);
            }
        }
    }
}
