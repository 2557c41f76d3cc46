//! The operations of one worker: settles what a pre-drawn stream leaves open (see `stream.rs`) at the moment an operation is
//! issued.

use std::sync::Arc;

use super::MapData;
use super::keys::{mix, value_for};
use super::request::MapRequest;
use super::stream::{Draw, LENGTH_MAX, Pass};
use crate::subject::WorkerId;

/// A worker writes a value again after so many operations; an update that writes what is there would cost less than others.
/// No key gets one value twice in a row: a stream that repeats writes each of its keys several times in between.
const VERSIONS: u64 = 1 << 24;
const _: () = assert!(LENGTH_MAX < VERSIONS);

/// A stream and how far it has been issued.
#[derive(Debug)]
pub struct MapSource {
    pub(super) data: Arc<MapData>,
    pub(super) worker: WorkerId,
    pub(super) stream: Vec<Draw>,
    /// Whether the stream begins again at its end.
    pub(super) repeats: bool,
    pub(super) issued: usize,
    /// How many operations this worker has issued over all phases of the run, modulo 2^32: they tell its [`VERSIONS`] apart.
    pub(super) settled: u32,
    /// The next workload's.
    pub(super) pass: Pass,
    /// How many insert numbers this worker has used up, over all phases of the run: no key is inserted twice.
    pub(super) insert_turns: u64,
}

impl Iterator for MapSource {
    type Item = MapRequest;

    fn next(&mut self) -> Option<MapRequest> {
        let place = if self.repeats { self.issued.checked_rem(self.stream.len())? } else { self.issued };
        let drawn = *self.stream.get(place)?;
        self.issued += 1;
        Some(self.settle(drawn))
    }
}

impl MapSource {
    pub(super) fn new(data: &Arc<MapData>, worker: WorkerId) -> Self {
        let pass = Pass { run: data.setting.run, number: 0 };
        let (data, stream) = (Arc::clone(data), Vec::new());
        Self { data, worker, stream, repeats: false, issued: 0, settled: 0, pass, insert_turns: 0 }
    }

    /// Of the workload that is prepared now.
    pub(super) fn next_pass(&mut self) -> Pass {
        let pass = self.pass;
        self.pass.number += 1;
        pass
    }

    fn settle(&mut self, drawn: Draw) -> MapRequest {
        // Versions only tell values of one key apart; the numbers of the worker and of the run keep those of two workers, and of
        // two runs with one seed, different.
        self.settled = self.settled.wrapping_add(1);
        let version = self.settled << 8 | (self.worker.index as u32 & 0xFF);
        let version = version ^ self.data.first_version ^ mix(self.pass.run.into()) as u32;
        let value = |key| value_for(key, version);
        match drawn {
            Draw::Read(key) => MapRequest::Get { key, latest: false },
            Draw::ReadLatest(age) => self.latest(age),
            Draw::Update(key) => MapRequest::Update { key, value: value(key) },
            Draw::ReadModifyWrite(key) => MapRequest::ReadModifyWrite { key, value: value(key) },
            Draw::Insert(key) => MapRequest::Insert { key, value: value(key) },
            Draw::InsertNext => {
                let key = self.next_insert_key();
                MapRequest::Insert { key, value: value(key) }
            }
            Draw::Remove(key) => MapRequest::Remove { key },
            Draw::Scan { from, limit } => MapRequest::Scan { from, limit },
        }
    }

    /// The key of this worker's insert number `turn`; `None` if the keys file holds it.
    fn turn_key(&self, turn: u64) -> Option<u64> {
        let step = turn.wrapping_mul(self.worker.total.max(1)).wrapping_add(self.worker.index);
        self.data.keys.insert_key(self.data.keys.loaded().wrapping_add(step))
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
    fn latest(&self, age: u64) -> MapRequest {
        let turns = self.insert_turns;
        if age < turns {
            // A turn that the keys file made void stands for the next older one.
            if let Some(key) = (0..turns - age).rev().find_map(|turn| self.turn_key(turn)) {
                return MapRequest::Get { key, latest: true };
            }
        }
        let loaded = self.data.keys.loaded();
        let back = age.saturating_sub(turns) % loaded;
        MapRequest::Get { key: self.data.keys.loaded_key(loaded - 1 - back), latest: false }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::maps::keys::KeySpace;
    use crate::maps::tests::data_of;
    use crate::subject::{Job, Setting, Subject as _};
    use farlink_structures::btree::Tree;
    use std::collections::HashSet;

    const ONLY: WorkerId = WorkerId { index: 0, total: 1 };

    fn source(stream: Vec<Draw>, keys: &KeySpace, worker: WorkerId, insert_turns: u64) -> MapSource {
        let data = Arc::new(data_of(keys.clone()));
        MapSource { stream, repeats: true, insert_turns, ..MapSource::new(&data, worker) }
    }

    #[test]
    fn inserts_are_new_keys_over_workers_phases_and_repeats() {
        let keys = KeySpace::scrambled(100, 1).unwrap();
        let mut seen: HashSet<u64> = keys.sorted().iter().copied().collect();
        let mut turns = [0; 3];
        for _phase in 0..3 {
            for worker in 0..3 {
                let id = WorkerId { index: worker, total: 3 };
                let mut source = source(vec![Draw::InsertNext], &keys, id, turns[worker as usize]);
                for request in source.by_ref().take(50) {
                    let MapRequest::Insert { key, .. } = request else { panic!("{request:?}") };
                    assert!(seen.insert(key));
                }
                turns[worker as usize] = source.insert_turns;
            }
        }
        assert_eq!(seen.len(), 100 + 3 * 3 * 50);
    }

    #[test]
    fn void_turns_are_skipped() {
        let computed = |number| KeySpace::scrambled(1, 1).unwrap().insert_key(number).unwrap();
        let mut held = [4, 5, 6].map(computed).to_vec();
        held.sort_unstable();
        let keys = KeySpace::from_sorted(held, 1).unwrap();
        let requests = source(vec![Draw::InsertNext, Draw::ReadLatest(0)], &keys, ONLY, 0).take(6);
        let keys_of: Vec<u64> = requests
            .map(|request| match request {
                MapRequest::Insert { key, .. } | MapRequest::Get { key, .. } => key,
                other => panic!("{other:?}"),
            })
            .collect();
        // Numbers 4 to 6 are in the file: 3, 7, 8 are inserted, and the latest is always the one just inserted.
        assert_eq!(keys_of, [3, 3, 7, 7, 8, 8].map(computed));
    }

    #[test]
    fn latest_walks_from_own_inserts_into_the_loaded_keys() {
        let keys = KeySpace::scrambled(10, 1).unwrap();
        let stream = vec![Draw::ReadLatest(0), Draw::ReadLatest(1), Draw::ReadLatest(2), Draw::ReadLatest(11)];
        let requests: Vec<MapRequest> = source(stream, &keys, ONLY, 2).take(4).collect();
        let new = [11, 10].map(|number| MapRequest::Get { key: keys.insert_key(number).unwrap(), latest: true });
        let old = [9, 0].map(|number| MapRequest::Get { key: keys.loaded_key(number), latest: false });
        assert_eq!(requests, [new, old].concat());
    }

    /// An update that writes what is there costs less than one that changes it.
    #[test]
    fn a_workload_that_comes_again_is_another_and_writes_other_values() {
        let written = |run| {
            let setting = Setting { run, ..Setting::of_entries(50) };
            let mut source = Tree::source(&Arc::new(Tree::data(&setting).unwrap()), ONLY);
            [(); 3].map(|()| {
                Tree::prepare(&mut source, Job::Workload { name: "a", operations: Some(1000) }, &|| Ok(())).unwrap();
                let written = source.by_ref().take(1000).filter_map(|request| match request {
                    MapRequest::Update { key, value } => Some((key, value)),
                    _ => None,
                });
                written.collect::<Vec<_>>()
            })
        };
        let (first, second) = (written(1), written(2));
        let all: Vec<_> = first.iter().chain(&second).flatten().collect();
        assert_eq!(all.iter().collect::<HashSet<_>>().len(), all.len(), "a key got one value twice");
        let keys = |updates: &Vec<(u64, u64)>| updates.iter().map(|update| update.0).collect::<Vec<_>>();
        let orders: HashSet<_> = first.iter().chain(&second).map(keys).collect();
        assert_eq!(orders.len(), 6, "two passes chose the same keys in the same order");
        assert_eq!(first, written(1), "the seed decides");
    }

    #[test]
    fn a_value_that_comes_again_is_not_the_one_before() {
        let keys = KeySpace::scrambled(10, 1).unwrap();
        let settled = VERSIONS as u32 - 3;
        let source = MapSource { settled, ..source(vec![Draw::Update(1), Draw::Read(2)], &keys, ONLY, 0) };
        let values: Vec<MapRequest> = source.step_by(2).take(5).collect();
        assert_eq!(values.iter().map(|update| format!("{update:?}")).collect::<HashSet<_>>().len(), 5, "{values:?}");
    }

    #[test]
    fn a_stream_ends_or_begins_again() {
        let keys = KeySpace::scrambled(10, 1).unwrap();
        let mut endless = source(vec![Draw::Read(1)], &keys, ONLY, 0);
        assert_eq!(endless.by_ref().take(7).count(), 7);
        assert_eq!(source(vec![], &keys, ONLY, 0).next(), None);
        let once = MapSource { repeats: false, ..source(vec![Draw::Read(1); 3], &keys, ONLY, 0) };
        assert_eq!(once.count(), 3);
    }
}
