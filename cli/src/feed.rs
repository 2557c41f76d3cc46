//! One worker's feed: the tasks of a worker share one pre-drawn stream and take its operations one at a time.
//!
//! The feed settles what a stream leaves open (see `stream.rs`) at the moment an operation is issued, and it ends: after
//! a number of operations, at a deadline, or when it is told to stop because an operation failed. A worker is one
//! thread, so the feed needs cells and no locks.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use crate::keys::{KeySpace, value_for};
use crate::stream::{Draw, WorkerId};

/// When a feed ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    /// After this many operations of this worker.
    Operations(u64),
    /// At this time.
    At(Instant),
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
}

/// A stream and how far it has been issued.
#[derive(Debug)]
pub(crate) struct Feed {
    stream: Vec<Draw>,
    keys: KeySpace,
    worker: WorkerId,
    end: End,
    place: Cell<usize>,
    issued: Cell<u64>,
    /// How many insert numbers this worker has used up, over all phases of the run.
    insert_turns: Cell<u64>,
    stopped: Cell<bool>,
    /// Set when the whole process is to stop.
    interrupted: Arc<AtomicBool>,
}

impl Feed {
    /// A feed over `stream`. `insert_turns` is what [`Feed::insert_turns`] answered at the end of the worker's previous
    /// phase, so that no key is inserted twice in a run.
    pub(crate) fn new(stream: Vec<Draw>, keys: KeySpace, worker: WorkerId, end: End, insert_turns: u64) -> Self {
        let is_empty = stream.is_empty();
        Self {
            stream,
            keys,
            worker,
            end,
            place: Cell::new(0),
            issued: Cell::new(0),
            insert_turns: Cell::new(insert_turns),
            stopped: Cell::new(is_empty),
            interrupted: Arc::default(),
        }
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
        };
        if ended || self.stopped.get() || self.interrupted.load(Ordering::Relaxed) {
            return None;
        }
        let place = self.place.get();
        let drawn = *self.stream.get(place)?;
        self.place.set(if place + 1 == self.stream.len() { 0 } else { place + 1 });
        self.issued.set(self.issued.get() + 1);
        Some(self.settle(drawn))
    }

    /// Ends the feed for all tasks of the worker.
    pub(crate) fn stop(&self) {
        self.stopped.set(true);
    }

    /// How many insert numbers this worker has used up so far.
    pub(crate) fn insert_turns(&self) -> u64 {
        self.insert_turns.get()
    }

    fn settle(&self, drawn: Draw) -> Request {
        // Versions only tell values of one key apart; the worker's number keeps two workers' values different.
        let version = (self.issued.get() as u32) << 8 | (self.worker.index as u32 & 0xFF);
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

    fn next_insert_key(&self) -> u64 {
        // Ends: a file holds finitely many keys, and each turn's key is another one.
        loop {
            let turn = self.insert_turns.get();
            self.insert_turns.set(turn.wrapping_add(1));
            if let Some(key) = self.turn_key(turn) {
                return key;
            }
        }
    }

    /// The key of this age, this worker's own inserts first.
    fn latest(&self, age: u64) -> Request {
        let turns = self.insert_turns.get();
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

    fn drain(feed: &Feed) -> Vec<Request> {
        let now = Instant::now();
        std::iter::from_fn(|| feed.next(now)).collect()
    }

    #[test]
    fn inserts_are_new_keys_over_workers_phases_and_repeats() {
        let keys = KeySpace::scrambled(100).unwrap();
        let mut seen: HashSet<u64> = keys.sorted().iter().copied().collect();
        let mut turns = [0; 3];
        for _phase in 0..3 {
            for worker in 0..3 {
                let id = WorkerId { index: worker, total: 3 };
                let feed =
                    Feed::new(vec![Draw::InsertNext], keys.clone(), id, End::Operations(50), turns[worker as usize]);
                for request in drain(&feed) {
                    let Request::Insert { key, .. } = request else { panic!("{request:?}") };
                    assert!(seen.insert(key));
                }
                turns[worker as usize] = feed.insert_turns();
            }
        }
        assert_eq!(seen.len(), 100 + 3 * 3 * 50);
    }

    #[test]
    fn void_turns_are_skipped() {
        let mut held = vec![mix(4), mix(5), mix(6)];
        held.sort_unstable();
        let keys = KeySpace::from_sorted(held).unwrap();
        let feed = Feed::new(vec![Draw::InsertNext, Draw::ReadLatest(0)], keys, ONLY, End::Operations(6), 0);
        let requests = drain(&feed);
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
        let feed = Feed::new(stream, keys, ONLY, End::Operations(4), 2);
        let expected = [(mix(11), true), (mix(10), true), (mix(9), false), (mix(0), false)];
        assert_eq!(drain(&feed), expected.map(|(key, latest)| Request::Get { key, latest }));
    }

    #[test]
    fn feeds_end() {
        let keys = KeySpace::scrambled(10).unwrap();
        let feed = |end| Feed::new(vec![Draw::Read(1)], keys.clone(), ONLY, end, 0);
        assert_eq!(drain(&feed(End::Operations(7))).len(), 7);
        assert!(drain(&Feed::new(vec![], keys.clone(), ONLY, End::Operations(7), 0)).is_empty());
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
