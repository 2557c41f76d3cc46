//! What the cache did, by level of the pages.

use std::{cell::Cell, ops::AddAssign};

/// Levels counted apart; higher ones count as the highest.
pub const LEVELS: usize = 16;

/// Counts of one level.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LevelCounters {
    /// Pages found in the cache.
    pub hits: u64,
    /// Pages read from the store.
    pub misses: u64,
    /// Waits for a page that somebody else was reading from the store already.
    pub shared_fetches: u64,
    /// Cooling pages that were touched and stay.
    pub rescues: u64,
    /// Pages read and not admitted.
    pub refusals: u64,
    /// Pages that made room for others.
    pub evictions: u64,
    /// Pages written to the store.
    pub write_backs: u64,
    /// Changes that found their page changed or locked by somebody else, and links that could not be swizzled for the same
    /// reason.
    pub failed_upgrades: u64,
}

/// Counts by level, the leaves first.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// One entry for each level.
    pub levels: [LevelCounters; LEVELS],
    /// Writes that the store refused.
    pub write_errors: u64,
}

impl Counters {
    /// The sum over all levels.
    pub fn total(&self) -> LevelCounters {
        let mut total = LevelCounters::default();
        for level in &self.levels {
            total += *level;
        }
        total
    }
}

impl AddAssign for LevelCounters {
    fn add_assign(&mut self, other: Self) {
        self.hits += other.hits;
        self.misses += other.misses;
        self.shared_fetches += other.shared_fetches;
        self.rescues += other.rescues;
        self.refusals += other.refusals;
        self.evictions += other.evictions;
        self.write_backs += other.write_backs;
        self.failed_upgrades += other.failed_upgrades;
    }
}

impl AddAssign for Counters {
    fn add_assign(&mut self, other: Self) {
        for (level, other) in self.levels.iter_mut().zip(other.levels) {
            *level += other;
        }
        self.write_errors += other.write_errors;
    }
}

/// The counters of one handle.
#[derive(Debug, Default)]
pub(crate) struct CounterCells {
    levels: [Cell<LevelCounters>; LEVELS],
    hits: [Cell<u64>; LEVELS],
    write_errors: Cell<u64>,
}

impl CounterCells {
    #[inline]
    pub(crate) fn hit(&self, level: u8) {
        let hits = &self.hits[usize::from(level).min(LEVELS - 1)];
        hits.set(hits.get() + 1);
    }

    pub(crate) fn count(&self, level: u8, add: impl FnOnce(&mut LevelCounters)) {
        let cell = &self.levels[usize::from(level).min(LEVELS - 1)];
        let mut counters = cell.get();
        add(&mut counters);
        cell.set(counters);
    }

    pub(crate) fn write_error(&self) {
        self.write_errors.set(self.write_errors.get() + 1);
    }

    pub(crate) fn snapshot(&self) -> Counters {
        let mut counters = Counters { write_errors: self.write_errors.get(), ..Counters::default() };
        for (level, counters) in counters.levels.iter_mut().enumerate() {
            *counters = self.levels[level].get();
            counters.hits = self.hits[level].get();
        }
        counters
    }
}
