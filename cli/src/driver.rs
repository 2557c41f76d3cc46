//! The closed loop: take an operation, run it, time it, check what it answered, record it.
//!
//! Each task of a worker runs [`run_task`]; as many tasks as `--in-flight` says share the worker's feed and tally. A
//! task reads the clock once an operation: the end of one is the start of the next, so what lies between (settling a
//! key, recording) is inside the measured time, and a latency includes the time that the worker spent on other tasks.

use std::cell::RefCell;
use std::fmt;
use std::time::Instant;

use crate::feed::{Feed, Request};
use crate::keys::value_belongs;
use crate::tally::{Outcomes, Tally};
use crate::trace::{Answer, Step};

/// An ordered map of 64-bit keys and values, as the driver sees it. Private to the program: it exists so that the driver
/// is tested against a map that is known to be right.
pub(crate) trait Target {
    /// Why an operation failed.
    type Error: fmt::Display;

    /// The value of a key.
    async fn get(&self, key: u64) -> Result<Option<u64>, Self::Error>;
    /// Adds a key; `false`, and no change, if it is there already.
    async fn insert(&self, key: u64, value: u64) -> Result<bool, Self::Error>;
    /// Adds or overwrites; answers the previous value.
    async fn upsert(&self, key: u64, value: u64) -> Result<Option<u64>, Self::Error>;
    /// Overwrites a key that is there; answers the previous value, `None` (and no change) if there is none.
    async fn update(&self, key: u64, value: u64) -> Result<Option<u64>, Self::Error>;
    /// Removes a key; answers its value.
    async fn remove(&self, key: u64) -> Result<Option<u64>, Self::Error>;
    /// Up to `limit` entries from `from` on, in key order.
    async fn scan(&self, from: u64, limit: usize) -> Result<Vec<(u64, u64)>, Self::Error>;
}

/// Runs operations from `feed` until it ends. The first error stops the feed for every task of the worker; operations
/// that are under way in other tasks still finish and are recorded.
pub(crate) async fn run_task<T: Target>(target: &T, feed: &Feed, tally: &RefCell<Tally>) -> Result<(), T::Error> {
    let mut start = Instant::now();
    while let Some(request) = feed.next(start) {
        // The outcome is settled first: the cell is never borrowed across an await.
        let outcomes = execute(target, request).await.inspect_err(|_| feed.stop())?;
        let end = Instant::now();
        let mut tally = tally.borrow_mut();
        tally.outcomes.add(&outcomes);
        tally.latency.record(u64::try_from((end - start).as_nanos()).unwrap_or(u64::MAX));
        start = end;
    }
    Ok(())
}

/// Runs one operation and says what it came to.
async fn execute<T: Target>(target: &T, request: Request) -> Result<Outcomes, T::Error> {
    let mut outcomes = Outcomes { ops: 1, ..Outcomes::default() };
    match request {
        Request::Get { key, latest } => {
            let value = target.get(key).await?;
            if latest && value.is_none() {
                outcomes.latest_missing = 1;
            } else {
                note_value(&mut outcomes, key, value);
            }
        }
        Request::Update { key, value } => note_value(&mut outcomes, key, target.update(key, value).await?),
        Request::ReadModifyWrite { key, value } => {
            let read = target.get(key).await?;
            note_value(&mut outcomes, key, read);
            // A key that another worker removed in between is no error: the mix removes keys, then.
            if read.is_some() && !target.update(key, value).await?.is_none_or(|before| value_belongs(key, before)) {
                outcomes.wrong_values += 1;
            }
        }
        Request::Insert { key, value } => match target.insert(key, value).await? {
            true => outcomes.inserted = 1,
            false => outcomes.duplicates = 1,
        },
        Request::Remove { key } => match target.remove(key).await? {
            Some(value) => {
                outcomes.removed = 1;
                outcomes.wrong_values = u64::from(!value_belongs(key, value));
            }
            None => outcomes.remove_missing = 1,
        },
        Request::Scan { from, limit } => {
            let entries = target.scan(from, limit as usize).await?;
            outcomes.scanned = entries.len() as u64;
            outcomes.wrong_values = entries.iter().filter(|(key, value)| !value_belongs(*key, *value)).count() as u64;
            outcomes.wrong_scans = u64::from(!scan_is_sound(&entries, from, limit));
        }
    }
    Ok(outcomes)
}

fn note_value(outcomes: &mut Outcomes, key: u64, value: Option<u64>) {
    match value {
        None => outcomes.missing = 1,
        Some(value) => {
            outcomes.found = 1;
            outcomes.wrong_values = u64::from(!value_belongs(key, value));
        }
    }
}

/// What a scan promises whatever runs beside it: in range, in order, each key once, no more than asked.
fn scan_is_sound(entries: &[(u64, u64)], from: u64, limit: u32) -> bool {
    entries.len() <= limit as usize
        && entries.first().is_none_or(|(key, _)| *key >= from)
        && entries.windows(2).all(|pair| pair[0].0 < pair[1].0)
}

/// Replays one step of a trace.
pub(crate) async fn replay<T: Target>(target: &T, step: Step) -> Result<Answer, T::Error> {
    Ok(match step {
        Step::Get(key) => Answer::Value(target.get(key).await?),
        Step::Put(key, value) => Answer::Value(target.upsert(key, value).await?),
        Step::Del(key) => Answer::Value(target.remove(key).await?),
        Step::Scan(from, limit) => Answer::Entries(target.scan(from, limit as usize).await?),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::feed::End;
    use crate::keys::{Distribution, KeySpace, value_for};
    use crate::stream::{self, Draw, Source, WorkerId};
    use crate::trace::{answer_line, parse};
    use crate::workload::Mix;
    use std::cell::Cell;
    use std::collections::BTreeMap;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    const ONLY: WorkerId = WorkerId { index: 0, total: 1 };

    /// A map in memory that lets other tasks run at every operation and can be told to fail or to lie.
    #[derive(Default)]
    struct Fake {
        map: RefCell<BTreeMap<u64, u64>>,
        left_until_error: Cell<Option<u64>>,
        reverse_scans: bool,
    }

    impl Fake {
        fn loaded(keys: &KeySpace) -> Self {
            let map = keys.sorted().iter().map(|key| (*key, value_for(*key, 0))).collect();
            Self { map: RefCell::new(map), ..Self::default() }
        }

        async fn turn(&self) -> Result<(), &'static str> {
            let mut waited = false;
            std::future::poll_fn(
                |_| if std::mem::replace(&mut waited, true) { Poll::Ready(()) } else { Poll::Pending },
            )
            .await;
            match self.left_until_error.get() {
                Some(0) => return Err("the server is gone"),
                Some(left) => self.left_until_error.set(Some(left - 1)),
                None => {}
            }
            Ok(())
        }
    }

    impl Target for Fake {
        type Error = &'static str;

        async fn get(&self, key: u64) -> Result<Option<u64>, Self::Error> {
            self.turn().await?;
            Ok(self.map.borrow().get(&key).copied())
        }
        async fn insert(&self, key: u64, value: u64) -> Result<bool, Self::Error> {
            self.turn().await?;
            let new = !self.map.borrow().contains_key(&key);
            self.map.borrow_mut().entry(key).or_insert(value);
            Ok(new)
        }
        async fn upsert(&self, key: u64, value: u64) -> Result<Option<u64>, Self::Error> {
            self.turn().await?;
            Ok(self.map.borrow_mut().insert(key, value))
        }
        async fn update(&self, key: u64, value: u64) -> Result<Option<u64>, Self::Error> {
            self.turn().await?;
            Ok(self.map.borrow_mut().get_mut(&key).map(|slot| std::mem::replace(slot, value)))
        }
        async fn remove(&self, key: u64) -> Result<Option<u64>, Self::Error> {
            self.turn().await?;
            Ok(self.map.borrow_mut().remove(&key))
        }
        async fn scan(&self, from: u64, limit: usize) -> Result<Vec<(u64, u64)>, Self::Error> {
            self.turn().await?;
            let mut entries: Vec<_> = self.map.borrow().range(from..).take(limit).map(|(k, v)| (*k, *v)).collect();
            if self.reverse_scans {
                entries.reverse();
            }
            Ok(entries)
        }
    }

    /// Runs `in_flight` tasks round robin until all have ended.
    fn run(fake: &Fake, feed: &Feed, in_flight: usize) -> (Tally, Vec<&'static str>) {
        let tally = RefCell::new(Tally::new().unwrap());
        let mut tasks: Vec<_> = (0..in_flight).map(|_| Box::pin(run_task(fake, feed, &tally))).collect();
        let mut errors = Vec::new();
        let mut context = Context::from_waker(Waker::noop());
        while !tasks.is_empty() {
            tasks.retain_mut(|task| match task.as_mut().poll(&mut context) {
                Poll::Pending => true,
                Poll::Ready(result) => {
                    errors.extend(result.err());
                    false
                }
            });
        }
        drop(tasks);
        (tally.into_inner(), errors)
    }

    fn source(keys: &KeySpace) -> Source<'_> {
        Source { keys, distribution: Distribution::Zipf(0.99), seed: 1, scan_length: 10 }
    }

    #[test]
    fn every_mix_runs_clean_on_a_map_that_is_right() {
        for name in crate::workload::NAMES.split(", ") {
            for in_flight in [1, 16] {
                let keys = KeySpace::scrambled(1000).unwrap();
                let fake = Fake::loaded(&keys);
                let stream = stream::draw(&Mix::named(name).unwrap(), source(&keys), ONLY, 500, &|| Ok(())).unwrap();
                let feed = Feed::new(stream, keys.clone(), ONLY, End::Operations(2000), 0);
                let (tally, errors) = run(&fake, &feed, in_flight);
                let seen = tally.outcomes;
                assert!(errors.is_empty());
                assert_eq!((seen.ops, tally.latency.len()), (2000, 2000), "{name}");
                let wrong = (seen.missing, seen.duplicates, seen.wrong_values, seen.wrong_scans);
                assert_eq!(wrong, (0, 0, 0, 0), "{name}");
                assert_eq!(fake.map.borrow().len() as u64, 1000 + seen.inserted);
                assert_eq!(seen.inserted, feed.insert_turns());
                if in_flight == 1 {
                    assert_eq!(seen.latest_missing, 0, "{name}");
                }
            }
        }
    }

    #[test]
    fn a_round_removes_and_inserts_everything() {
        let keys = KeySpace::scrambled(1000).unwrap();
        let fake = Fake::loaded(&keys);
        for (what, left) in [(Draw::Remove as fn(u64) -> Draw, 0), (Draw::Insert, 1000)] {
            let stream = stream::every_key(&keys, 3, ONLY, what, &|| Ok(())).unwrap();
            let end = End::Operations(stream.len() as u64);
            let feed = Feed::new(stream, keys.clone(), ONLY, end, 0);
            let (tally, _) = run(&fake, &feed, 8);
            assert_eq!(fake.map.borrow().len(), left);
            assert_eq!(tally.outcomes.removed + tally.outcomes.inserted, 1000);
            assert_eq!(tally.outcomes.wrong_values, 0);
        }
    }

    #[test]
    fn lost_keys_wrong_values_and_wrong_scans_are_seen() {
        let keys = KeySpace::scrambled(1000).unwrap();
        let mut fake = Fake::loaded(&keys);
        let (lost, spoiled) = (keys.loaded_key(1), keys.loaded_key(2));
        fake.map.borrow_mut().remove(&lost);
        fake.map.borrow_mut().insert(spoiled, 0);
        let stream = vec![
            Draw::Read(lost),
            Draw::Update(lost),
            Draw::ReadModifyWrite(lost),
            Draw::Remove(lost),
            Draw::Read(spoiled),
            Draw::ReadModifyWrite(spoiled),
            Draw::Insert(spoiled),
        ];
        let feed = Feed::new(stream, keys.clone(), ONLY, End::Operations(7), 0);
        let (tally, _) = run(&fake, &feed, 1);
        let seen = tally.outcomes;
        assert_eq!((seen.missing, seen.remove_missing, seen.duplicates), (3, 1, 1));
        assert_eq!(seen.wrong_values, 3);
        fake.reverse_scans = true;
        let feed = Feed::new(vec![Draw::Scan { from: 0, limit: 5 }], keys, ONLY, End::Operations(1), 0);
        assert_eq!(run(&fake, &feed, 1).0.outcomes.wrong_scans, 1);
    }

    #[test]
    fn scans_are_held_to_their_promise() {
        assert!(scan_is_sound(&[], 5, 1));
        assert!(scan_is_sound(&[(5, 0), (6, 0)], 5, 2));
        assert!(!scan_is_sound(&[(5, 0), (6, 0)], 5, 1));
        assert!(!scan_is_sound(&[(4, 0)], 5, 1));
        assert!(!scan_is_sound(&[(5, 0), (5, 0)], 5, 9));
    }

    #[test]
    fn the_first_error_stops_all_tasks() {
        let keys = KeySpace::scrambled(10).unwrap();
        let fake = Fake::loaded(&keys);
        fake.left_until_error.set(Some(100));
        let stream = vec![Draw::Read(keys.loaded_key(0))];
        let feed = Feed::new(stream, keys, ONLY, End::Operations(u64::MAX), 0);
        let (tally, errors) = run(&fake, &feed, 4);
        assert_eq!(tally.outcomes.ops, 100);
        assert!(!errors.is_empty() && errors.iter().all(|error| *error == "the server is gone"));
    }

    #[test]
    fn a_trace_replays() {
        let fake = Fake::default();
        let steps = parse(b"get 5\nput 5 7\nput 5 8\nput 6 1\nscan 0 9\ndel 5\ndel 5\nscan 9 9").unwrap();
        let mut lines = Vec::new();
        for step in steps {
            let mut context = Context::from_waker(Waker::noop());
            let mut answer = pin!(replay(&fake, step));
            let answer = loop {
                if let Poll::Ready(answer) = answer.as_mut().poll(&mut context) {
                    break answer.unwrap();
                }
            };
            lines.push(answer_line(step, &answer));
        }
        let expected = [
            "get 5 -> none",
            "put 5 7 -> new",
            "put 5 8 -> replaced 7",
            "put 6 1 -> new",
            "scan 0 9 -> 5=8 6=1",
            "del 5 -> removed 8",
            "del 5 -> none",
            "scan 9 9 -> none",
        ];
        assert_eq!(lines, expected);
    }
}
