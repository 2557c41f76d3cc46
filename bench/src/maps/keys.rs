//! Keys: which keys there are, and which of them an operation picks.
//!
//! **The key space.** Keys are numbered. The first `loaded` numbers are the keys that the load puts into the tree; the
//! numbers from `loaded` on are keys for inserts. Without `--keys-file`, key `i` is `mix(i ^ salt)`, a bijection on
//! 64-bit words, so distinct numbers are distinct keys and neighbouring numbers are far apart; the salt comes from the seed.
//! With a file, the first numbers are its keys in order, and the later numbers are computed in the same way, except for keys
//! that the file holds, which are skipped.
//!
//! **Insert keys.** Worker `w` of `W` (counted over all processes) inserts the keys numbered `loaded + w`,
//! `loaded + w + W`, `loaded + w + 2W`, ...: no two workers ever meet, and none needs to ask another. A run that finds
//! the tree loaded by an earlier one moves all these numbers on ([`KeySpace::for_run`]), so two runs never meet either.
//!
//! **The choice.** Uniform, or Zipf with exponent theta, sampled exactly by rejection (`rand_distr::Zipf`); the usual
//! closed form is off by several percent at the head. A Zipf *rank* becomes a key number through a pseudo-random
//! permutation of the loaded numbers, so that hot keys are spread over the leaves instead of sitting side by side. The
//! permutation is a four-round Feistel network that walks until it lands inside the range: a bijection for any size,
//! with no table. It depends on the run's seed and not on the worker, so all workers have the same hot keys.

use std::sync::Arc;

use anyhow::{Context as _, ensure};
use rand::distr::Distribution as _;
use rand::{Rng, RngExt as _};
use rand_distr::Zipf;

use crate::subject::Distribution;

/// A bijection on 64-bit words (the finaliser of SplitMix64, moved so that 0 does not map to itself).
pub(crate) fn mix(index: u64) -> u64 {
    let mut word = index.wrapping_add(0x9E37_79B9_7F4A_7C15);
    word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    word ^ (word >> 31)
}

/// The value that a benchmark stores for a key: its upper half proves which key it belongs to.
pub(crate) fn value_for(key: u64, version: u32) -> u64 {
    (mix(!key) & !0xFFFF_FFFF) | u64::from(version)
}

/// Whether a value found under `key` was ever stored for that key.
pub(crate) fn value_belongs(key: u64, value: u64) -> bool {
    (value ^ mix(!key)) >> 32 == 0
}

/// The numbered keys of a run.
#[derive(Debug, Clone)]
pub(crate) struct KeySpace {
    loaded: u64,
    salt: u64,
    /// Added to the numbers of insert keys.
    inserts_moved: u64,
    /// Sorted and without duplicates; `None` when keys are computed.
    file: Option<Arc<[u64]>>,
}

impl KeySpace {
    /// Keys computed from their numbers.
    pub(crate) fn scrambled(loaded: u64, seed: u64) -> anyhow::Result<Self> {
        ensure!(loaded > 0, "--keys must be at least 1");
        Ok(Self { loaded, salt: mix(seed), inserts_moved: 0, file: None })
    }

    /// Keys from a file; they must be sorted and distinct, as `keysfile.rs` hands them out.
    pub(crate) fn from_sorted(keys: Vec<u64>, seed: u64) -> anyhow::Result<Self> {
        ensure!(!keys.is_empty(), "there are no keys to load");
        ensure!(keys.windows(2).all(|pair| pair[0] < pair[1]), "keys must be sorted and distinct");
        Ok(Self { loaded: keys.len() as u64, salt: mix(seed), inserts_moved: 0, file: Some(keys.into()) })
    }

    /// The same loaded keys, with the insert keys of this run of all runs on the tree: 2^40 numbers for each.
    pub(crate) fn for_run(self, run: u32) -> Self {
        Self { inserts_moved: u64::from(run) << 40, ..self }
    }

    /// How many keys the load puts into the tree.
    pub(crate) fn loaded(&self) -> u64 {
        self.loaded
    }

    /// The loaded key with this number; numbers past the end wrap around.
    pub(crate) fn loaded_key(&self, number: u64) -> u64 {
        match &self.file {
            None => self.computed(number % self.loaded),
            Some(keys) => keys[(number % self.loaded) as usize],
        }
    }

    /// The insert key with this number, counted from `loaded` on; `None` if the file holds it, so that it is not new.
    pub(crate) fn insert_key(&self, number: u64) -> Option<u64> {
        let key = self.computed(number.wrapping_add(self.inserts_moved));
        match &self.file {
            Some(keys) if keys.binary_search(&key).is_ok() => None,
            _ => Some(key),
        }
    }

    fn computed(&self, number: u64) -> u64 {
        mix(number ^ self.salt)
    }

    /// All loaded keys in key order, for a bulk load.
    pub(crate) fn sorted(&self) -> Arc<[u64]> {
        match &self.file {
            Some(keys) => Arc::clone(keys),
            None => {
                let mut keys: Vec<u64> = (0..self.loaded).map(|number| self.computed(number)).collect();
                keys.sort_unstable();
                keys.into()
            }
        }
    }
}

/// A pseudo-random bijection on `0..size`.
#[derive(Debug, Clone)]
pub(crate) struct Permutation {
    size: u64,
    half_bits: u32,
    round_keys: [u64; 4],
}

impl Permutation {
    /// A permutation of `0..size`; the same seed gives the same one. A size of zero is taken as one.
    pub(crate) fn new(size: u64, seed: u64) -> Self {
        let size = size.max(1);
        let bits = (u64::BITS - (size - 1).leading_zeros()).max(2);
        let round_keys = std::array::from_fn(|round| mix(seed ^ mix(round as u64)));
        Self { size, half_bits: bits.div_ceil(2), round_keys }
    }

    /// Where `index` goes. Indices outside the range are folded into it.
    pub(crate) fn apply(&self, index: u64) -> u64 {
        let mut word = index % self.size;
        // The network permutes a power of four that is at most four times the range (or 4 itself); walking along its
        // cycle until inside the range keeps it a bijection. The cycle returns to `index`, so the walk ends.
        loop {
            word = self.network(word);
            if word < self.size {
                return word;
            }
        }
    }

    fn network(&self, word: u64) -> u64 {
        let mask = (1u64 << self.half_bits) - 1;
        let (mut left, mut right) = (word >> self.half_bits, word & mask);
        for key in self.round_keys {
            (left, right) = (right, left ^ (mix(right ^ key) & mask));
        }
        left << self.half_bits | right
    }
}

/// Draws numbers of loaded keys.
#[derive(Debug, Clone)]
pub(crate) struct Chooser {
    loaded: u64,
    /// `None` for uniform.
    zipf: Option<Zipf<f64>>,
    ranks: Permutation,
}

impl Chooser {
    /// A chooser among `loaded` keys; `seed` fixes which keys are hot.
    pub(crate) fn new(loaded: u64, distribution: Distribution, seed: u64) -> anyhow::Result<Self> {
        ensure!(loaded > 0, "there are no keys to choose from");
        let zipf = match distribution {
            Distribution::Uniform => None,
            Distribution::Zipf(theta) => Some(zipf(loaded, theta)?),
        };
        Ok(Self { loaded, zipf, ranks: Permutation::new(loaded, seed) })
    }

    /// The number of the loaded key with this rank of popularity.
    pub(crate) fn ranked(&self, rank: u64) -> u64 {
        self.ranks.apply(rank)
    }

    /// The number of one loaded key.
    pub(crate) fn draw(&self, random: &mut impl Rng) -> u64 {
        match &self.zipf {
            None => random.random_range(0..self.loaded),
            Some(zipf) => self.ranks.apply(draw_rank(zipf, self.loaded, random)),
        }
    }
}

/// A sampler of Zipf ranks, with the error that a user sees for a bad exponent.
pub(crate) fn zipf(size: u64, theta: f64) -> anyhow::Result<Zipf<f64>> {
    ensure!(theta.is_finite() && theta >= 0.0, "--theta must be a number of at least 0, and {theta} is not");
    Zipf::new(size.max(1) as f64, theta).with_context(|| format!("--theta {theta} over {size} keys"))
}

/// A rank from 0 (the most likely) to `size - 1`.
pub(crate) fn draw_rank(zipf: &Zipf<f64>, size: u64, random: &mut impl Rng) -> u64 {
    // The sampler answers 1..=size as a float; rounding at the far end must not leave the range.
    (zipf.sample(random) as u64).clamp(1, size.max(1)) - 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{SeedableRng as _, rngs::StdRng};
    use std::collections::HashSet;

    #[test]
    fn permutations_are_bijections_for_any_size() {
        for size in (1..200).chain([1000, 1023, 1024, 1025, 65_537]) {
            for seed in 0..3 {
                let permutation = Permutation::new(size, seed);
                let images: HashSet<u64> = (0..size).map(|index| permutation.apply(index)).collect();
                assert_eq!(images.len() as u64, size);
                assert!(images.iter().all(|image| *image < size));
            }
        }
        let wide = Permutation::new(u64::MAX >> 2, 1);
        assert!(wide.apply(17) < u64::MAX >> 2);
    }

    #[test]
    fn seeds_change_the_permutation() {
        let order = |seed| (0..100).map(|i| Permutation::new(1000, seed).apply(i)).collect::<Vec<_>>();
        assert_eq!(order(1), order(1));
        assert_ne!(order(1), order(2));
    }

    #[test]
    fn values_prove_their_key() {
        for key in [0, 1, 42, u64::MAX] {
            assert!(value_belongs(key, value_for(key, 0)));
            assert!(value_belongs(key, value_for(key, u32::MAX)));
            assert!(!value_belongs(key.wrapping_add(1), value_for(key, 0)));
        }
    }

    #[test]
    fn loaded_and_insert_keys_never_meet() {
        let space = KeySpace::scrambled(10_000, 1).unwrap();
        let loaded: HashSet<u64> = space.sorted().iter().copied().collect();
        assert_eq!(loaded.len(), 10_000);
        assert!((0..10_000).all(|n| loaded.contains(&space.loaded_key(n))));
        assert!((10_000..30_000).all(|n| !loaded.contains(&space.insert_key(n).unwrap())));
    }

    #[test]
    fn the_seed_decides_the_keys() {
        let keys = |seed| KeySpace::scrambled(1000, seed).unwrap().sorted();
        assert_eq!(keys(1), keys(1));
        let first: HashSet<u64> = keys(1).iter().copied().collect();
        assert!(keys(2).iter().all(|key| !first.contains(key)));
    }

    #[test]
    fn runs_insert_keys_of_their_own() {
        let inserts = |run| (1000..3000).map(move |n| KeySpace::scrambled(1000, 1).unwrap().for_run(run).insert_key(n));
        let keys: HashSet<_> = (0..3).flat_map(inserts).collect();
        assert_eq!(keys.len(), 3 * 2000);
    }

    #[test]
    fn insert_keys_skip_what_the_file_holds() {
        let computed = |number| KeySpace::scrambled(1, 9).unwrap().computed(number);
        let mut keys = vec![1, 2, computed(5)];
        keys.sort_unstable();
        let space = KeySpace::from_sorted(keys, 9).unwrap();
        assert_eq!(space.insert_key(5), None);
        assert_eq!(space.insert_key(6), Some(computed(6)));
        assert!(KeySpace::from_sorted(vec![2, 1], 1).is_err());
        assert!(KeySpace::from_sorted(vec![], 1).is_err());
        assert!(KeySpace::scrambled(0, 1).is_err());
    }

    #[test]
    fn zipf_has_the_exact_head() {
        let (size, theta, draws) = (1000u64, 0.99, 400_000u32);
        let chooser = Chooser::new(size, Distribution::Zipf(theta), 3).unwrap();
        let mut random = StdRng::seed_from_u64(5);
        let mut counts = vec![0u32; size as usize];
        for _ in 0..draws {
            counts[chooser.draw(&mut random) as usize] += 1;
        }
        let norm: f64 = (1..=size).map(|rank| (rank as f64).powf(-theta)).sum();
        for rank in 1..=5u64 {
            let expected = (rank as f64).powf(-theta) / norm;
            let seen = f64::from(counts[chooser.ranks.apply(rank - 1) as usize]) / f64::from(draws);
            assert!((seen / expected - 1.0).abs() < 0.03, "rank {rank}: {seen} for {expected}");
        }
    }

    #[test]
    fn edge_exponents_and_sizes() {
        let mut random = StdRng::seed_from_u64(5);
        for theta in [0.0, 0.5, 1.0, 1.5, 10.0] {
            for size in [1, 2, 1000] {
                let chooser = Chooser::new(size, Distribution::Zipf(theta), 1).unwrap();
                assert!((0..1000).all(|_| chooser.draw(&mut random) < size));
            }
        }
        for theta in [-0.1, f64::NAN, f64::INFINITY] {
            assert!(Chooser::new(10, Distribution::Zipf(theta), 1).is_err());
        }
    }
}
