//! The keys: 8 bytes, spread over all of u64, and drawn before the clock starts.

use std::sync::Arc;

use rand::{RngExt, SeedableRng, rngs::SmallRng};
use rand_distr::{Distribution as _, Zipf};

/// Odd, so that multiplying by it permutes u64; near 2^64 divided by the golden ratio, so that the products are spread evenly.
const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;
/// The exponent of the Zipf distribution.
const THETA: f64 = 0.99;
/// Keys drawn for each thread: with their lookups, far more than caches hold.
pub(crate) const DRAWN: usize = 4 << 20;

/// Which keys are looked up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Distribution {
    /// All alike.
    Uniform,
    /// Zipf with exponent 0.99; the popular ones are spread over the key space.
    Zipf,
}

impl Distribution {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Uniform => "uniform",
            Self::Zipf => "zipf",
        }
    }
}

/// The key with this number.
#[inline]
pub(crate) fn key_of(number: u64) -> u64 {
    number.wrapping_mul(SPREAD)
}

/// The value that every system stores under a key. 63 bits: some indexes keep one for themselves.
#[inline]
pub(crate) fn value_of(key: u64) -> u64 {
    (key ^ 0x5555_5555_5555_5555) >> 1
}

/// The keys number 0 to `count` - 1, in ascending order.
pub(crate) fn sorted(count: u64) -> Vec<u64> {
    let mut keys: Vec<u64> = (0..count).map(key_of).collect();
    keys.sort_unstable();
    keys
}

/// `draws` keys to look up, out of `count`.
///
/// # Errors
/// If there is no key to draw.
pub(crate) fn draw(distribution: Distribution, count: u64, draws: usize, seed: u64) -> anyhow::Result<Arc<[u64]>> {
    anyhow::ensure!(count > 0, "--keys: there must be a key to look up");
    let mut rng = SmallRng::seed_from_u64(seed);
    Ok(match distribution {
        Distribution::Uniform => (0..draws).map(|_| key_of(rng.random_range(0..count))).collect(),
        Distribution::Zipf => {
            let zipf = Zipf::new(count as f64, THETA)?;
            (0..draws).map(|_| key_of(zipf.sample(&mut rng) as u64 - 1)).collect()
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_are_keys() {
        let keys = sorted(1000);
        assert!(keys.is_sorted_by(|a, b| a < b));
        for distribution in [Distribution::Uniform, Distribution::Zipf] {
            let drawn = draw(distribution, 1000, 5000, 1).unwrap();
            assert!(drawn.iter().all(|key| keys.binary_search(key).is_ok()));
        }
        assert!(draw(Distribution::Uniform, 0, 1, 1).is_err());
    }
}
