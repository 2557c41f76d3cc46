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
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Latency {
    counts: Histogram<u64>,
}

/// The quantiles that every row reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Quantiles {
    pub(crate) p50_ns: u64,
    pub(crate) p99_ns: u64,
    pub(crate) p999_ns: u64,
}

/// How a histogram travels.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct Sparse(Vec<u64>);

impl Latency {
    /// An empty histogram.
    pub(crate) fn new() -> anyhow::Result<Self> {
        let counts = Histogram::new_with_bounds(1, NANOSECONDS_MAX, SIGNIFICANT_DIGITS)
            .context("the bounds of the latency histogram")?;
        Ok(Self { counts })
    }

    /// Counts one operation.
    pub(crate) fn record(&mut self, nanoseconds: u64) {
        self.counts.saturating_record(nanoseconds);
    }

    /// How many operations were counted.
    pub(crate) fn len(&self) -> u64 {
        self.counts.len()
    }

    /// Adds what another worker counted.
    pub(crate) fn merge(&mut self, other: &Self) -> anyhow::Result<()> {
        self.counts.add(&other.counts).context("merging latency histograms")
    }

    /// The reported quantiles; all zero if nothing was counted.
    pub(crate) fn quantiles(&self) -> Quantiles {
        Quantiles {
            p50_ns: self.counts.value_at_quantile(0.5),
            p99_ns: self.counts.value_at_quantile(0.99),
            p999_ns: self.counts.value_at_quantile(0.999),
        }
    }

    /// The form that is sent to another process.
    pub(crate) fn to_sparse(&self) -> Sparse {
        Sparse(self.counts.iter_recorded().flat_map(|at| [at.value_iterated_to(), at.count_at_value()]).collect())
    }

    /// Adds what another process sent.
    pub(crate) fn merge_sparse(&mut self, sparse: &Sparse) -> anyhow::Result<()> {
        let (pairs, rest) = sparse.0.as_chunks::<2>();
        ensure!(rest.is_empty(), "a latency histogram of {} numbers: values and counts must pair", sparse.0.len());
        for [value, count] in pairs {
            self.counts
                .record_n(*value, *count)
                .with_context(|| format!("a latency of {value} ns, {count} times, in a received histogram"))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(values: impl Iterator<Item = u64>) -> Latency {
        let mut latency = Latency::new().unwrap();
        values.for_each(|value| latency.record(value));
        latency
    }

    #[test]
    fn quantiles_within_the_promised_digits() {
        let quantiles = filled(1..=100_000).quantiles();
        for (seen, expected) in [(quantiles.p50_ns, 50_000), (quantiles.p99_ns, 99_000), (quantiles.p999_ns, 99_900)] {
            assert!(seen.abs_diff(expected) * 1000 <= expected, "{seen} for {expected}");
        }
        assert_eq!(Latency::new().unwrap().quantiles(), Quantiles::default());
    }

    #[test]
    fn long_ones_saturate() {
        let latency = filled([0, u64::MAX].into_iter());
        assert_eq!(latency.len(), 2);
        assert!(latency.quantiles().p999_ns >= NANOSECONDS_MAX);
    }

    #[test]
    fn merging_and_sending_equal_counting_together() {
        let together = filled((1..5000).map(|value| value * 37));
        let mut merged = filled((1..2000).map(|value| value * 37));
        let rest = filled((2000..5000).map(|value| value * 37));
        let mut sent = Latency::new().unwrap();
        for part in [&merged, &rest] {
            let line = serde_json::to_string(&part.to_sparse()).unwrap();
            sent.merge_sparse(&serde_json::from_str(&line).unwrap()).unwrap();
        }
        merged.merge(&rest).unwrap();
        assert_eq!(merged, together);
        assert_eq!(sent.quantiles(), together.quantiles());
        assert_eq!(sent.to_sparse(), together.to_sparse());
    }

    #[test]
    fn a_broken_message_is_an_error() {
        let mut latency = Latency::new().unwrap();
        assert!(latency.merge_sparse(&Sparse(vec![1])).is_err());
        assert!(latency.merge_sparse(&Sparse(vec![u64::MAX, 1])).is_err());
    }
}
