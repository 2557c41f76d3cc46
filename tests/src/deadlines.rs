//! How long a run goes on: for its time, and on a slow machine until all has happened that it is about.

use std::{
    fs::File,
    path::{Path, PathBuf},
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
    /// Splits.
    pub splits: bool,
    /// Merges.
    pub merges: bool,
    /// Operations on another owner's keys.
    pub strays: bool,
    /// Lock requests that lose, in any process: it takes two.
    pub conflicts: bool,
    /// Torn READs that are refused, in any process: somebody has to write.
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
    stray: AtomicBool,
    conflict: Anywhere,
    torn_read: Anywhere,
}

/// Whether something has happened in any of the processes. One to which it has makes a file.
#[derive(Debug)]
struct Anywhere(PathBuf);

impl Anywhere {
    fn note(&self, has_happened: bool) -> bool {
        let is_known = self.0.exists();
        is_known || has_happened && File::create(&self.0).is_ok()
    }
}

impl Deadlines {
    /// Until this has happened. `directory` is one that all processes of the run have, and no other run.
    pub fn new(awaited: Awaited, directory: &Path) -> Self {
        Self {
            awaited,
            breaks_before: faulty::breaks(),
            split: AtomicBool::default(),
            merge: AtomicBool::default(),
            stray: AtomicBool::default(),
            conflict: Anywhere(directory.join("conflict")),
            torn_read: Anywhere(directory.join("torn-read")),
        }
    }

    /// Whether a worker that has counted this, and so many strays, stops, if its time was over at `deadline`.
    pub fn is_over(&self, deadline: Instant, strays: u64, counters: impl FnOnce() -> Counters) -> bool {
        let now = Instant::now();
        now >= deadline && (now >= deadline + PATIENCE || self.has_all(strays, &counters()))
    }

    fn has_all(&self, strays: u64, counters: &Counters) -> bool {
        let here = [
            (&self.split, counters.splits, self.awaited.splits),
            (&self.merge, counters.merges, self.awaited.merges),
            (&self.stray, strays, self.awaited.strays),
        ];
        let anywhere = [
            (&self.conflict, counters.lock_conflicts + counters.local_waits, self.awaited.conflicts),
            (&self.torn_read, counters.torn_reads, self.awaited.torn_reads),
        ];
        here.iter().filter(|(_, count, _)| *count > 0).for_each(|(flag, ..)| flag.store(true, Ordering::Relaxed));
        // Each is noted, whatever else is missing: others may wait for it.
        let missing = anywhere.iter().filter(|(it, count, is_awaited)| *is_awaited && !it.note(*count > 0)).count();
        missing == 0
            && here.iter().all(|(flag, _, is_awaited)| !is_awaited || flag.load(Ordering::Relaxed))
            && (!self.awaited.breaks || faulty::breaks() > self.breaks_before)
    }
}
