//! Latencies of one phase: a histogram that workers fill, processes send, and the report merges.
//!
//! Three significant digits from 1 ns to one minute; anything longer counts as one minute. Between processes only the
//! buckets that are not empty travel, as one flat list of value, count, value, count.

use anyhow::{Context as _, ensure};
use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

const NANOSECONDS_MAX: u64 = 60_000_000_000;
const SIGNIFICANT_DIGITS: u8 = 3;

/// A histogram of nanoseconds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(into = "Vec<u64>", try_from = "Vec<u64>")]
pub(crate) struct Latency(Histogram<u64>);

impl Default for Latency {
    fn default() -> Self {
        Self(Histogram::new_with_bounds(1, NANOSECONDS_MAX, SIGNIFICANT_DIGITS).expect("these bounds are possible"))
    }
}

impl Latency {
    /// Counts one operation.
    pub(crate) fn record(&mut self, nanoseconds: u64) {
        self.0.saturating_record(nanoseconds);
    }

    /// How many operations were counted.
    #[cfg(test)]
    pub(crate) fn len(&self) -> u64 {
        self.0.len()
    }

    /// Adds what another worker counted.
    pub(crate) fn merge(&mut self, other: &Self) {
        self.0.add(&other.0).expect("all have the same bounds");
    }

    /// How long this share of the operations took at most; `None` if nothing was counted.
    pub(crate) fn quantile(&self, share: f64) -> Option<u64> {
        (!self.0.is_empty()).then(|| self.0.value_at_quantile(share))
    }
}

impl From<Latency> for Vec<u64> {
    fn from(latency: Latency) -> Self {
        latency.0.iter_recorded().flat_map(|at| [at.value_iterated_to(), at.count_at_value()]).collect()
    }
}

impl TryFrom<Vec<u64>> for Latency {
    type Error = anyhow::Error;

    fn try_from(sent: Vec<u64>) -> anyhow::Result<Self> {
        let mut latency = Self::default();
        let (pairs, rest) = sent.as_chunks::<2>();
        ensure!(rest.is_empty(), "a latency histogram of {} numbers: values and counts must pair", sent.len());
        for [value, count] in pairs {
            let recorded = latency.0.record_n(*value, *count);
            recorded.with_context(|| format!("a latency of {value} ns, {count} times, in a received histogram"))?;
        }
        Ok(latency)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(values: impl Iterator<Item = u64>) -> Latency {
        let mut latency = Latency::default();
        values.for_each(|value| latency.record(value));
        latency
    }

    #[test]
    fn quantiles_within_the_promised_digits() {
        let latency = filled(1..=100_000);
        for (share, expected) in [(0.5, 50_000), (0.99, 99_000), (0.999, 99_900)] {
            let seen = latency.quantile(share).unwrap();
            assert!(seen.abs_diff(expected) * 1000 <= expected, "{seen} for {expected}");
        }
        assert_eq!(Latency::default().quantile(0.5), None);
        let long = filled([0, u64::MAX].into_iter());
        assert!(long.len() == 2 && long.quantile(0.999).unwrap() >= NANOSECONDS_MAX);
    }

    #[test]
    fn merging_and_sending_equal_counting_together() {
        let mut merged = filled((1..2000).map(|value| value * 37));
        let rest = filled((2000..5000).map(|value| value * 37));
        merged.merge(&serde_json::from_str(&serde_json::to_string(&rest).unwrap()).unwrap());
        assert_eq!(Vec::from(merged), Vec::from(filled((1..5000).map(|value| value * 37))));
        assert!(Latency::try_from(vec![1]).is_err() && Latency::try_from(vec![u64::MAX, 1]).is_err());
    }
}
