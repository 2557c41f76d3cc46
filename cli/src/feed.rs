//! One worker's feed: the tasks of a worker share one source of operations and take them one at a time.
//!
//! A feed ends after a number of operations, at a deadline, with its source, or when it is told to stop because an operation
//! failed. A worker is one thread, so the feed needs cells and no locks. [`Issue`] is a bench's source: it settles what a
//! pre-drawn stream leaves open (see `stream.rs`) at the moment an operation is issued.

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use crate::keys::{KeySpace, value_for};
use crate::stream::{Draw, WorkerId};

/// When a feed ends, if its source does not before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    /// After this many operations of this worker.
    Operations(u64),
    /// At this time.
    At(Instant),
    /// With its source.
    Source,
}

/// An operation, ready to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Request {
    /// Look up; `latest` says that the key may not be there yet.
    Get { key: u64, latest: bool },
    /// Overwrite.
    Update { key: u64, value: u64 },
    /// Look up and overwrite.
    ReadModifyWrite { key: u64, value: u64 },
    /// Insert a new key.
    Insert { key: u64, value: u64 },
    /// Remove.
    Remove { key: u64 },
    /// Read up to `limit` entries from `from` on.
    Scan { from: u64, limit: u32 },
    /// Read the entries from `low` to `high`, both of which are there, and so many in all.
    Range { low: u64, high: u64, count: u64 },
}

/// A source of operations, and when to take no more from it.
#[derive(Debug)]
pub(crate) struct Feed<I> {
    source: RefCell<I>,
    end: End,
    issued: Cell<u64>,
    stopped: Cell<bool>,
    /// Set when the whole process is to stop.
    interrupted: Arc<AtomicBool>,
}

impl<I: Iterator<Item = Request>> Feed<I> {
    pub(crate) fn new(source: I, end: End) -> Self {
        let source = RefCell::new(source);
        Self { source, end, issued: Cell::new(0), stopped: Cell::new(false), interrupted: Arc::default() }
    }

    /// The same feed, which also ends once `flag` is set.
    pub(crate) fn interrupted_by(self, flag: &Arc<AtomicBool>) -> Self {
        Self { interrupted: Arc::clone(flag), ..self }
    }

    /// The next operation, or `None` at the end. `now` is a time that the caller has at hand anyway.
    pub(crate) fn next(&self, now: Instant) -> Option<Request> {
        let ended = match self.end {
            End::Operations(operations) => self.issued.get() >= operations,
            End::At(deadline) => now >= deadline,
            End::Source => false,
        };
        if ended || self.stopped.get() || self.interrupted.load(Ordering::Relaxed) {
            return None;
        }
        self.issued.set(self.issued.get() + 1);
        self.source.borrow_mut().next()
    }

    /// Ends the feed for all tasks of the worker.
    pub(crate) fn stop(&self) {
        self.stopped.set(true);
    }

    /// The source, as far as it was used.
    pub(crate) fn into_source(self) -> I {
        self.source.into_inner()
    }
}

/// A stream and how far it has been issued; it begins again at its end.
#[derive(Debug)]
pub(crate) struct Issue {
    stream: Vec<Draw>,
    keys: KeySpace,
    worker: WorkerId,
    issued: usize,
    insert_turns: u64,
}

impl Iterator for Issue {
    type Item = Request;

    fn next(&mut self) -> Option<Request> {
        let drawn = *self.stream.get(self.issued.checked_rem(self.stream.len())?)?;
        self.issued += 1;
        Some(self.settle(drawn))
    }
}

impl Issue {
    /// Operations of `stream`. `insert_turns` is what [`Issue::insert_turns`] answered at the end of the worker's previous
    /// phase, so that no key is inserted twice in a run.
    pub(crate) fn new(stream: Vec<Draw>, keys: KeySpace, worker: WorkerId, insert_turns: u64) -> Self {
        Self { stream, keys, worker, issued: 0, insert_turns }
    }

    /// How many insert numbers this worker has used up, over all phases of the run.
    pub(crate) fn insert_turns(&self) -> u64 {
        self.insert_turns
    }

    fn settle(&mut self, drawn: Draw) -> Request {
        // Versions only tell values of one key apart; the worker's number keeps two workers' values different.
        let version = (self.issued as u32) << 8 | (self.worker.index as u32 & 0xFF);
        match drawn {
            Draw::Read(key) => Request::Get { key, latest: false },
            Draw::ReadLatest(age) => self.latest(age),
            Draw::Update(key) => Request::Update { key, value: value_for(key, version) },
            Draw::ReadModifyWrite(key) => Request::ReadModifyWrite { key, value: value_for(key, version) },
            Draw::Insert(key) => Request::Insert { key, value: value_for(key, version) },
            Draw::InsertNext => {
                let key = self.next_insert_key();
                Request::Insert { key, value: value_for(key, version) }
            }
            Draw::Remove(key) => Request::Remove { key },
            Draw::Scan { from, limit } => Request::Scan { from, limit },
        }
    }

    /// The key of this worker's insert number `turn`; `None` if the keys file holds it.
    fn turn_key(&self, turn: u64) -> Option<u64> {
        let step = turn.wrapping_mul(self.worker.total.max(1)).wrapping_add(self.worker.index);
        self.keys.insert_key(self.keys.loaded().wrapping_add(step))
    }

    fn next_insert_key(&mut self) -> u64 {
        // Ends: a file holds finitely many keys, and each turn's key is another one.
        loop {
            self.insert_turns = self.insert_turns.wrapping_add(1);
            if let Some(key) = self.turn_key(self.insert_turns.wrapping_sub(1)) {
                return key;
            }
        }
    }

    /// The key of this age, this worker's own inserts first.
    fn latest(&self, age: u64) -> Request {
        let turns = self.insert_turns;
        if age < turns {
            // A turn that the keys file made void stands for the next older one.
            if let Some(key) = (0..turns - age).rev().find_map(|turn| self.turn_key(turn)) {
                return Request::Get { key, latest: true };
            }
        }
        let loaded = self.keys.loaded();
        let back = age.saturating_sub(turns) % loaded;
        Request::Get { key: self.keys.loaded_key(loaded - 1 - back), latest: false }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::mix;
    use std::collections::HashSet;
    use std::time::Duration;

    const ONLY: WorkerId = WorkerId { index: 0, total: 1 };

    fn drain(feed: &Feed<Issue>) -> Vec<Request> {
        let now = Instant::now();
        std::iter::from_fn(|| feed.next(now)).collect()
    }

    fn requests(stream: Vec<Draw>, keys: &KeySpace, count: u64, insert_turns: u64) -> Vec<Request> {
        drain(&Feed::new(Issue::new(stream, keys.clone(), ONLY, insert_turns), End::Operations(count)))
    }

    #[test]
    fn inserts_are_new_keys_over_workers_phases_and_repeats() {
        let keys = KeySpace::scrambled(100).unwrap();
        let mut seen: HashSet<u64> = keys.sorted().iter().copied().collect();
        let mut turns = [0; 3];
        for _phase in 0..3 {
            for worker in 0..3 {
                let id = WorkerId { index: worker, total: 3 };
                let mut issue = Issue::new(vec![Draw::InsertNext], keys.clone(), id, turns[worker as usize]);
                for request in issue.by_ref().take(50) {
                    let Request::Insert { key, .. } = request else { panic!("{request:?}") };
                    assert!(seen.insert(key));
                }
                turns[worker as usize] = issue.insert_turns();
            }
        }
        assert_eq!(seen.len(), 100 + 3 * 3 * 50);
    }

    #[test]
    fn void_turns_are_skipped() {
        let mut held = vec![mix(4), mix(5), mix(6)];
        held.sort_unstable();
        let keys = KeySpace::from_sorted(held).unwrap();
        let requests = requests(vec![Draw::InsertNext, Draw::ReadLatest(0)], &keys, 6, 0);
        let keys_of: Vec<u64> = requests
            .iter()
            .map(|request| match request {
                Request::Insert { key, .. } | Request::Get { key, .. } => *key,
                other => panic!("{other:?}"),
            })
            .collect();
        // Numbers 4 to 6 are in the file: 3, 7, 8 are inserted, and the latest is always the one just inserted.
        assert_eq!(keys_of, [mix(3), mix(3), mix(7), mix(7), mix(8), mix(8)]);
    }

    #[test]
    fn latest_walks_from_own_inserts_into_the_loaded_keys() {
        let keys = KeySpace::scrambled(10).unwrap();
        let stream = vec![Draw::ReadLatest(0), Draw::ReadLatest(1), Draw::ReadLatest(2), Draw::ReadLatest(11)];
        let expected = [(mix(11), true), (mix(10), true), (mix(9), false), (mix(0), false)];
        assert_eq!(requests(stream, &keys, 4, 2), expected.map(|(key, latest)| Request::Get { key, latest }));
    }

    #[test]
    fn feeds_end() {
        let keys = KeySpace::scrambled(10).unwrap();
        let feed = |end| Feed::new(Issue::new(vec![Draw::Read(1)], keys.clone(), ONLY, 0), end);
        assert_eq!(drain(&feed(End::Operations(7))).len(), 7);
        assert!(requests(vec![], &keys, 7, 0).is_empty());
        let now = Instant::now();
        let timed = feed(End::At(now + Duration::from_secs(1)));
        assert!(timed.next(now).is_some());
        assert!(timed.next(now + Duration::from_secs(1)).is_none());
        let stopped = feed(End::Operations(7));
        stopped.stop();
        assert!(drain(&stopped).is_empty());
        let flag = Arc::default();
        let interrupted = feed(End::Operations(7)).interrupted_by(&flag);
        assert!(interrupted.next(now).is_some());
        flag.store(true, Ordering::Relaxed);
        assert!(interrupted.next(now).is_none());
    }
}
