//! What a phase did: outcomes that can be checked, remote operations, latencies. Workers fill one [`Tally`] each;
//! processes send them; the report adds them up.

use serde::{Deserialize, Serialize};

use crate::latency::{Latency, Sparse};

/// What the operations of a phase came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(crate) struct Outcomes {
    /// Operations finished; a read-modify-write is one.
    pub(crate) ops: u64,
    /// Reads, updates and read-modify-writes of loaded keys that found the key.
    pub(crate) found: u64,
    /// Such that did not. A lost key, unless the run removes keys.
    pub(crate) missing: u64,
    /// Reads of the latest that found nothing: the insert may still have been under way.
    pub(crate) latest_missing: u64,
    /// Keys that an insert added.
    pub(crate) inserted: u64,
    /// Inserts that found their key present already.
    pub(crate) duplicates: u64,
    /// Keys that a remove took out.
    pub(crate) removed: u64,
    /// Removes that found nothing.
    pub(crate) remove_missing: u64,
    /// Entries that scans returned.
    pub(crate) scanned: u64,
    /// Values that were never stored for the key they were found under.
    pub(crate) wrong_values: u64,
    /// Scans that were out of order, out of range, or longer than asked.
    pub(crate) wrong_scans: u64,
}

/// Remote operations, as the runtime counts them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(crate) struct Counters {
    pub(crate) reads: u64,
    pub(crate) writes: u64,
    pub(crate) atomics: u64,
    pub(crate) two_sided: u64,
    pub(crate) bytes: u64,
    pub(crate) round_trips: u64,
    pub(crate) restarts: u64,
}

/// What a cache did; nothing without one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(crate) struct CacheCounts {
    /// Page accesses of operations.
    pub(crate) lookups: u64,
    /// Those that read a leaf from remote memory.
    pub(crate) leaf_misses: u64,
    /// Those that read another page.
    pub(crate) inner_misses: u64,
    /// Pages written because they left the cache.
    pub(crate) write_backs: u64,
    /// Pages written after the phase, untimed and part of no other count.
    pub(crate) flushed: u64,
}

/// Everything one worker counted in one phase.
#[derive(Debug, Clone)]
pub(crate) struct Tally {
    pub(crate) outcomes: Outcomes,
    pub(crate) counters: Counters,
    pub(crate) cache: CacheCounts,
    pub(crate) latency: Latency,
}

/// A tally as it travels between processes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SentTally {
    pub(crate) outcomes: Outcomes,
    pub(crate) counters: Counters,
    pub(crate) cache: CacheCounts,
    pub(crate) latency: Sparse,
}

impl Outcomes {
    /// Adds another worker's.
    pub(crate) fn add(&mut self, other: &Self) {
        // Destructured, so that a new field cannot be forgotten here.
        let Self {
            ops,
            found,
            missing,
            latest_missing,
            inserted,
            duplicates,
            removed,
            remove_missing,
            scanned,
            wrong_values,
            wrong_scans,
        } = other;
        self.ops += ops;
        self.found += found;
        self.missing += missing;
        self.latest_missing += latest_missing;
        self.inserted += inserted;
        self.duplicates += duplicates;
        self.removed += removed;
        self.remove_missing += remove_missing;
        self.scanned += scanned;
        self.wrong_values += wrong_values;
        self.wrong_scans += wrong_scans;
    }
}

impl Counters {
    /// Adds another worker's.
    pub(crate) fn add(&mut self, other: &Self) {
        let Self { reads, writes, atomics, two_sided, bytes, round_trips, restarts } = other;
        self.reads += reads;
        self.writes += writes;
        self.atomics += atomics;
        self.two_sided += two_sided;
        self.bytes += bytes;
        self.round_trips += round_trips;
        self.restarts += restarts;
    }

    /// What was counted since `earlier`, for counters that only grow.
    pub(crate) fn since(&self, earlier: &Self) -> Self {
        Self {
            reads: self.reads.saturating_sub(earlier.reads),
            writes: self.writes.saturating_sub(earlier.writes),
            atomics: self.atomics.saturating_sub(earlier.atomics),
            two_sided: self.two_sided.saturating_sub(earlier.two_sided),
            bytes: self.bytes.saturating_sub(earlier.bytes),
            round_trips: self.round_trips.saturating_sub(earlier.round_trips),
            restarts: self.restarts.saturating_sub(earlier.restarts),
        }
    }
}

impl CacheCounts {
    /// Adds another worker's.
    pub(crate) fn add(&mut self, other: &Self) {
        let Self { lookups, leaf_misses, inner_misses, write_backs, flushed } = other;
        self.lookups += lookups;
        self.leaf_misses += leaf_misses;
        self.inner_misses += inner_misses;
        self.write_backs += write_backs;
        self.flushed += flushed;
    }

    /// What was counted since `earlier`, for counts that only grow.
    pub(crate) fn since(&self, earlier: &Self) -> Self {
        Self {
            lookups: self.lookups.saturating_sub(earlier.lookups),
            leaf_misses: self.leaf_misses.saturating_sub(earlier.leaf_misses),
            inner_misses: self.inner_misses.saturating_sub(earlier.inner_misses),
            write_backs: self.write_backs.saturating_sub(earlier.write_backs),
            flushed: self.flushed.saturating_sub(earlier.flushed),
        }
    }

    /// The share of lookups that read nothing from remote memory; `None` if there were none.
    pub(crate) fn hit_ratio(&self) -> Option<f64> {
        let misses = self.leaf_misses + self.inner_misses;
        (self.lookups > 0).then(|| 1.0 - misses as f64 / self.lookups as f64)
    }
}

impl Tally {
    /// Nothing counted yet.
    pub(crate) fn new() -> anyhow::Result<Self> {
        Ok(Self {
            outcomes: Outcomes::default(),
            counters: Counters::default(),
            cache: CacheCounts::default(),
            latency: Latency::new()?,
        })
    }

    /// The form that is sent to another process.
    pub(crate) fn to_sent(&self) -> SentTally {
        let latency = self.latency.to_sparse();
        SentTally { outcomes: self.outcomes, counters: self.counters, cache: self.cache, latency }
    }

    /// Adds another worker's of this process.
    pub(crate) fn merge(&mut self, other: &Self) -> anyhow::Result<()> {
        self.outcomes.add(&other.outcomes);
        self.counters.add(&other.counters);
        self.cache.add(&other.cache);
        self.latency.merge(&other.latency)
    }

    /// Adds what another process sent.
    pub(crate) fn merge_sent(&mut self, sent: &SentTally) -> anyhow::Result<()> {
        self.outcomes.add(&sent.outcomes);
        self.counters.add(&sent.counters);
        self.cache.add(&sent.cache);
        self.latency.merge_sparse(&sent.latency)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sending_and_merging_agree() {
        let mut one = Tally::new().unwrap();
        one.outcomes = Outcomes { ops: 3, found: 2, scanned: 100, ..Outcomes::default() };
        one.counters = Counters { reads: 5, restarts: 1, ..Counters::default() };
        one.cache = CacheCounts { lookups: 10, leaf_misses: 2, inner_misses: 1, write_backs: 3, flushed: 4 };
        assert_eq!((one.cache.hit_ratio(), CacheCounts::default().hit_ratio()), (Some(0.7), None));
        [10, 20, 30].into_iter().for_each(|ns| one.latency.record(ns));
        let mut merged = one.clone();
        merged.merge(&one).unwrap();
        let line = serde_json::to_string(&one.to_sent()).unwrap();
        let mut received = one.clone();
        received.merge_sent(&serde_json::from_str(&line).unwrap()).unwrap();
        assert_eq!(merged.to_sent(), received.to_sent());
        assert_eq!((merged.cache.flushed, merged.cache.since(&one.cache)), (8, one.cache));
        assert_eq!((merged.outcomes.ops, merged.counters.reads, merged.latency.len()), (6, 10, 6));
    }

    #[test]
    fn differences_of_counters() {
        let earlier = Counters { reads: 1, writes: 2, atomics: 3, two_sided: 4, bytes: 5, round_trips: 6, restarts: 7 };
        let mut later = earlier;
        later.add(&earlier);
        assert_eq!(later.since(&earlier), earlier);
    }
}
