//! How long a run goes on: for its time, and on a slow machine until all has happened that it is about.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use farlink_runtime::worker::Counters;

/// After its time, a run goes on for so long at most.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// What has happened to any of the workers, and what is waited for.
#[derive(Debug, Default)]
pub struct Patience {
    /// Whether splits and merges are waited for.
    pub for_changes: bool,
    /// Whether conflicts are.
    pub for_conflicts: bool,
    split: AtomicBool,
    merge: AtomicBool,
    conflict: AtomicBool,
}

impl Patience {
    /// For splits and merges, if so.
    pub fn for_changes(for_changes: bool) -> Self {
        Self { for_changes, ..Self::default() }
    }

    /// For splits, merges and conflicts.
    pub fn for_all() -> Self {
        Self { for_changes: true, for_conflicts: true, ..Self::default() }
    }

    /// Whether a worker that has counted this stops, if its time was over at `deadline`.
    pub fn is_over(&self, deadline: Instant, counters: impl FnOnce() -> Counters) -> bool {
        let now = Instant::now();
        now >= deadline && (now >= deadline + PATIENCE || self.has_all(&counters()))
    }

    fn has_all(&self, counters: &Counters) -> bool {
        let noted = [
            (&self.split, counters.splits, self.for_changes),
            (&self.merge, counters.merges, self.for_changes),
            (&self.conflict, counters.lock_conflicts + counters.local_waits, self.for_conflicts),
        ];
        noted.iter().filter(|(_, count, _)| *count > 0).for_each(|(flag, ..)| flag.store(true, Ordering::Relaxed));
        noted.iter().all(|(flag, _, is_awaited)| !is_awaited || flag.load(Ordering::Relaxed))
    }
}
