//! What a phase did: outcomes that can be checked, remote operations, what caches did, latencies. Workers fill one [`Tally`]
//! each; processes send theirs; the report adds them up.

use std::collections::BTreeMap;
use std::ops::{AddAssign, Sub};

use farlink_offload::LEVELS;
use serde::{Deserialize, Serialize};

use crate::counts::counts;
use crate::latency::Latency;
use crate::subject::Outcomes;

counts! {
    /// Remote operations, as the runtime counts them.
    pub(crate) Counters {
        reads: u64,
        writes: u64,
        atomics: u64,
        two_sided: u64,
        bytes: u64,
        round_trips: u64,
        restarts: u64,
        named: Named,
    }
}

counts! {
    /// What a cache did, and what was shipped instead; nothing without one.
    #[derive(Copy)]
    pub(crate) CacheCounts {
        /// Page accesses of operations.
        lookups: u64,
        /// Those that read their page from remote memory.
        misses: Levels,
        /// Pages that made room for others, and pages written because they left the cache.
        evictions: u64,
        write_backs: u64,
        /// Pages written after the phase, untimed and part of no other count.
        flushed: u64,
        /// Operations that a memory server has carried out, sent back, and those chosen to learn from.
        shipped: u64,
        came_back: u64,
        contrary: u64,
    }
}

/// What structures count under names of their own.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(crate) struct Named(pub(crate) BTreeMap<String, u64>);

impl AddAssign for Named {
    fn add_assign(&mut self, other: Self) {
        other.0.into_iter().for_each(|(name, count)| *self.0.entry(name).or_default() += count);
    }
}

impl Sub for Named {
    type Output = Self;

    fn sub(mut self, earlier: Self) -> Self {
        self.0.iter_mut().for_each(|(name, count)| *count -= earlier.0.get(name).copied().unwrap_or(0));
        self
    }
}

/// A count for each level of a tree, leaves first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(crate) struct Levels(pub(crate) [u64; LEVELS]);

impl Levels {
    pub(crate) fn leaf(&self) -> u64 {
        self.0[0]
    }

    pub(crate) fn total(&self) -> u64 {
        self.0.iter().sum()
    }
}

impl AddAssign for Levels {
    fn add_assign(&mut self, other: Self) {
        self.0.iter_mut().zip(other.0).for_each(|(sum, count)| *sum += count);
    }
}

impl Sub for Levels {
    type Output = Self;

    fn sub(mut self, earlier: Self) -> Self {
        self.0.iter_mut().zip(earlier.0).for_each(|(now, then)| *now -= then);
        self
    }
}

impl From<farlink_runtime::worker::Counters> for Counters {
    fn from(counters: farlink_runtime::worker::Counters) -> Self {
        let farlink_runtime::worker::Counters {
            reads,
            writes,
            atomics,
            two_sided,
            bytes,
            round_trips,
            restarts,
            named,
            ..
        } = counters;
        let named = Named(named.iter().map(|(name, count)| (name.to_owned(), count)).collect());
        Self { reads, writes, atomics, two_sided, bytes, round_trips, restarts, named }
    }
}

impl CacheCounts {
    /// The share of lookups that read nothing from remote memory; `None` if there were none.
    pub(crate) fn hit_ratio(&self) -> Option<f64> {
        (self.lookups > 0).then(|| 1.0 - self.misses.total() as f64 / self.lookups as f64)
    }
}

/// Everything counted in one phase.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub(crate) struct Tally {
    pub(crate) outcomes: Outcomes,
    pub(crate) counters: Counters,
    pub(crate) cache: CacheCounts,
    pub(crate) latency: Latency,
}

impl AddAssign<&Self> for Tally {
    fn add_assign(&mut self, other: &Self) {
        self.outcomes += other.outcomes;
        self.counters += other.counters.clone();
        self.cache += other.cache;
        self.latency.merge(&other.latency);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sending_and_merging_agree() {
        let mut one = Tally { outcomes: Outcomes { ops: 3, found: 2, ..Outcomes::default() }, ..Tally::default() };
        (one.cache.lookups, one.cache.misses.0[0], one.cache.misses.0[1], one.cache.flushed) = (10, 2, 1, 4);
        assert_eq!((one.cache.hit_ratio(), CacheCounts::default().hit_ratio()), (Some(0.7), None));
        [10, 20, 30].into_iter().for_each(|ns| one.latency.record(ns));
        let mut merged = one.clone();
        merged += &serde_json::from_str(&serde_json::to_string(&one).unwrap()).unwrap();
        assert_eq!((merged.cache.flushed, merged.cache - one.cache), (8, one.cache));
        assert_eq!((merged.outcomes.ops, merged.latency.len()), (6, 6));
    }
}
