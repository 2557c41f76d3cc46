//! How long a run goes on: for its time, and on a slow machine until all has happened that it is about.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use farlink_runtime::{fabric::faulty, worker::Counters};
use serde::{Deserialize, Serialize};

/// After its time, a run goes on for so long at most.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// What a run waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Awaited {
    /// Splits and merges.
    pub changes: bool,
    /// Lock requests that lose.
    pub conflicts: bool,
    /// Torn READs that are refused.
    pub torn_reads: bool,
    /// Paths that break.
    pub breaks: bool,
}

/// What is waited for, and what of it has happened to any of the workers.
#[derive(Debug)]
pub struct Deadlines {
    awaited: Awaited,
    /// How many paths of this process were broken before.
    breaks_before: u64,
    split: AtomicBool,
    merge: AtomicBool,
    conflict: AtomicBool,
    torn_read: AtomicBool,
}

impl Deadlines {
    /// Until this has happened.
    pub fn new(awaited: Awaited) -> Self {
        Self {
            awaited,
            breaks_before: faulty::breaks(),
            split: AtomicBool::default(),
            merge: AtomicBool::default(),
            conflict: AtomicBool::default(),
            torn_read: AtomicBool::default(),
        }
    }

    /// Whether a worker that has counted this stops, if its time was over at `deadline`.
    pub fn is_over(&self, deadline: Instant, counters: impl FnOnce() -> Counters) -> bool {
        let now = Instant::now();
        now >= deadline && (now >= deadline + PATIENCE || self.has_all(&counters()))
    }

    fn has_all(&self, counters: &Counters) -> bool {
        let noted = [
            (&self.split, counters.splits, self.awaited.changes),
            (&self.merge, counters.merges, self.awaited.changes),
            (&self.conflict, counters.lock_conflicts + counters.local_waits, self.awaited.conflicts),
            (&self.torn_read, counters.torn_reads, self.awaited.torn_reads),
        ];
        noted.iter().filter(|(_, count, _)| *count > 0).for_each(|(flag, ..)| flag.store(true, Ordering::Relaxed));
        noted.iter().all(|(flag, _, is_awaited)| !is_awaited || flag.load(Ordering::Relaxed))
            && (!self.awaited.breaks || faulty::breaks() > self.breaks_before)
    }
}
