//! Zipf ranks: exact, and fast enough to draw hundreds of millions.
//!
//! Rank `r` (from 0) has the weight `(r + 1)^-theta`. Ranks are grouped into buckets whose width is at most 1/64 of their
//! first rank, so the weights inside one hardly differ. A draw takes a bucket from an alias table over the buckets'
//! upper bounds (width times the first weight), then a rank of the bucket, all alike, and keeps it with the ratio of its
//! weight to the first one, else draws again. That is exact, keeps over 99% of the draws for exponents around one, and
//! needs a power only where the ratio at the bucket's far end does not settle it. The table has some 64 ln(size) rows.

use anyhow::ensure;
use rand::Rng;

/// The first ranks have a bucket each; later ones are this many times narrower than their first rank.
const NARROWER: u64 = 64;

/// A sampler of Zipf ranks.
#[derive(Debug, Clone)]
pub(crate) struct Zipf {
    size: u64,
    theta: f64,
    buckets: Vec<Bucket>,
}

#[derive(Debug, Clone)]
struct Bucket {
    first: u64,
    width: u64,
    /// The least ratio of a weight in the bucket to the first.
    keep: f64,
    /// A coin below this stays at this row of the table; others go on to `alias`.
    stay: u64,
    alias: usize,
}

impl Zipf {
    /// Ranks `0..size` with exponent `theta`; 0 is uniform.
    pub(crate) fn new(size: u64, theta: f64) -> anyhow::Result<Self> {
        ensure!(theta.is_finite() && theta >= 0.0, "--theta {theta} is not a number of at least 0");
        ensure!(size > 0, "--keys must be at least 1");
        let mut zipf = Self { size, theta, buckets: Vec::new() };
        let (mut first, mut bounds) = (0, Vec::new());
        while first < size {
            let width = (first / NARROWER).clamp(1, size - first);
            let keep = ratio(first, first + width - 1, theta);
            zipf.buckets.push(Bucket { first, width, keep, stay: u64::MAX, alias: zipf.buckets.len() });
            bounds.push(width as f64 * zipf.weight(first));
            first += width;
        }
        zipf.fill_table(&bounds);
        Ok(zipf)
    }

    /// How many ranks there are.
    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    /// The exponent.
    pub(crate) fn theta(&self) -> f64 {
        self.theta
    }

    /// What a rank weighs; its probability is that over the sum of all.
    pub(crate) fn weight(&self, rank: u64) -> f64 {
        ((rank + 1) as f64).powf(-self.theta)
    }

    /// Draws a rank from 0 (the most likely) on.
    pub(crate) fn draw(&self, random: &mut impl Rng) -> u64 {
        loop {
            let (row, coin) = pick(random, self.buckets.len() as u64);
            let mut bucket = &self.buckets[row as usize];
            if coin >= bucket.stay {
                bucket = &self.buckets[bucket.alias];
            }
            if bucket.width == 1 {
                return bucket.first;
            }
            let (offset, coin) = pick(random, bucket.width);
            let coin = coin as f64 / 2f64.powi(64);
            let rank = bucket.first + offset;
            if coin < bucket.keep || coin < ratio(bucket.first, rank, self.theta) {
                return rank;
            }
        }
    }

    /// Vose's alias table: each row is shared by two buckets at most, so that all rows are equally likely.
    fn fill_table(&mut self, bounds: &[f64]) {
        let scale = bounds.len() as f64 / bounds.iter().sum::<f64>();
        let mut left: Vec<f64> = bounds.iter().map(|bound| bound * scale).collect();
        let (mut small, mut large): (Vec<usize>, Vec<usize>) = (0..left.len()).partition(|&row| left[row] < 1.0);
        while let (Some(&poor), Some(&rich)) = (small.last(), large.last()) {
            small.pop();
            self.buckets[poor].stay = (left[poor] * 2f64.powi(64)) as u64;
            self.buckets[poor].alias = rich;
            left[rich] -= 1.0 - left[poor];
            if left[rich] < 1.0 {
                large.pop();
                small.push(rich);
            }
        }
        // What is left over is a full row but for rounding; it keeps the `stay` of all.
    }
}

/// The weight of `rank` over that of `first`.
fn ratio(first: u64, rank: u64, theta: f64) -> f64 {
    ((first + 1) as f64 / (rank + 1) as f64).powf(theta)
}

/// A number below `size`, and the rest of the randomness as a coin.
fn pick(random: &mut impl Rng, size: u64) -> (u64, u64) {
    let wide = u128::from(random.next_u64()) * u128::from(size);
    ((wide >> 64) as u64, wide as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{SeedableRng as _, rngs::SmallRng};

    fn counts(size: u64, theta: f64, draws: u64) -> (Zipf, Vec<u64>) {
        let zipf = Zipf::new(size, theta).unwrap();
        let mut random = SmallRng::seed_from_u64(7);
        let mut counts = vec![0; size as usize];
        (0..draws).for_each(|_| counts[zipf.draw(&mut random) as usize] += 1);
        (zipf, counts)
    }

    #[test]
    fn frequencies_pass_a_chi_square_test() {
        const DRAWS: u64 = 2_000_000;
        for (size, theta) in [(1, 0.99), (2, 0.99), (65, 1.0), (129, 0.0), (1000, 0.99), (1000, 0.5), (5000, 1.2)] {
            let (zipf, counts) = counts(size, theta, DRAWS);
            let all: f64 = (0..size).map(|rank| zipf.weight(rank)).sum();
            let chi_square: f64 = (0u64..)
                .zip(&counts)
                .map(|(rank, &count)| {
                    let expected = zipf.weight(rank) / all * DRAWS as f64;
                    (count as f64 - expected).powi(2) / expected
                })
                .sum();
            // The statistic has mean d and variance 2d over d degrees of freedom.
            let degrees = (size - 1) as f64;
            let deviations = (chi_square - degrees) / (2.0 * degrees).sqrt().max(1.0);
            assert!(deviations.abs() < 4.0, "size {size}, theta {theta}: {deviations} deviations off");
        }
    }

    #[test]
    fn the_head_of_many_ranks_is_exact() {
        const DRAWS: u64 = 4_000_000;
        let size = 1_000_000;
        let (zipf, counts) = counts(size, 0.99, DRAWS);
        let all: f64 = (0..size).map(|rank| zipf.weight(rank)).sum();
        for ranks in [0..1, 1..2, 2..5, 5..100, 100..1000, 1000..10_000, 10_000..100_000, 100_000..size] {
            let share: f64 = ranks.clone().map(|rank| zipf.weight(rank)).sum::<f64>() / all;
            let seen = counts[ranks.start as usize..ranks.end as usize].iter().sum::<u64>() as f64 / DRAWS as f64;
            let deviation = (share * (1.0 - share) / DRAWS as f64).sqrt();
            assert!((seen - share).abs() < 4.0 * deviation, "{ranks:?}: {seen} for {share}");
        }
    }

    #[test]
    fn buckets_cover_every_rank_once() {
        for size in [1, 63, 64, 65, 127, 128, 1000, 200_000_000, u64::MAX >> 1] {
            let zipf = Zipf::new(size, 0.99).unwrap();
            let mut next = 0;
            for bucket in &zipf.buckets {
                assert_eq!(bucket.first, next);
                assert!(bucket.keep <= 1.0 && bucket.keep > 0.98);
                next += bucket.width;
            }
            assert_eq!(next, size);
            assert!(zipf.buckets.len() < 4000);
        }
    }

    #[test]
    fn bad_exponents_and_sizes_are_errors() {
        for theta in [-0.1, f64::NAN, f64::INFINITY] {
            assert!(Zipf::new(10, theta).unwrap_err().to_string().contains("--theta"));
        }
        assert!(Zipf::new(0, 1.0).is_err());
        let mut random = SmallRng::seed_from_u64(1);
        let steep = Zipf::new(1_000_000, 40.0).unwrap();
        assert!((0..1000).all(|_| steep.draw(&mut random) < 3));
    }
}
