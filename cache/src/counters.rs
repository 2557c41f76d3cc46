//! What the cache did, by level of the pages.

use std::{
    ops::AddAssign,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

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
    /// Waits for a page that somebody else was reading from the store already, or had excluded.
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

/// The counters of one handle. Only its thread counts, so no step has to be atomic as a whole; others may read. (The standard
/// library's, so that models spend no executions on them.)
#[derive(Debug, Default)]
pub(crate) struct CounterCells {
    hits: [AtomicU64; LEVELS],
    others: [[AtomicU64; OTHERS]; LEVELS],
    write_errors: AtomicU64,
}

/// Counts of a level but for hits.
const OTHERS: usize = 7;

impl LevelCounters {
    fn others(&mut self) -> [&mut u64; OTHERS] {
        let Self { hits: _, misses, shared_fetches, rescues, refusals, evictions, write_backs, failed_upgrades } = self;
        [misses, shared_fetches, rescues, refusals, evictions, write_backs, failed_upgrades]
    }
}

#[inline]
fn add(cell: &AtomicU64, by: u64) {
    cell.store(cell.load(Relaxed) + by, Relaxed);
}

impl CounterCells {
    #[inline]
    pub(crate) fn hit(&self, level: u8) {
        add(&self.hits[usize::from(level).min(LEVELS - 1)], 1);
    }

    pub(crate) fn count(&self, level: u8, count: impl FnOnce(&mut LevelCounters)) {
        let mut more = LevelCounters::default();
        count(&mut more);
        let cells = &self.others[usize::from(level).min(LEVELS - 1)];
        cells.iter().zip(more.others()).for_each(|(cell, by)| add(cell, *by));
    }

    pub(crate) fn write_error(&self) {
        add(&self.write_errors, 1);
    }

    pub(crate) fn snapshot(&self) -> Counters {
        let mut counters = Counters { write_errors: self.write_errors.load(Relaxed), ..Counters::default() };
        for (level, counters) in counters.levels.iter_mut().enumerate() {
            counters.hits = self.hits[level].load(Relaxed);
            counters
                .others()
                .into_iter()
                .zip(&self.others[level])
                .for_each(|(count, cell)| *count = cell.load(Relaxed));
        }
        counters
    }
}
