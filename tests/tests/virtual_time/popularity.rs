//! Keys of which few come often.

use rand::{RngExt, rngs::StdRng};

const SKEW: f64 = 0.99;

/// How often a key comes, in the order of how often: Zipf's law.
pub(crate) struct Popularity(Vec<f64>);

impl Popularity {
    pub(crate) fn new(keys: u64) -> Self {
        let mut sum = 0.0;
        let add = |rank: u64| {
            sum += (rank as f64).powf(-SKEW);
            sum
        };
        Self((1..=keys).map(add).collect())
    }

    /// Keys that come often are not side by side.
    pub(crate) fn draw(&self, rng: &mut StdRng) -> u64 {
        let at = rng.random::<f64>() * self.0.last().unwrap();
        let rank = self.0.partition_point(|&sum| sum <= at) as u64;
        rank * 7919 % self.0.len() as u64
    }
}
