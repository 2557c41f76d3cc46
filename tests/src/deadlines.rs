//! How long a run goes on: for its time, and on a slow machine until all has happened that it is about.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use farlink_runtime::worker::Counters;
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
}

/// What is waited for, and what of it has happened to any of the workers.
#[derive(Debug, Default)]
pub struct Deadlines {
    awaited: Awaited,
    split: AtomicBool,
    merge: AtomicBool,
    conflict: AtomicBool,
    torn_read: AtomicBool,
}

impl Deadlines {
    /// Until this has happened.
    pub fn new(awaited: Awaited) -> Self {
        Self { awaited, ..Self::default() }
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
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(set: impl FnOnce(&mut Counters)) -> Counters {
        let mut counters = Counters::default();
        set(&mut counters);
        counters
    }

    #[test]
    fn a_run_takes_its_time_and_no_more_if_nothing_is_awaited() {
        let deadlines = Deadlines::new(Awaited::default());
        let later = Instant::now() + Duration::from_secs(3600);
        assert!(!deadlines.is_over(later, || panic!("its counters are asked for before its time is over")));
        assert!(deadlines.is_over(Instant::now(), Counters::default));
    }

    #[test]
    fn a_run_goes_on_until_all_has_happened_to_any_worker() {
        let happens: [fn(&mut Counters); 4] =
            [|it| it.splits = 1, |it| it.merges = 1, |it| it.local_waits = 1, |it| it.torn_reads = 1];
        let deadlines = Deadlines::new(Awaited { changes: true, conflicts: true, torn_reads: true });
        let deadline = Instant::now();
        for (at, happens) in happens.into_iter().enumerate() {
            assert!(!deadlines.is_over(deadline, Counters::default), "over after {at} of 4");
            // Each to another worker.
            assert_eq!(deadlines.is_over(deadline, || counted(happens)), at == 3);
        }
        assert!(deadlines.is_over(deadline, Counters::default), "another worker has to go on");
    }

    #[test]
    fn what_is_not_awaited_need_not_happen() {
        let deadlines = Deadlines::new(Awaited { conflicts: true, ..Awaited::default() });
        let deadline = Instant::now();
        assert!(!deadlines.is_over(deadline, || counted(|it| it.splits = 1)));
        assert!(deadlines.is_over(deadline, || counted(|it| it.lock_conflicts = 1)));
    }

    #[test]
    fn patience_comes_to_an_end() {
        let Some(long_ago) = Instant::now().checked_sub(PATIENCE) else { return };
        let deadlines = Deadlines::new(Awaited { changes: true, ..Awaited::default() });
        assert!(deadlines.is_over(long_ago, || panic!("nothing is awaited any more")));
    }
}
